"""What the prefix cache would do for a prompt, and why. Needs `archerfish serve`."""

import sys

from openai import OpenAI

SYSTEM = "You are the assistant of a public aquarium. Answer questions of visitors in one friendly sentence. " * 3

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def explain(question: str) -> str:
    body = {"model": "smollm2-135m-instruct", "messages": conversation(question)}
    return client.post("/cache/explain", body=body, cast_to=dict)["text"]


print("before:", explain("What do archerfish eat?"))
client.chat.completions.create(
    model="smollm2-135m-instruct", messages=conversation("Do you have sharks?"), max_tokens=8
)
print("after another question with the same system prompt:", explain("What do archerfish eat?"))
