"""The web pages: `/` with what is served, a chat and examples of calls; `/docs` with all routes. No assets from elsewhere."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from msgspec import UNSET

from archerfish.serve.answers import Model

CHAT = {"messages": [{"role": "user", "content": "What does an archerfish do?"}], "max_tokens": 64}
RANK = {"query": "fish that shoot", "documents": ["Archerfish hunt insects.", "Bread needs yeast."]}
MAX_TOKENS = 512  # of an answer in the page's chat
EXAMPLES: tuple[tuple[str, str, str, dict[str, Any] | None], ...] = (  # kinds of models, method, path, body
    ("generation", "POST", "/v1/chat/completions", CHAT),
    ("generation", "POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    ("generation", "POST", "/v1/responses", {"input": "What does an archerfish do?", "max_output_tokens": 64}),
    ("generation", "POST", "/v1/messages", CHAT),
    ("tts", "POST", "/v1/tts/tokens", {"text": "An archerfish spits water.", "gender": "female"}),
    ("embedding", "POST", "/v1/embeddings", {"input": ["An archerfish spits water.", "射水鱼"]}),
    ("embedding cross-encoder", "POST", "/v1/rerank", RANK),
    ("embedding", "POST", "/similarity", {"source": "A fish.", "sentences": ["An animal that swims.", "A loaf of bread."]}),
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
    return [(method, path, body) for needed, method, path, body in EXAMPLES if not needed or kinds & set(needed.split())]


def page(base_url: str, models: Sequence[Model]) -> str:
    """The page of a server at `base_url`."""
    kinds: set[str] = {model.kind for model in models}
    shown = []
    for model in models:
        size = f", {model.dimension} dimensions" if model.dimension is not UNSET else ""
        shown.append(f"<b>{html.escape(model.id)}</b> ({model.kind}{size}, up to {model.max_length} tokens)")
    routes = ""
    for method, path, body in examples(kinds):
        routes += f"<b>{method} {path}</b><pre>{html.escape(curl(base_url, method, path, body))}</pre>\n"
    most_tokens = min([MAX_TOKENS, *(model.max_length for model in models if model.kind == "generation")])
    return Template(asset("page.html")).substitute(
        models="<br>".join(shown), routes=routes, hide_chat="" if "generation" in kinds else "hidden",
        hide_compare="" if "embedding" in kinds else "hidden", most_tokens=most_tokens,
    )


def docs_page(document: dict[str, Any]) -> str:
    """The page at `/docs` of an OpenAPI document."""
    shown = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            head = f"<code><b>{method.upper()}</b> {html.escape(path)}</code> {html.escape(operation['summary'])}"
            rows = "".join(parameter_rows(document, operation))
            table = f"<table>{rows}</table>"
            shown.append(f"<details><summary>{head}</summary>{table}</details>" if rows else f"<p>{head}</p>")
    return Template(asset("docs.html")).substitute(version=html.escape(document["info"]["version"]), routes="\n".join(shown))


def parameter_rows(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    """Table rows of the parameters of an operation's body: name, type and description."""
    stated = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = document["components"]["schemas"].get(stated.get("$ref", "").rpartition("/")[2], stated)
    for name, member in schema.get("properties", {}).items():
        is_needed = name in schema.get("required", ())
        title = f"<b>{html.escape(name)}</b>" if is_needed else html.escape(name)
        cells = (f"<code>{title}</code>", type_of(member), html.escape(member.get("description", "")))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def type_of(schema: dict[str, Any]) -> str:
    """The type of a value in words, without null, which stands for a parameter that is left out."""
    inner = [type_of(one) for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    kind = "object" if "$ref" in schema else "any of a list" if "enum" in schema else schema.get("type", "any")
    return " or ".join(dict.fromkeys(inner)) if inner else html.escape(str(kind))


@cache
def asset(name: str) -> str:
    """The text of a file beside this one."""
    return (files("archerfish.serve") / name).read_text(encoding="utf-8")
