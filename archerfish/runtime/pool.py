"""The memory of sequences, of keys and values or of states, as a runner uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from archerfish.kernels.decoding import DecodeState
from archerfish.kernels.ops import Ids, Ops, T
from archerfish.kernels.sampling import SamplingBatch


class MemoryPool(ABC, Generic[T]):
    """The memory of all blocks, in all layers. BlockManager counts the owners of blocks; this only holds them."""

    ops: Ops[T]
    num_blocks: int
    block_size: int
    layers: Sequence[Any]  # as `ModelAdapter.forward` takes them
    records_decodes: bool  # whether `decode_batch` can be used
    has_keys: bool  # else it has states

    def close(self) -> None:
        """Give the memory back."""
        self.layers = ()

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (from, to), in every layer."""

    @abstractmethod
    def pack_batch(
        self, token_ids: Ids, query_lens: Ids, starts: Ids, block_tables: Ids, *, is_deterministic: bool = False,
        num_rows: int = 0, kept_rows: Ids | None = None,
    ) -> Any:
        """The batch that the model takes, as `batch.pack_batch` says."""

    @abstractmethod
    def new_decode_state(self, num_rows: int, max_len: int) -> DecodeState[T]:
        """What the device remembers of so many sequences, of at most so many tokens, between steps that are only decodes."""

    @abstractmethod
    def decode_batch(self, inputs: T, state: DecodeState[T], *, is_shared: bool) -> tuple[Any, SamplingBatch[T]]:
        """What inputs of such a step say, for the model and for `Ops.sample`."""
