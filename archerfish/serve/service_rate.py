"""How fast a model serves, measured from its steps, and how many requests are with it for how long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

MEMORY = 64  # observations after which one weighs about a third of the newest
LEAST_PREFILL_SHARE = 0.1  # of a step that does both, where decoding alone seems to take all of it
LEAST_TOKEN_SHARE = 0.25  # of a job's time that its tokens take, however little jobs of several sizes seem to differ
SAME_SIZE = 0.003  # squared spread of sizes, against their mean, below which jobs say little of what tokens add
WORTH, MOST_WORTH = 3.0, 3.0  # what tokens of a job should take, for what the job itself takes; and at most, for its time


class Average:
    """The plain mean of the first `memory` values, exponentially weighted from then on."""

    __slots__ = ("_memory", "_num_values", "value")

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._num_values = 0
        self.value: float | None = None

    def add(self, value: float) -> None:
        self._num_values = min(self._num_values + 1, self._memory)
        self.value = value if self.value is None else self.value + (value - self.value) / self._num_values


class Ratio:
    """Sum over sum, exponentially weighted: large observations count for more, as they should in a rate."""

    __slots__ = ("_above", "_below", "_keep")

    def __init__(self, memory: int = MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> None:
        self._above = self._above * self._keep + above
        self._below = self._below * self._keep + below

    @property
    def value(self) -> float | None:
        return self._above / self._below if self._below > 0 else None


class ServiceRate:
    """Seconds for a token of a prompt, and for a decode step by the size of its batch.

    How long a step takes hardly depends on its batch on a GPU, and much on a CPU: sizes are told apart by powers of two. One
    that was never seen lies on the line through the two nearest smaller ones: under load hardly any step comes without
    prompts, from which alone it is measured, so that many would be let in before it is known what they do to one another.
    """

    def __init__(self) -> None:
        self._prefill = Ratio()  # seconds, tokens
        self._decode = Ratio()
        self._steps: dict[int, tuple[Average, Average]] = {}  # sizes and seconds, by the bits of the size - 1

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> None:
        """A step: tokens of prompts computed, tokens brought, seconds."""
        if not seconds > 0:
            return
        if num_prompt_tokens > 0:
            decode_s = (self.decode_step_s(num_output_tokens) or 0.0) if num_output_tokens else 0.0
            self._prefill.add(max(seconds - decode_s, LEAST_PREFILL_SHARE * seconds), num_prompt_tokens)
        elif num_output_tokens > 0:
            size, taken = self._steps.setdefault((num_output_tokens - 1).bit_length(), (Average(), Average()))
            size.add(num_output_tokens)
            taken.add(seconds)
            self._decode.add(seconds, num_output_tokens)

    def decode_step_s(self, batch: int) -> float | None:
        """Of a step that brings every sequence of a batch a token; None before the first."""
        steps = dict(self._steps)  # in one go: who makes text asks too, in its own thread
        if not steps:
            return None
        wanted = (max(1, batch) - 1).bit_length()
        smaller = sorted(bits for bits in steps if bits <= wanted) or [min(steps)]
        size, seconds = (each.value or 0.0 for each in steps[smaller[-1]])
        if smaller[-1] >= wanted or len(smaller) < 2:
            return seconds
        other_size, other_seconds = (each.value or 0.0 for each in steps[smaller[-2]])
        return seconds + max(0.0, seconds - other_seconds) / (size - other_size) * (batch - size)

    def alone_s(self, num_output_tokens: float) -> float:
        """At least, of a request beside which nothing runs; 0 before a step of one sequence was measured.

        Its prompt counts as one step: it may be cached, and short ones say little of what a long one takes.
        """
        steps = self._steps.get(0)
        return 0.0 if steps is None else max(1.0, num_output_tokens) * (steps[1].value or 0.0)

    def prefill_s(self, num_tokens: float) -> float:
        return num_tokens * (self._prefill.value or 0.0)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return 1 / self._prefill.value if self._prefill.value else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of all sequences together, as batches have been of late."""
        return 1 / self._decode.value if self._decode.value else None


class JobCost:
    """Seconds that every job takes, and seconds that each of its tokens adds: a line through the last jobs.

    A job is to have the tokens that take a given time. But where cores are contended for, every job may take that long by
    itself, and jobs that are made smaller and smaller to be in time would do next to nothing.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self._sums = [0.0] * 5  # of 1, tokens, seconds, tokens squared, tokens times seconds

    def add(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            values = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
            self._sums = [self._keep * total + value for total, value in zip(self._sums, values, strict=True)]

    def _line(self) -> tuple[float, float]:
        """Seconds of a job without tokens, and of a token."""
        num, tokens, seconds, squares, products = self._sums
        if not num:
            return 0.0, 0.0
        tokens, seconds = tokens / num, seconds / num
        prior = SAME_SIZE * tokens**2  # as if some jobs had told that tokens take all of the time
        slope = (products / num - tokens * seconds + prior * seconds / tokens) / (squares / num - tokens**2 + prior)
        token_s = min(1.0, max(LEAST_TOKEN_SHARE, slope * tokens / seconds)) * seconds / tokens
        return seconds - token_s * tokens, token_s

    def seconds(self, num_tokens: float) -> float:
        """Of a job with so many tokens; 0 before the first."""
        job_s, token_s = self._line()
        return job_s + num_tokens * token_s

    def least_seconds(self, num_tokens: float) -> float:
        """What such a job takes at least: it is not taken to be longer than the jobs that were measured."""
        return self.seconds(min(num_tokens, self._sums[1] / self._sums[0])) if self._sums[0] else 0.0

    def worthwhile(self, seconds: float) -> float:
        """How many tokens a job of so many seconds has, or one that takes longer and is worth it; any before the first."""
        job_s, token_s = self._line()
        return max(seconds - job_s, min(WORTH * job_s, MOST_WORTH * seconds)) / token_s if token_s else math.inf

    @property
    def tokens_per_s(self) -> float:
        return self._sums[1] / self._sums[2] if self._sums[2] else 0.0


@dataclass(frozen=True)
class LittlesLawFigures:
    """Over one period: mean_requests * period_s == requests_per_s * period_s * mean_s + open_s, but for rounding."""

    period_s: float
    mean_requests: float  # L: requests inside, averaged over time
    requests_per_s: float  # lambda: requests that left
    mean_s: float  # W: what those spent inside
    open_s: float  # what those that are still inside have spent there, together


class LittlesLaw:
    """L, lambda and W out of one set of books: L = lambda W once nothing is left inside."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = self._start = clock()
        self._num_inside = self._num_left = 0
        self._area = self._left_s = self._entered_sum = 0.0

    def _advance(self) -> float:
        now = max(self._now, self._clock())
        self._area += self._num_inside * (now - self._now)
        self._now = now
        return now

    def enter(self) -> float:
        """A request has come; keep what this returns for `leave`."""
        now = self._advance()
        self._num_inside += 1
        self._entered_sum += now
        return now

    def leave(self, entered: float) -> None:
        now = self._advance()
        self._num_inside -= 1
        self._entered_sum = self._entered_sum - entered if self._num_inside else 0.0
        self._num_left += 1
        self._left_s += now - entered

    def figures(self) -> LittlesLawFigures:
        now = self._advance()
        period = now - self._start
        open_s = self._num_inside * now - self._entered_sum
        mean_s = self._left_s / self._num_left if self._num_left else 0.0
        if not period > 0:
            return LittlesLawFigures(0.0, float(self._num_inside), 0.0, mean_s, open_s)
        return LittlesLawFigures(period, self._area / period, self._num_left / period, mean_s, open_s)
