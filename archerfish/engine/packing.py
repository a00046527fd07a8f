"""Texts into batches: sorted by length, cut by tokens, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from archerfish.kernels.ops import Segments
from archerfish.models.encoder import TokenBatch


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of one text, or of a pair with the segment that each token belongs to."""

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped into batches of at most max_tokens tokens (a longer text stands alone), longest first.

    The batches are then evened out: 5 texts that need 2 batches are cut 3 + 2, not 4 + 1.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    num_tokens = sum(lengths)
    if not order:
        return []
    target = num_tokens / -(-num_tokens // max_tokens)
    batches: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if batches[-1] and (filled + lengths[index] > max_tokens or filled >= target):
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += lengths[index]
    return batches


def pack(texts: Sequence[TokenizedText]) -> TokenBatch:
    """One packed batch of texts, in the order given."""
    segments = Segments(tuple(len(text.token_ids) for text in texts))
    token_ids = np.concatenate([np.asarray(text.token_ids, dtype=np.int64) for text in texts])
    type_ids = None
    if any(text.type_ids is not None and any(text.type_ids) for text in texts):
        parts = [text.type_ids if text.type_ids is not None else [0] * len(text.token_ids) for text in texts]
        type_ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    return TokenBatch(token_ids, segments, type_ids)
