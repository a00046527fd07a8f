"""What sequences have in the same blocks."""

from __future__ import annotations

import pytest

from archerfish.runtime import shared
from archerfish.runtime.shared import find_shared


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([[5, 7, 9], [5, 7, 8, 2]], 8),
        ([[5, 7, 8, 2], [5, 7, 9]], 8),
        ([[5, 7, 9, 4], [5, 7, 9, 2], [5, 6, 9, 2]], 4),
        ([[5, 7], [6, 7]], 0),
        ([[0, 0, 3], [0, 0]], 8),
        ([[1, 2, 3]], 0),
        ([], 0),
    ],
)
def test_whole_blocks_that_all_share(blocks: list[list[int]], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MIN_SHARED_SEQUENCES", 2)
    monkeypatch.setattr(shared, "MIN_SHARED_TOKENS", 4)
    assert find_shared(blocks, 4) == expected


def test_little_is_not_shared() -> None:
    same = list(range(100))
    assert find_shared([[*same, 200 + i] for i in range(8)], 16) == 1600
    assert find_shared([[*same, 200 + i] for i in range(7)], 16) == 0
    assert find_shared([[*same[:15], 200 + i] for i in range(8)], 16) == 0
