"""An answer that follows a JSON schema, whatever the model would rather say. Needs `archerfish serve`."""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["city", "population", "continent"],
    "additionalProperties": False,
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[{"role": "user", "content": "Describe Paris as JSON: city, population, continent."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    max_tokens=80,
    temperature=0,
)
print(json.dumps(json.loads(answer.choices[0].message.content), indent=2))
