"""A front end repeats what it has just heard from the engine process, instead of asking again."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from archerfish.observe.metrics import MetricRegistry
from archerfish.serve import refusals as refusals_module
from archerfish.serve.admission import TooLateError
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Question, RemoteError
from archerfish.serve.refusals import HOLD_S, MAX_BODY_BYTES, STATE, Refusals
from archerfish.serve.tenants import Tenants
from archerfish.serve.wire import EmbedRequest, Failed, decode_answer, encode

from .client import LIMIT_S, running, with_app
from .fake_backend import FakeBackend

EMBEDDINGS = "/v1/embeddings"
ALICE, BOB = (f"{name}-{'0123456789' * 3}" for name in ("alice", "bob"))
ROUTE = object()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """The app behind the layer: it reads a whole body and refuses, as VectorRoutes do when the engine process has."""

    def __init__(self, error: RemoteError) -> None:
        self.bodies: list[bytes] = []
        self.is_full, self.error = True, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        scope["route"] = ROUTE
        if self.is_full:
            scope["state"][STATE] = self.error
        await send({"type": "http.response.start", "status": 503 if self.is_full else 200, "headers": [(b"retry-after", b"2")]})
        await send({"type": "http.response.body", "body": b"full" if self.is_full else b"vectors"})


class Front:
    """The layer with an engine behind it and a clock of the test's."""

    def __init__(self, needs_s: tuple[float, float] | None = None) -> None:
        self.clock, self.engine = Clock(), Engine(refusal(needs_s=needs_s))
        self.layer = Refusals(self.engine, MetricRegistry(), self.clock)

    def asks(self, body: dict[str, Any] | bytes, *, path: str = EMBEDDINGS, pieces: int = 1, has_length: bool = True) -> bool:
        """Whether the engine is asked by a request, which must be answered with a refusal while it is full."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(raw) // pieces)
        coming = [raw[start : start + size] for start in range(0, len(raw), size)]
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming)}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-length", str(len(raw)).encode())] if has_length else []
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {}}
        num_before = len(self.engine.bodies)
        asyncio.run(self.layer(scope, receive, send))
        has_asked = len(self.engine.bodies) > num_before
        assert not has_asked or self.engine.bodies[-1] == raw
        assert scope["route"] is ROUTE
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        if self.engine.is_full or not has_asked:
            assert (sent[0]["status"], sent[0]["headers"], sent[1]["body"]) == (503, [(b"retry-after", b"2")], b"full")
        return has_asked


def body_of(text: Any = "four", **options: Any) -> dict[str, Any]:
    return {"model": "m", "input": text, **options}


def test_a_refusal_counts_for_a_moment() -> None:
    front = Front()
    assert front.asks(body_of())
    assert not front.asks(body_of())
    front.clock.now = HOLD_S
    assert front.asks(body_of())


def test_repeating_a_refusal_does_not_make_it_last() -> None:
    front = Front()
    assert front.asks(body_of())
    front.clock.now = 0.9 * HOLD_S
    assert not front.asks(body_of())
    front.clock.now = HOLD_S
    front.engine.is_full = False
    assert front.asks(body_of())


@pytest.mark.parametrize("other", [
    body_of(["four"], model="n"), {"input": ["four", "more"]}, body_of(["four"] * 3, deadline_s=2.0), body_of("one long text"),
], ids=str)  # fmt: skip
def test_who_has_another_model_other_time_or_fewer_texts_is_asked_for(other: dict[str, Any]) -> None:
    front = Front()
    front.asks(body_of(["four", "more"]))
    assert front.asks(other)


@pytest.mark.parametrize("other", [
    body_of("longer"), body_of("no"), body_of(["four", "more"]), body_of(user="somebody"), body_of(encoding_format="base64"),
], ids=str)  # fmt: skip
def test_who_asks_for_as_many_texts_finds_no_room_either(other: dict[str, Any]) -> None:
    front = Front()
    front.asks(body_of())
    assert not front.asks(other)


@pytest.mark.parametrize(("other", "is_asked"), [
    (body_of(deadline_s=2.4), False), (body_of(deadline_s=2.5), True), (body_of(), True),
    (body_of("for", deadline_s=2.3), False), (body_of("for", deadline_s=2.4), True),
    (body_of("fours", deadline_s=2.5), False), (body_of("fours", deadline_s=2.7), True),
    (body_of(["fo", "ur"], deadline_s=2.4), False),
])  # fmt: skip
def test_who_has_less_time_than_is_needed_is_refused(other: dict[str, Any], is_asked: bool) -> None:
    """2.5 s would have done for the first, and every character of a text makes that 0.125 s more."""
    front = Front(needs_s=(2.5, 0.125))
    assert front.asks(body_of(deadline_s=1.0))
    assert front.asks(other) == is_asked


def test_many_texts_that_are_late_say_nothing_of_one() -> None:
    """The one is read in its turn, while each of the many waits for a turn of its own."""
    front = Front(needs_s=(2.5, 0.125))
    front.asks(body_of(["four", "more"], deadline_s=1.0))
    assert front.asks(body_of("as long as all of them together", deadline_s=1.0))


@pytest.mark.parametrize(("query", "is_asked"), [("short", True), ("as long as before", False), ("longer than it was", False)])
def test_a_shorter_query_is_asked_for(query: str, is_asked: bool) -> None:
    """A cross-encoder reads it once with every document, which is not known here."""
    front = Front(needs_s=(2.5, 0.125))
    front.asks({"query": "as long as before", "documents": ["a", "b"], "deadline_s": 0.5}, path="/v1/rerank")
    assert front.asks({"query": query, "documents": ["a", "b"], "deadline_s": 0.5}, path="/v1/rerank") == is_asked


@pytest.mark.parametrize(("path", "less", "more"), [
    ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, {"query": "q", "documents": ["a", "b", "c"]}),
    ("/similarity", {"source": "q", "sentences": ["a", "b"]}, {"source": ["q", "r"], "sentences": ["a", "b"]}),
])  # fmt: skip
def test_the_other_routes_of_vectors_have_refusals_of_their_own(path: str, less: dict[str, Any], more: dict[str, Any]) -> None:
    front = Front()
    front.asks({"input": "q"})
    assert front.asks(more, path=path)
    assert front.asks(less, path=path)
    assert not front.asks(more, path=path)


@pytest.mark.parametrize("body", [
    b"{", b'{"model":"m","input":[1,2,3]}', b'{"model":7,"input":"four"}', b'{"model":"m","input":"\xff"}',
    '{"model":"m","input":"four"}'.encode("utf-16"), b"[" * 20_000,
])  # fmt: skip
def test_what_is_not_understood_here_is_left_to_others(body: bytes) -> None:
    front = Front()
    front.asks(body_of())
    assert front.asks(body)
    assert front.asks(body)


def test_what_comes_in_pieces_or_without_a_length_goes_on_whole() -> None:
    front = Front()
    assert front.asks(body_of())
    assert front.asks(body_of(), pieces=3)
    assert front.asks(body_of(), has_length=False)
    assert front.asks(body_of("x" * MAX_BODY_BYTES))
    assert not front.asks(body_of())


def test_an_answer_is_not_repeated() -> None:
    front = Front()
    front.engine.is_full = False
    assert front.asks(body_of())
    assert front.asks(body_of())


# In its place among the layers of the app


def refusal(code: str = "overloaded", **options: Any) -> RemoteError:
    return RemoteError("The queue is full.", code=code, status=503, retry_after_s=2.5, **options)


class Full(FakeBackend):
    """Refuses to embed."""

    def __init__(self, error: RemoteError | None = None) -> None:
        super().__init__()
        self.error = error or refusal()
        self.num_asked = 0

    async def ask(self, message: Question) -> Answer:
        if isinstance(message, EmbedRequest):
            self.num_asked += 1
            raise self.error
        return await super().ask(message)


@pytest.fixture
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals_module, "HOLD_S", 1e6)


@pytest.mark.usefixtures("_long")
def test_a_repeated_refusal_is_the_same_answer_and_is_counted() -> None:
    backend, registry = Full(), MetricRegistry()
    answers: list[httpx.Response] = []

    async def test(client: httpx.AsyncClient) -> None:
        answers.extend([await client.post(EMBEDDINGS, json={"model": "lab/vectors", "input": "x"}) for _ in range(3)])

    with_app(test, create_app(backend, registry=registry))
    assert backend.num_asked == 1
    for answer in answers:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
        assert answer.json() == {
            "error": {"message": "The queue is full.", "type": "server_error", "param": None, "code": "overloaded"}
        }
        assert answer.headers == answers[0].headers
    counted = registry.counter("archerfish_requests_total", "Requests answered.", ("route", "status"))
    assert counted.value(route=EMBEDDINGS, status="503") == 3
    repeated = registry.counter("archerfish_repeated_refusals_total", refusals_module.REPEATED, ("route",))
    assert repeated.value(route=EMBEDDINGS) == 2
    timed = registry.histogram("archerfish_request_seconds", "Time from request to answer.", ("route",))
    assert timed.count(route=EMBEDDINGS) == 3
    assert registry.gauge("archerfish_requests_running", "Requests being answered.").value() == 0


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("code", ["input_too_large", "deadline_unreachable"])
def test_what_says_nothing_of_who_comes_now_is_not_repeated(code: str) -> None:
    """As of a request that was let in and whose turn came too late: it has no needs."""
    backend = Full(refusal(code))

    async def test(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            assert (await client.post(EMBEDDINGS, json={"input": "x"})).status_code == 503

    with_app(test, create_app(backend))
    assert backend.num_asked == 2


@pytest.mark.usefixtures("_long")
def test_keys_come_first_and_refusals_are_a_tenants_own() -> None:
    backend = Full()

    async def test(client: httpx.AsyncClient) -> None:
        statuses = []
        for key in (ALICE, ALICE, BOB, "stranger", ""):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            statuses.append((await client.post(EMBEDDINGS, json={"input": "x"}, headers=headers)).status_code)
        assert statuses == [503, 503, 503, 401, 401]

    with_app(test, create_app(backend, tenants=Tenants.from_text(f"alice={ALICE}, bob={BOB}")))
    assert backend.num_asked == 2


@pytest.mark.usefixtures("_long")
def test_a_connection_is_kept_over_refusals() -> None:
    backend = Full()
    with running(create_app(backend)) as address:
        connection = http.client.HTTPConnection(*address, timeout=LIMIT_S)
        for _ in range(3):
            connection.request("POST", EMBEDDINGS, json.dumps({"input": "x"}), {"Content-Type": "application/json"})
            socket = connection.sock
            answer = connection.getresponse()
            assert (answer.status, json.load(answer)["error"]["code"]) == (503, "overloaded")
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        assert connection.sock is socket
        connection.close()
    assert backend.num_asked == 1


@pytest.mark.usefixtures("_long")
def test_a_body_that_comes_slowly_is_read_to_its_end() -> None:
    backend = Full()
    with running(create_app(backend)) as address:
        connection = http.client.HTTPConnection(*address, timeout=LIMIT_S)
        connection.connect()
        body = b'{"input":"x"}'
        for _ in range(2):
            connection.putrequest("POST", EMBEDDINGS)
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("Expect", "100-continue")  # which the server answers when it waits for the body
            connection.endheaders()
            assert connection.sock.recv(1 << 10).startswith(b"HTTP/1.1 100 ")
            connection.send(body)
            assert connection.getresponse().read().count(b"overloaded") == 1
        connection.close()
    assert backend.num_asked == 1


def test_what_would_have_done_reaches_the_front_end() -> None:
    failed = decode_answer(encode(Failed.of("1", TooLateError("Late.", 1.0, needs_s=(2.5, 0.125)), 1.0)))
    assert isinstance(failed, Failed)
    assert RemoteError.of(failed).needs_s == (2.5, 0.125)
    missed = decode_answer(encode(Failed.of("1", TooLateError("Late.", 1.0), 1.0)))
    assert isinstance(missed, Failed)
    assert RemoteError.of(missed).needs_s is None
