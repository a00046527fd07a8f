"""Clients that send slowly or never finish, and clients that stop reading, on real sockets against the real server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from archerfish.config import ServeConfig
from archerfish.serve import front
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Question
from archerfish.serve.connection import PATIENCE, Connection, Patience, Watch, connections_with
from archerfish.serve.wire import EmbedRequest, Vectors

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
    def num_received(self) -> int:
        return sum(connection._num_received for connection in self.server.server_state.connections)  # type: ignore[union-attr]

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
def serving(backend: FakeBackend, **patience: float) -> Iterator[Running]:
    usual: dict[str, float] = {"head_s": NEVER, "body_s": NEVER, "write_s": NEVER}
    config, ready = ServeConfig(port=0, log_level="error"), threading.Event()
    limits = Patience(**{**usual, **patience})  # type: ignore[arg-type]
    with front.bind(config) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        server = front.make_server(create_app(backend), listener, config, lambda url: ready.set(), patience=limits)
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
    """What somebody with manners gets."""
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


def test_a_request_may_come_byte_by_byte() -> None:
    payload = request(chat())
    with serving(FakeBackend()) as running, running.connect() as slow:
        for place in range(len(payload) - 1):
            slow.sendall(payload[place : place + 1])
        assert text_of(ask(running, chat())) == "Hello there"
        slow.sendall(payload[-1:])
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert text_of(json.loads(answer.read())) == "Hello there"


def test_requests_that_are_never_finished_cost_no_thread_and_slow_nobody() -> None:
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


@pytest.mark.parametrize("sent", ["", "POST", "GET /v1/models HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(sent: str) -> None:
    with serving(FakeBackend(), head_s=0.05) as running, running.connect() as slow:
        slow.sendall(sent.encode())
        said = rest_of(slow)
        wait_for(lambda: running.num_connections == 0)
        if sent:
            assert said.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b"connection: close" in said.lower()
            assert json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_timeout"
        else:
            assert not said


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(FakeBackend(), body_s=0.05) as running, running.connect() as slow:
        slow.sendall(request(chat())[:-1])
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")
        wait_for(lambda: running.num_tasks == 0 and running.num_connections == 0)
        assert not running.backend.requests
        assert text_of(ask(running, chat())) == "Hello there"


def test_a_second_request_on_a_connection_is_watched_too() -> None:
    with serving(FakeBackend(), head_s=0.05) as running, running.connect() as slow:
        slow.sendall(request(chat()))
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.status == 200
        answer.read()
        slow.sendall(b"POST /v1")
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")


def test_a_head_without_end_is_refused() -> None:
    with serving(FakeBackend(), max_head_bytes=1000) as running, running.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        wait_for(lambda: running.num_received == 16)
        slow.sendall(b"x: " + b"y" * 900)
        wait_for(lambda: running.num_received == 919)
        slow.sendall(b"y" * 200)
        said = rest_of(slow)
        assert said.startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_told_so_in_the_usual_shape() -> None:
    with serving(FakeBackend()) as running, running.connect() as strange:
        strange.sendall(b"HELLO?\r\n\r\n")
        head, body = rest_of(strange).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "bad_request"


def test_an_answer_may_take_longer_than_a_request() -> None:
    backend = FakeBackend()
    backend.num_before_gate = 1
    with serving(backend, head_s=0.05, body_s=0.05, write_s=0.05) as running, running.connect() as patient:
        backend.gate.clear()
        patient.sendall(request(chat(stream=True)))
        wait_for(lambda: backend.num_sent == 1)
        with running.connect() as silent:
            assert not rest_of(silent)  # by now the patience of the server is over
        running_loop(running).call_soon_threadsafe(backend.gate.set)
        answer = http.client.HTTPResponse(patient)
        answer.begin()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def running_loop(running: Running) -> Any:
    return next(iter(running.server.server_state.connections)).loop


# Readers


class Vectorial(FakeBackend):
    """Long vectors."""

    async def ask(self, message: Question) -> Answer:
        if isinstance(message, EmbedRequest):
            rows = np.ones((len(message.texts), 4096), "<f4")
            return Vectors(
                request_id=message.request_id, num_rows=rows.shape[0], num_columns=4096, data=rows.tobytes(), num_tokens=1
            )
        return await super().ask(message)


def test_a_stream_that_nobody_reads_is_given_up_and_slows_nobody() -> None:
    backend = FakeBackend("word " * 20_000, max_length=1 << 20)
    with serving(backend, write_s=0.3) as running, running.connect(buffer_bytes=SMALL) as stopped:
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


def test_the_end_of_a_stream_is_not_waited_for_either() -> None:
    """The whole answer fits into buffers of ours, so that its producer ends; its bytes still wait for the reader."""
    backend = FakeBackend("word " * 150, max_length=1 << 20)
    with serving(backend, write_s=0.2) as running, running.connect(buffer_bytes=1) as stopped:
        stopped.sendall(request(chat(stream=True, max_tokens=100_000)))
        wait_for(lambda: backend.num_sent == 752)
        wait_for(lambda: running.num_tasks == 0 and running.num_connections == 0)


def test_a_long_answer_that_nobody_reads_is_dropped() -> None:
    with serving(Vectorial(), write_s=0.2) as running, running.connect(buffer_bytes=SMALL) as stopped:
        stopped.sendall(request({"model": "lab/vectors", "input": ["x"] * 50}, "/v1/embeddings"))
        assert stopped.recv(10) == b"HTTP/1.1 2"
        wait_for(lambda: running.num_connections == 0)
        assert running.num_tasks == 0


def test_a_reader_that_is_slow_gets_everything() -> None:
    backend = FakeBackend("word " * 400, max_length=1 << 20)
    with serving(backend, write_s=5.0) as running, running.connect(buffer_bytes=SMALL) as slow:
        slow.sendall(request(chat(stream=True, max_tokens=100_000)))
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            piece = slow.recv(997)
            assert piece, found[-100:]
            found += piece
        assert found.count(b'"content":"w"') == 400
        assert not backend.left


def test_who_sends_two_requests_at_once_and_goes_has_both_cancelled() -> None:
    backend = FakeBackend("word " * 10)
    backend.num_before_gate = 1
    with serving(backend) as running:
        backend.gate.clear()
        with running.connect() as hasty:
            hasty.sendall(request(chat(stream=True)) + request(chat(stream=True)))
            wait_for(lambda: backend.num_sent == 1)
        wait_for(lambda: running.num_tasks == 0)
        assert len(backend.left) == 1


def test_a_head_without_end_behind_an_answer_does_not_write_into_it() -> None:
    backend = FakeBackend("word " * 10)
    backend.num_before_gate = 1
    with serving(backend, max_head_bytes=1000) as running, running.connect() as hasty:
        backend.gate.clear()
        hasty.sendall(request(chat(stream=True)))
        found = hasty.recv(1 << 16)
        num_received = running.num_received
        hasty.sendall(b"GET / HTTP/1.1\r\nx: ")
        wait_for(lambda: running.num_received > num_received)
        hasty.sendall(b"y" * 2000)
        with contextlib.suppress(ConnectionResetError):
            found += rest_of(hasty)
        assert found.startswith(b"HTTP/1.1 200 ") and b" 431 " not in found
        wait_for(lambda: running.num_tasks == 0)


# The rules, without a socket


def test_uvicorn_has_the_parts_that_connections_use() -> None:
    """They are none of its documented ones: if this fails, read `connection.py` beside uvicorn's new protocol."""
    server = uvicorn.Server(uvicorn.Config(lambda scope, receive, send: None, log_level="error"))

    async def main() -> None:
        made: Any = connections_with(PATIENCE)(server.config, server.server_state, {}, asyncio.get_running_loop())
        assert made.cycle is None and made.timeout_keep_alive_task is None
        made.connection_made(FakeTransport())
        assert made in server.server_state.connections and made.connections is server.server_state.connections
        assert made.flow.read_paused is False
        made.connection_lost(None)
        assert not made.connections

    asyncio.run(main())
    uses = {"on_message_begin", "on_headers_complete", "data_received", "connection_lost", "timeout_keep_alive_handler"}
    uses |= {"send_400_response", "connection_made"}
    assert uses <= vars(HttpToolsProtocol).keys()
    nothing: Any = None
    options = dict.fromkeys(inspect.signature(RequestResponseCycle.__init__).parameters, nothing)
    del options["self"]
    cycle: Any = RequestResponseCycle(**options)
    state = (cycle.more_body, cycle.response_started, cycle.response_complete, cycle.disconnected, cycle.message_event)
    assert state == (True, False, False, False, None)


def test_a_connection_that_cannot_be_looked_at_does_not_end_the_watch() -> None:
    class Broken:
        def look(self, now: float) -> None:
            raise AttributeError("flow")

    planned: list[Any] = []

    class Loop:
        def call_later(self, seconds: float, work: Any, *arguments: Any) -> object:
            planned.append(partial(work, *arguments))
            return object()

    watch, connection = Watch(PATIENCE), Broken()
    connection.loop, connection.connections = Loop(), {connection}  # type: ignore[attr-defined]
    watch.begin(connection)  # type: ignore[arg-type]
    for number in (1, 2):
        assert len(planned) == number
        with pytest.raises(AttributeError):
            planned[-1]()


class FakeTransport:
    num_unsent, is_aborted, is_closed = 0, False, False
    written = b""

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_aborted = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


class Flow:
    read_paused = False


class Cycle:
    response_complete = response_started = False
    more_body = True


def connection_with(patience: Patience = PATIENCE) -> tuple[Connection, FakeTransport]:
    made = connections_with(patience)
    connection, transport = made.__new__(made), FakeTransport()
    connection.transport, connection.flow, connection.cycle = transport, Flow(), None  # type: ignore[assignment]
    connection.timeout_keep_alive_task = None
    connection._num_received = connection._head_from = connection._received_then = connection._num_unsent = 0
    connection._since = connection._unsent_since = 0.0
    connection._is_in_head, connection._awaited, connection._earlier = False, None, []
    return connection, transport


def test_a_body_gets_a_second_more_for_every_thousand_bytes() -> None:
    connection, transport = connection_with(Patience(body_s=10, bytes_per_s=1000))
    connection.cycle = Cycle()  # type: ignore[assignment]
    now, closed_at = 0.0, 0.0
    connection.look(now)
    while not closed_at and now < 1000:
        now += 1
        connection._num_received += 1000 if now < 100 else 1
        connection.look(now)
        closed_at = now if transport.is_closed else 0.0
    assert 109 <= closed_at <= 112
    assert transport.written.startswith(b"HTTP/1.1 408 ")


def test_time_in_which_we_do_not_read_does_not_count() -> None:
    connection, transport = connection_with(Patience(body_s=10))
    connection.cycle = Cycle()  # type: ignore[assignment]
    connection.flow.read_paused = True
    for second in range(100):
        connection.look(float(second))
    connection.flow.read_paused = False
    closed: list[bool] = []
    for now in (100.0, 109.0, 111.0):
        connection.look(now)
        closed.append(transport.is_closed)
    assert closed == [False, False, True]


def test_bytes_that_move_are_not_stuck() -> None:
    connection, transport = connection_with(Patience(write_s=10, head_s=NEVER))
    for second in range(100):
        transport.num_unsent = 50_000 - second
        connection.look(float(second))
    assert not transport.is_aborted
    for second in range(100, 111):
        connection.look(float(second))
    assert transport.is_aborted
