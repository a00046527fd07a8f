"""ComputeThread: jobs of several models in one thread, in turns; and when an engine process counts as hung."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.engine.llm_engine import LLMEngine
from archerfish.runtime.runner import QueuedStep
from archerfish.serve.compute import LONGEST_FACTOR, NEW_FACTOR, NEW_JOBS, ComputeThread, HangWatch, Lane, Waker
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import ModelEntry
from archerfish.serve.processes import MAX_GAP_S, Stall
from archerfish.serve.wire import EmbedRequest, GenerationRequest, Ping, Vectors
from tests.engine.tiny_llama import save_tiny_llama, tiny_config

from .hosting import ENDLESS, LIMIT_S, FakeClock, WordEncoder, hold, make_host, talking

pytestmark = pytest.mark.anyio


def held(compute: ComputeThread, lane: Lane) -> threading.Event:
    """A job that holds the thread until the event is set."""
    gate, has_begun = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        assert gate.wait(LIMIT_S)

    lane.submit(hold)
    assert has_begun.wait(LIMIT_S)
    return gate


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40))
def test_lanes_take_turns_and_keep_their_order(submitted: list[int]) -> None:
    compute = ComputeThread()
    lanes = [compute.lane(str(number)) for number in range(4)]
    gate = held(compute, lanes[3])
    done: list[tuple[int, int]] = []
    for place, number in enumerate(submitted):
        lanes[number].submit(done.append, (number, place))
    gate.set()
    compute.close()
    for number in range(4):
        assert [place for one, place in done if one == number] == [
            i for i, one in enumerate(submitted) if one == number
        ]
    left = [submitted.count(number) for number in range(4)]
    last = 3
    for number, _ in done:  # always the next lane that has something
        expected = next(i % 4 for i in range(last + 1, last + 5) if left[i % 4])
        assert number == expected
        left[number] -= 1
        last = number


def test_job_that_raises() -> None:
    compute = ComputeThread()
    lane = compute.lane("a")

    def fail() -> Any:
        raise ValueError("no")

    failed: Future[Any] = lane.submit(fail)
    with pytest.raises(ValueError, match="no"):
        failed.result(LIMIT_S)
    assert lane.last_done == float("-inf")
    assert lane.submit(int).result(LIMIT_S) == 0
    assert lane.last_done > 0
    compute.close()
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(int)


def test_running_time_of_a_job() -> None:
    now = 10.0
    compute = ComputeThread(clock=lambda: now)
    lane = compute.lane("a")
    assert compute.running_s() == 0
    gate = held(compute, lane)
    now = 13.5
    assert compute.running_s() == 3.5
    gate.set()
    compute.close()
    assert (compute.running_s(), lane.busy_s, lane.last_done) == (0, 3.5, 13.5)


def test_waker() -> None:
    waker = Waker()
    for _ in range(3):
        for _ in range(1000):
            waker.wake()
        assert waker.reader.recv(10) == b"\0"
        waker.wake()
        waker.clear()
    waker.wake()
    assert waker.reader.recv(10) == b"\0"
    waker.close()
    waker.wake()


def test_lane_reports_activity_of_others() -> None:
    now = 0.0
    thread = ComputeThread(clock=lambda: now)
    own, other = thread.lane("own"), thread.lane("other")
    own.submit(int).result()
    assert not own.are_others_active(1.0)
    gate = held(thread, other)
    assert own.are_others_active(1.0) and other.are_others_active(1.0)
    gate.set()
    other.submit(int).result(LIMIT_S)
    assert own.are_others_active(1.0)
    now = 2.0
    assert not own.are_others_active(1.0)
    thread.close()


# Hangs


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.booleans()), max_size=60))
def test_stall_clips_gaps_between_checks(checks: list[tuple[float, bool, bool]]) -> None:
    stall = Stall()
    now = 0.0
    progress = 0
    expected = 0.0
    for number, (gap, has_moved, has_work) in enumerate(checks):
        now += gap
        progress += has_moved
        expected = expected + (min(gap, MAX_GAP_S) if number else 0.0) if has_work and not has_moved else 0.0
        assert stall.check(now, progress, has_work=has_work) == pytest.approx(expected)
        assert stall.seconds <= MAX_GAP_S * number


class Watched:
    """A compute thread under a fake clock, checked once a second."""

    def __init__(self, hang_s: float = 10.0) -> None:
        self.clock = FakeClock()
        self.compute = ComputeThread(clock=self.clock)
        self.watch = HangWatch(self.compute, hang_s)

    def old_lane(self) -> Lane:
        lane = self.compute.lane("old")
        for _ in range(NEW_JOBS):
            lane.submit(int).result(LIMIT_S)
        return lane

    def problem_after(self, seconds: int, *, has_work: bool = False, is_loading: bool = False) -> tuple[int, str]:
        """The second of the first problem, and its text."""
        for second in range(seconds + 1):
            problem = self.watch.check(self.clock.now, has_work=has_work, is_loading=is_loading)
            if problem:
                return second, problem
            self.clock.now += 1
        return -1, ""


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.compute.close()


def test_job_without_end_is_reported(watched: Watched) -> None:
    gate = held(watched.compute, watched.old_lane())
    assert watched.problem_after(100) == (11, "A job of old runs and none has ended for 11 s.")
    gate.set()
    watched.compute.close()
    assert watched.problem_after(100) == (-1, "")


def test_many_jobs_are_no_hang(watched: Watched) -> None:
    lane = watched.old_lane()
    for _ in range(20):
        gate = held(watched.compute, lane)
        assert watched.problem_after(9)[0] == -1
        gate.set()
        lane.submit(int).result(LIMIT_S)


def test_new_loading_and_slow_models_get_more_time(watched: Watched) -> None:
    young = held(watched.compute, watched.compute.lane("young"))
    assert watched.problem_after(1000)[0] == 10 * NEW_FACTOR + 1
    young.set()
    grown = watched.old_lane()
    gate = held(watched.compute, grown)
    assert watched.problem_after(1000, is_loading=True)[0] == 10 * NEW_FACTOR + 1
    gate.set()
    grown.submit(int).result(LIMIT_S)
    assert grown.longest_s == 10 * NEW_FACTOR + 1
    gate = held(watched.compute, grown)
    assert watched.problem_after(1000)[0] == LONGEST_FACTOR * grown.longest_s + 1
    gate.set()


def test_work_without_a_job_is_reported(watched: Watched) -> None:
    assert watched.problem_after(100, has_work=True) == (11, "There is work, but no job has ended for 11 s.")


def test_pause_of_the_whole_process_is_no_hang(watched: Watched) -> None:
    gate = held(watched.compute, watched.old_lane())
    watched.problem_after(3)
    watched.clock.now += 3600
    assert watched.problem_after(3)[0] == -1
    gate.set()


async def test_host_beats_until_a_job_hangs(tmp_path: Path) -> None:
    clock, encoder = FakeClock(), WordEncoder()
    host = make_host(tmp_path, encoder, clock=clock, hang_s=2.0)
    beats: list[float] = []
    hangs = threading.Event()

    def beat() -> None:
        beats.append(clock.now)
        clock.now += 1

    def hang() -> None:
        hangs.set()
        clock.now += 1

    host.on_beat, host.on_hang = beat, hang
    async with talking(host) as client:
        job = await hold(encoder, client.ask(EmbedRequest(request_id="", texts=["long"])))
        while not hangs.is_set():
            host.waker.wake()
            await asyncio.sleep(0)
        encoder.gate.set()
        assert isinstance(await job, Vectors)
    assert len(beats) > 2 * NEW_FACTOR


async def test_steps_of_a_device_are_progress(tmp_path: Path) -> None:
    """On a GPU the loop itself queues a step, and no job of the compute thread ends."""
    clock = FakeClock()
    host = make_host(tmp_path, clock=clock, hang_s=2.0)
    (tmp_path / "tiny").mkdir()
    save_tiny_llama(tmp_path / "tiny", max_position_embeddings=4096)
    engine = LLMEngine(tiny_config(tmp_path / "tiny"), text_thread=host.writer)
    launch = engine.runner.launch
    engine.runner.launch = lambda step: QueuedStep(launch(step).result)  # type: ignore[method-assign]
    host.models.add(ModelEntry("tiny", "generation", lambda lane: HostedLLM(engine, lane, host)))
    beats: list[float] = []
    hangs: list[float] = []
    host.on_beat, host.on_hang = lambda: beats.append(clock.now), lambda: hangs.append(clock.now)
    async with talking(host) as client:
        request = GenerationRequest(request_id="", token_ids=[5, 6], params=ENDLESS, stream=True, wants_ids=True)
        async with contextlib.aclosing(client.generate(request)) as parts:
            for _ in range(30):
                await anext(parts)
                clock.now += 1
            num_requests = engine.scheduler.stats().total_requests
            await anext(parts)
            await client.ask(Ping(request_id="", probe=""))
            assert engine.scheduler.stats().total_requests == num_requests  # no step was made for the probe alone
    assert (len(beats) > 10, hangs) == (True, [])
    assert host.compute.num_done == 0
