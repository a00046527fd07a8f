"""A chat through the package openai, streamed. Needs `archerfish serve`; the first argument is its address."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")

messages = [{"role": "system", "content": "Answer in one sentence."}]
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    options = {"model": "smollm2-135m-instruct", "max_tokens": 40, "temperature": 0}
    for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    messages.append({"role": "assistant", "content": answer})
