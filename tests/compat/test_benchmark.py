"""BenchmarkConfig, TestCase, PerformanceTarget and run_benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from archerfish import BenchmarkConfig, PerformanceTarget, TestCase, run_benchmark
from archerfish.errors import InvalidInputError, ServiceError
from tests.engine.tiny_llama import greedy, tiny_config


def test_prompts_are_given_or_drawn_anew_in_every_round() -> None:
    drawn = TestCase("short", 6)
    assert drawn.tokens(50, 0) == drawn.tokens(50, 0) != drawn.tokens(50, 1)
    assert drawn.tokens(50, 0) != TestCase("other", 6).tokens(50, 0)
    assert drawn.num_tokens == len(drawn.tokens(50, 0)) == 6 and max(drawn.tokens(2, 3)) < 2
    given = TestCase("given", [4, 5])
    assert given.tokens(50, 0) == given.tokens(50, 7) == [4, 5] and given.num_tokens == 2


def test_impossible_configurations_are_refused() -> None:
    case = TestCase("a", 3)
    for wrong in (
        {"test_cases": ()},
        {"test_cases": (case, case)},
        {"warmup_iterations": -1},
        {"measurement_iterations": 0},
        {"timeout_s": 0.0},
    ):
        with pytest.raises(InvalidInputError):
            BenchmarkConfig(**{"test_cases": (case,), **wrong})  # type: ignore[arg-type]
    for empty in (0, ()):
        with pytest.raises(InvalidInputError, match="empty prompt"):
            TestCase("a", empty)


def test_cases_are_measured_and_judged(llama: Path) -> None:
    loose = PerformanceTarget(max_latency_ms=1e9, min_throughput_tps=1e-9, max_memory_mb=1e9, max_cpu_percent=1e9)
    tight = PerformanceTarget(max_latency_ms=1e-9, min_throughput_tps=1e12, max_memory_mb=0.001, max_cpu_percent=1e-9)
    gaps = PerformanceTarget(max_first_token_ms=1e9, max_gap_ms=1e9)
    cases = (
        TestCase("loose", [5, 6, 7], greedy(8), loose),
        TestCase("tight", 3, greedy(8), tight),
        TestCase("one token", 9, greedy(1), gaps),
    )
    figures, results = run_benchmark(
        tiny_config(llama), BenchmarkConfig(cases, warmup_iterations=1, measurement_iterations=2)
    )
    names = ("answer, ms", "tokens/s", "memory, MB", "CPU, %")
    assert [(one.name, one.verdict) for one in results] == [
        *((f"{case}: {name}", verdict) for case, verdict in (("loose", "met"), ("tight", "not met")) for name in names),
        ("one token: first token, ms", "met"),
        ("one token: gap p99, ms", "not measured"),
    ]
    assert figures["loose: first token, ms"].rounds == 2
    assert figures["loose: first token, ms"].median < figures["loose: answer, ms"].median


def test_case_above_its_timeout_is_an_error(llama: Path) -> None:
    benchmark = BenchmarkConfig((TestCase("slow", 9, greedy(200)),), timeout_s=1e-9)
    with pytest.raises(ServiceError, match="'slow' took longer than 1e-09 s"):
        run_benchmark(tiny_config(llama), benchmark)
