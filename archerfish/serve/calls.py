"""Examples of calls of each route, as commands of curl and as programs in Python."""

from __future__ import annotations

import json
import shlex
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "What does an archerfish do?"}], "max_tokens": 64}
RANK = {"query": "fish that shoot", "documents": ["Archerfish hunt insects.", "Bread needs yeast."]}
EXAMPLES: tuple[tuple[str, str, str, dict[str, Any] | None], ...] = (  # kinds of models, method, path, body
    ("generation", "POST", "/v1/chat/completions", CHAT),
    ("generation", "POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    ("generation", "POST", "/v1/responses", {"input": "What does an archerfish do?", "max_output_tokens": 64}),
    ("generation", "POST", "/v1/messages", CHAT),
    ("tts", "POST", "/v1/tts/tokens", {"text": "An archerfish spits water.", "gender": "female"}),
    ("embedding", "POST", "/v1/embeddings", {"input": ["An archerfish spits water.", "射水鱼"]}),
    ("embedding cross-encoder", "POST", "/v1/rerank", RANK),
    (
        "embedding",
        "POST",
        "/similarity",
        {"source": "A fish.", "sentences": ["An animal that swims.", "A loaf of bread."]},
    ),
    ("", "POST", "/tokenize", {"prompt": "An archerfish spits water."}),
    ("", "POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("generation", "POST", "/v1/cache/explain", {"prompt": "Once upon a time"}),
    ("generation", "GET", "/v1/cache/view", None),
    *(("", "GET", path, None) for path in ("/v1/models", "/version", "/health", "/ready", "/stats", "/metrics")),
)


def curl(base_url: str, method: str, path: str, body: dict[str, Any] | None, *, has_keys: bool = False) -> str:
    """The shell command of one call."""
    key = " -H 'Authorization: Bearer YOUR-KEY'" if has_keys else ""
    if method == "GET":
        return f"curl {base_url}{path}{key}"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {base_url}{path} -H 'Content-Type: application/json'{key} \\\n  -d {data}"


def examples(kinds: set[str]) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Calls that a service with models of these kinds answers, the most interesting first."""
    return [
        (method, path, body) for needed, method, path, body in EXAMPLES if not needed or kinds & set(needed.split())
    ]


# How Python calls a route: the package, its client, the method, and what is shown of the answer.
OPENAI, ANTHROPIC = ("openai", "OpenAI", "/v1"), ("anthropic", "Anthropic", "")
METHODS = {
    "/v1/chat/completions": (OPENAI, "chat.completions.create", "answer.choices[0].message.content"),
    "/v1/completions": (OPENAI, "completions.create", "answer.choices[0].text"),
    "/v1/responses": (OPENAI, "responses.create", "answer.output_text"),
    "/v1/embeddings": (OPENAI, "embeddings.create", "[item.embedding[:3] for item in answer.data]"),
    "/v1/models": (OPENAI, "models.list", "[model.id for model in answer]"),
    "/v1/messages": (ANTHROPIC, "messages.create", "answer.content"),
}
# Stand for the address of the server and the name of a model, which the page puts there.
ADDRESS, MODEL = "$ADDRESS", "$MODEL"


def python(method: str, path: str, body: dict[str, Any] | None, *, has_keys: bool = False) -> str:
    """The Python program of one call, with placeholders for address and model."""
    key = "YOUR-KEY" if has_keys else "none"
    if path in METHODS:
        (package, client, base), name, shown = METHODS[path]
        values = {} if body is None else {"model": MODEL, **body}
        given = "".join(f"\n    {key}={json.dumps(value, ensure_ascii=False)}," for key, value in values.items())
        made = f'client = {client}(base_url="{ADDRESS}{base}", api_key="{key}")'
        lines = [
            f"from {package} import {client}",
            "",
            made,
            f"answer = client.{name}({given}{chr(10) if given else ''})",
        ]
    else:
        given = "" if body is None else f", json={json.dumps(body, ensure_ascii=False)}"
        given += f', headers={{"Authorization": "Bearer {key}"}}' if has_keys else ""
        lines = ["import httpx", "", f'answer = httpx.{method.lower()}("{ADDRESS}{path}"{given})']
        shown = "answer.text" if path == "/metrics" else "answer.json()"
    return "\n".join([*lines, f"print({shown})"])
