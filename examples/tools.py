"""A tool call: the model names a function and its arguments, the program runs it, and the model goes on.

Needs `archerfish serve`.
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> str:
    return f"It is 21 degrees and sunny in {city}."


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
options = {"model": "smollm2-135m-instruct", "tools": [TOOL], "max_tokens": 60, "temperature": 0}
# Larger models decide themselves, with tool_choice="auto"; the smallest one is told to call.
answer = client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
call = answer.tool_calls[0]
arguments = json.loads(call.function.arguments)
print(f"{call.function.name}({arguments})")
messages.append(answer.model_dump(exclude_none=True))
messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)})
print(client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message.content)
