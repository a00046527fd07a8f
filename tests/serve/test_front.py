"""Front ends: the listening socket, a clean stop, and several processes that accept from one socket."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from archerfish.config import ServeConfig
from archerfish.errors import InvalidOptionError, MachineError
from archerfish.serve import front
from archerfish.serve.front import FrontConfig
from archerfish.serve.front_ends import FrontEnds
from archerfish.serve.tenants import add_key

from .client import LIMIT_S, PASS, WORDS, app_of, host_with
from .hosting import WordEncoder

JSON = {"Content-Type": "application/json"}
QUIET: dict[str, Any] = {"port": 0, "log_level": "error"}


def get(address: tuple[str, int], route: str) -> int:
    connection = http.client.HTTPConnection(*address, timeout=2 * LIMIT_S)
    try:
        connection.request("GET", route)
        return connection.getresponse().status
    finally:
        connection.close()


# The socket


def test_a_taken_port_is_named() -> None:
    with front.bind(ServeConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"Cannot listen on 127.0.0.1:{port}"):
            front.bind(ServeConfig(port=port))
    with pytest.raises(MachineError, match="no address of this machine"):
        front.bind(ServeConfig(host="nowhere.invalid"))


def test_addresses_are_shown_as_one_can_use_them() -> None:
    with front.bind(ServeConfig(host="0.0.0.0", port=0)) as listener:
        assert front.url_of(listener).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        try:
            listener = front.bind(ServeConfig(host="::1", port=0))
        except MachineError:
            return
        with listener:
            assert front.url_of(listener).startswith("http://[::1]:")


# The end


def test_what_runs_is_answered_before_the_end_and_others_are_told_first(tmp_path: Path) -> None:
    encoder, config = WordEncoder(WORDS), ServeConfig(**QUIET)
    host = host_with(tmp_path, encoder)
    ready, stopped = threading.Event(), threading.Event()
    with host, front.bind(config) as listener:
        server = front.make_server(app_of(host), listener, config, lambda url: ready.set(), stopped.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert ready.wait(LIMIT_S)
        encoder.gate.clear()
        address, port = listener.getsockname()
        connection = http.client.HTTPConnection(address, port, timeout=LIMIT_S)
        connection.request("POST", "/v1/embeddings", json.dumps({"input": "x"}), JSON)
        assert encoder.entered.acquire(timeout=LIMIT_S)
        assert not stopped.is_set()
        server.should_exit = True
        assert stopped.wait(LIMIT_S)
        assert thread.is_alive()
        encoder.gate.set()
        answer = connection.getresponse()
        assert (answer.status, len(json.load(answer)["data"])) == (200, 1)
        connection.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_signals_are_as_they_were_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = front.Server(uvicorn.Config(lambda: None), lambda: None)
    was_told = [server.should_exit]
    with front.quiet_signals(server):
        os.kill(os.getpid(), signal.SIGTERM)
        was_told.append(server.should_exit)
    assert was_told == [False, True]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# Several


def test_every_front_end_accepts_from_the_one_socket(tmp_path: Path) -> None:
    config = ServeConfig(**QUIET)
    with host_with(tmp_path, WordEncoder(WORDS)) as host, front.bind(config) as listener:
        settings = FrontConfig(address=host.address, credentials=PASS, serve=QUIET, listener=listener.fileno())
        address = listener.getsockname()
        with FrontEnds(settings, 2) as others:
            assert get(address, "/health") == 200
            started = list(others.processes)
            for asleep in started:
                os.kill(asleep.pid, signal.SIGSTOP)
                try:
                    os.waitpid(asleep.pid, os.WUNTRACED)
                    assert get(address, "/stats") == 200  # by the other one
                finally:
                    os.kill(asleep.pid, signal.SIGCONT)
    assert [process.returncode for process in started] == [0, 0]
    assert others.num_restarts == 0


def test_a_front_end_that_dies_is_replaced(tmp_path: Path) -> None:
    config = ServeConfig(**QUIET)
    with host_with(tmp_path, WordEncoder(WORDS)) as host, front.bind(config) as listener:
        settings = FrontConfig(address=host.address, credentials=PASS, serve=QUIET, listener=listener.fileno())
        with FrontEnds(settings, 1) as others:
            for number in range(2):
                assert get(listener.getsockname(), "/health") == 200
                assert others.num_restarts == number
                os.kill(others.processes[0].pid, signal.SIGKILL)
            assert get(listener.getsockname(), "/health") == 200  # which waited in the socket for the third
            last = others.processes[0]
    assert (last.returncode, others.num_restarts) == (0, 2)


def test_front_ends_that_die_at_once_are_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    enough = threading.Event()

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waits.append(timeout)
            if len(waits) == 9:
                enough.set()
                return super().wait()
            return self.is_set()

    with front.bind(ServeConfig(**QUIET)) as listener:
        settings = FrontConfig(address="ipc:///nowhere", credentials=PASS, listener=listener.fileno())
        others = FrontEnds(settings, 1, command=("false",))
        monkeypatch.setattr(others, "_is_stopping", Stopping())
        with others:
            assert enough.wait(LIMIT_S)
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert others.num_restarts == 8


def test_none_is_started_while_all_are_stopped() -> None:
    with front.bind(ServeConfig(**QUIET)) as listener:
        settings = FrontConfig(address="ipc:///nowhere", credentials=PASS, listener=listener.fileno())
        others = FrontEnds(settings, 1, command=("cat",))
        with others:
            others.stop()
        assert others.processes[0].returncode == -signal.SIGTERM
        assert others._launch() is None


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_a_front_end_ends_with_who_started_it_or_by_a_signal(number: int | None, tmp_path: Path) -> None:
    config = ServeConfig(**QUIET)
    with host_with(tmp_path, WordEncoder(WORDS)) as host, front.bind(config) as listener:
        settings = FrontConfig(address=host.address, credentials=PASS, serve=QUIET, listener=listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "archerfish.serve.front"], stdin=subprocess.PIPE, pass_fds=(listener.fileno(),)
        )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            assert get(listener.getsockname(), "/health") == 200
            if number is None:
                process.stdin.close()
            else:
                os.kill(process.pid, number)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def test_keys_are_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add_key(path, "alice")
    assert front.read_tenants(ServeConfig(api_keys_file=str(path))).find(key).name == "alice"
    assert not front.read_tenants(ServeConfig()).has_keys
    settings = FrontConfig(address="ipc:///nowhere", credentials=PASS, serve={"api_keys_file": str(tmp_path / "none.toml")})
    with pytest.raises(InvalidOptionError, match=r"none\.toml cannot be read"):
        front.build_app(settings)
