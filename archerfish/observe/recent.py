"""Figures of the last minute, for live views: exact counts in slots of a second, durations to about 2.5 percent."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

WINDOW_S, RATE_S = 60, 3
PERCENTS = (50, 99)
STEPS_PER_E = 20  # durations are kept as the nearest power of e ** (1 / STEPS_PER_E)


@dataclass(slots=True)
class Slot:
    second: int
    num_tokens: int = 0
    first: dict[int, int] = field(default_factory=dict)  # times to the first token, by rounded logarithm
    gaps: dict[int, int] = field(default_factory=dict)  # times between tokens


class RecentFigures:
    """Times to the first token, times between tokens, and output tokens of the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=WINDOW_S)

    def _slot(self, now: float) -> Slot:
        slots, second = self._slots, int(now)
        if not slots or slots[-1].second < second:
            slots.append(Slot(second))
        return slots[-1]

    def first_token(self, now: float, seconds: float) -> None:
        found, key = self._slot(now).first, _key(seconds)
        found[key] = found.get(key, 0) + 1

    def gaps(self, now: float, seconds: float, times: int = 1) -> None:
        found, key = self._slot(now).gaps, _key(seconds)
        found[key] = found.get(key, 0) + times

    def tokens(self, now: float, count: int) -> None:
        self._slot(now).num_tokens += count

    def since(self, now: float) -> list[Slot]:
        return [slot for slot in list(self._slots) if slot.second > now - WINDOW_S]  # another thread may add one


def _key(seconds: float) -> int:
    return round(math.log(max(seconds, 1e-6)) * STEPS_PER_E)


def tokens_per_second(slots: Iterable[Slot], now: float) -> float:
    """The mean over the last RATE_S whole seconds."""
    return sum(slot.num_tokens for slot in slots if int(now) - RATE_S <= slot.second < int(now)) / RATE_S


def percentiles(
    slots: Iterable[Slot], durations: Callable[[Slot], dict[int, int]], percents: Sequence[float]
) -> list[float | None]:
    """Percentiles (nearest rank) in seconds; None where there is nothing."""
    counts: Counter[int] = Counter()
    for slot in slots:
        counts.update(dict(durations(slot)))
    total, ordered = counts.total(), sorted(counts.items())
    if not total:
        return [None] * len(percents)
    found: list[float | None] = []
    for percent in percents:
        rank, seen = max(1, math.ceil(percent * total / 100)), 0
        for key, count in ordered:
            seen += count
            if seen >= rank:
                found.append(math.exp(key / STEPS_PER_E))
                break
    return found


def figures(slots: Sequence[Slot], now: float) -> dict[str, float | None]:
    first, gaps = (
        percentiles(slots, lambda slot: slot.first, PERCENTS),
        percentiles(slots, lambda slot: slot.gaps, PERCENTS),
    )
    return {
        "tokens_per_second": round(tokens_per_second(slots, now), 2),
        **{f"ttft_p{percent}_s": value for percent, value in zip(PERCENTS, first, strict=True)},
        **{f"inter_token_p{percent}_s": value for percent, value in zip(PERCENTS, gaps, strict=True)},
    }
