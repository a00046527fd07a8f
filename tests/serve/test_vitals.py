"""Signs of life: when an engine process counts as hung, and when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.engine.llm_engine import LLMEngine
from archerfish.runtime.runner import QueuedStep
from archerfish.serve.client import AsyncClient
from archerfish.serve.compute import ComputeThread, Lane
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.models import Slot
from archerfish.serve.vitals import MOST_GAP_S, USUAL_FACTOR, YOUNG_FACTOR, YOUNG_JOBS, ComputeWatch, Heart, Pulse, Stall
from archerfish.serve.wire import EmbedRequest, GenerationRequest, Ping, Vectors
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.serve.hosting import ENDLESS, LIMIT_S, WordEncoder, add_encoder, make_host, talk
from tests.serve.test_compute import held


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.booleans()), max_size=60))
def test_a_stall_counts_only_time_in_which_one_looked(looks: list[tuple[float, bool, bool]]) -> None:
    stall, now, progress = Stall(), 0.0, 0
    expected = 0.0
    for number, (gap, has_moved, has_work) in enumerate(looks):
        now += gap
        progress += has_moved
        expected = expected + (min(gap, MOST_GAP_S) if number else 0.0) if has_work and not has_moved else 0.0
        assert stall.look(now, progress, has_work=has_work) == pytest.approx(expected)
        assert stall.seconds <= MOST_GAP_S * number


class Watched:
    """A compute thread under a fake clock, looked at once a second."""

    def __init__(self, hang_s: float = 10.0) -> None:
        self.clock = FakeClock()
        self.compute = ComputeThread(clock=self.clock)
        self.watch = ComputeWatch(self.compute, hang_s)

    def grown_lane(self) -> Lane:
        lane = self.compute.lane("old")
        for _ in range(YOUNG_JOBS):
            lane.submit(int).result(LIMIT_S)
        return lane

    def complaint_after(self, seconds: int, *, has_work: bool = False, is_loading: bool = False) -> tuple[int, str]:
        """At which second there is the first complaint, and what it is."""
        for second in range(seconds + 1):
            complaint = self.watch.look(self.clock.now, has_work=has_work, is_loading=is_loading)
            if complaint:
                return second, complaint
            self.clock.now += 1
        return -1, ""


def test_a_job_that_does_not_end_is_told_of() -> None:
    watched = Watched()
    gate = held(watched.compute, watched.grown_lane())
    assert watched.complaint_after(100) == (11, "A job of old runs and none has ended for 11 s.")
    gate.set()
    watched.compute.close()
    assert watched.complaint_after(100) == (-1, "")


def test_many_jobs_are_no_stall_however_long_they_take_together() -> None:
    watched = Watched()
    lane = watched.grown_lane()
    for _ in range(20):
        gate = held(watched.compute, lane)
        assert watched.complaint_after(9)[0] == -1
        gate.set()
        lane.submit(int).result(LIMIT_S)
    watched.compute.close()


def test_new_models_loading_ones_and_slow_ones_get_more_time() -> None:
    watched = Watched()
    young = held(watched.compute, watched.compute.lane("young"))
    assert watched.complaint_after(1000)[0] == 10 * YOUNG_FACTOR + 1
    young.set()
    grown = watched.grown_lane()
    gate = held(watched.compute, grown)
    assert watched.complaint_after(1000, is_loading=True)[0] == 10 * YOUNG_FACTOR + 1
    gate.set()
    grown.submit(int).result(LIMIT_S)
    assert grown.longest_s == 10 * YOUNG_FACTOR + 1
    gate = held(watched.compute, grown)
    assert watched.complaint_after(1000)[0] == USUAL_FACTOR * grown.longest_s + 1
    gate.set()
    watched.compute.close()


def test_work_that_never_becomes_a_job_is_told_of() -> None:
    watched = Watched()
    assert watched.complaint_after(100, has_work=True) == (11, "There is work, but no job has ended for 11 s.")
    watched.compute.close()


def test_who_was_asleep_himself_does_not_complain() -> None:
    watched = Watched()
    gate = held(watched.compute, watched.grown_lane())
    watched.complaint_after(3)
    watched.clock.now += 3600
    assert watched.complaint_after(3)[0] == -1
    gate.set()
    watched.compute.close()


def test_beats_never_wait_and_are_heard() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as pipe, os.fdopen(read, "rb") as reader:
        heart, clock = Heart(pipe), FakeClock()
        pulse = Pulse(5.0, clock)
        for _ in range(100_000):  # more than a pipe holds
            heart.beat("")
        assert pulse.hear(os.read(reader.fileno(), 1 << 20)) == ""
        os.set_blocking(reader.fileno(), False)
        with pytest.raises(BlockingIOError):
            while os.read(reader.fileno(), 1 << 20):
                pass
        heart.beat("stuck")
        line = os.read(reader.fileno(), 1 << 20)
        assert (pulse.hear(line[:5]), pulse.hear(line[5:])) == ("", "stuck")
        reader.close()
        heart.beat("nobody listens")


def test_silence_is_counted_until_the_next_beat() -> None:
    clock = FakeClock()
    pulse = Pulse(5.0, clock)
    told = []
    for second in range(20):
        told.append(pulse.hear(b'{"complaint":""}\n' if second < 8 else b""))
        clock.now += 1
    assert told[:13] == [""] * 13
    assert told[13] == "Its loop has not moved for 6 s."
    assert pulse.hear(b"anything\n") == ""
    clock.now += 3600  # who listens has slept
    assert pulse.hear(b"") == ""


def test_a_host_beats_and_complains_of_a_job_that_hangs(tmp_path: Path) -> None:
    clock, encoder = FakeClock(), WordEncoder()
    host = make_host(tmp_path, clock=clock, hang_s=2.0)
    add_encoder(host, encoder)
    told: list[str] = []
    has_told = threading.Event()

    def hear(complaint: str) -> None:
        told.append(complaint)
        if complaint:
            has_told.set()
        clock.now += 1

    host.on_beat = hear

    async def test(client: AsyncClient) -> None:
        encoder.gate.clear()
        job = asyncio.create_task(client.ask(EmbedRequest(request_id="", texts=["long"])))
        assert await asyncio.to_thread(encoder.entered.acquire)
        while not has_told.is_set():
            host.waker.wake()
            await asyncio.sleep(0)
        encoder.gate.set()
        assert isinstance(await job, Vectors)

    talk(host, test)
    assert told[-1] == "" or "A job of words runs" in told[-1]
    assert len(told) > 2 * YOUNG_FACTOR


def test_steps_that_are_no_jobs_are_progress_and_show_that_a_model_works(tmp_path: Path) -> None:
    """As on a GPU: a step is queued by the loop itself, and no job of the compute thread ever ends."""
    clock = FakeClock()
    host = make_host(tmp_path, clock=clock, hang_s=2.0)
    (tmp_path / "tiny").mkdir()
    save_tiny_llama(tmp_path / "tiny", max_position_embeddings=4096)
    engine = LLMEngine(tiny_config(tmp_path / "tiny"), text_thread=host.writer)
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: QueuedStep(launch(plan).result)  # type: ignore[method-assign]
    host.shelf.add(Slot("tiny", "generation", lambda lane: HostedLLM(engine, lane, host, host.figures, host.gate_of(engine))))
    told: list[str] = []
    host.on_beat = told.append

    async def test(client: AsyncClient) -> None:
        request = GenerationRequest(request_id="", token_ids=[5, 6], params=ENDLESS, stream=True, wants_ids=True)
        async with contextlib.aclosing(client.generate(request)) as parts:
            for _ in range(30):
                await anext(parts)
                clock.now += 1
            num_requests = engine.scheduler.stats().total_requests
            await anext(parts)
            await client.ask(Ping(request_id="", probe=""))
            assert engine.scheduler.stats().total_requests == num_requests  # no step was made for the probe alone

    talk(host, test)
    assert len(told) > 10
    assert set(told) == {""}
    assert host.compute.num_done == 0
