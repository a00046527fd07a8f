"""Targets, test cases, and the latency bench that runs them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from archerfish.bench import gpu, startup
from archerfish.bench.generate import Report, latency_bars, measure_latency, params_for, run_benchmark
from archerfish.bench.gpu import EngineRun
from archerfish.bench.startup import Start, judge_starts
from archerfish.bench.targets import Bar, BenchmarkConfig, PerformanceTarget, TestCase, row_of
from archerfish.errors import InvalidInputError, ServiceError
from tests.engine.tiny_llama import save_tiny_llama, tiny_config


def test_a_target_is_met_missed_or_not_measured() -> None:
    most, least = Bar("p99, ms", 200), Bar("rate", 2.5, at_least=True)
    assert [most.judged(value).is_met for value in (200, 201, None, math.nan)] == [True, False, None, None]
    assert [least.judged(value).verdict for value in (2.5, 2.4, None)] == ["met", "not met", "not measured"]
    assert row_of(least.judged(3.14159)) == ("rate", "3.142", "at least 2.5", "met")
    assert row_of(most.judged(None)) == ("p99, ms", "-", "at most 200", "not measured")
    assert most.judged(1).as_dict() == {"name": "p99, ms", "value": 1, "at_least": False, "wanted": 200, "is_met": True}


def test_prompts_of_a_case_are_given_or_drawn_anew_in_every_round() -> None:
    drawn = TestCase("short", 6)
    assert drawn.tokens(50, 0) == drawn.tokens(50, 0) != drawn.tokens(50, 1)
    assert drawn.tokens(50, 0) != TestCase("other", 6).tokens(50, 0)
    assert drawn.num_tokens == len(drawn.tokens(50, 0)) == 6 and max(drawn.tokens(2, 3)) < 2
    given = TestCase("given", [4, 5])
    assert given.tokens(50, 0) == given.tokens(50, 7) == [4, 5] and given.num_tokens == 2


def test_cases_and_what_they_expect_have_the_promised_fields() -> None:
    expected = PerformanceTarget(max_latency_ms=9, min_throughput_tps=2, max_memory_mb=3, max_cpu_percent=0)
    case = TestCase(name="a", input_tokens=[1, 2], sampling_args=params_for(3), expected_performance=expected)
    assert [bar.wanted for bar in case.expected_performance.bars()] == [9, 2, 3, 0] and case.num_tokens == 2
    assert BenchmarkConfig(test_cases=(case,), warmup_iterations=1, measurement_iterations=2).test_cases == (case,)


def test_a_bench_that_cannot_be_run_is_refused() -> None:
    case = TestCase("a", 3)
    for wrong in (
        {"test_cases": ()}, {"test_cases": (case, case)}, {"warmup_iterations": -1}, {"measurement_iterations": 0},
        {"timeout_s": 0.0},
    ):  # fmt: skip
        with pytest.raises(InvalidInputError):
            BenchmarkConfig(**{"test_cases": (case,), **wrong})  # type: ignore[arg-type]
    for empty in (0, ()):
        with pytest.raises(InvalidInputError, match="empty prompt"):
            TestCase("a", empty)


def test_cases_are_run_as_often_as_asked_and_held_to_what_they_expect(tmp_path: Path) -> None:
    expected = PerformanceTarget(max_first_token_ms=1e9, min_throughput_tps=1e12, max_gap_ms=1e9)
    benchmark = BenchmarkConfig(
        (TestCase("given", [5, 6, 7], params_for(4), expected), TestCase("drawn", 9, params_for(1), expected)),
        warmup_iterations=2, measurement_iterations=3,
    )  # fmt: skip
    asked: list[list[int]] = []

    def peer(prompt: list[int], num_output: int) -> list[float]:
        asked.append(prompt)
        return [0.1 * (number + 1) for number in range(num_output)]

    report = Report()
    measure_latency(tiny_config(save_tiny_llama(tmp_path)), report, benchmark, {"peer": peer})
    assert [len(prompt) for prompt in asked] == [3, 3, *[3, 9] * 3]
    assert len(report.samples["archerfish: first token drawn, ms"]) == 3
    assert "archerfish: tokens/s drawn" not in report.samples  # one token has no rate
    assert [(bar.name, bar.is_met) for bar in latency_bars(report, benchmark)] == [
        ("given: tokens/s", False), ("given: first token, ms", True), ("given: gap p99, ms", True),
        ("drawn: tokens/s", None), ("drawn: first token, ms", True), ("drawn: gap p99, ms", True),
    ]  # fmt: skip


def test_limits_of_latency_rate_memory_and_processor(tmp_path: Path) -> None:
    loose = PerformanceTarget(max_latency_ms=1e9, min_throughput_tps=1e-9, max_memory_mb=1e9, max_cpu_percent=1e9)
    tight = PerformanceTarget(max_latency_ms=1e-9, min_throughput_tps=1e12, max_memory_mb=0.001, max_cpu_percent=1e-9)
    assert [str(bar) for bar in tight.bars()] == ["at most 1e-09", "at least 1e+12", "at most 0.001", "at most 1e-09"]
    assert PerformanceTarget(max_memory_mb=5).bars() == [Bar("memory, MB", 5)] and PerformanceTarget().bars() == []
    cases = (TestCase("loose", [5, 6, 7], params_for(8), loose), TestCase("tight", 3, params_for(8), tight))
    config = tiny_config(save_tiny_llama(tmp_path))
    report, judged = run_benchmark(config, BenchmarkConfig(cases, measurement_iterations=2))
    names = ("answer, ms", "tokens/s", "memory, MB", "CPU, %")
    assert [(one.name, one.is_met) for one in judged] == [
        (f"{case}: {name}", case == "loose") for case in ("loose", "tight") for name in names
    ]
    first, whole = (report.summary(f"archerfish: {what} loose, ms") for what in ("first token", "answer"))
    assert first is not None and whole is not None and first.median < whole.median
    beside = Report()
    measure_latency(config, beside, BenchmarkConfig(cases[:1], measurement_iterations=1), {"peer": lambda prompt, num: [0.1]})
    assert "archerfish: memory, MB" not in beside.samples  # which would be that of the peer too


def test_a_case_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    benchmark = BenchmarkConfig((TestCase("slow", 9, params_for(200)),), timeout_s=1e-9)
    with pytest.raises(ServiceError, match="'slow' took longer than 1e-09 s"):
        measure_latency(tiny_config(save_tiny_llama(tmp_path)), Report(), benchmark, {})


def test_the_gpu_bench_is_judged_by_its_ratios() -> None:
    def run(engine: str, rate: float) -> EngineRun:
        return EngineRun(engine, "qwen3-0.6b", {"offline256_tok_s": [rate], "bs1_decode_tok_s": [rate]})

    both = {gpu.OURS: run(gpu.OURS, 120.0), gpu.THEIRS: run(gpu.THEIRS, 100.0)}
    assert [(one.name, one.verdict) for one in gpu.judge("qwen3-0.6b", both)] == [
        ("qwen3-0.6b: offline256_tok_s", "met"), ("qwen3-0.6b: bs1_decode_tok_s", "not met"),
    ]  # fmt: skip
    assert gpu.judge("qwen3-0.6b", {gpu.OURS: both[gpu.OURS]}) == gpu.judge("tiny", both) == []
    assert {key for targets in gpu.TARGETS.values() for key in targets} <= {metric.key for metric in gpu.METRICS}


def test_only_our_second_start_is_judged() -> None:
    starts = [
        Start("qwen3-0.6b", engine, start, 1, 1, 1, total)
        for engine, start, total in ((gpu.OURS, "first", 30), (gpu.OURS, "second", 7), (gpu.THEIRS, "second", 50))
    ]
    assert [(one.name, one.is_met) for one in judge_starts(starts)] == [("qwen3-0.6b: second start, s", True)]
    assert startup.TARGETS_S.keys() <= gpu.SHAPES.keys()
