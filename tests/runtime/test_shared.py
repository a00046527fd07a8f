"""What sequences have in the same blocks."""

from __future__ import annotations

import numpy as np
import pytest

from archerfish.runtime.batch import pad_tables
from archerfish.runtime.shared import find_shared


@pytest.mark.parametrize(
    ("blocks", "context_lens", "expected"),
    [
        ([[5, 7, 9], [5, 7, 8, 2]], [11, 15], 8),
        ([[5, 7, 9], [5, 7, 9, 2]], [12, 15], 8),  # a sequence keeps a key of its own
        ([[5, 7, 9], [5, 7, 9, 2]], [3, 15], 0),
        ([[5, 7, 9, 4], [5, 7, 9, 2], [5, 6, 9, 2]], [13, 14, 15], 4),
        ([[5, 7], [6, 7]], [5, 5], 0),
        ([[0, 0, 3], [0, 0]], [9, 9], 8),
        ([[1, 2, 3]], [9], 8),
        ([], [], 0),
    ],
)
def test_whole_blocks_that_all_share(blocks: list[list[int]], context_lens: list[int], expected: int) -> None:
    assert find_shared(blocks, 4, context_lens) == expected
    if blocks:
        assert find_shared(pad_tables(blocks), 4, np.array(context_lens)) == expected


def test_without_lengths_a_single_sequence_shares_nothing() -> None:
    assert find_shared([[1, 2, 3]], 4) == 0
    assert find_shared([[1, 2, 3], [1, 2, 4]], 4) == 8
