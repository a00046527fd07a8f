"""Signatures of what recurrent models compute beside `Ops`: over state slots instead of KV blocks.

A slot holds the whole state of one sequence, or of a prefix that others may start from. Slot 0 is the empty state and is never
written: a sequence starts as a copy of it, or of the slot of its longest known prefix. `wkv.py` gives every operation its
meaning in plain torch, and each faster backend is tested against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, cast

import numpy as np

from archerfish.errors import DeviceError
from archerfish.kernels.ops import Ids, Ops, T

EMPTY_SLOT = 0
NO_SLOT = -1  # of a row that stands for no sequence: nothing is read or written


@dataclass(frozen=True)
class StateShape:
    """What a sequence keeps in every layer: a matrix for each head, and the last input of each of two mixes."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def bytes_per_slot(self, item_bytes: int) -> int:
        """Matrices are float32, inputs of the compute type."""
        return self.num_layers * (4 * self.width * self.head_dim + 2 * self.width * item_bytes)


@dataclass(frozen=True)
class StateLayer(Generic[T]):
    """Memory of one layer in all slots."""

    wkv: T  # (slots, heads, head_dim, head_dim) float32: values down, keys across
    time_input: T  # (slots, width): the time mix's last input
    channel_input: T  # (slots, width): the channel mix's last input


@dataclass(frozen=True)
class StateMemory(Generic[T]):
    """States of all slots. What a slot keeps of all layers lies together, so that copying it is one piece of work."""

    shape: StateShape
    wkv: T  # (slots, layers, heads, head_dim, head_dim)
    inputs: T  # (slots, layers, 2, width)
    layers: tuple[StateLayer[T], ...]  # views of these


@dataclass(frozen=True)
class RecurrentBatch(Generic[T]):
    """Packed tokens of one step over state slots. Sequences with one new token stand first; no two share a slot.

    Tensors of T may have more rows than there are tokens (a backend's filling): num_tokens counts the real ones.
    """

    num_tokens: int
    num_decodes: int  # leading sequences with exactly one new token
    query_lens: Ids  # host: new tokens of each sequence
    token_ids: T  # (tokens,)
    state_slots: T  # (sequences,)
    starts: T  # (sequences + 1,): where each sequence's tokens begin; the last is their number
    previous: T  # (tokens,): the row of the token before, or -1 - slot for the first new token of a sequence
    is_deterministic: bool = False  # a sequence's numbers must not depend on the others, nor on how its prompt was cut up
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # a backend's notes, shared by all layers

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)


@dataclass(frozen=True)
class HeadInputs(Generic[T]):
    """Products of a time mix, (tokens, width) each, before anything but a product has been done to them."""

    receptance: T
    decay: T
    key: T
    value: T
    rate: T  # the in-context learning rate
    gate: T
    first_value: T | None = None  # the first layer's values; None in that layer
    value_mix: T | None = None  # how much of them goes into the values


@dataclass(frozen=True)
class HeadWeights(Generic[T]):
    """Vectors of a time mix, (width,) float32 each."""

    removal: T  # k_k: keys times this, normalised, say what is taken out of the state
    replacement: T  # k_a: how far the learning rate scales keys
    bonus: T  # r_k
    norm: T
    norm_bias: T
    eps: float


class RecurrentOps(ABC, Generic[T]):
    """Operations on states, beside an `Ops` of the same backend."""

    @abstractmethod
    def new_states(self, num_slots: int, shape: StateShape) -> StateMemory[T]:
        """Memory for so many slots, slot 0 included; all of them empty states."""

    @abstractmethod
    def copy_states(self, memory: StateMemory[T], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slot to slot in all layers, for each (from, to). No slot is both source and target."""

    @abstractmethod
    def shift(self, x: T, inputs: T, batch: RecurrentBatch[T], factors: T) -> tuple[T, ...]:
        """For each of some (width,) factors, one after the other in `factors`: x + (the token's before it - x) * factor.

        inputs: (slots, width), where the tokens before come from at the start of a sequence, and where its last x goes.
        """

    @abstractmethod
    def sigmoid(self, x: T) -> T:
        """The logistic function; x's memory may become the result's."""

    @abstractmethod
    def square(self, x: T) -> T:
        """x * x; its memory may become the result's."""

    @abstractmethod
    def mix_heads(self, inputs: HeadInputs[T], weights: HeadWeights[T], states: T, batch: RecurrentBatch[T]) -> T:
        """The time mix between its products: (tokens, width). states: a layer's wkv, which the new tokens change."""


def recurrent_ops(ops: Ops[T]) -> RecurrentOps[T]:
    """The operations on states that belong to a backend."""
    if not isinstance(cast(object, ops), Ops):  # stands for a backend where nothing is computed
        return cast(RecurrentOps[T], ops)
    from archerfish.kernels.reference import TorchOps
    from archerfish.kernels.select import has_triton

    if not isinstance(ops, TorchOps):
        raise DeviceError(f"The backend {ops.name!r} has no recurrent models.", hint="Choose another one.")
    if ops.device == "cuda" and has_triton():
        from archerfish.kernels.triton_wkv import TritonRecurrentOps

        return cast(RecurrentOps[T], TritonRecurrentOps(ops))
    from archerfish.kernels.wkv import ChunkedRecurrentOps

    return cast(RecurrentOps[T], ChunkedRecurrentOps(ops))


def build_recurrent_batch(
    ops: Ops[T], *, tokens: Sequence[Sequence[int] | Ids], slots: Sequence[int], is_deterministic: bool = False,
    num_rows: int = 0,
) -> RecurrentBatch[T]:
    """The batch of sequences with new tokens and a state slot each. Sequences with one new token must stand first."""
    query_lens = np.fromiter(map(len, tokens), np.int64, len(tokens))
    is_decode = query_lens == 1
    num_decodes = int(np.count_nonzero(is_decode))
    assert is_decode[:num_decodes].all(), "sequences with one new token must stand first"
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int64)
    num_tokens = int(starts[-1])
    num_rows = num_rows or ops.padded_rows(num_tokens)
    rows = np.zeros((2, num_rows), dtype=np.int64)  # token ids, rows before; the filling is 0
    rows[0, :num_tokens] = np.concatenate([np.asarray(new, dtype=np.int64) for new in tokens])
    rows[1, 1:num_tokens] = np.arange(num_tokens - 1)
    state_slots = np.asarray(slots, dtype=np.int64)
    rows[1, starts[:-1]] = -1 - state_slots
    return RecurrentBatch(
        num_tokens=num_tokens, num_decodes=num_decodes, query_lens=query_lens, token_ids=ops.ids(rows[0]),
        state_slots=ops.ids(state_slots), starts=ops.ids(starts), previous=ops.ids(rows[1]), is_deterministic=is_deterministic,
    )
