"""BenchmarkConfig, TestCase, PerformanceTarget and run_benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from archerfish import BenchmarkConfig, PerformanceTarget, SamplingParams, TestCase, run_benchmark
from archerfish.errors import InvalidInputError, ServiceError
from archerfish.observe.summary import Target
from tests.engine.tiny_llama import save_tiny_llama, tiny_config


def params_for(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)


def test_prompts_are_given_or_drawn_anew_in_every_round() -> None:
    drawn = TestCase("short", 6)
    assert drawn.tokens(50, 0) == drawn.tokens(50, 0) != drawn.tokens(50, 1)
    assert drawn.tokens(50, 0) != TestCase("other", 6).tokens(50, 0)
    assert drawn.num_tokens == len(drawn.tokens(50, 0)) == 6 and max(drawn.tokens(2, 3)) < 2
    given = TestCase("given", [4, 5])
    assert given.tokens(50, 0) == given.tokens(50, 7) == [4, 5] and given.num_tokens == 2


def test_cases_have_the_fields_of_the_seed() -> None:
    expected = PerformanceTarget(max_latency_ms=9, min_throughput_tps=2, max_memory_mb=3, max_cpu_percent=0)
    case = TestCase(name="a", input_tokens=[1, 2], sampling_args=params_for(3), expected_performance=expected)
    assert [target.wanted for target in case.expected_performance.targets()] == [9, 2, 3, 0]
    assert PerformanceTarget(max_memory_mb=5).targets() == [Target("memory, MB", 5)] and not PerformanceTarget().targets()
    assert BenchmarkConfig(test_cases=(case,), warmup_iterations=1, measurement_iterations=2).test_cases == (case,)


def test_impossible_configurations_are_refused() -> None:
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


def test_cases_are_measured_and_judged(tmp_path: Path) -> None:
    loose = PerformanceTarget(max_latency_ms=1e9, min_throughput_tps=1e-9, max_memory_mb=1e9, max_cpu_percent=1e9)
    tight = PerformanceTarget(max_latency_ms=1e-9, min_throughput_tps=1e12, max_memory_mb=0.001, max_cpu_percent=1e-9)
    gaps = PerformanceTarget(max_first_token_ms=1e9, max_gap_ms=1e9)
    cases = (
        TestCase("loose", [5, 6, 7], params_for(8), loose), TestCase("tight", 3, params_for(8), tight),
        TestCase("one token", 9, params_for(1), gaps),
    )  # fmt: skip
    config = tiny_config(save_tiny_llama(tmp_path))
    figures, results = run_benchmark(config, BenchmarkConfig(cases, warmup_iterations=1, measurement_iterations=2))
    names = ("answer, ms", "tokens/s", "memory, MB", "CPU, %")
    assert [(one.name, one.verdict) for one in results] == [
        *((f"{case}: {name}", verdict) for case, verdict in (("loose", "met"), ("tight", "not met")) for name in names),
        ("one token: first token, ms", "met"), ("one token: gap p99, ms", "not measured"),
    ]  # fmt: skip
    assert figures["loose: first token, ms"].rounds == 2
    assert figures["loose: first token, ms"].median < figures["loose: answer, ms"].median


def test_case_above_its_timeout_is_an_error(tmp_path: Path) -> None:
    benchmark = BenchmarkConfig((TestCase("slow", 9, params_for(200)),), timeout_s=1e-9)
    with pytest.raises(ServiceError, match="'slow' took longer than 1e-09 s"):
        run_benchmark(tiny_config(save_tiny_llama(tmp_path)), benchmark)
