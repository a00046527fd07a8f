"""The end of a service whose requests still run: each of them is answered, or told that it will not be."""

from __future__ import annotations

import http.client
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from archerfish.config import ServeConfig
from archerfish.serve import front
from archerfish.serve.catalog import ModelText
from tests.engine.tiny_llama import save_tiny_llama
from tests.text.tiny_tokenizers import byte_fallback

from .client import LIMIT_S, app_of, host_with
from .fake_backend import TEMPLATE
from .hosting import add_llm

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "a"}]
ENDLESS = {"ignore_eos": True, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 60_000, **ENDLESS},
    "/v1/completions": {"prompt": "a", "max_tokens": 60_000, **ENDLESS},
    "/v1/responses": {"input": HI, "max_output_tokens": 60_000, **ENDLESS},
    "/v1/messages": {"messages": HI, "max_tokens": 60_000, **ENDLESS},
}
SMALL = 4096
Complaints = Callable[[], list[str]]
TOLD = "The service was stopped before the answer was complete. Send the request again."


class Serving:
    """A server in a thread, over a tiny model that writes for a long time."""

    def __init__(self, server: front.Server, address: tuple[str, int]) -> None:
        self.server, self.address = server, address
        self.has_begun_to_stop, self.forced = threading.Event(), threading.Event()
        server.on_stop, server.on_force = self.has_begun_to_stop.set, self.forced.set
        self.thread = threading.current_thread()

    def request(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_S)
        connection.request("POST", path, json.dumps(body), JSON)
        return connection

    def streams(self) -> dict[str, tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        """One of each kind, which have begun."""
        asked = {path: self.request(path, body) for path, body in STREAMS.items()}
        found = {path: (connection, connection.getresponse()) for path, connection in asked.items()}
        for _, answer in found.values():
            assert answer.readline().startswith((b"data: ", b"event: "))
        return found

    def stop(self) -> None:
        self.server.should_exit = True
        assert self.has_begun_to_stop.wait(LIMIT_S)

    def join(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@contextmanager
def serving(directory: Path) -> Iterator[Serving]:
    model = directory / "tiny"
    model.mkdir()
    save_tiny_llama(model, vocab_size=288, max_position_embeddings=65536)
    byte_fallback(model, chat_template=TEMPLATE)
    host = host_with(directory)
    add_llm(host, directory, has_text=True, max_cache_tokens=4 * 65536)
    config, ready = ServeConfig(port=0, log_level="info"), threading.Event()
    with host, front.bind(config) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # of connections too
        server = front.make_server(app_of(host), listener, config, lambda url: ready.set())
        made = Serving(server, listener.getsockname())
        made.thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        made.thread.start()
        try:
            assert ready.wait(LIMIT_S)
            yield made
        finally:
            server.should_exit = server.force_exit = True
            made.join()


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Complaints:
    """What was logged of warnings and errors: by us, and by uvicorn, which writes for itself."""
    caplog.set_level(logging.WARNING)

    def found() -> list[str]:
        lines = capfd.readouterr().err.splitlines()
        return [record.getMessage() for record in caplog.records] + [line for line in lines if not line.startswith("INFO: ")]

    return found


def check_told(path: str, rest: str) -> None:
    """The end of a stream that was cut off, in the shape of its API."""
    rest = f"\n{rest}"
    *_, name, last, _, _ = rest.split("\n")
    data = json.loads(last.removeprefix("data: "))
    if path == "/v1/messages":
        assert (name, data) == ("event: error", {"type": "error", "error": {"type": "overloaded_error", "message": TOLD}})
    elif path == "/v1/responses":
        assert (name, data["type"], data["response"]["status"]) == ("event: response.failed", "response.failed", "failed")
        assert data["response"]["error"] == {"code": "stopped", "message": TOLD}
        assert "\nevent: error\n" in rest
    else:
        assert data == {"error": {"message": TOLD, "type": "server_error", "param": None, "code": "stopped"}}
    assert "[DONE]" not in rest


@pytest.mark.parametrize("cut", ["at a second signal", "when the grace is over"])
def test_every_stream_is_told_in_its_own_shape(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaints: Complaints
) -> None:
    if cut == "when the grace is over":
        monkeypatch.setattr(front, "GRACE_S", 0.3)
    with serving(tmp_path) as served:
        streams = served.streams()
        whole = served.request("/v1/chat/completions", {**STREAMS["/v1/chat/completions"], "stream": False})
        idle = http.client.HTTPConnection(*served.address, timeout=LIMIT_S)
        idle.request("GET", "/ready")
        assert idle.getresponse().read()
        served.stop()
        if cut == "at a second signal":
            assert all(answer.readline() for _, answer in streams.values())
            served.server.force_exit = True
        for path, (connection, answer) in streams.items():
            check_told(path, answer.read().decode())
            connection.close()
        answer = whole.getresponse()
        error = json.load(answer)["error"]
        assert (answer.status, error["code"], error["message"]) == (503, "stopped", TOLD)
        assert int(answer.headers["retry-after"]) >= 1
        for connection in (whole, idle):
            connection.close()
        served.join()
        assert served.forced.is_set() == (cut == "at a second signal")
    assert complaints() == []


def test_who_reads_nothing_is_not_waited_for(tmp_path: Path, complaints: Complaints) -> None:
    with serving(tmp_path) as served, ExitStack() as stack:
        stopped = stack.enter_context(socket.socket())
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        stopped.connect(served.address)
        body = json.dumps({**STREAMS["/v1/completions"], "logprobs": 20}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        stopped.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        assert stopped.recv(1)
        connections = served.server.server_state.connections
        pause = threading.Event()
        while not any(connection.flow.write_paused for connection in list(connections)):  # type: ignore[union-attr]
            assert not pause.wait(0.001)
        served.stop()
        served.server.force_exit = True
        served.join()
    assert complaints() == []


def test_who_is_in_a_thread_is_not_waited_for_and_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaints: Complaints
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        entered.set()
        assert leave.wait(LIMIT_S)
        return [1]

    with serving(tmp_path) as served:
        assert served.request("/tokenize", {"prompt": "a"}).getresponse().status == 200
        monkeypatch.setattr(ModelText, "need_tokenizer", lambda *_: type("Slow", (), {"encode": encode})())
        waiting = served.request("/tokenize", {"prompt": "a" * 10_000})
        assert entered.wait(LIMIT_S)
        served.stop()
        served.server.force_exit = True
        assert served.forced.wait(LIMIT_S)  # where a process would end
        leave.set()
        served.join()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            waiting.getresponse()
    assert complaints() == []


def test_only_a_third_sigint_does_not_wait_for_the_loop() -> None:
    forced: list[int] = []
    server = front.Server(uvicorn.Config(lambda: None), lambda: None, on_force=lambda: forced.append(len(signals)))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signals.append(number)
        server.handle_exit(number, None)
        assert (server.should_exit, server.force_exit) == (True, signal.SIGINT in signals)
    assert forced == [5]


def test_what_is_finished_in_time_is_answered_and_nothing_new_is_taken(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        body = {**STREAMS["/v1/completions"], "max_tokens": 200}
        stream = served.request("/v1/completions", body)
        answer = stream.getresponse()
        assert answer.readline().startswith(b"data: ")
        served.stop()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        served.join()
        assert not served.forced.is_set()
        with pytest.raises(ConnectionRefusedError):
            served.request("/v1/completions", body)
