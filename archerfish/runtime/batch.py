"""Token ids, positions and blocks of a step made into the batch that a model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from archerfish.kernels.batches import Ids, T
from archerfish.kernels.ops import Ops, PagedBatch
from archerfish.kernels.recurrent import EMPTY_SLOT, FIRST_SLOT, RecurrentBatch
from archerfish.step import StepInput

MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS = 8, 256  # from which on reading shared keys once for all of them pays


class BlockTables:
    """The blocks of the sequence in each row, in the order of its tokens. Every step brings the new ones."""

    def __init__(self, num_rows: int) -> None:
        self._blocks = np.zeros((num_rows, 8), dtype=np.int64)  # grows with the longest sequence
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)

    def update(self, step: StepInput) -> None:
        for entry in step.entries:
            self._blocks[entry.row] = 0
            self._num_blocks[entry.row] = 0
        if not len(step.block_ids):
            return
        wanted, width = int(step.block_places.max()) + 1, self._blocks.shape[1]
        if wanted > width:
            self._blocks = np.pad(self._blocks, ((0, 0), (0, max(wanted, 2 * width) - width)))
        self._blocks[step.block_rows, step.block_places] = step.block_ids
        self._num_blocks[step.block_rows] = (
            step.block_places + 1
        )  # of a row that stands there more than once, the last counts

    def of(self, rows: Ids) -> Ids:
        """(rows, most blocks of any)"""
        return self._blocks[rows, : max(1, int(self._num_blocks[rows].max(initial=0)))]

    def at(self, rows: Ids, places: Ids) -> Ids:
        """One block of each row."""
        return self._blocks[rows, places]


def pad_tables(blocks: Sequence[Sequence[int]]) -> Ids:
    """Lists of blocks as the rows of one array, filled up with 0."""
    lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
    tables = np.zeros((len(blocks), int(lengths.max(initial=1))), dtype=np.int64)
    is_block = np.arange(tables.shape[1]) < lengths[:, None]
    tables[is_block] = np.fromiter(chain.from_iterable(blocks), np.int64, int(lengths.sum()))
    return tables


def at_least_one(ops: Ops[T], rows: Ids) -> T:
    """Rows that are wanted, on the device; the first one where none is."""
    return ops.tensor(rows if len(rows) else np.zeros(1, dtype=np.int64))


def pack_batch(
    ops: Ops[T],
    token_ids: Ids,
    query_lens: Ids,
    starts: Ids,
    block_tables: Ids,
    block_size: int,
    *,
    is_deterministic: bool = False,
    num_rows: int = 0,
    kept_rows: Ids | None = None,
    adapters: Ids | None = None,
) -> PagedBatch[T]:
    """The batch of sequences over KV blocks: token_ids (tokens,), query_lens, starts (sequences,), block_tables
    (sequences, most blocks of any).

    Sequences with one new token must stand first. num_rows: of the batch's tensors; 0: as many as tokens. kept_rows: as
    in `PagedBatch`. adapters: of each sequence, the slot of its adapter, or 0.
    """
    num_decodes, num_tokens = int(np.count_nonzero(query_lens == 1)), len(token_ids)
    assert (query_lens[:num_decodes] == 1).all(), "sequences with one new token must stand first"
    num_rows = num_rows or num_tokens
    assert num_rows >= num_tokens, "a batch has at least a row per token"
    sequence = np.repeat(np.arange(len(query_lens)), query_lens)
    ends = np.cumsum(query_lens)
    rows = np.zeros((3, num_rows), dtype=np.int64)  # token ids, positions, slots; the filling is 0
    rows[0, :num_tokens] = token_ids
    positions = np.arange(num_tokens) + (starts - ends + query_lens)[sequence]
    rows[1, :num_tokens] = positions
    rows[2, :num_tokens] = block_tables[sequence, positions // block_size] * block_size + positions % block_size
    return PagedBatch(
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        query_lens=query_lens,
        context_lens=starts + query_lens,
        token_ids=ops.tensor(rows[0]),
        positions=ops.tensor(rows[1]),
        slots=ops.tensor(rows[2]),
        block_tables=ops.tensor(block_tables),
        block_size=block_size,
        is_deterministic=is_deterministic,
        num_shared=find_shared(block_tables[:num_decodes], block_size) if ops.is_async else 0,
        kept_rows=None if kept_rows is None else at_least_one(ops, kept_rows),
        adapters=adapters_of_tokens(ops, adapters, query_lens, num_rows),
    )


def pack_recurrent_batch(
    ops: Ops[T],
    token_ids: Ids,
    query_lens: Ids,
    begins: Ids,
    tables: Ids,
    block_size: int,
    *,
    is_deterministic: bool = False,
    num_rows: int = 0,
    kept_rows: Ids | None = None,
    states: Mapping[int, Sequence[int]] | None = None,
    adapters: Ids | None = None,
) -> RecurrentBatch[T]:
    """The batch of sequences whose blocks hold a state each; the arrays are those of `pack_batch`.

    The state behind token i is in block i // block_size, until that of the next token takes its place there: so the new
    tokens are cut at the multiples of block_size. states: of some sequences, other blocks for the state behind each new
    token.
    """
    num_decodes, num_tokens = int(np.count_nonzero(query_lens == 1)), len(token_ids)
    assert (query_lens[:num_decodes] == 1).all(), "sequences with one new token must stand first"
    ends = begins + query_lens
    counts = (ends - 1) // block_size - begins // block_size + 1
    for index, blocks in (states or {}).items():
        counts[index] = len(blocks)
    first_pieces = np.concatenate(([0], np.cumsum(counts)))
    sequence = np.repeat(np.arange(len(query_lens)), counts)
    logical = np.arange(len(sequence)) + (begins // block_size - first_pieces[:-1])[sequence]  # which of its blocks
    piece_begins = np.maximum(begins[sequence], logical * block_size)
    piece_lens = np.minimum(ends[sequence], (logical + 1) * block_size) - piece_begins
    targets = tables[sequence, np.minimum(logical, tables.shape[1] - 1)] + FIRST_SLOT
    for index, blocks in (states or {}).items():
        pieces = slice(first_pieces[index], first_pieces[index + 1])
        piece_lens[pieces], targets[pieces] = 1, np.asarray(blocks) + FIRST_SLOT
    before = tables[np.arange(len(begins)), np.maximum(begins - 1, 0) // block_size] + FIRST_SLOT
    sources = np.concatenate(([EMPTY_SLOT], targets[:-1]))  # a sequence's next piece goes on where the one before ended
    sources[first_pieces[:-1]] = np.where(begins == 0, EMPTY_SLOT, before)
    piece_starts = np.concatenate(([0], np.cumsum(piece_lens)))
    rows = np.zeros((2, num_rows or num_tokens), dtype=np.int64)  # token ids, rows before; the filling is 0
    rows[0, :num_tokens] = token_ids
    rows[1, 1:num_tokens] = np.arange(num_tokens - 1)
    rows[1, piece_starts[first_pieces[:-1]]] = -1 - sources[first_pieces[:-1]]
    return RecurrentBatch(
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        query_lens=query_lens,
        piece_counts=counts,
        piece_lens=piece_lens,
        token_ids=ops.tensor(rows[0]),
        previous=ops.tensor(rows[1]),
        sources=ops.tensor(sources),
        targets=ops.tensor(targets),
        starts=ops.tensor(piece_starts),
        first_pieces=ops.tensor(first_pieces),
        is_deterministic=is_deterministic,
        kept_rows=None if kept_rows is None else at_least_one(ops, kept_rows),
        adapters=adapters_of_tokens(ops, adapters, query_lens, num_rows or num_tokens),
    )


def adapters_of_tokens(ops: Ops[T], adapters: Ids | None, query_lens: Ids, num_rows: int) -> T | None:
    """The slots of sequences, for each of their tokens and for the filling behind them."""
    if adapters is None:
        return None
    rows = np.zeros(num_rows, dtype=np.int64)
    rows[: query_lens.sum()] = np.repeat(adapters, query_lens)
    return ops.tensor(rows)


def build_batch(
    ops: Ops[T],
    *,
    tokens: Sequence[Sequence[int] | Ids],
    starts: Sequence[int],
    blocks: Sequence[Sequence[int]],
    block_size: int,
    pack: Callable[..., Any] = pack_batch,
    **options: Any,
) -> Any:
    """What `pack` makes of lists: the new tokens of each sequence, where they begin, and its blocks."""
    query_lens = np.fromiter(map(len, tokens), np.int64, len(tokens))
    token_ids = np.fromiter(chain.from_iterable(tokens), np.int64, int(query_lens.sum()))
    return pack(ops, token_ids, query_lens, np.asarray(starts, np.int64), pad_tables(blocks), block_size, **options)


def find_shared(tables: Ids, block_size: int) -> int:
    """Leading tokens that all sequences have in the same blocks, or 0 where sharing them does not pay.

    The block of a sequence's new token is its own, so that the shared ones end before it.
    """
    if len(tables) < MIN_SHARED_SEQUENCES:
        return 0
    differs = (tables != tables[0]).any(axis=0)
    num_tokens = (int(differs.argmax()) if differs.any() else tables.shape[1]) * block_size
    return num_tokens if num_tokens >= MIN_SHARED_TOKENS else 0
