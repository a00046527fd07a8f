"""The load generator and the scenarios of `bench serve`, against a server that only pretends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from archerfish.bench.report import BenchReport
from archerfish.cli.main import main
from archerfish.errors import InvalidOptionError

pytest.importorskip("aiohttp")
from aiohttp import web

from archerfish.bench import load, serve
from archerfish.bench.load import Dialect, Load, LoadDriver, Record, Shape, arrivals, make_body

CHAT = Shape("chat", (4, 4), (3, 3))
EMBEDDING = Shape("embeddings", (2, 2))


class PretendServer:
    """Answers the OpenAI routes at once. refuses: answer so many requests with 429; knows_extras: else they are a
    400."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuses = 0
        self.is_cut_off = False
        self.hangs = False
        self.knows_extras = True
        self.num_in_use = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._start())
        self._is_up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/stats", self.stats)
        for path in set(load.PATHS.values()):
            app.router.add_post(path, self.answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": "vectors", "kind": "embedding"}, {"id": "words", "kind": "generation"}]}
        )

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"models": [{"num_running": self.num_in_use, "num_waiting": 0, "num_blocks_in_use": 0}]}
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses:
            self.refuses -= 1
            return web.json_response({"error": {"code": "too_many_requests"}}, status=429, headers={"Retry-After": "0"})
        if not self.knows_extras and "ignore_eos" in body:
            return web.json_response({"error": {"code": "unknown"}}, status=400)
        if "input" in body:
            return web.json_response({"data": [{"embedding": [1.0]}]})
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            event = {"choices": [{"delta": {"content": " word"}, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.hangs:
                await asyncio.sleep(30)
        if not self.is_cut_off:
            end = {
                "choices": [{"delta": {}, "finish_reason": "length"}],
                "usage": {"completion_tokens": body["max_tokens"]},
            }
            await response.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[PretendServer]:
    made = PretendServer()
    yield made
    made.close()


def options(**changes: Any) -> Namespace:
    usual = {
        "scenarios": [],
        "server": [],
        "start": [],
        "model": "",
        "embedding_model": "",
        "api_key_env": "",
        "workload": [],
        "concurrency": (),
        "rate": (),
        "requests": 4,
        "duration": 0.0,
        "rounds": 1,
        "timeout": 30.0,
        "e2e_target": 0.0,
    }
    return Namespace(**{**usual, **changes})


def drive(server: PretendServer, wanted: Load) -> LoadDriver:
    async def run() -> LoadDriver:
        one = serve.Server("archerfish", server.url, options(timeout=wanted.timeout_s))
        one.dialect = Dialect("words", "vectors", {"ignore_eos": True})
        return await one.drive(wanted)

    return asyncio.run(run())


def test_workloads_are_parsed() -> None:
    assert Shape.parse("chat:64/16") == Shape("chat", (64, 64), (16, 16))
    assert Shape.parse("ids:32-512/16-128") == Shape("ids", (32, 512), (16, 128))
    assert Shape.parse(" embeddings:32 ") == Shape("embeddings", (32, 32))
    for wrong in ("chat:64", "embeddings:3/4", "talk:3/4", "chat:0/4", "chat:4/0", "chat:9-3/4", "chat:3/9-4", "chat"):
        with pytest.raises(InvalidOptionError, match="is not a workload"):
            Shape.parse(wrong)


def test_bodies_have_the_shape_that_is_asked_for() -> None:
    import random

    dialect = Dialect("m", "e", {"ignore_eos": True})
    chat = make_body(CHAT, dialect, random.Random(1))
    assert chat["max_tokens"] == 3 and chat["model"] == "m" and chat["stream"] and chat["ignore_eos"]
    assert len(chat["messages"][0]["content"].split()) == 4
    ids = make_body(Shape("ids", (5, 9), (1, 2)), dialect, random.Random(1))["prompt"]
    assert 5 <= len(ids) <= 9 and all(load.MIN_ID <= token <= load.MAX_ID for token in ids)
    assert isinstance(make_body(Shape("completions", (3, 3), (1, 1)), dialect, random.Random(1))["prompt"], str)
    embedding = make_body(EMBEDDING, dialect, random.Random(1))
    assert embedding.keys() == {"model", "input"} and embedding["model"] == "e"


def test_arrivals_are_a_poisson_process_that_ends() -> None:
    times = list(arrivals(Load((CHAT,), rate=50.0, duration_s=100.0)))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert 4500 < len(times) < 5500 and max(times) < 100 and min(gaps) > 0
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(mean**2, rel=0.15)  # the mean of an exponential is its standard deviation
    assert len(list(arrivals(Load((CHAT,), rate=50.0, count=7)))) == 7


def test_closed_loop_sends_every_request_once_and_counts_tokens(server: PretendServer) -> None:
    driver = drive(server, Load((CHAT, EMBEDDING), concurrency=3, count=20))
    found = driver.figures()
    assert len(driver.records) == len(server.bodies) == 20 and found["not answered"] == found["unanswered"] == 0
    assert {len(record.times) for record in driver.records} == {0, 3}
    assert (
        found["requests/s"] == pytest.approx(20 / driver._window_s)
        and found["goodput, requests/s"] == found["requests/s"]
    )
    assert found["first token p50, ms"] <= found["end to end p99, ms"] and "gap p99, ms" in found
    assert driver.figures(good_within_s=1e-9)["goodput, requests/s"] == 0
    again = drive(server, Load((CHAT, EMBEDDING), concurrency=1, count=20))
    assert len(again.records) == 20
    key = {json.dumps(body, sort_keys=True) for body in server.bodies}
    assert len(key) == 20  # the same seed makes the same requests, however many are sent at once


def test_open_loop_sends_as_many_as_arrive(server: PretendServer) -> None:
    wanted = Load((EMBEDDING,), rate=200.0, duration_s=0.2, deadline_s=2.5, seed="x")
    driver = drive(server, wanted)
    assert len(driver.records) == len(list(arrivals(wanted))) == len(server.bodies) > 10
    assert all(body["deadline_s"] == 2.5 for body in server.bodies)


def test_refusals_cut_streams_and_lost_servers_are_told_apart(server: PretendServer) -> None:
    server.refuses = 2
    found = drive(server, Load((CHAT,), concurrency=1, count=5)).figures()
    assert (found["refused, requests"], found["not answered"], found["unanswered"]) == (2, 2, 0)
    server.is_cut_off = True
    assert drive(server, Load((CHAT,), concurrency=1, count=2)).figures()["error, requests"] == 2
    server.is_cut_off, server.url = False, "http://127.0.0.1:9"
    assert drive(server, Load((CHAT,), concurrency=1, count=1)).figures()["disconnected, requests"] == 1


def test_timeouts_and_clients_that_leave_are_told_apart(server: PretendServer) -> None:
    server.hangs = True
    assert drive(server, Load((CHAT,), concurrency=2, count=2, timeout_s=0.1)).figures()["timeout, requests"] == 2
    found = drive(server, Load((CHAT,), concurrency=2, count=2, hang_up_within_s=0.1, timeout_s=30)).figures()
    assert found["left, requests"] == 2


def test_streams_that_a_deadline_cut_are_not_good() -> None:
    record = Record(0.0)
    load.take_event({"choices": [{"delta": {"content": "a"}}]}, record)
    load.take_event({"choices": [{"delta": {}, "finish_reason": "length", "stop_reason": "deadline"}]}, record)
    assert (record.outcome, record.is_cut, record.num_tokens) == ("ok", True, 1)
    failed = Record(0.0)
    load.take_event({"error": {"code": "x"}}, failed)
    load.take_event({"choices": [{"text": "b", "finish_reason": "stop"}]}, failed)
    assert failed.outcome == "error" and failed.num_tokens == 1


def run_bench(one: PretendServer, *scenarios: str, **changes: Any) -> BenchReport:
    report = BenchReport("serve")
    for found in serve.measure(options(**{"scenarios": scenarios, "server": [f"archerfish={one.url}/v1"], **changes})):
        report.add(found)
    return report


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"CHAT": CHAT, "EMBEDDING": EMBEDDING, "TABLE_SIZES": (1, 2), "CAPACITY_SIZES": (2,), "CAPACITY_S": 0.1}
    for name, value in {**sizes, "SETTLE_S": 0.0, "LEAVERS_AT_ONCE": 4}.items():
        monkeypatch.setattr(serve, name, value)


def test_scenarios_measure(server: PretendServer, small: None) -> None:
    report = run_bench(server, "chat8", "embed", "table", rounds=2)
    assert report.samples["chat8: not answered"] == {"archerfish": [0, 0]}
    assert "embed, 100 arrivals/s: end to end p99, ms" in report.samples
    tokens = report.summary("table, chat, 2 at once: tokens/s")
    assert tokens and tokens.rounds == 2 and not report.notes
    assert {body["model"] for body in server.bodies} == {"words", "vectors"}


def test_overload_reports_goodput_against_the_capacity(server: PretendServer, small: None) -> None:
    report = run_bench(server, "overload", "overload-embed", requests=0, duration=0.1)
    measured = ("unanswered", "goodput / capacity", "capacity after / before")
    assert {f"{scenario}: {name}" for scenario in ("overload", "overload-embed") for name in measured} <= set(
        report.samples
    )
    assert any(body.get("deadline_s") == 10.0 for body in server.bodies)


def test_disconnect_reports_what_the_server_still_holds(server: PretendServer, small: None) -> None:
    server.num_in_use = 3
    report = run_bench(server, "disconnect")
    for metric, value in {"not answered": 0, "blocks in use": 0, "requests in use": 3}.items():
        assert report.samples[f"disconnect: {metric} afterwards"]["archerfish"] == [value]


def test_loads_by_flags_and_servers_that_know_no_extras(server: PretendServer) -> None:
    server.knows_extras = False
    report = run_bench(server, workload=["chat:4/2", "embeddings:3"], concurrency=(2,), rate=(100.0,))
    assert "does not take ignore_eos" in report.notes[0]
    assert {
        "chat:4/2 + embeddings:3, 2 at once: requests/s",
        "chat:4/2 + embeddings:3, 100.0 arrivals/s: requests/s",
    } < set(report.samples)


def test_server_that_cannot_be_measured_is_noted(server: PretendServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STOP_S", 0.0)
    report = run_bench(server, server=[f"one={server.url}", "two=http://127.0.0.1:9"], workload=["chat:3/2"])
    assert report.engines == ["one"] and report.notes[0].startswith("two was not measured: two does not answer.")
    start = f"two={sys.executable} -c raise(SystemExit(3))"
    monkeypatch.setattr(serve, "STOP_S", 5.0)
    (note,) = serve.measure(options(server=["two=http://127.0.0.1:9"], start=[start]))
    assert isinstance(note, str) and "two ended with 3" in note


def test_sigterm_ends_the_server_that_the_bench_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    start = (
        f"one={sys.executable} -c \"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)\""
    )
    words = ["bench", "serve", "--server", "one=http://127.0.0.1:9", "--start", start]
    with subprocess.Popen([sys.executable, "-m", "archerfish", *words]) as bench:
        ends_s = time.monotonic() + 60
        while not (file.is_file() and file.read_text()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat9"], "Unknown scenario"),
        (["chat8", "--rate", "3"], "are for a load of your own"),
        (["--server", "http://x"], "--server is NAME=VALUE"),
        (["--start", "a=b"], "no --server names"),
        (["--requests", "-1"], "--requests must be"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert said in capsys.readouterr().err


def test_sums_are_found_however_deep() -> None:
    stats = {"a": [{"num_running": 2}, {"b": {"num_running": 3, "other": 9}}], "num_running": 1}
    assert serve.sum_of(stats, "num_running") == 6 and serve.sum_of(stats, "absent") == 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["overhead", "frontends", "chat8"])
def test_own_server_is_started_and_measured(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STREAMS", 8)
    monkeypatch.setattr(serve, "FRONT_ENDS", (1,))
    found = list(serve.measure(options(scenarios=[scenario], requests=3)))
    assert len(found) >= 3
