"""Figures of the last minute, compared with exact percentiles of all values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from archerfish.observe.recent import WINDOW_S, RecentFigures, percentiles, tokens_per_second


def test_percentiles_of_the_last_minute() -> None:
    rng = random.Random(1)
    recent = RecentFigures()
    values = list[float]()
    for number in range(5000):
        now = 1000 + number / 40  # 125 seconds
        seconds, times = rng.lognormvariate(-4, 1), rng.randrange(1, 4)
        recent.gaps(now, seconds, times)
        recent.first_token(now, 10 * seconds)
        values += [seconds] * times if now >= 1065 else []
    slots = recent.since(1124.99)
    assert len(slots) == WINDOW_S
    exact = np.percentile(values, [50, 99], method="inverted_cdf")
    assert percentiles(slots, lambda slot: slot.gaps, [50, 99]) == pytest.approx(exact, rel=0.026)
    first, longest = percentiles(slots, lambda slot: slot.first, [0, 100])
    assert first and longest and first < exact[0] < longest
    assert percentiles(recent.since(1124.99 + WINDOW_S), lambda slot: slot.gaps, [50]) == [None]


def test_tokens_per_second_are_of_whole_seconds() -> None:
    recent = RecentFigures()
    for tenth in range(100):  # 20 tokens each second
        recent.tokens(500 + tenth / 10, 2)
    assert tokens_per_second(recent.since(510.0), 510.0) == 20
    assert tokens_per_second(recent.since(509.95), 509.95) == 20
    assert tokens_per_second(recent.since(511.5), 511.5) == pytest.approx(40 / 3)
    assert tokens_per_second(recent.since(514), 514) == 0
    recent.gaps(515, 0.0)
    assert percentiles(recent.since(515), lambda slot: slot.gaps, [50]) == [pytest.approx(1e-6, rel=0.026)]
