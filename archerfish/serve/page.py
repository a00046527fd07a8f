"""The web page at `/`: what is served, a chat, and how to call the routes. No assets from elsewhere."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
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
    ("", "GET", "/v1/models", None),
    ("", "GET", "/health", None),
    ("", "GET", "/ready", None),
    ("", "GET", "/stats", None),
    ("", "GET", "/metrics", None),
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
    routes = "".join(
        f"<b>{method} {path}</b><pre>{html.escape(curl(base_url, method, path, body))}</pre>\n"
        for method, path, body in examples(kinds)
    )
    most_tokens = min([MAX_TOKENS, *(model.max_length for model in models if model.kind == "generation")])
    return template().substitute(
        models="<br>".join(shown), routes=routes, hide_chat="" if "generation" in kinds else "hidden",
        hide_compare="" if "embedding" in kinds else "hidden", most_tokens=most_tokens,
    )


@cache
def template() -> Template:
    return Template((files("archerfish.serve") / "page.html").read_text(encoding="utf-8"))
