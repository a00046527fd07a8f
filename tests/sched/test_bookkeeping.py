from __future__ import annotations

import time

from archerfish.bench.bookkeeping import measure_bookkeeping


def test_a_step_of_256_sequences_costs_well_under_a_millisecond() -> None:
    report = measure_bookkeeping(256, 60, clock=time.thread_time)
    assert report.steps == 60
    assert 0 < report.plan_p50_us < report.both_p50_us <= report.both_p99_us
    assert report.both_p50_us < 1000


def test_the_number_of_waiting_requests_does_not_matter() -> None:
    few = measure_bookkeeping(32, 60, num_waiting=10, prompt_tokens=16, clock=time.thread_time)
    many = measure_bookkeeping(32, 60, num_waiting=5000, prompt_tokens=16, clock=time.thread_time)
    assert many.both_p50_us < 5 * few.both_p50_us
