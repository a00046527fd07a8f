"""The web page at `/`: what is served, how to call it, and a box to try it. No assets from elsewhere."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from typing import Any

EXAMPLES: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/v1/embeddings", {"input": ["An archerfish spits water.", "射水鱼"]}),
    ("POST", "/v1/rerank", {"query": "fish that shoot", "documents": ["Archerfish hunt insects.", "Bread needs yeast."]}),
    ("POST", "/similarity", {"source": "A fish.", "sentences": ["An animal that swims.", "A loaf of bread."]}),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>archerfish</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ margin-bottom: 0; }} h2 {{ margin-top: 2rem; font-size: 1.1rem; }}
pre {{ background: #8882; padding: .6rem .8rem; border-radius: .4rem; overflow-x: auto; font-size: .85rem; }}
input {{ width: 100%; box-sizing: border-box; padding: .5rem; margin: .2rem 0; font: inherit; }}
button {{ padding: .4rem 1.2rem; font: inherit; }} output {{ margin-left: 1rem; font-weight: 600; }}
meter {{ width: 100%; height: 1.2rem; }}
</style>
</head>
<body>
<h1>archerfish</h1>
<p>{models}</p>
<h2>Try it: how similar are two sentences?</h2>
<form id="try">
<input id="a" aria-label="First sentence" value="The archerfish hunts insects above the water.">
<input id="b" aria-label="Second sentence" value="A fish that shoots down flies.">
<p><button>Compare</button><output id="answer"></output></p>
<meter id="meter" min="0" max="1" value="0"></meter>
</form>
<h2>Routes</h2>
{routes}
<p>Machines read <a href="/openapi.json">/openapi.json</a>.</p>
<script>
const by = (id) => document.getElementById(id);
by("try").addEventListener("submit", async (event) => {{
  event.preventDefault();
  const began = performance.now();
  try {{
    const answer = await fetch("/similarity", {{
      method: "POST",
      headers: {{"Content-Type": "application/json"}},
      body: JSON.stringify({{source: by("a").value, sentences: [by("b").value]}}),
    }});
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error.message);
    by("meter").value = Math.max(0, data.similarities[0]);
    by("answer").textContent = `${{data.similarities[0].toFixed(4)}} in ${{(performance.now() - began).toFixed(0)}} ms`;
  }} catch (error) {{
    by("answer").textContent = error.message;
  }}
}});
</script>
</body>
</html>
"""


def curl(base_url: str, method: str, path: str, body: dict[str, Any] | None) -> str:
    """The shell command of one call."""
    if method == "GET":
        return f"curl {base_url}{path}"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {base_url}{path} -H 'Content-Type: application/json' \\\n  -d {data}"


def page(base_url: str, models: Sequence[dict[str, Any]]) -> str:
    """The page, for a server that is reached at `base_url`."""
    shown = []
    for model in models:
        size = f", {model['dimension']} dimensions" if "dimension" in model else ""
        shown.append(f"<b>{html.escape(model['id'])}</b> ({model['kind']}{size}, up to {model['max_length']} tokens)")
    routes = "".join(
        f"<b>{method} {path}</b><pre>{html.escape(curl(base_url, method, path, body))}</pre>\n"
        for method, path, body in EXAMPLES
    )
    return PAGE.format(models="<br>".join(shown), routes=routes)
