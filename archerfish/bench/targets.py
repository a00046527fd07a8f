"""What a bench runs, how often, and what it must reach."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams


@dataclass(frozen=True)
class Bar:
    """A figure that a bench is held to: at most `wanted`, or at least."""

    name: str
    wanted: float
    at_least: bool = False

    def judged(self, value: float | None) -> Judged:
        return Judged(self, None if value is None or math.isnan(value) else value)

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.wanted:g}"


@dataclass(frozen=True)
class Judged:
    """A target and what was measured: met, missed, or not measured."""

    target: Bar
    value: float | None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.target.wanted if self.target.at_least else self.value <= self.target.wanted

    @property
    def verdict(self) -> str:
        return "not measured" if self.is_met is None else "met" if self.is_met else "not met"

    def as_dict(self) -> dict[str, Any]:
        target = self.target
        return {
            "name": target.name, "value": self.value, "at_least": target.at_least, "wanted": target.wanted,
            "is_met": self.is_met,
        }  # fmt: skip


def row_of(judged: Judged, digits: int = 4) -> tuple[str, str, str, str]:
    """Name, measured, wanted and verdict, for a table."""
    shown = "-" if judged.value is None else f"{judged.value:,.{digits}g}"
    return judged.name, shown, str(judged.target), judged.verdict


@dataclass(frozen=True, kw_only=True)
class PerformanceTarget:
    """What is expected of a TestCase; None: nothing."""

    max_latency_ms: float | None = None  # of a whole answer
    min_throughput_tps: float | None = None  # tokens a second, from the first one on
    max_memory_mb: float | None = None  # of this process
    max_cpu_percent: float | None = None  # 100: one core at work all the time
    max_first_token_ms: float | None = None
    max_gap_ms: float | None = None  # between tokens, at the 99th percentile of all cases

    def bars(self) -> list[Bar]:
        return [
            Bar(figure, getattr(self, name), at_least=name.startswith("min_"))
            for name, figure in FIGURES.items() if getattr(self, name) is not None
        ]  # fmt: skip


FIGURES = {
    "max_latency_ms": "answer, ms", "min_throughput_tps": "tokens/s", "max_memory_mb": "memory, MB",
    "max_cpu_percent": "CPU, %", "max_first_token_ms": "first token, ms", "max_gap_ms": "gap p99, ms",
}  # fmt: skip


@dataclass(frozen=True)
class TestCase:
    """One request that a bench sends again and again, and what is expected of it.

    input_tokens: its token ids, or how many random ones it has, which are others in every round, so that no cache knows them.
    """

    __test__ = False  # for pytest: no test, in spite of its name

    name: str
    input_tokens: int | Sequence[int]
    sampling_args: SamplingParams = field(default_factory=SamplingParams)
    expected_performance: PerformanceTarget = field(default_factory=PerformanceTarget)

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidInputError(f"The test case {self.name!r} has an empty prompt.", hint="Give at least one token.")

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
    """The cases of a bench and how often each is measured. timeout_s: what one request may take; None: any time."""

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
            raise InvalidInputError(f"Test cases need names of their own: {names}.", hint="Give at least one case.")
