"""Where requests come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archerfish.errors import InvalidInputError, NotFoundError
from archerfish.simulate.replica import ANSWER
from archerfish.simulate.traces import Arrival, Workload, one_cache_hit_rate, read_trace


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_conversations_grow_by_answers_and_belong_to_a_tenant() -> None:
    trace = Workload(rate=20, seconds=60, tenants=3, turns=4).arrivals()
    assert len(trace) == pytest.approx(1200, rel=0.1)
    assert sum(one.output_tokens for one in trace) / len(trace) == pytest.approx(200, rel=0.1)
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    later = [
        (one, two) for one in trace for two in trace if two.parts[: len(one.parts)] == one.parts and two is not one
    ]
    assert later
    for one, two in later:
        told = one.prompt() + one.prompt()[:0].__class__("I", [ANSWER]) * one.output_tokens
        assert two.tenant == one.tenant and two.prompt()[: len(told)] == told
    counts = [sum(one.tenant == f"tenant-{i}" for one in trace) for i in range(3)]
    assert counts == sorted(counts, reverse=True)


def test_bursts_come_in_a_part_of_the_time() -> None:
    trace = Workload(rate=20, seconds=40, turns=1, burst=4).arrivals()
    assert len(trace) == pytest.approx(800, rel=0.15)
    assert max(one.at_s % 10 for one in trace) <= 2.5


def test_files_of_both_kinds(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 30000, "input_length": 600, "output_length": 5, "hash_ids": [46, 48]},
        {"arrival_s": 0.5, "tenant": "a", "parts": [["system", 90], ["q", 8]], "output_tokens": 9},
        {"arrival_s": 1, "tokens": [1, 2, 3], "output_tokens": 9},
    )
    third, fourth, first, second = read_trace(path)
    assert (first.at_s, first.num_prompt, first.output_tokens) == (27.482, 700, 52)
    assert first.prompt()[:512] == second.prompt()[:512] and first.prompt()[512] != second.prompt()[512]
    assert (third.tenant, third.num_prompt, list(fourth.prompt())) == ("a", 98, [1, 2, 3])


@pytest.mark.parametrize(
    "line",
    [
        {"arrival_s": 0.5, "output_tokens": 9},
        {"arrival_s": -1, "tokens": [1], "output_tokens": 9},
        [],
        {"tokens": [1]},
        {"arrival_s": 0, "parts": [["a", 0]], "output_tokens": 9},
        {"arrival_s": 0, "tokens": [1], "output_tokens": 0},
        {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [46]},
    ],
)
def test_wrong_lines_are_refused(line: object, tmp_path: Path) -> None:
    good = {"arrival_s": 1, "tokens": [1, 2, 3], "output_tokens": 9}
    with pytest.raises(InvalidInputError, match="line 2"):
        read_trace(write(tmp_path / "trace.jsonl", good, line))
    with pytest.raises(NotFoundError):
        read_trace(tmp_path / "none")


def test_one_cache_finds_what_came_before() -> None:
    """Red: what is inserted is not found, or the cache keeps more than it has room for."""
    alike = [Arrival(float(i), "", ((1, 900), (2 + i, 100)), 10) for i in range(2)]
    assert one_cache_hit_rate(alike, 10_000) == pytest.approx(900 / 2000, abs=0.001)
    returning = [Arrival(float(i), "", ((1 + i % 2, 1000),), 10) for i in range(3)]
    assert one_cache_hit_rate(returning, 10_000) == pytest.approx(1 / 3, abs=0.001)
    assert one_cache_hit_rate(returning, 1024) < 0.2
