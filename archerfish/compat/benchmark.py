"""BenchmarkConfig, TestCase, PerformanceTarget and run_benchmark: a bench of a user's own requests, one at a time."""

from __future__ import annotations

import random
import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError, ServiceError
from archerfish.observe.summary import Summary, percentile, summarize
from archerfish.params import SamplingParams

FIGURES = {  # the figure that each limit of a PerformanceTarget is about
    "max_latency_ms": "answer, ms",
    "min_throughput_tps": "tokens/s",
    "max_memory_mb": "memory, MB",
    "max_cpu_percent": "CPU, %",
    "max_first_token_ms": "first token, ms",
    "max_gap_ms": "gap p99, ms",
}
MAXRSS_BYTES = 1024  # Linux counts the largest resident size in kilobytes


@dataclass(frozen=True, kw_only=True)
class PerformanceTarget:
    """What is expected of a TestCase; None: no limit."""

    max_latency_ms: float | None = None  # of a whole answer
    min_throughput_tps: float | None = None  # tokens a second, from the first one on
    max_memory_mb: float | None = None  # peak of this process
    max_cpu_percent: float | None = None  # 100: one core is always busy
    max_first_token_ms: float | None = None
    max_gap_ms: float | None = None  # between tokens, 99th percentile


@dataclass(frozen=True)
class TargetResult:
    """A limit of a case and the median that was measured; the value is None where nothing was measured."""

    name: str
    wanted: float
    at_least: bool
    value: float | None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.wanted if self.at_least else self.value <= self.wanted) else "not met"


@dataclass(frozen=True)
class TestCase:
    """One request that a bench repeats, and what is expected of it.

    input_tokens: the token ids, or the number of random ones, which differ in every round so that no cache has them.
    """

    __test__ = False  # pytest must not collect this class

    name: str
    input_tokens: int | Sequence[int]
    sampling_args: SamplingParams = field(default_factory=SamplingParams)
    expected_performance: PerformanceTarget = field(default_factory=PerformanceTarget)

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidInputError(
                f"The test case {self.name!r} has an empty prompt.", hint="Give at least one token."
            )

    @property
    def num_tokens(self) -> int:
        return self.input_tokens if isinstance(self.input_tokens, int) else len(self.input_tokens)

    def tokens(self, vocab_size: int, round_index: int) -> list[int]:
        """The prompt of one round."""
        if not isinstance(self.input_tokens, int):
            return list(self.input_tokens)
        draw = random.Random(f"{self.name}:{round_index}")
        return [draw.randrange(vocab_size) for _ in range(self.input_tokens)]


@dataclass(frozen=True)
class BenchmarkConfig:
    """The cases of a bench and how often each is measured. timeout_s: the limit of one request; None: no limit."""

    test_cases: tuple[TestCase, ...]
    warmup_iterations: int = 1
    measurement_iterations: int = 5
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        has_time = self.timeout_s is None or self.timeout_s > 0
        if self.warmup_iterations < 0 or self.measurement_iterations < 1 or not has_time:
            raise InvalidInputError(
                "warmup_iterations must be at least 0, measurement_iterations at least 1 and timeout_s above 0: "
                f"{self.warmup_iterations}, {self.measurement_iterations}, {self.timeout_s}."
            )
        names = [case.name for case in self.test_cases]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(f"Test cases need different names: {names}.", hint="Give at least one case.")


def run_benchmark(config: EngineConfig, benchmark: BenchmarkConfig) -> tuple[dict[str, Summary], list[TargetResult]]:
    """Run all cases on a new engine: the figures by "CASE: FIGURE", and a verdict for every limit that a case has."""
    samples: dict[str, list[float]] = defaultdict(list)
    with LLMEngine(config) as engine:
        for round_index in range(-benchmark.warmup_iterations, benchmark.measurement_iterations):
            for case in benchmark.test_cases:
                figures = measure_case(engine, case, round_index, benchmark.timeout_s)
                for figure, value in figures.items() if round_index >= 0 else ():
                    samples[f"{case.name}: {figure}"].append(value)
    summaries = {name: summarize(values) for name, values in samples.items()}
    verdicts = []
    for case in benchmark.test_cases:
        for limit, figure in FIGURES.items():
            name, wanted = f"{case.name}: {figure}", getattr(case.expected_performance, limit)
            if wanted is not None:
                median = summaries[name].median if name in summaries else None
                verdicts.append(TargetResult(name, wanted, limit.startswith("min_"), median))
    return summaries, verdicts


def measure_case(engine: LLMEngine, case: TestCase, round_index: int, timeout_s: float | None) -> dict[str, float]:
    """The figures of one request; a request of one token has no rate and no gap."""
    prompt = case.tokens(engine.facts.vocab_size, round_index)
    engine.clear_cache()
    started, used_s = time.perf_counter(), time.process_time()
    times: list[float] = []
    for delta in engine.stream(prompt, case.sampling_args, deadline_s=timeout_s):
        if delta.finish_reason == "deadline":
            raise ServiceError(f"The case {case.name!r} took longer than {timeout_s:g} s.", hint="Give it more time.")
        if delta.token_ids:
            times.append(time.perf_counter() - started)
    figures = {
        "first token, ms": times[0] * 1000,
        "answer, ms": times[-1] * 1000,
        "CPU, %": 100 * (time.process_time() - used_s) / (time.perf_counter() - started),
        "memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES / 1e6,
    }
    gaps = [(later - earlier) * 1000 for earlier, later in pairwise(times)]
    if gaps:
        figures |= {"tokens/s": len(gaps) / (times[-1] - times[0]), "gap p99, ms": percentile(gaps, 0.99)}
    return figures
