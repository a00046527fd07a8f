"""The end of a front end with running requests: each of them is answered, or fails with an error."""

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
from archerfish.serve import front, run
from archerfish.text.text_tokenizer import TextTokenizer
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
Warnings = Callable[[], list[str]]
STOPPED_MESSAGE = "The service was stopped before the answer was complete. Send the request again."


class Serving:
    """A server in a thread, over a tiny model that generates many tokens."""

    def __init__(self, server: front.Server, address: tuple[str, int]) -> None:
        self.server, self.address = server, address
        self.thread = threading.current_thread()

    def request(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_S)
        connection.request("POST", path, json.dumps(body), JSON)
        return connection

    def streams(self) -> dict[str, tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        """One stream of each route; all have begun."""
        asked = {path: self.request(path, body) for path, body in STREAMS.items()}
        found = {path: (connection, connection.getresponse()) for path, connection in asked.items()}
        for _, answer in found.values():
            assert answer.readline().startswith((b"data: ", b"event: "))
        return found

    def stop(self) -> None:
        self.server.should_exit = True
        pause = threading.Event()
        while any(one.is_serving() for one in self.server.servers):
            pause.wait(0.001)

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
    with host, run.bind(config) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # of connections too
        server = front.make_server(app_of(host), config, ready.set)
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
def warnings(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Warnings:
    """Logged warnings and errors, ours and those of uvicorn, which writes to standard error itself."""
    caplog.set_level(logging.WARNING)

    def found() -> list[str]:
        lines = capfd.readouterr().err.splitlines()
        return [record.getMessage() for record in caplog.records] + [line for line in lines if not line.startswith("INFO: ")]

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
        assert (name, data["type"], data["response"]["status"]) == ("event: response.failed", "response.failed", "failed")
        assert data["response"]["error"] == {"code": "stopped", "message": STOPPED_MESSAGE}
        assert "\nevent: error\n" in rest
    else:
        assert data == {"error": {"message": STOPPED_MESSAGE, "type": "server_error", "param": None, "code": "stopped"}}
    assert "[DONE]" not in rest


@pytest.mark.parametrize("cut", ["at a second signal", "when the grace is over"])
def test_running_streams_get_an_error_in_the_form_of_their_route(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    if cut == "when the grace is over":
        monkeypatch.setattr("archerfish.serve.processes.GRACE_S", 0.3)
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
            check_error_event(path, answer.read().decode())
            connection.close()
        answer = whole.getresponse()
        error = json.load(answer)["error"]
        assert (answer.status, error["code"], error["message"]) == (503, "stopped", STOPPED_MESSAGE)
        assert int(answer.headers["retry-after"]) >= 1
        for connection in (whole, idle):
            connection.close()
        served.join()
    assert warnings() == []


def test_client_that_does_not_read_does_not_delay_the_end(tmp_path: Path, warnings: Warnings) -> None:
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
    assert warnings() == []


def test_request_in_a_thread_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        entered.set()
        assert leave.wait(LIMIT_S)
        return [1]

    with serving(tmp_path) as served:
        assert served.request("/tokenize", {"prompt": "a"}).getresponse().status == 200
        monkeypatch.setattr(TextTokenizer, "encode", encode)
        waiting = served.request("/tokenize", {"prompt": "a" * 10_000})
        assert entered.wait(LIMIT_S)
        served.stop()
        served.server.force_exit = True
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            waiting.getresponse()
        leave.set()
        served.join()
    assert warnings() == []


def test_sigterm_stops_and_sigint_forces() -> None:
    server = front.Server(uvicorn.Config(lambda: None), lambda: None)
    for number, is_forced in ((signal.SIGTERM, False), (signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGTERM, True)):
        server.handle_exit(number, None)
        assert (server.should_exit, server.force_exit) == (True, is_forced)


def test_requests_finish_within_the_grace_time_and_new_ones_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        body = {**STREAMS["/v1/completions"], "max_tokens": 200}
        stream = served.request("/v1/completions", body)
        answer = stream.getresponse()
        assert answer.readline().startswith(b"data: ")
        served.stop()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        served.join()
        with pytest.raises(ConnectionRefusedError):
            served.request("/v1/completions", body)
