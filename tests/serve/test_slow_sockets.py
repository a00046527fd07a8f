"""Clients that send slowly or stop reading, on real sockets against the real server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from archerfish.config import ServeConfig
from archerfish.serve import front, run
from archerfish.serve.app import create_app

from .fake_backend import MODEL, FakeBackend

LIMIT_S = 20.0
NEVER = 1000.0
CHAT = "/v1/chat/completions"
SMALL = 8 << 10  # of a socket's buffers, so that what is not read is soon noticed


@dataclass
class Running:
    """A server of a fake backend in a thread."""

    address: tuple[str, int]
    server: front.Server
    backend: FakeBackend

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def num_tasks(self) -> int:
        return len(self.server.server_state.tasks)

    def connect(self, *, buffer_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        made.settimeout(LIMIT_S)
        if buffer_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect(self.address)
        return made


@contextmanager
def serving(backend: FakeBackend, *, request_s: float = NEVER, unread_s: float = NEVER) -> Iterator[Running]:
    config, ready = ServeConfig(port=0, log_level="error"), threading.Event()
    with pytest.MonkeyPatch.context() as patch, run.bind(config) as listener:
        patch.setattr(front, "REQUEST_S", request_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        server = front.make_server(create_app(backend), config, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(LIMIT_S)
            yield Running(listener.getsockname(), server, backend)
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LIMIT_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("the server did not get there")


def request(body: dict[str, Any], route: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def chat(content: str = "Hi", **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}


def ask(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a normal client."""
    connection = http.client.HTTPConnection(*running.address, timeout=LIMIT_S)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        found: dict[str, Any] = json.load(answer)
        return found
    finally:
        connection.close()


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def rest_of(slow: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    while piece := slow.recv(1 << 16):
        found += piece
    return found


# Senders


def test_request_may_arrive_byte_by_byte() -> None:
    payload = request(chat())
    with serving(FakeBackend()) as running, running.connect() as slow:
        for place in range(len(payload) - 1):
            slow.sendall(payload[place : place + 1])
        assert text_of(ask(running, chat())) == "Hello there"
        slow.sendall(payload[-1:])
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert text_of(json.loads(answer.read())) == "Hello there"


def test_unfinished_requests_cost_no_thread_and_delay_no_other() -> None:
    payload = request(chat())
    head_end = payload.index(b"\r\n\r\n") + 4
    cuts = [0, 1, head_end // 2, head_end - 1, head_end, len(payload) - 1]
    with serving(FakeBackend()) as running:
        ask(running, chat())
        num_threads = threading.active_count()
        waiting = [running.connect() for _ in range(10) for _ in cuts]
        for place, slow in enumerate(waiting):
            slow.sendall(payload[: cuts[place % len(cuts)]])
        wait_for(lambda: running.num_tasks == 20)  # those with a whole head: one task each, and nothing in the backend
        assert text_of(ask(running, chat())) == "Hello there"
        assert threading.active_count() == num_threads
        assert len(running.backend.requests) == 2
        for slow in waiting:
            slow.close()
        wait_for(lambda: running.num_tasks == 0 and running.num_connections == 0)
        assert len(running.backend.requests) == 2


@pytest.mark.parametrize("num_bytes", [0, 4, 60, -1])
def test_request_that_does_not_arrive_is_refused(num_bytes: int) -> None:
    """Nothing, a part of the first line, a part of the head, and all but the last byte of the body."""
    with serving(FakeBackend(), request_s=0.05) as running, running.connect() as slow:
        slow.sendall(request(chat())[:num_bytes])
        assert rest_of(slow).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        wait_for(lambda: running.num_tasks == 0 and running.num_connections == 0)
        assert not running.backend.requests
        assert text_of(ask(running, chat())) == "Hello there"


def test_second_request_of_a_connection_has_a_time_limit_too() -> None:
    with serving(FakeBackend(), request_s=0.05) as running, running.connect() as slow:
        slow.sendall(request(chat()))
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.status == 200
        answer.read()
        slow.sendall(b"POST /v1")
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")


def test_time_limits_do_not_apply_to_a_slow_answer() -> None:
    backend = FakeBackend()
    backend.num_before_gate = 1
    with serving(backend, request_s=0.05, unread_s=0.05) as running, running.connect() as patient:
        backend.gate.clear()
        patient.sendall(request(chat(stream=True)))
        wait_for(lambda: backend.num_sent == 1)
        with running.connect() as silent:
            assert rest_of(silent)  # the time limits are over
        running_loop(running).call_soon_threadsafe(backend.gate.set)
        answer = http.client.HTTPResponse(patient)
        answer.begin()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def running_loop(running: Running) -> Any:
    return next(iter(running.server.server_state.connections)).loop


# Readers


def test_unread_stream_is_cancelled_and_delays_no_other() -> None:
    backend = FakeBackend("word " * 20_000, max_length=1 << 20)
    with serving(backend, unread_s=0.3) as running, running.connect(buffer_bytes=SMALL) as stopped:
        stopped.sendall(request(chat(stream=True, max_tokens=100_000)))
        assert stopped.recv(10)
        wait_for(lambda: backend.num_sent > 100)
        backend.reply = "Hello there"
        assert text_of(ask(running, chat())) == "Hello there"
        assert not backend.left
        wait_for(lambda: bool(backend.left))
        wait_for(lambda: running.num_tasks == 0 and running.num_connections == 0)
        assert backend.num_sent < 10_000  # of 100,000: events of 200 bytes or more, as many as the buffers on the way hold
        assert len(backend.left) == 1


def test_slow_reader_gets_the_whole_stream() -> None:
    backend = FakeBackend("word " * 400, max_length=1 << 20)
    with serving(backend, unread_s=5.0) as running, running.connect(buffer_bytes=SMALL) as slow:
        slow.sendall(request(chat(stream=True, max_tokens=100_000)))
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            piece = slow.recv(997)
            assert piece, found[-100:]
            found += piece
        assert found.count(b'"content":"w"') == 400
        assert not backend.left
