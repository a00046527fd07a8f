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
class PerformanceTarget:
    """A figure that a bench is held to: at most `wanted`, or at least."""

    name: str
    wanted: float
    at_least: bool = False

    @classmethod
    def limits(
        cls, *, max_latency_ms: float | None = None, min_throughput_tps: float | None = None,
        max_memory_mb: float | None = None, max_cpu_percent: float | None = None,
    ) -> tuple[PerformanceTarget, ...]:
        """What a TestCase may expect, in usual terms: of whole answers, of tokens a second, and of this process.

        100 per cent are one core at work all the time.
        """
        limits = (
            cls("answer, ms", max_latency_ms or 0.0), cls("tokens/s", min_throughput_tps or 0.0, at_least=True),
            cls("memory, MB", max_memory_mb or 0.0), cls("CPU, %", max_cpu_percent or 0.0),
        )  # fmt: skip
        given = (max_latency_ms, min_throughput_tps, max_memory_mb, max_cpu_percent)
        return tuple(limit for limit, value in zip(limits, given, strict=True) if value is not None)

    def judged(self, value: float | None) -> Judged:
        return Judged(self, None if value is None or math.isnan(value) else value)

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.wanted:g}"


@dataclass(frozen=True)
class Judged:
    """A target and what was measured: met, missed, or not measured."""

    target: PerformanceTarget
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


@dataclass(frozen=True)
class TestCase:
    """One request that a bench sends again and again, and what is expected of it.

    prompt: its token ids, or how many random ones it has, which are others in every round, so that no cache knows them.
    """

    __test__ = False  # for pytest: no test, in spite of its name

    name: str
    prompt: int | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    expected: tuple[PerformanceTarget, ...] = ()

    def __post_init__(self) -> None:
        if (self.prompt if isinstance(self.prompt, int) else len(self.prompt)) < 1:
            raise InvalidInputError(f"The test case {self.name!r} has an empty prompt.", hint="Give at least one token.")

    @property
    def num_tokens(self) -> int:
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)

    def tokens(self, vocab_size: int, round_index: int) -> list[int]:
        """The prompt of one round."""
        if not isinstance(self.prompt, int):
            return list(self.prompt)
        draw = random.Random(f"{self.name}:{round_index}")
        return [draw.randrange(vocab_size) for _ in range(self.prompt)]


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
