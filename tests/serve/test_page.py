"""The page at `/`, its files and the examples that it shows. What its scripts do: test_page_scripts.py and
tests/browser."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from archerfish.config import ServeConfig
from archerfish.kernels.build import build_info
from archerfish.serve.app import create_app
from archerfish.serve.calls import ADDRESS, EXAMPLES, MODEL, curl, examples, python
from archerfish.serve.page import assets
from archerfish.serve.tenants import Tenants

from .client import LIMIT_S, PASS, WORDS, client_of, host_with, running, serving
from .fake_backend import MODEL as WRITER
from .fake_backend import FakeBackend
from .hosting import WordEncoder

pytestmark = pytest.mark.anyio
WEB = Path(str(files("archerfish.serve") / "web"))
MAX_BYTES = 300_000  # of all that the page loads
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


class Parts(HTMLParser):
    """What a page refers to, what its text may not hold, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []  # scripts and styles in the page itself
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [str(given[name]) for name in ("src", "href") if given.get(name)]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        if tag not in ("meta", "br", "input", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_allow_nothing_but_their_own_files(path: str) -> None:
    """Red: an inline script or style, a file of another host, or a policy that would let one in."""
    async with client_of(create_app(FakeBackend(), ServeConfig(allowed_hosts="*"))) as client:
        answer = await client.get(path, headers={"Host": "<b>evil</b>"})
        parts = Parts(answer.text)
        assert answer.headers["content-type"] == "text/html; charset=utf-8" and "evil" not in answer.text
        policy = dict(one.strip().partition(" ")[::2] for one in answer.headers["content-security-policy"].split(";"))
        own = dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'")
        none = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
        assert policy == {**own, **none, "img-src": "'self' data: blob:"}
        assert not parts.inline
        for link in parts.links:
            assert link.startswith("#") or (await client.get(link)).status_code == 200, link


async def test_files_of_the_page() -> None:
    """Red: a wrong type, a file that browsers load again though it is the same, or a name outside of the folder."""
    async with client_of(create_app(FakeBackend())) as client:
        shipped = {path.name for path in WEB.iterdir()}
        assert shipped == set(assets()) and all(path.is_file() for path in WEB.iterdir())
        num_bytes = 0
        for name in sorted({*shipped, "data.json"}):
            path = f"/web/{name}"
            answer, head = await client.get(path), await client.head(path)
            assert answer.headers["content-type"].partition(";")[0] == TYPES[Path(name).suffix], name
            assert (head.status_code, head.headers["etag"]) == (200, answer.headers["etag"])
            assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == (
                "no-cache",
                "nosniff",
            )
            again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            num_bytes += len(answer.content)
        assert num_bytes < MAX_BYTES
        for name in ("nothing.js", "../page.py", "%2e%2e/page.py", "..%2Fpage.py", ""):
            assert (await client.get(f"/web/{name}")).status_code == 404, name
        assert (await client.post("/web/main.js")).status_code == 405


async def test_files_need_no_key() -> None:
    """The page has to load before it can ask for one."""
    key = "alice-" + "0123456789" * 3
    async with client_of(
        create_app(FakeBackend(), credentials=PASS, tenants=Tenants.from_text(f"alice={key}"))
    ) as client:
        for path in ("/", "/web/main.js", "/web/data.json"):
            assert (await client.get(path)).status_code == 200
        calls = (await client.get("/web/data.json")).json()["calls"]
        assert all("YOUR-KEY" in call["curl"] and "YOUR-KEY" in call["python"] for call in calls)
        assert (await client.get("/v1/models")).status_code == 401


def test_modules_import_what_is_there() -> None:
    """Red: a module that no file is, HTML made from text, or an address of another host."""
    for path in WEB.glob("*.js"):
        text = path.read_text()
        assert set(re.findall(r"https?://[\w.-]+", text)) <= {"http://www.w3.org"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        for name in re.findall(r'from "\./([\w.]+)"', text):
            assert (WEB / name).is_file(), (path, name)


async def test_parameters_of_the_page_are_those_of_the_route() -> None:
    async with client_of(create_app(FakeBackend())) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        told = (await client.get("/web/data.json")).json()["parameters"]
        assert told.keys() == schemas["ChatBody"]["properties"].keys()
        assert told["temperature"]["maximum"] == 100


OF_TEXTS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/cache/explain",
    "/v1/cache/view",
}
OF_VECTORS = {"/v1/embeddings", "/similarity"}


@pytest.mark.parametrize(
    ("kinds", "first", "absent"),
    [
        ({"generation", "tts", "embedding"}, "/v1/chat/completions", set()),
        ({"generation"}, "/v1/chat/completions", {*OF_VECTORS, "/v1/rerank", "/v1/tts/tokens"}),
        ({"embedding"}, "/v1/embeddings", {*OF_TEXTS, "/v1/tts/tokens"}),
        ({"cross-encoder"}, "/v1/rerank", {*OF_TEXTS, *OF_VECTORS, "/v1/tts/tokens"}),
        ({"tts"}, "/v1/tts/tokens", {*OF_TEXTS, *OF_VECTORS, "/v1/rerank"}),
        ({"tts", "embedding"}, "/v1/tts/tokens", OF_TEXTS),
    ],
)
def test_examples_fit_the_models(kinds: set[str], first: str, absent: set[str]) -> None:
    shown = [path for _, path, _ in examples(kinds)]
    assert shown[0] == first
    assert {path for _, _, path, _ in EXAMPLES} - set(shown) == absent


# Routes for the clients of other servers, which the page does not show.
OTHER_SERVERS = (
    "/",
    "/embed",
    "/info",
    "/predict",
    "/rerank",
    "/v2/rerank",
    "/v1/embed",
    "/v2/embed",
    "/score",
    "/v1/score",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/embed_sparse",
    "/embed_all",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


async def test_page_shows_every_route() -> None:
    async with client_of(create_app(FakeBackend())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        of_others = {path for path in paths if path.startswith(("/admin", "/api/")) or path in OTHER_SERVERS}
        told = {(method.upper(), path) for path in paths.keys() - of_others for method in paths[path]}
        shown = {(method, path) for _, method, path, _ in EXAMPLES}
        assert told - shown == {("GET", "/v1/models/{model_id}"), ("POST", "/v1/messages/count_tokens")}
        assert shown <= told


async def test_docs_show_routes_and_their_parameters() -> None:
    async with client_of(create_app(FakeBackend())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        docs, icon = await client.get("/docs"), await client.get("/favicon.ico")
        assert (await client.get("/version")).json() == build_info()
    for path, operations in paths.items():
        assert all(f"<b>{method.upper()}</b> {path}</code>" in docs.text for method in operations)
    assert "<tr><td><code><b>messages</b></code></td><td>array</td>" in docs.text
    assert "<tr><td><code>stop</code></td><td>string or array</td>" in docs.text
    assert icon.headers["content-type"] == "image/svg+xml" and icon.text.startswith("<svg ")


async def test_examples_are_answered(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    async with serving(host) as client:
        for method, path, body in examples({"generation", "embedding"}):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 200, (path, answer.text)


def test_examples_survive_shell_quoting() -> None:
    body = {"prompt": 'it\'s "so" $HOME `x`', "n": 1}
    words = shlex.split(curl("http://here", "POST", "/v1/x", body).replace("\\\n", " "))
    assert words[:2] == ["curl", "http://here/v1/x"]
    assert json.loads(words[-1]) == body
    assert shlex.split(curl("http://here", "GET", "/health", None)) == ["curl", "http://here/health"]


def test_python_examples_run() -> None:
    """Every program is run as it is shown, on one server of all that the fake backend has."""
    programs = [python(method, path, body) for method, path, body in examples({"generation", "embedding"})]
    with running(create_app(FakeBackend())) as served:
        filled = [text.replace(ADDRESS, served.url) for text in programs]
        named = [text.replace(MODEL, "lab/vectors" if "client.embeddings" in text else WRITER) for text in filled]
        source = "\n".join(f"exec({text!r}, {{}})" for text in named)
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=3 * LIMIT_S
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Hello there" in done.stdout and len(done.stdout.splitlines()) >= len(programs)
    assert 'headers={"Authorization": "Bearer YOUR-KEY"}' in python("GET", "/health", None, has_keys=True)
