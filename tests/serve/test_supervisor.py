"""Supervisor: a real engine process, killed, stopped and started again."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archerfish.serve.client import AsyncClient, RemoteError
from archerfish.serve.host_config import HostConfig, ModelSpec
from archerfish.serve.supervisor import EngineStartError, Supervisor
from archerfish.serve.wire import Generated, GenerationRequest, Ping, Pong
from tests.engine.tiny_llama import save_tiny_llama
from tests.serve.hosting import ENDLESS, LONG, whole

LIMIT_S = 120


def config_of(directory: Path, **options: Any) -> HostConfig:
    directory.mkdir(exist_ok=True)
    save_tiny_llama(directory, max_position_embeddings=4096)
    engine = {
        "model": str(directory), "dtype": "float32", "load_format": "dummy", "max_cache_tokens": 16384, "max_num_seqs": 32,
        "num_threads": 1, "seed": 7,
    }  # fmt: skip
    return HostConfig(models=(ModelSpec(kind="generation", options=engine),), **options)


def exists(pid: int) -> bool:
    """Also of a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(directory: Path, **options: Any) -> tuple[Supervisor, threading.Semaphore]:
    """A supervisor that serves, and what counts its changes."""
    changed = threading.Semaphore(0)
    supervisor = Supervisor(config_of(directory, **options), on_change=lambda is_serving: changed.release())
    supervisor.start()
    assert changed.acquire(timeout=LIMIT_S)
    return supervisor, changed


async def load(client: AsyncClient, num: int, params: dict[str, Any] = ENDLESS) -> list[asyncio.Task[Any]]:
    """Requests that would run for long, each of which has begun."""
    requests = [GenerationRequest(request_id="", token_ids=[5 + i], params=params, stream=True) for i in range(num)]
    streams = [client.generate(request) for request in requests]
    for stream in streams:
        await anext(stream)

    async def rest(stream: Any) -> list[Any]:
        return [part async for part in stream]

    return [asyncio.create_task(rest(stream)) for stream in streams]


def kill_again_and_again(tmp_path: Path, num_kills: int) -> None:
    supervisor, changed = start(tmp_path / "tiny")
    directory = Path(supervisor.address.removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    shared_before = set(Path("/dev/shm").iterdir())
    pids: list[int] = []

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S * 4), supervisor.client() as client:
            for _ in range(num_kills):
                running = await load(client, 6)
                waiting = asyncio.create_task(whole(client, token_ids=[9] * 50, params=ENDLESS))
                await client.ask(Ping(request_id=""))
                pids.append(supervisor.pid)
                os.kill(supervisor.pid, signal.SIGKILL)
                answers = await asyncio.gather(*running, waiting, return_exceptions=True)
                for answer in answers:
                    assert isinstance(answer, RemoteError)
                    assert answer.status == 503
                    assert answer.retry_after_s is not None
                for _ in range(2):  # it is gone, it serves again
                    assert await asyncio.to_thread(changed.acquire, timeout=LIMIT_S)
                assert supervisor.is_serving
                while not client.is_connected:
                    await asyncio.sleep(0.001)
                assert isinstance(await client.ask(Ping(request_id="", probe="")), Pong)
            pids.append(supervisor.pid)

    asyncio.run(main())
    supervisor.stop()
    assert len(set(pids)) == num_kills + 1
    assert supervisor.num_starts == num_kills + 1
    assert not any(exists(pid) for pid in pids)
    assert not directory.exists()
    assert set(Path("/dev/shm").iterdir()) <= shared_before
    assert (supervisor.pid, supervisor.is_serving) == (0, False)


def test_a_killed_process_is_started_again_and_nobody_is_left_waiting(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 1)


@pytest.mark.slow
def test_ten_kills_under_load(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 10)


def test_stopping_lets_what_runs_finish(tmp_path: Path) -> None:
    supervisor, _ = start(tmp_path / "tiny")
    pid = supervisor.pid

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), supervisor.client() as client:
            running = await load(client, 3, LONG)
            stopping = asyncio.create_task(asyncio.to_thread(supervisor.stop))
            for parts in await asyncio.gather(*running):
                assert isinstance(parts[-1], Generated)
                assert parts[-1].num_output_tokens == LONG["max_tokens"]
            await stopping

    asyncio.run(main())
    assert not exists(pid)
    supervisor.stop()


def test_what_outlives_its_grace_is_ended(tmp_path: Path) -> None:
    supervisor, _ = start(tmp_path / "tiny", grace_s=0.0)

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), supervisor.client() as client:
            running = await load(client, 2)
            await asyncio.to_thread(supervisor.stop)
            for answer in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(answer, RemoteError)
                assert answer.status == 503

    asyncio.run(main())


def test_a_model_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    spec = ModelSpec(kind="generation", options={"model": str(tmp_path / "nothing")})
    supervisor = Supervisor(HostConfig(models=(spec,), hub={"offline": True}))
    with pytest.raises(EngineStartError, match="nothing"):
        supervisor.start()
    assert not Path(supervisor.address.removeprefix("ipc://")).parent.exists()


def test_a_process_that_ends_without_a_word_is_told() -> None:
    for command in (("false",), (sys.executable, "-c", "print('hello')")):
        with pytest.raises(EngineStartError, match="ended while it started"):
            Supervisor(HostConfig(), command=command).start()


ORPHAN = """
import os, sys
from archerfish.serve.supervisor import Supervisor
from archerfish.serve.host_config import HostConfig
supervisor = Supervisor(HostConfig(address=sys.argv[1]))
supervisor.start()
print(supervisor.pid, flush=True)
os._exit(1)
"""


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    parent = subprocess.run([sys.executable, "-c", ORPHAN, address], capture_output=True, text=True, timeout=LIMIT_S)
    pid = int(parent.stdout)
    watch = os.pidfd_open(pid) if exists(pid) else None
    if watch is not None:
        poller = select.poll()
        poller.register(watch)
        assert poller.poll(LIMIT_S * 1000)
        os.close(watch)


# A process that hangs

ENGINE = """
import json, sys, time
config = json.loads(sys.stdin.readline())
print(json.dumps({"address": config["address"]}), flush=True)
for line in %r:
    print(line, flush=True)
sys.stdin.read()
"""


def hang(beats: list[str], clock: Callable[[], float]) -> tuple[Supervisor, list[int]]:
    """A supervisor of processes that say their beats and no more, after it has lost one of them; and their pids."""
    changed = threading.Semaphore(0)
    supervisor = Supervisor(
        HostConfig(silence_s=10.0), on_change=lambda is_serving: changed.release(), clock=clock,
        command=(sys.executable, "-c", ENGINE % (beats,)),
    )  # fmt: skip
    with supervisor:
        pids = [supervisor.pid]
        for _ in range(3):  # serves, hangs, serves again
            assert changed.acquire(timeout=LIMIT_S)
        pids.append(supervisor.pid)
    return supervisor, pids


def test_a_process_that_complains_is_killed_and_started_again() -> None:
    supervisor, pids = hang(['{"complaint":""}', '{"complaint":"A step has no end."}'], time.monotonic)
    assert supervisor.num_hangs >= 1
    assert supervisor.num_starts >= 2
    assert pids[0] != pids[1]
    assert not any(exists(pid) for pid in pids)


def test_a_silent_process_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.supervisor.BEAT_S", 0.001)
    ticks = itertools.count()
    supervisor, pids = hang(['{"complaint":""}'], lambda: float(next(ticks)))
    assert supervisor.num_hangs >= 1
    assert next(ticks) >= 10
    assert not any(exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_stopped_process_is_replaced_and_its_requests_fail(tmp_path: Path) -> None:
    supervisor, changed = start(tmp_path / "tiny", silence_s=3.0)

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), supervisor.client() as client:
            running = await load(client, 4)
            stopped = supervisor.pid
            os.kill(stopped, signal.SIGSTOP)
            for answer in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(answer, RemoteError)
                assert (answer.status, answer.retry_after_s is not None) == (503, True)
            for _ in range(2):
                assert await asyncio.to_thread(changed.acquire, timeout=LIMIT_S)
            assert (supervisor.num_hangs, supervisor.num_starts, exists(stopped)) == (1, 2, False)
            while not client.is_connected:
                await asyncio.sleep(0.001)
            assert isinstance(await client.ask(Ping(request_id="", probe="")), Pong)

    asyncio.run(main())
    supervisor.stop()
