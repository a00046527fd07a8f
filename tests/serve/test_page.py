"""The page at `/`: what it shows, and what its script does, run by node if that is installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette

from archerfish.kernels.build import build_info
from archerfish.serve.answers import Model
from archerfish.serve.app import create_app
from archerfish.serve.client import RemoteError
from archerfish.serve.page import EXAMPLES, MAX_TOKENS, curl, examples, page
from archerfish.serve.tenants import Tenants

from .client import LIMIT_S, PASS, WORDS, app_of, client_of, host_with, running, serving, words_host
from .fake_backend import FakeBackend
from .hosting import WordEncoder

NODE = shutil.which("node")
pytestmark = pytest.mark.anyio
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
WRITER = Model(created=0, id="lab/writer", kind="generation", max_length=100)
VECTORS = Model(created=0, id="lab/vectors", kind="embedding", max_length=64, dimension=8)
SPEAKER = Model(created=0, id="lab/speaker", kind="tts", max_length=4096)
PAIRS = Model(created=0, id="lab/pairs", kind="cross-encoder", max_length=64)


class Parts(HTMLParser):
    """Ids and the sections that are hidden; the script; whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.hidden: set[str] = set()
        self.script = ""
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
            if "hidden" in given:
                self.hidden.add(str(given["id"]))
        if tag not in ("meta", "br", "input", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.script += data


# What it shows


async def test_page_loads_nothing_from_elsewhere() -> None:
    async with serving() as client:
        answer = await client.get("/", headers={"Host": "<b>evil</b>"})
        assert answer.headers["content-type"].startswith("text/html")
        for text in ("/v1/embeddings", "/v1/rerank", "/similarity", WORDS, "8 dimensions", "up to 512 tokens"):
            assert text in answer.text
        for outside in ("src=", "<link", "@import", "url(", "https://", "<b>evil"):
            assert outside not in answer.text.replace('<link rel="icon" type="image/svg+xml" href="/favicon.ico">', "")
        assert "/v1/chat/completions" not in re.sub(r"<script>.*</script>", "", answer.text, flags=re.DOTALL)
        assert "chat" in Parts(answer.text).hidden


@pytest.mark.parametrize(("models", "hidden"), [
    ([WRITER, VECTORS], set()), ([WRITER], {"compare"}), ([VECTORS], {"chat"}), ([PAIRS], {"chat", "compare"}),
    ([WRITER, PAIRS], {"compare"}), ([], {"chat", "compare"}), ([SPEAKER], {"chat", "compare"}), ([SPEAKER, VECTORS], {"chat"}),
])  # fmt: skip
def test_page_hides_sections_without_models(models: list[Model], hidden: set[str]) -> None:
    parts = Parts(page("http://here", models))
    assert parts.hidden & {"chat", "compare"} == hidden
    assert len(parts.ids) == len(set(parts.ids))
    assert set(re.findall(r'by\("(\w+)"\)', parts.script)) <= set(parts.ids)


def test_all_placeholders_are_filled() -> None:
    text = page("http://here", [WRITER, VECTORS, PAIRS])
    assert "$$" not in text
    assert not re.findall(r"\$(?!\{)", text)


def test_chat_max_tokens_fits_the_model() -> None:
    for max_length, asked in ((256, 256), (8192, MAX_TOKENS)):
        assert f"max_tokens: {asked}," in page("http://here", [replace(WRITER, max_length=max_length), VECTORS])


def test_names_are_escaped() -> None:
    text = page("http://here/<i>", [replace(WRITER, id="a<script>alert(1)</script>$routes & b")])
    assert "a&lt;script&gt;alert(1)&lt;/script&gt;$routes &amp; b" in text
    assert "<i>" not in text


OF_TEXTS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/cache/explain"}
OF_VECTORS = {"/v1/embeddings", "/similarity"}


@pytest.mark.parametrize(("kinds", "first", "absent"), [
    ({"generation", "tts", "embedding"}, "/v1/chat/completions", set()),
    ({"generation"}, "/v1/chat/completions", {*OF_VECTORS, "/v1/rerank", "/v1/tts/tokens"}),
    ({"embedding"}, "/v1/embeddings", {*OF_TEXTS, "/v1/tts/tokens"}),
    ({"cross-encoder"}, "/v1/rerank", {*OF_TEXTS, *OF_VECTORS, "/v1/tts/tokens"}),
    ({"tts"}, "/v1/tts/tokens", {*OF_TEXTS, *OF_VECTORS, "/v1/rerank"}), ({"tts", "embedding"}, "/v1/tts/tokens", OF_TEXTS),
])  # fmt: skip
def test_examples_fit_the_models(kinds: set[str], first: str, absent: set[str]) -> None:
    shown = [path for _, path, _ in examples(kinds)]
    assert shown[0] == first
    assert {path for _, _, path, _ in EXAMPLES} - set(shown) == absent


# Routes for the clients of other servers, which the page does not show.
OTHER_SERVERS = (
    "/", "/embed", "/info", "/predict", "/rerank", "/v2/rerank", "/v1/embed", "/v2/embed", "/score", "/v1/score", "/pooling",
    "/classify",
)  # fmt: skip


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
    Parts(docs.text)
    for path, operations in paths.items():
        assert all(f"<b>{method.upper()}</b> {path}</code>" in docs.text for method in operations)
    assert "<tr><td><code><b>messages</b></code></td><td>array</td>" in docs.text
    assert "<tr><td><code>stop</code></td><td>string or array</td>" in docs.text
    assert not re.search(r"(src|href)=.?(https?:)?//", docs.text)
    assert icon.headers["content-type"] == "image/svg+xml" and icon.text.startswith("<svg ")


async def test_examples_are_answered(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})
    (tmp_path / "tiny" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    async with serving(host) as client:
        for method, path, body in examples({"generation", "embedding"}):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 200, (path, answer.text)


def test_examples_survive_shell_quoting() -> None:
    body = {"prompt": "it's \"so\" $HOME `x`", "n": 1}
    words = shlex.split(curl("http://here", "POST", "/v1/x", body).replace("\\\n", " "))
    assert words[:2] == ["curl", "http://here/v1/x"]
    assert json.loads(words[-1]) == body
    assert shlex.split(curl("http://here", "GET", "/health", None)) == ["curl", "http://here/health"]


# What its script does


BROWSER = """
const made = {};
const element = () => ({
  value: "", textContent: "", hidden: false, className: "", scrollTop: 0, scrollHeight: 0, children: [], heard: {},
  append(child) { this.children.push(child); },
  addEventListener(name, act) { this.heard[name] = act; },
  fire(name, values = {}) { return this.heard[name]({preventDefault() {}, ...values}); },
  requestSubmit() { this.fire("submit"); },
});
globalThis.document = {getElementById: (id) => (made[id] ??= element()), createElement: element};
const outside = fetch;
globalThis.fetch = (path, options) => outside("ADDRESS" + path, options);
const until = async (isTrue) => { while (!isTrue()) await new Promise((go) => setTimeout(go, 2)); };
"""
TELL = """
const seen = by("talk").children.map((one) => [one.className, one.textContent]);
const found = {seen, messages, note: by("note").textContent, isAsked: asked !== null, canSend: !by("send").hidden,
  answer: by("answer").textContent, meter: by("meter").value, hasKeyField: !by("key").hidden};
console.log(JSON.stringify(found));
process.exit(0);
"""
SAY = """
by("words").value = " TEXT ";
by("words").fire("keydown", {key: "Enter", shiftKey: false});
"""


def play(app: Starlette, steps: str, tmp_path: Path) -> dict[str, Any]:
    """What the page shows after some steps of a user."""
    assert NODE is not None
    with running(app) as served:
        script = Parts(httpx.get(served.url, timeout=LIMIT_S).text).script
        path = tmp_path / "play.mjs"
        path.write_text(BROWSER.replace("ADDRESS", served.url) + script + 'by("key").hidden = true;\n' + steps + TELL)
        done = subprocess.run([NODE, str(path)], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["isAsked"]
    assert found["canSend"]
    return found


def said(text: str) -> str:
    """Say something and wait for the end of the answer."""
    return SAY.replace("TEXT", text) + "await until(() => !asked);\n"


@needs_node
def test_conversation_is_streamed_and_sent_whole(tmp_path: Path) -> None:
    backend = FakeBackend("Hello thére")
    found = play(create_app(backend), said("Hi") + said("And you?"), tmp_path)
    talk = [["user", "Hi"], ["assistant", "Hello thére"], ["user", "And you?"], ["assistant", "Hello thére"]]
    assert found["seen"] == talk
    assert [[message["role"], message["content"]] for message in found["messages"]] == talk
    assert re.fullmatch(r"first word after \d+ ms, 13 tokens, [\d.]+ tokens/s", found["note"])
    sent = bytes(i for i in backend.requests[-1].token_ids or [] if i < 256).decode()
    assert "Hi" in sent and "Hello thére" in sent and "And you?" in sent


@needs_node
@pytest.mark.parametrize("num_before", [0, 4])
def test_failed_turn_is_shown_and_left_out(num_before: int, tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.fails[num_before] = RemoteError("The engine process has gone.", status=503, retry_after_s=1.0)
    found = play(create_app(backend), said("Hi"), tmp_path)
    assert found["seen"][0] == ["user", "Hi"]
    assert found["seen"][1][0] == "failed"
    assert "The engine process has gone." in found["seen"][1][1]
    assert found["messages"] == []


@needs_node
@pytest.mark.parametrize("num_before", [0, 4])
def test_answer_can_be_stopped(num_before: int, tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.gate.clear()
    backend.num_before_gate = num_before
    seen = "Hello there"[:num_before]
    arrived = f'await until(() => by("talk").children[1]?.textContent === "{seen}" && !by("stop").hidden);\n'
    steps = SAY.replace("TEXT", "Hi") + arrived + 'by("stop").fire("click");\nawait until(() => !asked);\n'
    found = play(create_app(backend), steps, tmp_path)
    assert found["seen"] == [["user", "Hi"], ["assistant", seen]]
    kept = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": seen}]
    assert found["messages"] == (kept if seen else [])
    assert len(backend.left) == len(backend.requests)


@needs_node
def test_page_asks_for_an_api_key(tmp_path: Path) -> None:
    key = "alice-" + "0123456789" * 3
    app = create_app(FakeBackend(), credentials=PASS, tenants=Tenants.from_text(f"alice={key}"))
    refused = play(app, said("Hi"), tmp_path)
    assert refused["hasKeyField"]
    assert "needs an API key" in refused["seen"][1][1]
    found = play(app, f'by("key").value = " {key} ";\n' + said("Hi"), tmp_path)
    assert found["seen"][1] == ["assistant", "Hello there"]
    assert not found["hasKeyField"]


@needs_node
def test_two_sentences_are_compared(tmp_path: Path) -> None:
    steps = 'by("a").value = "red fish"; by("b").value = "red fish";\nawait by("try").fire("submit");\n'
    with words_host() as host, host:
        found = play(app_of(host), steps, tmp_path)
        assert re.fullmatch(r"1\.0000 in \d+ ms", found["answer"])
        assert found["meter"] == pytest.approx(1, abs=1e-6)
        steps = 'by("a").value = "unreadable"; by("b").value = "x";\nawait by("try").fire("submit");\n'
        assert play(app_of(host), steps, tmp_path)["answer"] == "A text is unreadable."
