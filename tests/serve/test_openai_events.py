"""How requests are answered while their client is there, and how events are sent, whatever they contain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from archerfish.config import ServeConfig
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.app import create_app
from archerfish.serve.bodies import Body
from archerfish.serve.client import RemoteError
from archerfish.serve.http import KEEP_ALIVE, BodyRoute, EventStream, EventWriter
from archerfish.serve.wire import Chunk, GenerationRequest

from .fake_backend import END, FakeBackend, events, ids, post, until
from .hosting import llm_host, talking

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_task_is_left")]
STREAM = {"prompt": "p", "max_tokens": 50, "stream": True}


class Reader:
    """The client of one request to an ASGI app. It reads what the app sends, and may disconnect."""

    def __init__(self, app: Starlette, path: str = "/v1/completions", body: dict[str, Any] = STREAM) -> None:
        self.app, self.path = app, path
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.requests = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive(self) -> dict[str, Any]:
        if self.requests:
            return self.requests.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def data(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    async def read(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "headers": headers,
            "query_string": b"",
        }
        scope["state"] = {"remarks": []}
        await self.app(scope, self.receive, self.send)


@pytest.mark.parametrize(("stream", "num_before"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_disconnect_cancels_generation(stream: bool, num_before: int, num_prompts: int) -> None:
    """Before the first event of a stream, and afterwards."""
    backend, registry = FakeBackend(), MetricRegistry()
    backend.gate.clear()
    backend.num_before_gate = num_before
    body = {**STREAM, "prompt": ["p"] * num_prompts, "stream": stream}
    reader = Reader(create_app(backend, registry=registry), body=body)
    reading = asyncio.create_task(reader.read())
    await until(lambda: len(backend.requests) == num_prompts and len(reader.data) == num_before * num_prompts)
    reader.gone.set()
    await reading
    assert len(backend.left) == num_prompts
    [requests] = [metric for metric in registry if metric.name == "archerfish_requests_total"]
    assert [sample.labels for sample in requests.samples()] == [("/v1/completions", "200" if num_before else "499")]


async def test_quiet_stream_sends_comments() -> None:
    """Also before the first event; a later error is an event."""
    backend = FakeBackend()
    backend.fails = {1: RemoteError("refused", status=400)}
    backend.gate.clear()
    reader = Reader(create_app(backend, ServeConfig(keep_alive_s=0.004)))
    reading = asyncio.create_task(reader.read())
    await until(lambda: reader.data.count(KEEP_ALIVE) >= 3)
    backend.gate.set()
    await reading
    assert reader.sent[0]["status"] == 200
    [first, last] = [data for data in reader.data if data != KEEP_ALIVE]
    assert b'"text":"H"' in first
    assert b'"message":"refused"' in last
    assert [message.get("more_body") for message in reader.sent[-2:]] == [True, False]


async def test_no_comment_is_sent_after_the_last_event() -> None:
    """The stream ends in the same turn of the event loop in which its timer decides to send a comment."""
    reader = Reader(create_app(FakeBackend(), ServeConfig()))

    class Ending:
        config = ServeConfig(keep_alive_s=0.0)

        async def run(self, *_: Any, **options: Any) -> AsyncIterator[list[Any]]:
            stream._is_quiet = True
            stream._tick(reader.send, 60.0)
            yield []

    class Writer:
        headers, keep_alive = EventWriter.headers, EventWriter.keep_alive

        def end(self) -> bytes:
            return b"end"

    service = cast(Any, Ending())
    writer = cast(Any, Writer())
    scope = {"type": "http"}
    stream = EventStream(service, Request(scope), [], writer)
    await stream(scope, reader.receive, reader.send)
    await asyncio.sleep(0)
    assert reader.data == [KEEP_ALIVE, b"end"]


# Handlers


def app_with(handler: Callable[[], Awaitable[None]]) -> Starlette:
    async def answer(request: Request, body: Body) -> Response:
        await handler()
        return Response(b"done")

    return Starlette(routes=[BodyRoute("/", answer, Body, None)])


async def test_disconnect_cancels_a_handler() -> None:
    has_begun, is_cancelled = asyncio.Event(), False

    async def handler() -> None:
        nonlocal is_cancelled
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    for is_gone in (True, False):
        reader = Reader(app_with(handler), "/", {})
        task = asyncio.create_task(reader.read())
        await has_begun.wait()
        has_begun.clear()
        if is_gone:
            reader.gone.set()
        else:
            task.cancel()
        with pytest.raises(ClientDisconnect if is_gone else asyncio.CancelledError):
            await task
        assert is_cancelled
        is_cancelled = False


async def test_handler_may_raise_its_own_timeout() -> None:
    async def fail() -> None:
        raise TimeoutError("of the handler")

    with pytest.raises(TimeoutError, match="of the handler"):
        await Reader(app_with(fail), "/", {}).read()
    reader = Reader(app_with(lambda: asyncio.sleep(0)), "/", {})
    await reader.read()
    assert reader.data == [b"done"]


# Chunks and stops


@pytest.mark.no_cover
@given(
    text=st.text("ab é", min_size=1, max_size=30),
    stop=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    size=st.integers(1, 8),
    stream=st.booleans(),
)
def test_text_and_usage_do_not_depend_on_chunk_sizes(text: str, stop: list[str], size: int, stream: bool) -> None:
    ends = {word: place for word in stop if (place := text.find(word)) >= 0}
    first = min(ends, key=lambda word: (ends[word] + len(word), -len(word)), default="")
    shown = text[: ends[first]] if ends else text
    token_ids = ids(text[: ends[first] + len(first)]) if ends else [*ids(text), END]
    backend = FakeBackend(text)
    backend.tokens_per_chunk = size
    body: dict[str, Any] = {"prompt": "p", "stop": stop, "max_tokens": None, "stream": stream, "logprobs": 0}
    body |= {"stream_options": {"include_usage": True}} if stream else {"return_token_ids": True}
    answer = post(backend, "/v1/completions", body)
    if stream:
        chunks = events(answer)
        written, usage = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]), chunks[-1]["usage"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    else:
        [choice], usage = answer.json()["choices"], answer.json()["usage"]
        written = choice["text"]
        assert (choice["token_ids"], choice["stop_reason"]) == (token_ids, first or END)
        assert len(choice["logprobs"]["tokens"]) == len(token_ids) - (not ends)  # the end token is not shown
    assert (written, usage["completion_tokens"], usage["prompt_tokens"]) == (shown, len(token_ids), 1)


@pytest.mark.parametrize("stream", [False, True])
def test_stopped_choice_is_ended_in_the_engine(stream: bool) -> None:
    backend = FakeBackend(lambda request: "one two three")
    body = {"prompt": "a", "n": 2, "stop": [" 1"], "max_tokens": 50, "stream": stream}
    answer = post(backend, "/v1/completions", body)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json()["choices"]
    assert [choice["stop_reason"] for choice in choices if choice["finish_reason"]] == [END, " 1"]
    assert "".join(choice["text"] for choice in choices) == "one two three" * 2
    [request] = backend.requests
    assert backend.ended == [(request.request_id, 1)]
    for num in (1, 2):
        backend = FakeBackend("one two three")
        post(backend, "/v1/completions", {**body, "n": num, "stop": ["two"]})
        [request] = backend.requests
        assert backend.ended == [(request.request_id, index) for index in range(num)]


async def test_ended_sequence_takes_no_more_steps(tmp_path: Path) -> None:
    host, engine = llm_host(tmp_path, max_len=4096)
    params = {"n": 2, "max_tokens": 300, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    num_tokens = [0, 0]
    request = GenerationRequest(request_id="r", token_ids=[5, 6, 7], params=params, stream=True, wants_ids=True)
    async with talking(host) as client:
        async for part in client.generate(request):
            if isinstance(part, Chunk):
                num_tokens[part.index] += len(part.token_ids)
                if part.index == 0 and num_tokens[0] == 3:
                    for request_id, index in (("r", 0), ("r", 0), ("r", 9), ("unknown", 0)):
                        client.end_sequence(request_id, index)
            else:
                reasons = {output.index: output.finish_reason for output in part.outputs}
    assert reasons == {0: "stop", 1: "length"}
    assert num_tokens[1] == 300
    assert num_tokens[0] < 300
    assert engine.scheduler.stats().num_running == 0
