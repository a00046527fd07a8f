"""What a step of many sequences does, counted in calls: times belong to `archerfish bench scheduler`."""

from __future__ import annotations

from archerfish.bench.scheduler import step_times_us
from tests.calls import num_calls


def calls_of(num_sequences: int, num_waiting: int, steps: int) -> int:
    return num_calls(lambda: step_times_us(num_sequences, steps, num_waiting=num_waiting, prompt_tokens=16))


def test_a_decode_costs_a_few_calls() -> None:
    per_step = (calls_of(64, 0, 60) - calls_of(64, 0, 30)) / 30
    assert per_step < 64 * 4


def test_the_number_of_waiting_requests_does_not_matter() -> None:
    few = calls_of(16, 10, 60) - calls_of(16, 10, 30)
    many = calls_of(16, 2000, 60) - calls_of(16, 2000, 30)
    assert many < 2 * few
