"""docs/scale.md: its numbers come from the formulas, and the simulator agrees with them."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from random import Random

import pytest

import archerfish
from archerfish.simulate.pace import PRESETS, kv_bytes, num_kv_tokens
from archerfish.simulate.simulation import Outcome, Setup, Simulation
from archerfish.simulate.traces import Arrival, Workload

PAGE = (Path(archerfish.__file__).parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
PACE = PRESETS["h200-8b"]


def example(number: int) -> str:
    return PAGE.partition(f"**Example {number}.**")[2].partition("\n\n")[0]


def run(num_replicas: int, system_tokens: int, rate: float, seconds: float) -> Outcome:
    sizes = {"system_tokens": system_tokens, "user_tokens": 1200 - system_tokens, "output_tokens": 200}
    trace = Workload(rate=rate, seconds=seconds, tenants=1, turns=1, **sizes).arrivals()
    return Simulation(trace, Setup(PACE, num_replicas), "cache-aware").run()


def test_memory() -> None:
    token_bytes = kv_bytes(1, 32, 8, 128)
    num_tokens = num_kv_tokens(141e9, 16.1e9, token_bytes)
    assert PACE.kv_tokens == num_tokens
    for value in (token_bytes, num_tokens, num_tokens // 3000, (num_tokens - 1000) // 2000):
        assert f"{value:,}" in example(1)


@pytest.mark.parametrize(("name", "measured"), [("h200-8b", 10_756), ("h200-0.6b", 27_160)])
def test_presets_give_what_was_measured(name: str, measured: int) -> None:
    random = Random(0)
    lengths = [(random.randint(100, 1024), random.randint(100, 1024)) for _ in range(256)]
    trace = [Arrival(0.0, "", ((1 + i, prompt),), output) for i, (prompt, output) in enumerate(lengths)]
    tokens_per_s = Simulation(trace, Setup(PRESETS[name], 1), "cache-aware").run().figures()["tokens/s"]
    assert tokens_per_s == pytest.approx(measured, rel=0.12)
    assert f"{round(tokens_per_s, -1):,.0f}" in PAGE


def test_little() -> None:
    work_s, at_once = PACE.request_s(1200, 200), PACE.mean_running(15, 1200, 200)
    shown = (
        f"w = {1000 * work_s:.1f} ms",
        f"{1 / work_s:.1f} requests/s",
        f"{at_once:.1f} requests",
        f"{at_once / 15:.2f} s",
    )
    for text in shown:
        assert text in example(2)
    outcome = run(1, 1, 15, 30)
    expected_s = PACE.mean_running(len(outcome.jobs) / 30, 1200, 200) / (len(outcome.jobs) / 30)
    assert outcome.figures()["latency mean"] == pytest.approx(expected_s, rel=0.15)


def test_what_a_cached_prefix_saves() -> None:
    work_s = PACE.request_s(1200, 200, 1000 / 1200)
    exact_s = PACE.request_s(1200, 200, 0.8)
    assert f"w = {1000 * exact_s:.1f} ms" in example(3) and f"{1 / exact_s:.1f} requests/s" in example(3)
    assert work_s < exact_s < PACE.request_s(1200, 200) / 2


@pytest.mark.parametrize(("system_tokens", "num_replicas"), [(1, 6), (1000, 3)])
def test_replicas_for_a_rate(system_tokens: int, num_replicas: int) -> None:
    hit_rate = 0.8 if system_tokens > 1 else 0.0
    needed = 100 * PACE.request_s(1200, 200, hit_rate) / 0.7
    assert f"{needed:.1f}, so {num_replicas}" in example(4) and num_replicas - 1 < needed <= num_replicas
    figures = run(num_replicas, system_tokens, 100, 4).figures()
    assert figures["first token p99"] < 0.5
    assert figures["hit rate"] == pytest.approx(hit_rate, abs=0.05)


@pytest.mark.slow
def test_routing_table() -> None:
    """Two rows of the table of example 5, as its command gives them."""
    pace = dataclasses.replace(PACE, kv_tokens=30_000)
    sizes = {"system_prompts": 40, "system_tokens": 2000, "user_tokens": 20, "output_tokens": 10}
    trace = Workload(rate=60, seconds=20, tenants=1, turns=1, **sizes).arrivals()
    for policy in ("round-robin", "cache-aware"):
        figures = Simulation(trace, Setup(pace, 4), policy).run().figures()
        times = " / ".join(f"{1000 * figures[f'first token {name}']:.0f}" for name in ("p50", "p90", "p99"))
        assert f"| {policy} | {figures['hit rate']:.2f} | {times} |" in PAGE


def test_latency_is_the_sum_of_its_parts() -> None:
    """Queue, prefill, decode and network: red if a moment is taken from another try or another clock."""
    outcome = run(2, 1000, 60, 2)
    waits = [job.admitted_s - job.arrival.at_s for job in outcome.jobs]
    prefills = [job.first_token_s - job.admitted_s for job in outcome.jobs]
    decodes = [job.end_s - job.first_token_s for job in outcome.jobs]
    assert min(waits) > 0 and min(prefills) > 0 and min(decodes) > 0
    total = statistics.fmean(waits) + statistics.fmean(prefills) + statistics.fmean(decodes)
    assert total == pytest.approx(outcome.figures()["latency mean"])
