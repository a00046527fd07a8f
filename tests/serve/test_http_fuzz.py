"""Whatever a request holds, the answer is an answer or an error that blames the caller, in the shape of the route's family."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from archerfish.config import ServeConfig
from archerfish.serve.app import create_app
from archerfish.serve.openapi import ANSWERS

from .client import WORDS, app_of, host_with
from .fake_backend import MODEL, TEMPLATE, FakeBackend
from .fuzzed_requests import FuzzedRequest, fuzzed
from .hosting import WordEncoder, add_llm

LIMIT_S = 60  # of one request
ALLOWED = {200, 400, 403, 404, 405, 413, 429, 503, 504}
AT_ONCE = 8
MAX_BODY = 1 << 20
COMPLETION = {"prompt": "Hi", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@dataclass
class Answered:
    """What came back."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


async def ask(app: Starlette, made: FuzzedRequest) -> Answered:
    """Call an app as a server does, with headers that no HTTP client would send."""
    size = max(1, -(-len(made.content) // made.num_parts))
    parts = [made.content[start : start + size] for start in range(0, len(made.content), size)] or [b""]
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if made.is_broken_off:
        messages[-1] = {"type": "http.disconnect"}
    else:
        messages[-1]["more_body"] = False
    answered = Answered()

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        return {"type": "http.disconnect"} if made.is_broken_off else await asyncio.Future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered.status, answered.headers = message["status"], dict(message["headers"])
        else:
            answered.body += message.get("body", b"")

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": made.method, "scheme": "http",
        "path": made.path, "raw_path": made.path.encode("utf-8", "surrogatepass"), "root_path": "", "query_string": made.query,
        "headers": [(b"host", b"test"), *made.headers], "client": ("127.0.0.1", 1), "server": ("test", 80), "state": {},
    }  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        await app(scope, receive, send)
    return answered


def read_json(data: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(data, parse_constant=refuse)


def check(made: FuzzedRequest, answered: Answered) -> None:
    """That an answer is in order."""
    if made.is_broken_off and answered.status in (0, 499):
        return
    assert answered.status in ALLOWED, answered.status
    kind = answered.headers.get(b"content-type", b"").decode()
    if answered.status not in (200, 404, 405, 413, 499):
        assert answered.status in ANSWERS[made.method.lower(), route_of(made.path)][1]
    is_claude = made.path == "/v1/messages" or made.path.startswith("/v1/messages/")
    if answered.status != 200:
        if made.method == "HEAD":
            return
        assert kind == "application/json"
        check_error(read_json(answered.body), is_claude)
    elif kind.startswith("text/event-stream"):
        check_events(made.path, answered.body.decode())
    elif made.method == "HEAD" or made.path == "/openapi.json":
        assert kind == "application/json"
    elif kind == "application/json":
        stated, _ = ANSWERS[made.method.lower(), route_of(made.path)]
        assert not isinstance(stated, str)
        msgspec.convert(read_json(answered.body), stated)
    else:
        assert made.path in ("/", "/metrics")


def route_of(path: str) -> str:
    return "/v1/models/{model_id}" if path.startswith("/v1/models/") else path


def check_error(body: Any, is_claude: bool) -> None:
    if is_claude:
        assert set(body) == {"type", "error"}
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["code"], str)
    assert isinstance(body["error"]["message"], str)
    assert 0 < len(body["error"]["message"]) < 1010
    assert "Traceback" not in body["error"]["message"]


def check_events(path: str, text: str) -> None:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/tts/tokens"):
        assert lines.pop() == "[DONE]", lines[-1:]
    found = [read_json(line.encode()) for line in lines]
    assert not any("error" in event or event.get("type") == "error" for event in found if not event.get("response")), found[-1]
    last = {"/v1/messages": ["message_stop"], "/v1/responses": ["response.completed", "response.incomplete"]}.get(path)
    assert last is None or found[-1]["type"] in last


async def fuzz(app: Starlette, seed: int, number: int, at_once: int = 1) -> Counter[int]:
    """So many requests; the statuses of their answers."""
    draw = random.Random(seed)
    statuses: Counter[int] = Counter()

    async def one(made: FuzzedRequest) -> None:
        try:
            answered = await ask(app, made)
            check(made, answered)
        except Exception as error:
            error.add_note(f"seed {seed}, after {statuses.total()} requests: {shown(made)}")
            raise
        statuses[answered.status] += 1

    async with app.router.lifespan_context(app):
        before = await ask(app, completion())
        for _ in range(0, number, at_once):
            await asyncio.gather(*(one(fuzzed(draw)) for _ in range(at_once)))
        after = await ask(app, completion())
        await until_free(app)
    assert before.status == after.status == 200
    assert text_of(before) == text_of(after)
    return statuses


async def until_free(app: Starlette) -> None:
    """Waits until no sequence of any model holds a block; this ends, or an engine has lost some."""
    async with asyncio.timeout(LIMIT_S):
        while any(model.get("num_blocks_in_use") for model in (await stats_of(app)).get("models", {}).values()):
            await asyncio.sleep(0)


async def stats_of(app: Starlette) -> dict[str, Any]:
    found: dict[str, Any] = read_json((await ask(app, FuzzedRequest("/stats", method="GET"))).body)
    return found


def shown(made: FuzzedRequest) -> str:
    content = made.content if len(made.content) < 1500 else made.content[:1500] + b"..."
    return f"{made.method} {made.path!r}?{made.query!r} {made.headers} {content!r} in {made.num_parts} parts"


def completion() -> FuzzedRequest:
    return FuzzedRequest("/v1/completions", json.dumps(COMPLETION).encode(), headers=[(b"content-type", b"application/json")])


def text_of(answered: Answered) -> str:
    text: str = read_json(answered.body)["choices"][0]["text"]
    return text


def fake_app() -> Starlette:
    return create_app(FakeBackend(), ServeConfig(max_body_bytes=MAX_BODY))


@contextmanager
def hosted_app(directory: Path) -> Iterator[Starlette]:
    """Over a tiny Llama and encoders in an engine host."""
    host = host_with(directory, WordEncoder(WORDS), WordEncoder("fake/pairs", is_cross_encoder=True))
    add_llm(host, directory, has_text=True, max_len=64)
    host.models.entries[-1].aliases = (MODEL,)
    (directory / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    with host:
        yield app_of(host, max_body_bytes=MAX_BODY)


def is_varied(statuses: Counter[int]) -> bool:
    """Whether both good and bad requests were among them: a generator of nonsense would prove little."""
    total = statuses.total()
    return statuses[200] > total / 8 and statuses[400] > total / 8


@pytest.mark.no_cover
def test_fuzzed_requests_are_never_the_servers_fault() -> None:
    assert is_varied(asyncio.run(fuzz(fake_app(), 0, 1500)))


@pytest.mark.no_cover
def test_fuzzed_requests_leave_an_engine_as_it_was(tmp_path: Path) -> None:
    with hosted_app(tmp_path) as app:
        assert is_varied(asyncio.run(fuzz(app, 1, 400, AT_ONCE)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_thousand_fuzzed_requests(tmp_path: Path, seed: int) -> None:
    statuses = asyncio.run(fuzz(fake_app(), seed, 9_000))
    with hosted_app(tmp_path) as app:
        statuses += asyncio.run(fuzz(app, seed + 100, 1_000, AT_ONCE))
    assert statuses.total() >= 10_000
