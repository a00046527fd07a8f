"""`serve --replicas`: what each replica gets of the machine, and services whose replicas are killed, paused and
restarted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from archerfish.config import EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError
from archerfish.serve import replicas, run
from archerfish.serve.processes import HostConfig, ModelSpec, engine_process
from archerfish.serve.replicas import RollingRestart, core_shares, replica_processes

from .test_processes import COMMAND, CONFIG, exists, running
from .test_run import Service

GIB = 1 << 30
MODEL = ModelSpec(kind="generation", options={"model": "lab/writer"})
HOST = HostConfig(address="ipc:///a/engine", models=(MODEL,), memory_gib=6.0, routing_secret="secret")


@pytest.mark.parametrize(
    ("cores", "num_usable", "count", "expected"),
    [
        ([0, 1, 2, 3], 4, 2, [[0, 1], [2, 3]]),
        ([4, 5, 6], 3, 2, [[4], [5, 6]]),
        ([0, 1], 2, 3, [[0], [1], [0]]),
        ([0, 1, 2, 3], 2, 2, [[], []]),  # a quota: which cores are free is not known
    ],
)
def test_cores_are_shared(
    monkeypatch: pytest.MonkeyPatch, cores: list[int], num_usable: int, count: int, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(replicas, "usable_cores", lambda: cores)
    monkeypatch.setattr(replicas, "num_usable_cores", lambda: num_usable)
    assert core_shares(cores, count) == expected
    monkeypatch.delattr(os, "sched_setaffinity")  # as on macOS
    assert core_shares(cores, count) == [[]] * count


def made(monkeypatch: pytest.MonkeyPatch, host: HostConfig, count: int) -> list[tuple[HostConfig, dict[str, Any]]]:
    """The configurations and options of the processes that would be started."""
    found: list[tuple[HostConfig, dict[str, Any]]] = []
    monkeypatch.setattr(replicas, "engine_process", lambda config, **options: found.append((config, options)))
    replica_processes(host, count)
    return found


def test_replicas_on_cores_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "choose_device", lambda wanted: SimpleNamespace(name="cpu"))
    monkeypatch.setattr(replicas, "memory", lambda: SimpleNamespace(available_bytes=8 * GIB))
    monkeypatch.setattr(replicas, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(replicas, "num_usable_cores", lambda: 2)
    found = made(monkeypatch, HOST, 2)
    assert [config.name for config, _ in found] == ["replica-0", "replica-1"]
    assert [config.address for config, _ in found] == ["ipc:///a/engine-0", "ipc:///a/engine-1"]
    assert [options for _, options in found] == [{"cores": [0]}, {"cores": [1]}]
    assert all(config.memory_gib == 3.0 and config.routing_secret == "secret" for config, _ in found)
    assert found[0][0].models[0].options["memory_budget_gib"] == 1.0  # a quarter of what is free, shared
    for given, expected in (({"memory_budget_gib": 5.0}, 2.5), ({"max_cache_tokens": 64}, 0.0)):
        spec = ModelSpec(kind="generation", options={"model": "lab/writer", **given})
        [(config, _), _] = made(monkeypatch, HostConfig(address="ipc:///a", models=(spec,)), 2)
        assert EngineConfig(**config.models[0].options).memory_budget_gib == expected
    monkeypatch.setattr(replicas, "usable_cores", lambda: list(range(16)))
    monkeypatch.setattr(replicas, "num_usable_cores", lambda: 4)
    assert made(monkeypatch, HOST, 2)[0][0].models[0].options["num_threads"] == 2
    ranks = ModelSpec(kind="generation", options={"tensor_parallel_size": 2})  # each computes with so many threads
    assert (
        made(monkeypatch, HostConfig(address="ipc:///a", models=(ranks,)), 2)[0][0].models[0].options["num_threads"]
        == 1
    )
    assert [replicas.with_threads(ranks, number)["num_threads"] for number in (0, 1, 2, 9)] == [0, 1, 1, 4]
    [(config, options)] = made(monkeypatch, HOST, 1)
    assert config is HOST and not options


def test_replicas_have_cards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(replicas, "choose_device", lambda wanted: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(replicas, "import_torch", lambda what: torch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = made(monkeypatch, HOST, 2)
    assert [options for _, options in found] == [{"environment": {"CUDA_VISIBLE_DEVICES": str(i)}} for i in (0, 1)]
    assert found[0][0].memory_gib == 6.0 and found[0][0].models[0].options == MODEL.options
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 5")
    assert [options["environment"]["CUDA_VISIBLE_DEVICES"] for _, options in made(monkeypatch, HOST, 2)] == [
        "GPU-a",
        "5",
    ]
    with pytest.raises(InvalidOptionError, match="replicas is 3, but there are 2 cards"):
        made(monkeypatch, HOST, 3)
    torch.cuda.device_count = lambda: 5
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    divided = ModelSpec(kind="generation", options={**MODEL.options, "tensor_parallel_size": 2})
    host = HostConfig(address="ipc:///a/engine", models=(divided, MODEL), routing_secret="secret")
    assert [options["environment"]["CUDA_VISIBLE_DEVICES"] for _, options in made(monkeypatch, host, 2)] == [
        "0,1",
        "2,3",
    ]
    with pytest.raises(InvalidOptionError, match="each replica takes 2") as caught:
        made(monkeypatch, host, 3)
    assert "Set replicas to 2" in str(caught.value.hint)


def test_options_of_replicas() -> None:
    host = run.host_config(ServeConfig(replicas=2), (MODEL,), HubConfig(), "/a")
    assert len(host.routing_secret) > 30
    assert run.host_config(ServeConfig(), (MODEL,), HubConfig(), "/a").routing_secret == ""
    with pytest.raises(InvalidOptionError, match="zmq_address"):
        run.host_config(ServeConfig(replicas=2, zmq_address="tcp://127.0.0.1:5555"), (MODEL,), HubConfig(), "/a")


def test_child_has_its_cores_and_environment() -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import json, os, sys\nsys.stdin.readline()\n"
        "address = f\"{sorted(os.sched_getaffinity(0))} {os.environ['A_NAME']}\"\n"
        "print(json.dumps({'address': address}), flush=True)\nsys.stdin.read()"
    )
    child = engine_process(
        CONFIG, command=(sys.executable, "-c", script), cores=[core], environment={"A_NAME": "value"}
    )
    with running(child):
        assert child.wait()["address"] == f"[{core}] value"
    assert os.sched_getaffinity(0) != {core} or os.cpu_count() == 1


def test_replaced_process_serves_again_without_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    with running(engine_process(CONFIG, command=COMMAND)) as child:
        for count in (2, 3, 4, 5):  # the deaths of as many would be followed by pauses
            before = child.pid
            assert child.replace()
            assert child.num_starts == count and child.pid != before and not exists(before)
    assert not child.replace() and "has died" not in caplog.text


class Kept:
    """Writes its name into `order` when it is restarted. num_away: so many looks at it find that it does not serve."""

    is_ending = False

    def __init__(self, name: str, order: list[str], *, num_away: int = 0, serves: bool = True) -> None:
        self.name = name
        self.order = order
        self.num_away = num_away
        self.serves = serves
        self.gate = threading.Event()
        self.gate.set()
        self.is_asked = threading.Event()

    @property
    def is_serving(self) -> bool:
        self.num_away -= 1
        return self.num_away < 0

    def replace(self) -> bool:
        self.is_asked.set()
        assert self.gate.wait(60)
        self.order.append(self.name)
        return self.serves


async def until_in(caplog: pytest.LogCaptureFixture, text: str, count: int = 1) -> None:
    async with asyncio.timeout(60):
        while caplog.text.count(text) < count:
            await asyncio.sleep(0.001)


def test_rolling_restart_stops_a_replica_only_while_all_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "SETTLE_S", 0.001)
    order: list[str] = []
    kept: Any = [Kept("a", order), Kept("b", order), Kept("c", order, num_away=5)]
    with RollingRestart(kept).on_signal():
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.run(until_in(caplog, "The c was restarted (3 of 3)"))
        assert order == ["a", "b", "c"] and "it waits for: c." in caplog.text
        kept[1].gate.clear()
        kept[1].is_asked.clear()
        os.kill(os.getpid(), signal.SIGHUP)
        assert kept[1].is_asked.wait(60)
        os.kill(os.getpid(), signal.SIGHUP)  # in the middle of a restart: it is followed by another one
        kept[1].gate.set()
        asyncio.run(until_in(caplog, "The c was restarted (3 of 3)", 3))
        assert order == ["a", "b", "c"] * 3
        kept[1].serves = False
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.run(until_in(caplog, "The restart ends at the b"))
        monkeypatch.setattr(replicas, "WAIT_S", 0.01)
        kept[1].num_away = 1 << 30
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.run(until_in(caplog, "The restart ends at the a"))
        assert order == [*"abcabcabc", "a", "b"]
    before = signal.getsignal(signal.SIGHUP)
    with RollingRestart(kept[:1]).on_signal():
        assert signal.getsignal(signal.SIGHUP) == before


# Whole services


@contextmanager
def service(directory: Path, *flags: str) -> Iterator[Service]:
    with Service(directory, "--replicas", "2", *flags, max_files=1024) as found:
        yield found
        found.process.terminate()
        found.check_end(0)


def hosts(found: Service) -> list[int]:
    return [pid for pid, command in found.children().items() if "serve.host" in command]


async def outcome(client: httpx.AsyncClient, rng: random.Random) -> str:
    """What becomes of one request: ok, or what was wrong with the answer."""
    text = " ".join(rng.choices(["fish", "water", "red", "blue"], k=rng.randrange(4, 40)))
    body = {"prompt": text, "max_tokens": 24, "ignore_eos": True, "stream": rng.random() < 0.5}
    if rng.random() < 0.3:
        body["stop"] = ["\0"]
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        return "ok" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code}: {(await answer.aread()).decode()}"
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
    if lines[-1] == "[DONE]":
        return "ok"
    error = json.loads(lines[-1]).get("error", {})
    return "cut" if len(lines) > 1 and error.get("code") == "unavailable" else f"ended with {lines[-1]}"


async def under_load(found: Service, act: Callable[[httpx.AsyncClient], Awaitable[None]]) -> Counter[str]:
    """What becomes of all requests that are sent while `act` runs."""
    outcomes: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def send(client: httpx.AsyncClient, rng: random.Random) -> None:
        while not is_over.is_set():
            outcomes[await outcome(client, rng)] += 1

    address = f"http://{found.address}:{found.port}"
    async with asyncio.timeout(600), httpx.AsyncClient(base_url=address, timeout=120) as client:
        senders = [asyncio.create_task(send(client, random.Random(seed))) for seed in range(6)]
        await act(client)
        is_over.set()
        await asyncio.gather(*senders)
    return outcomes


async def states(client: httpx.AsyncClient) -> list[str]:
    return [one["state"] for one in (await client.get("/stats")).json()["replicas"].values()]


async def until_all_ready(client: httpx.AsyncClient) -> None:
    while await states(client) != ["ready", "ready"]:
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.no_cover
def test_killed_replicas_lose_nothing_that_has_not_begun(tmp_path: Path) -> None:
    with service(tmp_path) as found:

        async def kill(client: httpx.AsyncClient) -> None:
            for number in range(10):
                await until_all_ready(client)
                await asyncio.sleep(1)
                os.kill(hosts(found)[number % 2], signal.SIGKILL)
                while "away" not in await states(client):
                    await asyncio.sleep(0.01)
            await until_all_ready(client)

        outcomes = asyncio.run(under_load(found, kill))
    assert set(outcomes) <= {"ok", "cut"} and outcomes["ok"] > 100, outcomes


@pytest.mark.slow
@pytest.mark.no_cover
def test_rolling_restart_loses_nothing(tmp_path: Path) -> None:
    with service(tmp_path, "--num-front-ends", "2") as found:

        async def restart(client: httpx.AsyncClient) -> None:
            await until_all_ready(client)
            for is_by_signal in (True, False):
                before = set(hosts(found))
                if is_by_signal:
                    found.process.send_signal(signal.SIGHUP)
                else:
                    assert (await client.post("/admin/restart")).json() == {"status": "restarting", "replicas": 2}
                while len(set(hosts(found)) - before) < 2 or before & set(hosts(found)):
                    await asyncio.sleep(0.1)
                await until_all_ready(client)
                await asyncio.sleep(2)

        outcomes = asyncio.run(under_load(found, restart))
    assert set(outcomes) == {"ok"} and outcomes["ok"] > 50, outcomes


@pytest.mark.slow
@pytest.mark.no_cover
def test_paused_replica_gets_no_requests_and_its_whole_answers_come_from_the_other(tmp_path: Path) -> None:
    with service(tmp_path) as found:

        async def pause(client: httpx.AsyncClient) -> None:
            await until_all_ready(client)
            await asyncio.sleep(1)
            pid = hosts(found)[0]
            os.kill(pid, signal.SIGSTOP)
            while "late" not in await states(client):
                await asyncio.sleep(0.1)
            assert set((await client.get("/health")).json()["failing"]) < {"replica-0", "replica-1"}
            assert (await client.get("/ready")).status_code == 200
            while "away" not in await states(client):  # its connection is given up after 15 s
                await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
            await until_all_ready(client)

        outcomes = asyncio.run(under_load(found, pause))
    assert set(outcomes) <= {"ok", "cut"} and outcomes["ok"] > 50, outcomes
