"""ComputeThread: jobs of several models in one thread, in turns."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.serve.compute import ComputeThread, Lane, Waker

LIMIT_S = 20


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
        assert [place for one, place in done if one == number] == [i for i, one in enumerate(submitted) if one == number]
    left = [submitted.count(number) for number in range(4)]
    last = 3
    for number, _ in done:  # always the next lane that has something
        expected = next(i % 4 for i in range(last + 1, last + 5) if left[i % 4])
        assert number == expected
        left[number] -= 1
        last = number


def test_one_job_runs_at_a_time() -> None:
    num_told = num_running = 0
    seen: list[int] = []

    def tell() -> None:
        nonlocal num_told
        num_told += 1

    def work() -> None:
        nonlocal num_running
        num_running += 1
        seen.append(num_running)
        num_running -= 1

    compute = ComputeThread(tell)
    lanes = [compute.lane("a"), compute.lane("b")]
    futures = [lanes[i % 2].submit(work) for i in range(20)]
    for future in futures:
        future.result(LIMIT_S)
    compute.close()
    assert (num_told, set(seen), [lane.num_done for lane in lanes]) == (20, {1}, [10, 10])


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
        assert waker._reader.recv(10) == b"\0"
        waker.wake()
        waker.clear()
    waker.wake()
    assert waker._reader.recv(10) == b"\0"
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
