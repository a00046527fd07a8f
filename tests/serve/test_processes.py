"""KeptProcess: real child processes, killed, paused, stopped and started again."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.config import ServeConfig
from archerfish.errors import StoppedError
from archerfish.kernels.select import choose_device
from archerfish.serve import processes, run
from archerfish.serve.client import AsyncClient, RemoteError
from archerfish.serve.host import NICENESS
from archerfish.serve.processes import FrontConfig, HostConfig, KeptProcess, ModelSpec, engine_process, front_process
from archerfish.serve.wire import Generated, GenerationRequest, Ping, Pong
from tests.engine.tiny_llama import save_tiny_llama
from tests.serve.client import PASS, WORDS, host_with
from tests.serve.hosting import ENDLESS, LONG, WordEncoder, whole

LIMIT_S = 120
QUIET: dict[str, Any] = {"port": 0, "log_level": "error"}


def exists(pid: int) -> bool:
    """Whether there is such a process, zombies included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The engine process


@contextmanager
def running(child: KeptProcess) -> Iterator[KeptProcess]:
    child.start()
    try:
        child.wait()
        yield child
    finally:
        child.stop()


@contextmanager
def serving(directory: Path, **options: Any) -> Iterator[tuple[KeptProcess, str]]:
    """An engine process and its address."""
    model = directory / "tiny"
    model.mkdir()
    save_tiny_llama(model, max_position_embeddings=4096)
    engine = {
        "model": str(model),
        "dtype": "float32",
        "load_format": "dummy",
        "max_cache_tokens": 16384,
        "max_num_seqs": 32,
        "num_threads": 1,
        "seed": 7,
    }
    spec = ModelSpec(kind="generation", options=engine)
    config = HostConfig(address=f"ipc://{directory}/engine", models=(spec,), **options)
    with running(engine_process(config)) as child:
        yield child, config.address


async def start_streams(client: AsyncClient, num: int, params: dict[str, Any]) -> list[asyncio.Task[Any]]:
    """Long requests, each of which has begun."""
    requests = [GenerationRequest(request_id="", token_ids=[5 + i], params=params, stream=True) for i in range(num)]
    streams = [client.generate(request) for request in requests]
    for stream in streams:
        await anext(stream)

    async def rest(stream: Any) -> list[Any]:
        return [part async for part in stream]

    return [asyncio.create_task(rest(stream)) for stream in streams]


def wait_for_start(child: KeptProcess, num_starts: int) -> None:
    """Wait until a process has been started so many times and serves."""
    pause, deadline = threading.Event(), time.monotonic() + LIMIT_S
    while child.num_starts < num_starts or not child.is_serving:
        assert time.monotonic() < deadline
        pause.wait(0.005)


async def answers_during_a_stop(child: KeptProcess, address: str, params: dict[str, Any]) -> list[Any]:
    """What three requests get that run when their engine process is stopped."""
    async with asyncio.timeout(LIMIT_S), AsyncClient(address) as client:
        running = await start_streams(client, 3, params)
        stopping = asyncio.create_task(asyncio.to_thread(child.stop))
        answers = await asyncio.gather(*running, return_exceptions=True)
        await stopping
        return answers


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_engine_is_restarted_and_stops_with_a_grace_time(tmp_path: Path, num_kills: int) -> None:
    shared_before = set(Path("/dev/shm").iterdir())

    async def kill(child: KeptProcess, address: str, num_starts: int) -> int:
        async with asyncio.timeout(LIMIT_S), AsyncClient(address) as client:
            running = await start_streams(client, 6, ENDLESS)
            waiting = asyncio.create_task(whole(client, token_ids=[9] * 50, params=ENDLESS))
            await client.ask(Ping(request_id=""))
            killed = child.pid
            os.kill(killed, signal.SIGKILL)
            for answer in await asyncio.gather(*running, waiting, return_exceptions=True):
                assert isinstance(answer, RemoteError)
                assert (answer.status, answer.retry_after_s is not None) == (503, True)
            await asyncio.to_thread(wait_for_start, child, num_starts)
            while not client.is_connected:
                await asyncio.sleep(0.001)
            assert isinstance(await client.ask(Ping(request_id="", probe="")), Pong)
            return killed

    with serving(tmp_path) as (child, address):
        pids = [asyncio.run(kill(child, address, 2 + i)) for i in range(num_kills)]
        pids.append(child.pid)
        niceness = NICENESS if choose_device("auto").name == "cpu" else 0
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        for answer in asyncio.run(answers_during_a_stop(child, address, LONG)):
            assert isinstance(answer, list) and isinstance(answer[-1], Generated)
            assert answer[-1].num_output_tokens == LONG["max_tokens"]
    assert (len(set(pids)), child.num_starts) == (num_kills + 1, num_kills + 1)
    assert not any(exists(pid) for pid in pids)
    assert set(Path("/dev/shm").iterdir()) <= shared_before
    assert (child.pid, child.is_serving) == (0, False)


def test_engine_process_without_a_grace_time_ends_requests(tmp_path: Path) -> None:
    with serving(tmp_path, grace_s=0.0) as (child, address):
        pid = child.pid
        for answer in asyncio.run(answers_during_a_stop(child, address, ENDLESS)):
            assert isinstance(answer, RemoteError) and answer.status == 503
        assert not exists(pid)


def test_start_error_names_the_missing_model(tmp_path: Path) -> None:
    spec = ModelSpec(kind="generation", options={"model": str(tmp_path / "nothing")})
    config = HostConfig(address=f"ipc://{tmp_path}/engine", models=(spec,), hub={"offline": True})
    with pytest.raises(processes.ProcessStartError, match="nothing"), running(engine_process(config)):
        pass


# Any child process

CHILD = """
import json, sys
config = json.loads(sys.stdin.readline())
print(json.dumps({"address": config.get("address", "")}), flush=True)
print(flush=True)
sys.stdin.read()
"""
COMMAND = (sys.executable, "-c", CHILD)
CONFIG = HostConfig(address="ipc:///nowhere", silence_s=10.0)


@pytest.mark.parametrize("command", [("false",), (sys.executable, "-c", "print('hello')")])
def test_early_end_is_a_start_error(command: tuple[str, ...]) -> None:
    started = engine_process(CONFIG, command=command)
    with pytest.raises(processes.ProcessStartError, match="ended while it started"), running(started):
        pass


def test_silent_process_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "BEAT_S", 0.001)
    ticks = itertools.count()
    with running(engine_process(CONFIG, command=COMMAND, clock=lambda: float(next(ticks)))) as child:
        pid = child.pid
        wait_for_start(child, 2)
    assert "sent no heartbeat" in caplog.text
    assert next(ticks) >= 10
    assert not exists(pid)


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Use up the file descriptors of this process."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held[0], 64) + 64, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            while True:
                held.append(os.dup(held[0]))
        assert caught.value.errno == errno.EMFILE
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_restart_waits_for_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    monkeypatch.setattr(
        processes.logger, "error", lambda text, *_: failed.set() if "could not be started" in text else None
    )
    monkeypatch.setattr(processes, "backoff_s", lambda num_short_lives: 0.01)
    with running(engine_process(CONFIG, command=COMMAND)) as child:
        with no_free_descriptors():
            os.kill(child.pid, signal.SIGKILL)
            assert failed.wait(LIMIT_S)  # a start needs more descriptors than the two that the old process has freed
        wait_for_start(child, 2)


def test_short_lives_are_followed_by_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    enough = threading.Event()

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            if len(waits) == 9:
                enough.set()
                return super().wait()
            return self.is_set()

    report = 'print(\'{"address": ""}\')'
    child = engine_process(CONFIG, command=(sys.executable, "-S", "-c", report))
    monkeypatch.setattr(child, "_is_stopping", Stopping())
    with running(child):
        assert enough.wait(LIMIT_S)
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_no_process_is_started_after_the_stop() -> None:
    child = engine_process(CONFIG, command=COMMAND)
    child.terminate()
    with pytest.raises(StoppedError), running(child):
        pass
    assert child.process is None


DEAF = f"import signal\nfor one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n{CHILD}"


def test_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_AFTER_S", 0.1)
    config = HostConfig(address="ipc:///nowhere", grace_s=0.0)
    with running(engine_process(config, command=(sys.executable, "-c", DEAF))) as child:
        pass
    assert child.process is not None and child.process.returncode == -signal.SIGKILL


HEEDING = f"import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n{CHILD}"


@pytest.mark.parametrize(("script", "last_s", "code"), [(DEAF, 0.01, -signal.SIGKILL), (HEEDING, LIMIT_S, 7)])
def test_killed_front_ends_are_not_replaced(
    script: str, last_s: float, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LAST_S", last_s)
    command = (sys.executable, "-c", script)
    children = [front_process(lambda: FrontConfig(addresses=("x",), credentials=""), 0, command) for _ in range(2)]
    for child in children:
        child.start()
        child.wait()
    with children[0]._lock:  # the thread that a signal interrupts may hold it
        processes.kill_all(children)
    for child in children:
        child._thread.join(LIMIT_S)
        assert child.process is not None and child.process.returncode == code
        assert child.num_starts == 1
    assert caplog.records == []


ORPHAN = """
import os, sys
from archerfish.serve.processes import engine_process
from archerfish.serve.processes import HostConfig
child = engine_process(HostConfig(address=sys.argv[1]))
child.start()
child.wait()
print(child.pid, flush=True)
os._exit(1)
"""


def test_engine_process_ends_with_its_parent(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    parent = subprocess.run([sys.executable, "-c", ORPHAN, address], capture_output=True, text=True, timeout=LIMIT_S)
    pid = int(parent.stdout)
    watch = os.pidfd_open(pid) if exists(pid) else None
    if watch is not None:
        poller = select.poll()
        poller.register(watch)
        assert poller.poll(LIMIT_S * 1000)
        os.close(watch)


# Front ends


def get(address: tuple[str, int], route: str) -> int:
    return httpx.get(f"http://{address[0]}:{address[1]}{route}", timeout=LIMIT_S).status_code


@contextmanager
def front_ends(directory: Path, number: int) -> Iterator[tuple[list[KeptProcess], tuple[str, int]]]:
    with host_with(directory, WordEncoder(WORDS)) as host, run.bind(ServeConfig(**QUIET)) as listener:
        config = FrontConfig(addresses=(host.address,), credentials=PASS, serve=QUIET, listener=listener.fileno())
        children = [front_process(lambda: config, listener.fileno()) for _ in range(number)]
        try:
            for child in children:
                child.start()
            for child in children:
                child.wait()
            yield children, listener.getsockname()
        finally:
            processes.stop_all(children)


def test_dead_front_end_is_replaced(tmp_path: Path) -> None:
    with front_ends(tmp_path, 2) as (children, address):
        assert get(address, "/health") == 200
        for paused in children:
            os.kill(paused.pid, signal.SIGSTOP)
            try:
                os.waitpid(paused.pid, os.WUNTRACED)
                assert get(address, "/stats") == 200  # the other one answers
            finally:
                os.kill(paused.pid, signal.SIGCONT)
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        assert get(address, "/health") == 200  # the connection waited in the socket for a new process
        for child in children:
            wait_for_start(child, 2)
        last = [child.process for child in children]
    assert [child.num_starts for child in children] == [2, 2]
    assert [process.returncode for process in last if process is not None] == [0, 0]


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_front_end_ends_with_its_parent_or_by_a_signal(number: int | None, tmp_path: Path) -> None:
    with front_ends(tmp_path, 1) as ([child], _):
        process = child.process
        assert process is not None and process.stdin is not None
        if number is None:
            process.stdin.close()
        else:
            os.kill(process.pid, number)
        assert process.wait(LIMIT_S) == 0


# Signals


class LeftError(Exception):
    """Replaces the end of the process."""


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_first_signal_raises_and_a_later_sigint_kills(
    first: int, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise LeftError(code)

    def kill() -> None:
        killed.append("all")
        raise RuntimeError("a failure that must not stop the exit")

    killed: list[str] = []
    monkeypatch.setattr("os._exit", leave)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with processes.stop_on_signals(kill):
        with pytest.raises(KeyboardInterrupt if code is None else SystemExit) as raised:
            signal.raise_signal(first)
        assert getattr(raised.value, "code", None) == code
        signal.raise_signal(signal.SIGTERM)
        assert killed == []
        with pytest.raises(LeftError, match="130"):
            signal.raise_signal(signal.SIGINT)
        assert killed == ["all"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_signals_are_left_alone_in_other_threads() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with processes.stop_on_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
