"""Batches of texts: grouped by length, bounded by tokens, packed without padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from archerfish.kernels.ops import Segments
from archerfish.models.adapter import TokenBatch
from archerfish.text.tokenizer import TokenizedText


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped into batches of at most max_tokens tokens, longest first. A longer text is a batch of its own.

    Each batch takes the longest text that is left, then repeatedly the longest that still fits. Full batches cost least per
    token, and few distinct sizes need few compiled products.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)  # ascending: the longest is cheap to take
    sizes = [lengths[i] for i in order]
    batches: list[list[int]] = []
    while order:
        room = max_tokens - sizes.pop()
        batch = [order.pop()]
        while (end := bisect_right(sizes, room)) > 0:
            size = sizes[end - 1]
            start = max(bisect_left(sizes, size), end - room // size) if size else 0  # as many of one size as fit
            batch += order[start:end][::-1]
            room -= size * (end - start)
            del sizes[start:end], order[start:end]
        batches.append(batch)
    return batches


def pack(texts: Sequence[TokenizedText]) -> TokenBatch:
    """One packed batch of texts, in the order given."""
    segments = Segments(tuple([len(text.token_ids) for text in texts]))
    token_ids = np.concatenate([text.token_ids for text in texts])
    type_ids = None
    if any(text.type_ids is not None and text.type_ids.any() for text in texts):
        type_ids = np.concatenate([np.zeros_like(ids) if types is None else types for ids, types in texts])
    return TokenBatch(token_ids, segments, type_ids)
