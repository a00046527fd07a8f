from __future__ import annotations

import pytest

from archerfish.cache.block_manager import BlockManager
from archerfish.errors import InvalidInputError, InvalidOptionError, InvariantError, OutOfBlocksError


def test_allocates_distinct_blocks_and_takes_them_back() -> None:
    blocks = BlockManager(4, 16)
    first, second = blocks.allocate(3), blocks.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert blocks.num_free == 0 and blocks.num_total == 4
    assert blocks.free(first) == 3
    assert blocks.num_free == 3
    assert sorted(blocks.allocate(3)) == sorted(first)


def test_allocating_too_many_takes_none() -> None:
    blocks = BlockManager(2, 16)
    with pytest.raises(OutOfBlocksError, match="3 blocks are wanted; 2 of 2 are free") as caught:
        blocks.allocate(3)
    assert caught.value.status == 503
    assert blocks.num_free == 2
    assert blocks.allocate(0) == []


def test_a_shared_block_comes_back_with_its_last_owner() -> None:
    blocks = BlockManager(2, 16)
    taken = blocks.allocate(1)
    blocks.share(taken)
    assert blocks.ref_count(taken[0]) == 2
    assert blocks.free(taken) == 0 and blocks.num_free == 1
    assert blocks.free(taken) == 1 and blocks.num_free == 2
    assert blocks.ref_count(taken[0]) == 0
    with pytest.raises(InvariantError):
        blocks.free(blocks.allocate(1) * 2)


@pytest.mark.parametrize(("num_taken", "block"), [(0, -1), (0, 0), (0, 2), (2, -1), (2, 2)])
def test_a_free_or_unknown_block_is_neither_freed_nor_shared(num_taken: int, block: int) -> None:
    blocks = BlockManager(2, 16)
    blocks.allocate(num_taken)
    with pytest.raises(InvariantError):
        blocks.free([block])
    with pytest.raises(InvariantError):
        blocks.share([block])
    if block != 0:
        with pytest.raises(InvalidInputError):
            blocks.ref_count(block)
    assert blocks.num_free == 2 - num_taken


def test_physical_blocks_are_those_that_were_allocated() -> None:
    blocks = BlockManager(4, 16)
    taken = blocks.allocate(2)
    assert blocks.get_physical_blocks(taken[::-1]) == taken[::-1]
    blocks.free(taken)
    with pytest.raises(InvalidInputError, match="is free"):
        blocks.get_physical_blocks(taken)
    with pytest.raises(InvalidInputError, match="no block 4"):
        blocks.get_physical_blocks([4])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (4, (1 << 20) + 1)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(InvalidOptionError):
        BlockManager(num_blocks, block_size)


def test_blocks_are_taken_in_the_order_in_which_they_were_freed() -> None:
    blocks = BlockManager(8, 4)
    for _ in range(3):
        taken = blocks.allocate(5)
        assert taken == [0, 1, 2, 3, 4]
        blocks.free(taken)
