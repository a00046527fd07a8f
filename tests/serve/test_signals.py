"""Ctrl+C: the first ends a service in order, the second at once, with status 130, without a word, and with all it started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archerfish.config import ServeConfig
from archerfish.serve import front
from archerfish.serve.front import FrontConfig
from archerfish.serve.front_ends import FrontEnds
from archerfish.serve.host_config import HostConfig
from archerfish.serve.signals import orderly_end, start_process
from archerfish.serve.supervisor import Supervisor
from tests.engine.tiny_llama import save_tiny_llama
from tests.text.tiny_tokenizers import byte_fallback

from .fake_backend import TEMPLATE
from .test_end import STREAMS, check_told

LIMIT_S = 60
ROOT = Path(__file__).parents[2]


class LeftError(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr("os._exit", leave)


def broken() -> None:
    raise RuntimeError("cannot be killed")


def test_the_first_raises_and_the_second_leaves(leaving: None) -> None:
    killed: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with orderly_end() as ending:
        ending.kills += [broken, lambda: killed.append("engine")]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert killed == []
        with pytest.raises(LeftError, match="130"):
            signal.raise_signal(signal.SIGINT)
        assert killed == ["engine"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_after_sigterm_does_not_wait_either(leaving: None) -> None:
    with orderly_end():
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LeftError, match="130"):
            signal.raise_signal(signal.SIGINT)


def test_a_thread_has_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)

    def run() -> None:
        with orderly_end() as ending:
            seen.append((ending.is_begun, signal.getsignal(signal.SIGINT)))

    seen: list[Any] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


CHILD = """
import sys
sys.stdin.readline()
from archerfish.serve.signals import ignore_interrupts
ignore_interrupts()
print("lives", flush=True)
sys.stdin.read()
"""


def test_ctrl_c_does_not_end_a_process_that_is_not_ready_for_it() -> None:
    process = start_process([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    os.kill(process.pid, signal.SIGINT)
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"lives\n"
    os.kill(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


SERVING = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.readline()
print('{"address": "ipc:///nowhere"}', flush=True)
sys.stdin.read()
"""


def test_an_engine_process_that_is_killed_is_not_started_again() -> None:
    changes: list[bool] = []
    supervisor = Supervisor(HostConfig(), on_change=changes.append, command=(sys.executable, "-c", SERVING))
    directory = Path(supervisor._directory)
    supervisor.start()
    process = supervisor._process
    assert process is not None and directory.is_dir()
    with supervisor._lock:  # which the thread that a signal interrupts may hold
        supervisor.kill()
    assert process.returncode == -signal.SIGKILL
    assert not directory.exists()
    supervisor._watcher.join(LIMIT_S)
    assert (supervisor.num_starts, changes) == (1, [True])
    supervisor.stop()


HEEDING = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("command", "last_s", "code"), [(("cat",), 0.01, -signal.SIGKILL), ((sys.executable, "-c", HEEDING), LIMIT_S, 7)]
)
def test_front_ends_that_are_killed_have_a_moment_and_are_not_replaced(
    command: tuple[str, ...], last_s: float, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archerfish.serve.front_ends.LAST_S", last_s)
    with front.bind(ServeConfig(port=0)) as listener:
        settings = FrontConfig(address="ipc:///nowhere", credentials="", listener=listener.fileno())
        with FrontEnds(settings, 2, command=command) as others:
            with others._lock:
                others.kill()
            for keeper in others._keepers:
                keeper.join(LIMIT_S)
            assert [process.returncode for process in others.processes] == [code] * 2
    assert (others.num_restarts, caplog.records) == (0, [])


ENDLESS = """
import asyncio
from archerfish.config import ServeConfig
from archerfish.serve import front
from archerfish.serve.signals import Ending

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await asyncio.Event().wait()

config = ServeConfig(port=0, log_level="info")
with front.bind(config) as listener:
    say = lambda text: print(text, flush=True)
    front.run_app(app, listener, config, say, lambda: say("Stopping"), Ending().force)
"""


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, all output in one pipe; none of the group stays."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    too_late = threading.Timer(3 * LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    too_late.start()
    assert process.stdout is not None
    try:
        yield process
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        too_late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return line
    raise AssertionError(seen)


def press(process: subprocess.Popen[str], *, is_group: bool = True) -> None:
    """Ctrl+C, which reaches the whole group; or a signal for the first process alone."""
    (os.killpg if is_group else os.kill)(process.pid, signal.SIGINT)


def rest_of(process: subprocess.Popen[str]) -> str:
    """What is still printed, until all who hold the pipe are gone; nothing of it is a complaint."""
    assert process.stdout is not None
    rest = process.stdout.read()
    assert not {"Traceback", "ERROR", "WARNING", "Exception"} & set(rest.replace(":", " ").split()), rest
    return rest


def test_a_second_ctrl_c_ends_a_front_end_in_the_middle_of_an_answer() -> None:
    with started([sys.executable, "-c", ENDLESS]) as process:
        host, port = read_until(process, "http://").strip().removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().read(5) == b"begun"
        press(process)
        read_until(process, "Stopping")
        press(process)
        rest_of(process)
        assert process.wait(LIMIT_S) == 130
        connection.close()


@contextmanager
def whole_service(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A service of a tiny model; of what it writes outside of its directory, nothing stays."""
    model, scratch = directory / "tiny", directory / "scratch"
    model.mkdir()
    scratch.mkdir()
    save_tiny_llama(model, vocab_size=288, max_position_embeddings=65536)
    byte_fallback(model, chat_template=TEMPLATE)
    command = [
        sys.executable, "-m", "archerfish", "serve", "--port", "0", "--kinds", "generation", "--model", str(model),
        "--load-format", "dummy", "--dtype", "float32", "--max-cache-tokens", "262144", "--num-threads", "1", *flags,
    ]  # fmt: skip
    with started(command, TMPDIR=str(scratch)) as process:
        host, port = read_until(process, "http://").split("http://")[1].split(" ")[0].split(":")
        yield process, host, int(port)
        assert list(scratch.iterdir()) == []


def begin_streams(host: str, port: int, num_each: int = 1) -> list[tuple[str, http.client.HTTPResponse]]:
    found: list[tuple[str, http.client.HTTPResponse]] = []
    for path, body in [*STREAMS.items()] * num_each:
        connection = http.client.HTTPConnection(host, port, timeout=2 * LIMIT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        found.append((path, connection.getresponse()))
    for _, answer in found:
        assert answer.readline().startswith((b"data: ", b"event: "))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_group", [True, False])
@pytest.mark.parametrize("num_front_ends", ["1", "2"])
def test_a_second_ctrl_c_tells_every_client_and_ends_the_whole_service(
    tmp_path: Path, num_front_ends: str, is_group: bool
) -> None:
    with whole_service(tmp_path, "--num-front-ends", num_front_ends) as (process, host, port):
        streams = begin_streams(host, port, num_each=2)  # so that each front end has some
        press(process, is_group=is_group)
        assert "30 s to finish" in read_until(process, "Stopping: ")
        assert all(answer.readline() for _, answer in streams)
        press(process, is_group=is_group)
        for path, answer in streams:
            check_told(path, answer.read().decode())
        rest_of(process)
        assert process.wait(LIMIT_S) == 130
        for _, answer in streams:
            answer.close()


@pytest.mark.slow
def test_when_the_grace_is_over_every_client_is_told_too(tmp_path: Path) -> None:
    """As long as the grace of a service takes."""
    with whole_service(tmp_path, "--num-front-ends", "2") as (process, host, port):
        streams = begin_streams(host, port)
        process.terminate()
        read_until(process, "Stopping: ")
        for path, answer in streams:
            check_told(path, answer.read().decode())
        rest_of(process)
        assert process.wait(LIMIT_S) == 0
        for _, answer in streams:
            answer.close()
