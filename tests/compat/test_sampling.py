from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.cache.adaptive import CacheKey, LogitsCache
from archerfish.compat.sampling import LogitsView, SamplingConfig, sample_optimized, sample_with_cache
from archerfish.errors import InvalidInputError, UnknownOptionError
from archerfish.runtime.host_sampling import sample_row

VOCAB = 640
GREEDY = SamplingConfig(temperature=0)


def test_logits_are_computed_once_for_a_key() -> None:
    rows = torch.randn(2, VOCAB)
    cache = LogitsCache(VOCAB * 4, 60.0)

    def drawn(row: int, context: list[int]) -> int:
        key = CacheKey(context, len(context), "model")
        return sample_with_cache(lambda: rows[row], SamplingConfig(), cache=cache, cache_key=key, seed=1)

    first = drawn(0, [1, 2, 3])
    assert first == sample_row(rows[0], seed=1) == drawn(1, [1, 2, 3])  # the row of the first call is used again
    assert drawn(1, [4]) == sample_row(rows[1], seed=1)
    assert cache.get_stats().hits == 1 and cache.get_stats().evictions == 1  # the cache has room for one row


def test_a_view_shares_memory_and_keeps_to_its_range_and_mask() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    logits[:100] = 50.0
    view = LogitsView(logits, 128, 192, masked=[130, 131, 5])
    assert view.values.shape == (64,) and view.effective_logit(7) == -math.inf
    drawn = {sample_optimized(view, SamplingConfig(temperature=20.0), seed=seed) for seed in range(600)}
    assert drawn <= set(range(128, 192)) - {130, 131} and len(drawn) > 50
    logits[140] = 99.0
    assert sample_optimized(view, GREEDY) == 140


@pytest.mark.parametrize("bounds", [(-1, 5), (5, 5), (0, VOCAB + 1)])
def test_a_view_refuses_a_range_outside_of_the_row(bounds: tuple[int, int]) -> None:
    with pytest.raises(InvalidInputError, match="range"):
        LogitsView(torch.zeros(VOCAB), *bounds)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fast_path_threshold": 0.9}, "distribution"),
        ({"use_simd": True}, "vector instructions"),
        ({"topk": 3}, "top_k"),
        ({"temperature": -1.0}, "temperature"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused_with_the_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises((UnknownOptionError, InvalidInputError), match=message):
        SamplingConfig(**values)
