"""Real sockets: slow clients, and the end of a front end with running requests, each of which is answered or fails."""

from __future__ import annotations

import http.client
import json
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from archerfish.serve import front
from archerfish.serve import http as serve_http
from archerfish.serve.app import create_app
from archerfish.text.text_tokenizer import TextTokenizer
from tests.text.tiny_tokenizers import save_text_llama

from .client import LIMIT_S, WORDS, Running, app_of, host_with, running, words_host
from .fake_backend import MODEL, TEMPLATE, FakeBackend

NEVER = 1000.0
CHAT = "/v1/chat/completions"
SMALL = 8 << 10  # of a socket's buffers, so that what is not read is soon noticed
SMALL_SEND_BUFFER = (socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
HI = [{"role": "user", "content": "a"}]
ENDLESS = {"ignore_eos": True, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 60_000, **ENDLESS},
    "/v1/completions": {"prompt": "a", "max_tokens": 60_000, **ENDLESS},
    "/v1/responses": {"input": HI, "max_output_tokens": 60_000, **ENDLESS},
    "/v1/messages": {"messages": HI, "max_tokens": 60_000, **ENDLESS},
}
STOPPED_MESSAGE = "The service was stopped before the answer was complete. Send the request again."
Warnings = Callable[[], list[str]]


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LIMIT_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("the server did not get there")


def connect(served: Running, *, buffer_bytes: int = 0) -> socket.socket:
    made = socket.socket()
    made.settimeout(LIMIT_S)
    if buffer_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.connect(served.address)
    return made


def request(body: dict[str, Any], route: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def chat(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **options}


def text_of(answer: http.client.HTTPResponse) -> str:
    assert answer.status == 200
    return str(json.load(answer)["choices"][0]["message"]["content"])


def ask(served: Running) -> str:
    """The answer to a normal client."""
    connection = served.post(CHAT, chat())
    found = text_of(connection.getresponse())
    connection.close()
    return found


def answer_on(slow: socket.socket) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(slow)
    answer.begin()
    return answer


def rest_of(slow: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    while piece := slow.recv(1 << 16):
        found += piece
    return found


# Slow senders


@contextmanager
def serving(backend: FakeBackend, *, request_s: float = NEVER, unread_s: float = NEVER) -> Iterator[Running]:
    unread_ms = int(unread_s * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_http, "REQUEST_S", request_s)
        options = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms), SMALL_SEND_BUFFER
        with running(create_app(backend), *options) as served:
            yield served


def is_idle(served: Running) -> bool:
    return not served.server.server_state.tasks and not served.server.server_state.connections


def test_request_may_arrive_byte_by_byte() -> None:
    payload = request(chat())
    with serving(FakeBackend()) as served, connect(served) as slow:
        for place in range(len(payload) - 1):
            slow.sendall(payload[place : place + 1])
        assert ask(served) == "Hello there"
        slow.sendall(payload[-1:])
        assert text_of(answer_on(slow)) == "Hello there"


def test_unfinished_requests_cost_no_thread() -> None:
    payload, backend = request(chat()), FakeBackend()
    head_end = payload.index(b"\r\n\r\n") + 4
    cuts = [0, 1, head_end // 2, head_end - 1, head_end, len(payload) - 1]
    with serving(backend) as served:
        ask(served)
        num_threads = threading.active_count()
        waiting = [connect(served) for _ in range(10) for _ in cuts]
        for place, slow in enumerate(waiting):
            slow.sendall(payload[: cuts[place % len(cuts)]])
        wait_for(lambda: len(served.server.server_state.tasks) == 20)  # those with a whole head: one task each
        assert ask(served) == "Hello there"
        assert threading.active_count() == num_threads
        for slow in waiting:
            slow.close()
        wait_for(lambda: is_idle(served))
        assert len(backend.requests) == 2


@pytest.mark.parametrize(("num_bytes", "is_first"), [(0, True), (4, True), (60, True), (-1, True), (8, False)])
def test_request_that_does_not_arrive_is_refused(num_bytes: int, is_first: bool) -> None:
    """Nothing, a part of the first line, a part of the head, and all but the last byte; then a second request."""
    backend = FakeBackend()
    with serving(backend, request_s=0.05) as served, connect(served) as slow:
        if not is_first:
            slow.sendall(request(chat()))
            assert text_of(answer_on(slow)) == "Hello there"
        slow.sendall(request(chat())[:num_bytes])
        assert rest_of(slow).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        wait_for(lambda: is_idle(served))
        assert len(backend.requests) == (not is_first)
        assert ask(served) == "Hello there"


def test_time_limits_do_not_apply_to_a_slow_answer() -> None:
    backend = FakeBackend()
    backend.num_before_gate = 1
    with serving(backend, request_s=0.05, unread_s=0.05) as served, connect(served) as patient:
        backend.gate.clear()
        patient.sendall(request(chat(stream=True)))
        wait_for(lambda: backend.num_sent == 1)
        with connect(served) as silent:
            assert rest_of(silent)  # the time limits are over
        loop: Any = next(iter(served.server.server_state.connections)).loop
        loop.call_soon_threadsafe(backend.gate.set)
        assert answer_on(patient).read().endswith(b"data: [DONE]\n\n")


# Slow readers


def test_unread_stream_is_cancelled_and_delays_no_other() -> None:
    backend = FakeBackend("word " * 20_000, max_length=1 << 20)
    with serving(backend, unread_s=2.0) as served, connect(served, buffer_bytes=SMALL) as stopped:
        stopped.sendall(request(chat(stream=True, max_tokens=100_000)))
        assert stopped.recv(10)
        wait_for(lambda: backend.num_sent > 100)
        backend.reply = "Hello there"
        assert ask(served) == "Hello there"
        assert not backend.left
        wait_for(lambda: bool(backend.left) and is_idle(served))
        assert (
            backend.num_sent < 10_000
        )  # of 100,000: events of 200 bytes or more, as many as the buffers on the way hold
        assert len(backend.left) == 1


def test_slow_reader_gets_the_whole_stream() -> None:
    backend = FakeBackend("word " * 400, max_length=1 << 20)
    with serving(backend, unread_s=5.0) as served, connect(served, buffer_bytes=SMALL) as slow:
        slow.sendall(request(chat(stream=True, max_tokens=100_000)))
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            piece = slow.recv(997)
            assert piece, found[-100:]
            found += piece
        assert found.count(b'"content":"w"') == 400
        assert not backend.left


def test_closed_socket_cancels_the_request() -> None:
    backend = FakeBackend("abc")
    backend.num_before_gate = 2
    backend.gate.clear()
    with serving(backend) as served:
        with connect(served) as leaving:
            leaving.sendall(request({"prompt": "a", "stream": True}, "/v1/completions"))
            received = b""
            while b'"text":"b"' not in received:
                received += leaving.recv(4096)
        wait_for(lambda: bool(backend.left))


def test_head_is_get_without_a_body() -> None:
    threads = set(threading.enumerate())
    with words_host() as host, host, running(app_of(host)) as served:
        connection = http.client.HTTPConnection(*served.address, timeout=LIMIT_S)
        for path in (
            "/",
            "/health",
            "/ready",
            "/metrics",
            "/stats",
            "/v1/models",
            f"/v1/models/{WORDS}",
            "/openapi.json",
        ):
            found = []
            for method in ("GET", "HEAD"):
                connection.request(method, path)
                answer = connection.getresponse()
                found.append((answer.status, answer.getheader("content-type"), bool(answer.read())))
            kind = found[0][1]
            assert found == [(200, kind, True), (200, kind, False)], path
        connection.request("HEAD", "/v1/models/nobody")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (404, b"")
        connection.close()
    assert set(threading.enumerate()) <= threads  # host and server have ended theirs


# The end


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Running]:
    """A server over a tiny model that generates many tokens."""
    save_text_llama(tmp_path / "tiny", 65536, chat_template=TEMPLATE)
    host = host_with(tmp_path, llm={"has_text": True, "max_cache_tokens": 4 * 65536})
    with host, running(app_of(host), SMALL_SEND_BUFFER, log_level="info") as made:
        yield made


def stop(served: Running) -> None:
    served.server.should_exit = True
    wait_for(lambda: not any(one.is_serving() for one in served.server.servers))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Warnings:
    """Logged warnings and errors, ours and those of uvicorn, which writes to standard error itself."""
    caplog.set_level(logging.WARNING)

    def found() -> list[str]:
        lines = capfd.readouterr().err.splitlines()
        return [record.getMessage() for record in caplog.records] + [
            line for line in lines if not line.startswith("INFO: ")
        ]

    return found


def check_error_event(path: str, rest: str) -> None:
    """Check the last event of a stream that was cut off."""
    rest = f"\n{rest}"
    *_, name, last, _, _ = rest.split("\n")
    data = json.loads(last.removeprefix("data: "))
    if path == "/v1/messages":
        error = {"type": "overloaded_error", "message": STOPPED_MESSAGE}
        assert (name, data) == ("event: error", {"type": "error", "error": error})
    elif path == "/v1/responses":
        assert (name, data["type"], data["response"]["status"]) == (
            "event: response.failed",
            "response.failed",
            "failed",
        )
        assert data["response"]["error"] == {"code": "stopped", "message": STOPPED_MESSAGE}
        assert "\nevent: error\n" in rest
    else:
        assert data == {"error": {"message": STOPPED_MESSAGE, "type": "server_error", "param": None, "code": "stopped"}}
    assert "[DONE]" not in rest


@pytest.mark.parametrize("cut", ["at a second signal", "when the grace is over"])
def test_stopped_streams_get_an_error_event(cut: str, served: Running, warnings: Warnings) -> None:
    if cut == "when the grace is over":
        served.server.grace_s = 0.3
    connections = {path: served.post(path, body) for path, body in STREAMS.items()}
    streams = {path: connection.getresponse() for path, connection in connections.items()}
    for answer in streams.values():
        assert answer.readline().startswith((b"data: ", b"event: "))
    whole = served.post(CHAT, {**STREAMS[CHAT], "stream": False})
    idle = http.client.HTTPConnection(*served.address, timeout=LIMIT_S)
    idle.request("GET", "/ready")
    assert idle.getresponse().read()
    stop(served)
    if cut == "at a second signal":
        assert all(answer.readline() for answer in streams.values())
        served.server.force_exit = True
    for path, answer in streams.items():
        check_error_event(path, answer.read().decode())
    answer = whole.getresponse()
    error = json.load(answer)["error"]
    assert (answer.status, error["code"], error["message"]) == (503, "stopped", STOPPED_MESSAGE)
    assert int(answer.headers["retry-after"]) >= 1
    for connection in (*connections.values(), whole, idle):
        connection.close()
    served.join()
    assert warnings() == []


def test_client_that_does_not_read_does_not_delay_the_end(served: Running, warnings: Warnings) -> None:
    with connect(served, buffer_bytes=SMALL) as stopped:
        stopped.sendall(request({**STREAMS["/v1/completions"], "logprobs": 20}, "/v1/completions"))
        assert stopped.recv(1)
        connections: Any = served.server.server_state.connections
        wait_for(lambda: any(connection.flow.write_paused for connection in list(connections)))
        stop(served)
        served.server.force_exit = True
        served.join()
    assert warnings() == []


def test_request_in_a_thread_leaves_no_traceback(
    served: Running, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        entered.set()
        assert leave.wait(LIMIT_S)
        return [1]

    assert served.post("/tokenize", {"prompt": "a"}).getresponse().status == 200
    monkeypatch.setattr(TextTokenizer, "encode", encode)
    waiting = served.post("/tokenize", {"prompt": "a" * 10_000})
    assert entered.wait(LIMIT_S)
    stop(served)
    served.server.force_exit = True
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        waiting.getresponse()
    leave.set()
    served.join()
    assert warnings() == []


def test_sigterm_stops_and_sigint_forces() -> None:
    server = front.FrontServer(uvicorn.Config(lambda: None), lambda: None)
    for number, is_forced in (
        (signal.SIGTERM, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, True),
    ):
        server.handle_exit(number, None)
        assert (server.should_exit, server.force_exit) == (True, is_forced)
    server = front.FrontServer(uvicorn.Config(lambda: None), drain_s=NEVER)
    for number, is_over in ((signal.SIGTERM, False), (signal.SIGTERM, False), (signal.SIGINT, True)):
        server.handle_exit(number, None)
        assert (server.should_exit, server.force_exit) == (is_over, is_over)


def test_requests_are_taken_until_the_drain_is_over(served: Running) -> None:
    """Red: a listener that is closed at SIGTERM, /ready that stays 200, connections that balancers keep."""
    served.server.drain_s = NEVER
    kept = http.client.HTTPConnection(*served.address, timeout=LIMIT_S)
    for is_stopping in (False, True):
        kept.request("GET", "/ready")
        answer = kept.getresponse()
        assert (answer.status, answer.getheader("connection")) == ((503, "close") if is_stopping else (200, None))
        assert b"being stopped" in answer.read() or not is_stopping
        if not is_stopping:
            served.server.handle_exit(signal.SIGTERM, None)
    assert served.server.closes_at < math.inf and not served.server.should_exit
    body = {**STREAMS["/v1/completions"], "max_tokens": 200}
    answer = served.post("/v1/completions", body).getresponse()  # a new connection
    assert answer.getheader("connection") == "close" and answer.readline().startswith(b"data: ")
    assert served.post("/health", {}).getresponse().status == 405
    served.server.closes_at = 0.0
    assert answer.read().endswith(b"data: [DONE]\n\n")
    served.join()
    with pytest.raises(ConnectionRefusedError):
        served.post("/v1/completions", body)


def test_requests_finish_within_the_grace_time(served: Running) -> None:
    body = {**STREAMS["/v1/completions"], "max_tokens": 200}
    answer = served.post("/v1/completions", body).getresponse()
    assert answer.readline().startswith(b"data: ")
    stop(served)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    served.join()
    with pytest.raises(ConnectionRefusedError):
        served.post("/v1/completions", body)
