"""Token ids, places and block lists of a step made into the PagedBatch that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from archerfish.kernels.ops import Ids, Ops, PagedBatch, T


def build_batch(
    ops: Ops[T], *, tokens: Sequence[Sequence[int] | Ids], starts: Sequence[int], blocks: Sequence[Sequence[int]],
    block_size: int, is_deterministic: bool = False, num_rows: int = 0, num_shared: int = 0,
) -> PagedBatch[T]:
    """The batch of sequences whose new tokens begin at `starts` and whose KV lies in `blocks`.

    Sequences with one new token must stand first. num_rows: of the batch's tensors; 0: as the backend likes it. num_shared: as
    in `PagedBatch`.
    """
    query_lens = np.fromiter(map(len, tokens), np.int64, len(tokens))
    num_tokens = int(query_lens.sum())
    if num_tokens == len(tokens):  # only decodes: no list is worth an array of its own
        token_ids = np.fromiter(chain.from_iterable(tokens), np.int64, num_tokens)
    else:
        token_ids = np.concatenate([np.asarray(new, dtype=np.int64) for new in tokens])
    return pack_batch(
        ops, token_ids, query_lens, np.asarray(starts, dtype=np.int64), pad_tables(blocks), block_size,
        is_deterministic=is_deterministic, num_rows=num_rows, num_shared=num_shared,
    )


def pad_tables(blocks: Sequence[Sequence[int]]) -> Ids:
    """Lists of blocks as the rows of one array, filled up with 0."""
    lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
    tables = np.zeros((len(blocks), int(lengths.max(initial=1))), dtype=np.int64)
    is_block = np.arange(tables.shape[1]) < lengths[:, None]
    tables[is_block] = np.fromiter(chain.from_iterable(blocks), np.int64, int(lengths.sum()))
    return tables


def pack_batch(
    ops: Ops[T], token_ids: Ids, query_lens: Ids, starts: Ids, block_tables: Ids, block_size: int, *,
    is_deterministic: bool = False, num_rows: int = 0, num_shared: int = 0,
) -> PagedBatch[T]:
    """The batch out of arrays: token_ids (tokens,), query_lens, starts (sequences,), block_tables (sequences, most blocks)."""
    is_decode = query_lens == 1
    num_decodes = int(np.count_nonzero(is_decode))
    assert is_decode[:num_decodes].all(), "sequences with one new token must stand first"
    num_tokens = len(token_ids)
    num_rows = num_rows or ops.padded_rows(num_tokens)
    assert num_rows >= num_tokens, "a batch has at least a row per token"
    sequence = np.repeat(np.arange(len(query_lens)), query_lens)
    ends = np.cumsum(query_lens)
    rows = np.zeros((3, num_rows), dtype=np.int64)  # token ids, positions, slots; the filling is 0
    rows[0, :num_tokens] = token_ids
    positions = np.arange(num_tokens) + (starts - ends + query_lens)[sequence]
    rows[1, :num_tokens] = positions
    rows[2, :num_tokens] = block_tables[sequence, positions // block_size] * block_size + positions % block_size
    return PagedBatch(
        num_tokens=num_tokens, num_decodes=num_decodes, query_lens=query_lens, context_lens=starts + query_lens,
        token_ids=ops.ids(rows[0]), positions=ops.ids(rows[1]), slots=ops.ids(rows[2]), block_tables=ops.ids(block_tables),
        block_size=block_size, is_deterministic=is_deterministic, num_shared=num_shared,
    )
