"""Little's law between the figures that are reported: the mean number of requests is their rate times their mean
latency."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.engine.outputs import request_metrics
from archerfish.observe.metrics import DECODE, PREFILL, QUEUE, WHOLE, MetricsCollector
from archerfish.params import SamplingParams
from archerfish.sequence import Request
from tests.sched.worlds import World

Arrival = tuple[
    int, int, int, int
]  # steps after the one before, prompt tokens, output tokens, steps until an abort (0: none)
arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 20), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals, step_ms=st.lists(st.integers(1, 500), min_size=1, max_size=7), depth=st.integers(0, 1))
def test_requests_are_their_rate_times_their_latency(arrivals: list[Arrival], step_ms: list[int], depth: int) -> None:
    """Red: a phase that is left out or counted twice, a request without its times, a gauge that forgets preempted
    ones."""
    world, collector = World(num_blocks=24, depth=depth, max_num_seqs=4, max_num_batched_tokens=16), MetricsCollector()
    scheduler = world.scheduler
    due: list[tuple[int, Request]] = []
    aborts: dict[int, list[str]] = {}
    place = 0
    for number, (gap, num_prompt, num_output, lifetime) in enumerate(arrivals):
        place += gap
        due.append(
            (place, Request(f"{number}", [number + 1] * num_prompt, SamplingParams(max_tokens=num_output), num_output))
        )
        if lifetime:
            aborts.setdefault(place + lifetime, []).append(f"{number}")
    began = world.now
    area = 0.0
    running = 0.0
    waiting = 0.0
    step = 0
    while due or scheduler.has_work:
        while due and due[0][0] <= step:
            scheduler.add(due.pop(0)[1])
        for request_id in aborts.pop(step, ()):
            scheduler.abort(request_id)
        stats, seconds = scheduler.stats(), step_ms[step % len(step_ms)] / 1000
        area += (stats.num_running + stats.num_waiting) * seconds
        waiting, running = waiting + stats.num_waiting * seconds, running + stats.num_running * seconds
        world.now += seconds
        for delta in [*scheduler.take_deltas(), *world.step()]:
            if delta.finish_reason is not None:
                times = request_metrics([delta.sequence])
                collector.ended("m", times.queue_ms, times.prefill_ms, times.decode_ms, [delta.finish_reason])
        step += 1
    whole, queue, prefill, decode = (
        collector.histograms[name].samples()[0] for name in (WHOLE, QUEUE, PREFILL, DECODE)
    )
    interval = world.now - began
    rate, latency = len(arrivals) / interval, whole.value / whole.count
    assert whole.count == len(arrivals)
    assert area / interval == pytest.approx(rate * latency)
    assert whole.value == pytest.approx(queue.value + prefill.value + decode.value)
    if not scheduler.stats().num_preemptions:
        assert [waiting, running] == pytest.approx([queue.value, prefill.value + decode.value])
