"""Paced engines, the readers of streams, and the two scenarios that use them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archerfish.bench import serve_frontends, serve_overhead
from archerfish.bench.paced_engine import (
    FIRST_WORD,
    NUM_WORDS,
    Pace,
    PacedRunner,
    Step,
    figures_of,
    full_stretch,
    make_engine,
    save_model,
    word,
)
from archerfish.bench.paced_process import Report, Task, report_of, run_alone
from archerfish.bench.serve import SCENARIOS, measure_servers
from archerfish.bench.serve_bench import BenchOptions, ServeBench
from archerfish.bench.serve_overhead import ADDED, IN_PROCESS, SERVED, Line, Pair, Timing, time_in_process
from archerfish.bench.serve_report import Point
from archerfish.bench.stream_reader import Reader, Reading, WasRead, cpu_seconds
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ServiceError
from archerfish.params import SamplingParams

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n0\r\n\r\n"


def event(number: int) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % word(number).encode()


class Here(Executor):
    """Runs what it gets at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Sleeper:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def plan_of(number: int) -> Any:
    return SimpleNamespace(sequences=[None] * number)


def make_runner(sleeper: Sleeper, pace: Pace) -> PacedRunner:
    return PacedRunner(Here(), pace, clock=sleeper.clock, sleep=sleeper.sleep)


def test_a_step_begins_where_the_one_before_ends_or_when_it_is_launched() -> None:
    sleeper = Sleeper()
    runner = make_runner(sleeper, Pace(0.5))
    runner.launch(plan_of(2))
    assert sleeper.now == 100.5
    sleeper.now = 100.6  # launched late: the device was idle meanwhile
    assert runner.launch(plan_of(2)).result().tokens == [FIRST_WORD + 1] * 2
    assert sleeper.now == pytest.approx(101.1)
    runner._wait(100.8)  # launched while the one before ran, and taken up late
    assert sleeper.naps[-1] == pytest.approx(0.5)
    sleeper.now += 0.2
    runner._wait(101.5)
    assert sleeper.now == pytest.approx(102.1)  # the late hand-over is not added


def test_many_waits_each_begin_when_the_thread_gets_to_them() -> None:
    sleeper = Sleeper()
    make_runner(sleeper, Pace(0.5, 5)).launch(plan_of(1))
    assert sleeper.naps == [0.1] * 5


def test_words_come_again_after_all_of_them() -> None:
    runner = make_runner(Sleeper(), Pace(0.0))
    tokens = [runner.launch(plan_of(1)).result().tokens[0] - FIRST_WORD for _ in range(NUM_WORDS + 1)]
    assert tokens == [*range(NUM_WORDS), 0]
    assert (word(0), word(NUM_WORDS + 7)) == (" 0000", " 0007")


def step(number: int, size: int) -> Step:
    return Step(number, size, float(number), number + 1.0, 0.25 * number, 0.5 * number, 0.125 * number)


def test_figures_are_of_the_longest_stretch_with_all_streams() -> None:
    sizes = [1, 4, 4, 3, 4, 4, 4, 4, 2]
    steps = [step(number, size) for number, size in enumerate(sizes)]
    assert [one.number for one in full_stretch(steps, 4)] == [5, 6, 7]
    found = figures_of(steps, 4)
    assert (found["steps"], found["steps_s"], found["tokens_s"]) == (2, 1.0, 4.0)
    assert found["loop_us_token"] == pytest.approx(0.25 / 4 * 1e6)
    assert found["engine_us_token"] == pytest.approx(0.5 / 4 * 1e6)
    assert found["core_wait_share"] == pytest.approx(0.125)
    assert figures_of(steps, 9) == {}


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLMEngine, PacedRunner]]:
    engine, runner = make_engine(save_model(tmp_path_factory.mktemp("paced")))
    with engine:
        yield engine, runner


def test_a_paced_engine_writes_the_numbers_of_its_steps(paced: tuple[LLMEngine, PacedRunner]) -> None:
    engine, runner = paced
    first = runner._number
    parts = list(engine.stream_chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=5, ignore_eos=True)))
    assert "".join(part.text for part in parts) == "".join(word(first + place) for place in range(5))


def test_a_run_alone_brings_every_stream_all_its_tokens(paced: tuple[LLMEngine, PacedRunner]) -> None:
    engine, runner = paced
    runner.steps.clear()
    before = engine.engine_stats().total_tokens_generated
    run_alone(engine, runner, Task(kind="run", num_streams=6, num_tokens=9))
    report = report_of(runner, 6)
    assert engine.engine_stats().total_tokens_generated - before == 54
    assert report.figures["steps"] == 7  # of nine, without the first and between the others
    assert len(report.ends) == 9


@contextmanager
def listening(answer: Callable[[socket.socket, int], None]) -> Iterator[tuple[str, int]]:
    """A server that hands each connection, once it has a request, to `answer` in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for number in range(1000):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection, number), daemon=True).start()

        def handle(connection: socket.socket, number: int) -> None:
            with connection:
                while connection.recv(1 << 16):
                    answer(connection, number)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_reader_counts_from_when_all_have_a_token_until_one_ends() -> None:
    seconds = iter(range(1, 100))
    reader = Reader(Reading(host="", port=0, request=b"", num_streams=2), clock=lambda: float(next(seconds)))
    reader.add(7)
    reader.add(8)  # of 16 the first one is looked at token by token
    assert reader.take(7, HEAD) and reader.take(7, event(1)) and reader.take(7, event(2)) and reader.take(8, HEAD)
    assert reader.result().num_tokens == 0
    assert reader.take(8, event(1))  # the last one to begin
    assert reader.take(7, event(3) + event(4)) and reader.take(8, event(2))
    assert reader.take(7, event(5) + END[:5])
    assert not reader.take(7, END[5:])
    assert reader.take(8, event(3))
    assert not reader.take(8, END)
    read = reader.result()
    assert (read.num_tokens, read.num_reads, read.num_done) == (4, 4, 2)
    assert [number for number, _ in read.words] == [3, 4, 5]
    assert read.window_s == 3 and set(read.cpu_s) == {"reader"}


def test_a_reader_reads_all_its_streams_to_their_end() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.sendall(HEAD + b"".join(map(event, range(3))) + END)

    with listening(answer) as (host, port):
        assert Reader(Reading(host=host, port=port, request=b"GET", num_streams=5)).run().num_done == 5


def test_a_reader_says_when_streams_break_off() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.sendall(HEAD + event(1))
        connection.shutdown(socket.SHUT_RDWR)

    with listening(answer) as (host, port):
        read = Reader(Reading(host=host, port=port, request=b"GET", num_streams=3)).run()
    assert read.num_done == 0


def test_processor_time_of_a_process_grows() -> None:
    before, began = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < began + 0.1:  # the processor's time, not the wall's
        pass
    assert before + 0.05 < cpu_seconds(os.getpid()) < before + 10


FULL = {"steps_s": 10.0, "tokens_s": 100.0, "engine_us_token": 1.0}


def test_figures_of_a_served_run_say_how_late_tokens_are_and_who_used_the_cores() -> None:
    report = Report(figures=FULL, ends={NUM_WORDS + 1: 5.0, NUM_WORDS + 2: 6.0})
    read = WasRead(
        window_s=2.0, num_tokens=198, num_reads=99, num_done=4, words=[(1, 5.01), (2, 6.03), (2, 6.05)],
        cpu_s={"engine": 0.2, "front end 0": 0.4, "front end 1": 0.4, "reader": 0.1},
    )  # fmt: skip
    found = serve_frontends.served_figures(report, read, serve_frontends.Size(4))
    assert found["read_tokens_s"] == 99.0 and found["delivered"] == pytest.approx(0.99)
    assert [round(found[f"late_p{percent}_ms"]) for percent in (50, 99)] == [30, 50]
    assert found["front_cores"] == pytest.approx(0.2) and found["all_cores"] == pytest.approx(0.55)
    assert found["front_us_token"] == pytest.approx(0.8 / 198 * 1e6) and found["tokens_read"] == 2.0
    with pytest.raises(ServiceError, match="Only 1 of 4 streams"):
        serve_frontends.served_figures(report, WasRead(num_done=1), serve_frontends.Size(4))


def test_a_scenario_of_its_own_needs_no_server_and_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(size: serve_frontends.Size, rounds: int, tell: Any) -> list[Point]:
        assert (size.duration_s, rounds) == (1.5, 2)
        points = []
        for load in serve_frontends.PACES:
            for server, steps_s in {"in process": 100.0, "sockets alone": 99.0, "1 front end": 94.0}.items():
                figures = {"steps_s": steps_s, "delivered": 0.995, "read_tokens_s": 19_000.0}
                points.append(Point("frontends", server, load, part=load, rounds=[figures]))
        return points

    monkeypatch.setattr(serve_frontends, "measure", measure)
    found = measure_servers([], BenchOptions(rounds=2, duration_s=1.5), ["frontends"], [])
    assert not found.errors
    judged = {(server, target.name): target.is_met for _, server, target in found.targets}
    assert judged["sockets alone", "engine loop slowed by, one wait a step"] is True
    assert judged["1 front end", "engine loop slowed by, 100 waits a step"] is False
    assert judged["1 front end", "delivered, one wait a step"] is True
    assert judged["1 front end", "tokens/s at the reader"] is False


def test_what_cannot_be_measured_is_an_error_of_the_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> list[Point]:
        raise ServiceError("It broke.", hint="")

    monkeypatch.setattr(serve_frontends, "measure", measure)
    assert "It broke." in measure_servers([], BenchOptions(), ["frontends"], []).errors["frontends"]


def test_scenarios_that_need_no_server_are_marked() -> None:
    assert {name for name, scenario in SCENARIOS.items() if scenario.is_own} == {"overhead", "frontends"}
    assert all(scenario.is_own == (not scenario.shapes) for scenario in SCENARIOS.values())


# What is added


def test_a_timing_is_to_the_first_token_and_between_the_others() -> None:
    assert Timing.of(1.0, [1.25, 1.5, 2.25], 3) == Timing(250.0, 500.0)
    with pytest.raises(ServiceError, match="no text"):
        Timing.of(1.0, [], 3)


def test_a_line_times_events_and_renews_a_connection_that_was_idle() -> None:
    class Clock:
        now = 100.0

        def __call__(self) -> float:
            self.now += 0.125
            return self.now

    clock, numbers = Clock(), list[int]()

    def answer(connection: socket.socket, number: int) -> None:
        numbers.append(number)
        connection.sendall(HEAD + event(0) + event(1) + END)

    with listening(answer) as (host, port):
        line = Line(host, port, clock)
        for _ in range(2):
            assert line.chat("paced", "Hi", 2).ttft_ms >= 125
        clock.now += 10
        line.chat("paced", "Hi", 2)
        line.close()
    assert numbers == [0, 0, 0, 1, 1]  # a question before the first chat of each


def test_a_line_tells_what_a_server_refuses() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n0\r\n\r\n")

    with listening(answer) as (host, port):
        line = Line(host, port)
        with pytest.raises(ServiceError, match="404"):
            line.chat("paced", "Hi", 2)
        line.close()


def test_an_answer_in_process_is_timed(paced: tuple[LLMEngine, PacedRunner]) -> None:
    ticks = iter(range(100))
    found = time_in_process(paced[0], "Hi", 5, clock=lambda: float(next(ticks)))
    assert found == Timing(1000.0, 1000.0)


def test_both_ways_take_turns_and_what_is_added_is_their_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def in_process(engine: Any, content: str, num_tokens: int) -> Timing:
        asked.append((IN_PROCESS, content))
        return Timing(10.0, 5.0)

    class Wire:
        def chat(self, model: str, content: str, num_tokens: int) -> Timing:
            asked.append((SERVED, content))
            return Timing(11.5, 5.125)

    monkeypatch.setattr(serve_overhead, "time_in_process", in_process)
    pair = Pair(None, Wire(), "m", 4)  # type: ignore[arg-type]
    points = {point.server: point for point in serve_overhead.measure(pair, "test", 2, 2)}
    assert points[ADDED].rounds == [{"ttft_p50_ms": 1.5, "per_token_ms": 0.125}] * 2
    assert [way for way, _ in asked[:4]] == [IN_PROCESS, SERVED, SERVED, IN_PROCESS]
    contents = [content for _, content in asked]
    assert contents[0::2] == contents[1::2] and len(set(contents)) == len(contents) / 2  # each prompt once on each way


def test_what_is_added_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_all(config: Any, rounds: int, count: int) -> list[Point]:
        assert (config.model, rounds, count) == ("some-model", 3, 7)
        return [
            Point("overhead", server, "steps", part="steps", rounds=[{"ttft_p50_ms": 1.0, "per_token_ms": 0.3}])
            for server in (IN_PROCESS, SERVED, ADDED)
        ]

    monkeypatch.setattr(serve_overhead, "measure_all", measure_all)
    bench = ServeBench([], BenchOptions(count=7, model="some-model"))
    found = asyncio.run(bench.run({"overhead": SCENARIOS["overhead"]}))
    assert [(target.name, target.is_met) for _, _, target in found.targets] == [
        ("added to the first token, ms", True), ("added to a token, ms", False),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_small_run_of_both_scenarios_with_real_processes(tmp_path: Path) -> None:
    size = serve_frontends.Size(num_streams=8, tokens_s=800.0, duration_s=0.5)
    points = serve_frontends.measure(size, rounds=1)
    assert len(points) == 8
    for point in points:
        assert point.rounds[0]["steps"] > 10
        if "front end" in point.server:
            assert point.rounds[0]["num_ok"] == 8 and point.rounds[0]["late_p50_ms"] > 0
    with serve_overhead.paced_pairs(8) as at:
        added = serve_overhead.measure(at(Pace(0.002)), "small", rounds=1, count=2)[-1]
    assert added.server == ADDED and added.rounds[0]["ttft_p50_ms"] > 0
