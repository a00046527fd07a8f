"""How much of their beginnings the sequences of a batch have in the same KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from archerfish.kernels.ops import Ids

MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS = 8, 256  # from which on reading shared keys once for all of them pays


def find_shared(
    blocks: Sequence[list[int]] | Ids, block_size: int, context_lens: Sequence[int] | Ids | None = None
) -> int:
    """Leading tokens that all sequences have in the same blocks: whole blocks, and fewer tokens than any sequence has.

    blocks: of each sequence, as lists or as rows of an array. context_lens: tokens of each, the new ones included, for an array
    whose rows are filled up; blocks that sequences share hold no new token, so that lists of several need none.
    """
    if not len(blocks) or (len(blocks) == 1 and context_lens is None):
        return 0
    most = min(map(len, blocks))
    if context_lens is not None:
        most = min(most, (int(min(context_lens)) - 1) // block_size)
    if isinstance(blocks, np.ndarray):
        is_equal = (blocks[:, :most] == blocks[0, :most]).all(axis=0)
        return (most if is_equal.all() else int(is_equal.argmin())) * block_size
    shared = blocks[0][:most]
    for other in blocks:
        if other[: len(shared)] != shared:
            shared = shared[: next(i for i, (one, two) in enumerate(zip(shared, other, strict=False)) if one != two)]
            if not shared:
                return 0
    return len(shared) * block_size
