"""Batches from lists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from archerfish.kernels.torch.reference import TorchOps
from archerfish.params import SamplingParams
from archerfish.runtime import batch as batch_module
from archerfish.runtime.batch import BlockTables, build_batch, find_shared, pack_batch, pack_recurrent_batch, pad_tables
from archerfish.step import NO_IDS, RowEntry, StepInput
from tests.calls import num_calls


def test_every_token_gets_its_position_and_slot() -> None:
    batch = build_batch(
        TorchOps(),
        tokens=[[5], np.array([6, 7, 8]), [9, 10]],
        starts=[4, 0, 3],
        blocks=[[7, 2, 3], [1], [9, 0]],
        block_size=4,
    )
    assert (batch.num_tokens, batch.num_decodes, batch.block_size) == (6, 1, 4)
    assert batch.query_lens.tolist() == [1, 3, 2]
    assert batch.context_lens.tolist() == [5, 3, 5]
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4]
    assert batch.slots.tolist() == [2 * 4, 4, 5, 6, 9 * 4 + 3, 0]
    assert batch.block_tables.tolist() == [[7, 2, 3], [1, 0, 0], [9, 0, 0]]


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 3), (32, 32)])
def test_tensors_are_filled_up(num_rows: int, expected: int) -> None:
    ops = TorchOps()
    batch = build_batch(
        ops, tokens=[[5], [6], [7]], starts=[1, 2, 3], blocks=[[3], [4], [5]], block_size=8, num_rows=num_rows
    )
    assert batch.num_tokens == batch.num_decodes == 3
    for tensor, real in ((batch.token_ids, [5, 6, 7]), (batch.positions, [1, 2, 3]), (batch.slots, [25, 34, 43])):
        assert tensor.tolist() == real + [0] * (expected - 3)


PACKERS = pytest.mark.parametrize("pack", [pack_batch, pack_recurrent_batch])


@PACKERS
def test_decodes_after_longer_ones_are_refused(pack: Callable[..., object]) -> None:
    with pytest.raises(AssertionError, match="first"):
        build_batch(TorchOps(), tokens=[[1, 2], [3]], starts=[0, 0], blocks=[[0], [1]], block_size=4, pack=pack)


@PACKERS
def test_building_a_batch_calls_nothing_per_token(pack: Callable[..., object]) -> None:
    """The number of Python calls does not grow with the batch; how long they take is for benchmarks to say."""
    ops = TorchOps()

    def calls(num: int) -> int:
        tokens, starts = [[i] for i in range(num)], list(range(100, 100 + num))
        blocks = [list(range(start // 16 + 1)) for start in starts]
        return num_calls(
            lambda: build_batch(ops, tokens=tokens, starts=starts, blocks=blocks, block_size=16, pack=pack)
        )

    assert calls(256) == calls(16)


def test_tokens_over_states_are_cut_where_blocks_end() -> None:
    """A decode inside of a block, one that begins a block, a chunk over three blocks, and a prompt from its
    beginning."""
    batch = build_batch(
        TorchOps(),
        tokens=[[5], [6], np.arange(10, 19), [1, 2, 3]],
        starts=[6, 8, 3, 0],
        blocks=[[7, 2], [3, 9, 8], [4, 0, 5], [6]],
        block_size=4,
        num_rows=16,
        pack=pack_recurrent_batch,
    )
    assert (batch.num_tokens, batch.num_decodes) == (14, 2)
    assert batch.query_lens.tolist() == [1, 1, 9, 3]
    assert batch.piece_counts.tolist() == [1, 1, 3, 1]
    assert batch.piece_lens.tolist() == [1, 1, 1, 4, 4, 3]
    assert batch.sources.tolist() == [3, 10, 5, 5, 1, 0]
    assert batch.targets.tolist() == [3, 9, 5, 1, 6, 7]
    assert batch.starts.tolist() == [0, 1, 2, 3, 7, 11, 14]
    assert batch.first_pieces.tolist() == [0, 1, 2, 5, 6]
    assert batch.token_ids.tolist() == [5, 6, *range(10, 19), 1, 2, 3, 0, 0]
    assert batch.previous.tolist() == [-4, -11, -6, *range(2, 10), -1, 11, 12, 0, 0]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([[5, 7, 9], [5, 7, 8, 2]], 8),
        ([[5, 7, 8, 2], [5, 7, 9]], 8),
        ([[5, 7, 9, 4], [5, 7, 9, 2], [5, 6, 9, 2]], 4),
        ([[5, 7], [6, 7]], 0),
        ([[0, 0, 3], [0, 0, 4]], 8),
        ([[1, 2, 3]], 0),
        ([], 0),
    ],
)
def test_whole_blocks_that_all_share(blocks: list[list[int]], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MIN_SHARED_SEQUENCES", 2)
    monkeypatch.setattr(batch_module, "MIN_SHARED_TOKENS", 4)
    assert find_shared(pad_tables(blocks), 4) == expected


def test_little_is_not_shared() -> None:
    same = list(range(100))
    assert find_shared(pad_tables([[*same, 200 + i] for i in range(8)]), 16) == 1600
    assert find_shared(pad_tables([[*same, 200 + i] for i in range(7)]), 16) == 0
    assert find_shared(pad_tables([[*same[:15], 200 + i] for i in range(8)]), 16) == 0


def test_block_tables_keep_blocks_until_a_row_changes_hands() -> None:
    def step(rows: list[int], places: list[int], blocks: list[int], *entered: int) -> StepInput:
        entries = [RowEntry(row, "r", SamplingParams(), 1) for row in entered]
        return StepInput(
            0,
            NO_IDS,
            NO_IDS,
            NO_IDS,
            NO_IDS,
            NO_IDS,
            NO_IDS,
            0,
            np.asarray(rows),
            np.asarray(places),
            np.asarray(blocks),
            entries=entries,
        )

    tables = BlockTables(3)
    tables.update(step([0, 0, 2], [0, 1, 0], [7, 8, 9], 0, 2))
    tables.update(step([0, 2], [2, 1], [5, 6]))
    assert tables.of(np.array([2, 0])).tolist() == [[9, 6, 0], [7, 8, 5]]
    assert tables.at(np.array([0, 2]), np.array([2, 1])).tolist() == [5, 6]
    long = list(range(100))
    tables.update(step([0] * 100, long, long, 0))
    assert tables.of(np.array([0])).tolist() == [long]
    tables.update(step([0], [0], [4], 0))
    assert tables.of(np.array([0])).tolist() == [[4]]
