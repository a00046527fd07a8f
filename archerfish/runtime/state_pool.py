"""The memory of recurrent states: a block is the state behind the last of its tokens that has been computed."""

from __future__ import annotations

from collections.abc import Sequence

from archerfish.errors import InvariantError
from archerfish.kernels.decoding import DecodeState
from archerfish.kernels.ops import Ids, Ops, T
from archerfish.kernels.recurrent import FIRST_SLOT, RecurrentBatch, StateShape
from archerfish.kernels.sampling import SamplingBatch
from archerfish.runtime.batch import pack_recurrent_batch
from archerfish.runtime.pool import MemoryPool


class StatePool(MemoryPool[T]):
    """States of all blocks and, in front of them, the empty state. block_size: tokens between two states that are kept."""

    records_decodes = True
    has_keys = False

    def __init__(self, ops: Ops[T], shape: StateShape, num_blocks: int, block_size: int) -> None:
        self.ops, self.recurrent = ops, ops.recurrent()
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers = self.recurrent.new_states(FIRST_SLOT + num_blocks, shape).layers

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            raise InvariantError(f"States are not to be copied, since others can be computed from them: {pairs}.")

    def pack_batch(
        self, token_ids: Ids, query_lens: Ids, starts: Ids, block_tables: Ids, *, is_deterministic: bool = False,
        num_rows: int = 0, kept_rows: Ids | None = None,
    ) -> RecurrentBatch[T]:
        return pack_recurrent_batch(
            self.ops, token_ids, query_lens, starts, block_tables, self.block_size, is_deterministic=is_deterministic,
            num_rows=num_rows, kept_rows=kept_rows,
        )

    def new_decode_state(self, num_rows: int, max_len: int) -> DecodeState[T]:
        return self.ops.new_decode_state(num_rows, 1)  # both blocks of a step travel with it

    def decode_batch(
        self, inputs: T, state: DecodeState[T], *, is_shared: bool
    ) -> tuple[RecurrentBatch[T], SamplingBatch[T]]:
        return self.recurrent.decode_batch(inputs, state)
