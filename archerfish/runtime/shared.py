"""How much of their beginnings the decodes of a batch have in the same KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS = 8, 256  # from which on reading shared keys once for all of them pays


def find_shared(blocks: Sequence[Sequence[int]], block_size: int) -> int:
    """Leading tokens that all sequences have in the same blocks, or 0 where sharing them does not pay.

    Every sequence has more: the block of its new token is its own.
    """
    if len(blocks) < MIN_SHARED_SEQUENCES:
        return 0
    shared = blocks[0]
    for other in blocks:
        if other[: len(shared)] != shared:
            most = min(len(shared), len(other))
            shared = shared[: next((i for i in range(most) if shared[i] != other[i]), most)]
            if len(shared) * block_size < MIN_SHARED_TOKENS:
                return 0
    return len(shared) * block_size
