"""Signatures of the operations that recurrent models need in addition to `Ops`: over state slots instead of KV blocks.

A slot holds the whole state of one sequence after one of its tokens. Slot 0 is the empty state, which every sequence
begins from, and is never written; block b of an engine is slot b + 1. `torch/wkv.py` gives every operation its meaning
in plain torch, and each faster backend is tested against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from archerfish.errors import DeviceError
from archerfish.kernels.batches import Ids, T
from archerfish.kernels.decoding import DecodeState
from archerfish.kernels.ops import Activation, LinearWeight, NormWeights
from archerfish.kernels.sampling import SamplingBatch

EMPTY_SLOT = 0
FIRST_SLOT = 1  # of block 0
NO_SLOT = -1  # of a row that stands for no sequence: nothing is read or written


@dataclass(frozen=True)
class StateShape:
    """What a sequence keeps in every layer: a matrix for each head, and the last input of each of two mixes."""

    num_layers: int
    num_heads: int
    head_dim: int
    num_all_heads: int = 0  # of all ranks, each of which keeps the inputs of all; 0: there is one rank

    @property
    def width(self) -> int:
        """Of an input."""
        return (self.num_all_heads or self.num_heads) * self.head_dim

    def bytes_per_block(self, block_size: int, item_bytes: int) -> int:
        """A block is one state for any number of tokens; matrices are float32, inputs of the compute type."""
        return self.num_layers * (4 * self.num_heads * self.head_dim**2 + 2 * self.width * item_bytes)


class StateLayer(NamedTuple, Generic[T]):
    """Memory of one layer in all slots."""

    wkv: T  # (slots, heads, head_dim, head_dim) float32: values down, keys across (native: keys down)
    time_input: T  # (slots, width): the time mix's last input
    channel_input: T  # (slots, width): the channel mix's last input


class StateMemory(NamedTuple, Generic[T]):
    """States of all slots."""

    wkv: T  # (slots, layers, heads, head_dim, head_dim)
    inputs: T  # (slots, layers, 2, width)
    layers: tuple[StateLayer[T], ...]  # views of these


@dataclass(frozen=True, eq=False)
class RecurrentBatch(Generic[T]):
    """Packed tokens of one step over state slots. Sequences with one new token stand first.

    The new tokens of a sequence are divided into pieces wherever its state is to be kept. A piece starts from the state
    in its source slot and leaves the new state in its target slot, which is the source of the sequence's next piece.
    Sequences may share a source; a target belongs to one piece only, and is the source of no other sequence.

    Tensors of T may have more rows than there are tokens (a backend's filling): num_tokens counts the real ones.
    """

    num_tokens: int
    num_decodes: int  # leading sequences with exactly one new token
    query_lens: Ids  # host: new tokens of each sequence
    piece_counts: Ids  # host: pieces of each sequence
    piece_lens: Ids  # host: tokens of each piece
    token_ids: T  # (tokens,)
    previous: T  # (tokens,): the row of the token before, or -1 - source for the first new token of a sequence
    sources: T  # (pieces,): slots
    targets: T  # (pieces,): slots
    starts: T  # (pieces + 1,): where each piece's tokens begin; the last is their number
    first_pieces: T  # (sequences + 1,): where each sequence's pieces begin; the last is their number
    is_deterministic: bool = (
        False  # a sequence's numbers must not depend on the others, nor on how its prompt was cut up
    )
    kept_rows: T | None = None  # those of the hidden states that are wanted; None: all
    adapters: T | None = None  # as in PagedBatch

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)


class HeadInputs(NamedTuple, Generic[T]):
    """Products of a time mix, (tokens, width) each, as the linear maps give them."""

    receptance: T
    decay: T
    key: T
    value: T
    rate: T  # the in-context learning rate
    gate: T
    first_value: T | None = None  # the first layer's values; None in that layer
    value_mix: T | None = None  # how much of the first layer's values is mixed in


class HeadWeights(NamedTuple, Generic[T]):
    """Vectors of a time mix, (width,) float32 each."""

    removal: T  # k_k: keys times this, normalised, say what is taken out of the state
    replacement: T  # k_a: how far the learning rate scales keys
    bonus: T  # r_k
    norm: T
    norm_bias: T
    eps: float


class LowRankWeights(NamedTuple, Generic[T]):
    """up(activation(down(x))), where down has few outputs."""

    down: LinearWeight[T]
    up: LinearWeight[T]
    activation: Activation = "none"


class TimeWeights(NamedTuple, Generic[T]):
    """Of a time mix."""

    norm: NormWeights[T]
    factors: T  # (6 * width,) float32: of r, w, k, v, a and g, one after the other
    receptance: LinearWeight[T]
    key: LinearWeight[T]
    value: LinearWeight[T]
    decay: LowRankWeights[T]
    rate: LowRankWeights[T]
    gate: LowRankWeights[T]
    value_mix: LowRankWeights[T] | None  # None in the first layer
    heads: HeadWeights[T]
    out: LinearWeight[T]


class ChannelWeights(NamedTuple, Generic[T]):
    """Of a channel mix."""

    norm: NormWeights[T]
    factor: T  # (width,) float32
    key: LinearWeight[T]
    value: LinearWeight[T]


@dataclass(frozen=True, eq=False)
class BlockWeights(Generic[T]):
    """Of a layer of RWKV-7."""

    time: TimeWeights[T]
    channel: ChannelWeights[T]


class RecurrentOps(ABC, Generic[T]):
    """Operations on states. The `Ops` of a backend gives them."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], *, is_input: bool) -> T:
        """Memory with any contents: of inputs, or of matrices in float32."""

    def new_states(self, num_slots: int, shape: StateShape) -> StateMemory[T]:
        """Memory for num_slots slots. Slot 0 is the empty state; the others are not initialised."""
        layers = shape.num_layers
        heads = shape.num_heads
        dim = shape.head_dim
        wkv: Any = self.empty((num_slots, layers, heads, dim, dim), is_input=False)
        inputs: Any = self.empty((num_slots, layers, 2, shape.width), is_input=True)
        wkv[EMPTY_SLOT] = inputs[EMPTY_SLOT] = 0
        return StateMemory(
            wkv, inputs, tuple(StateLayer(wkv[:, i], inputs[:, i, 0], inputs[:, i, 1]) for i in range(layers))
        )

    @abstractmethod
    def shift(self, x: T, inputs: T, batch: RecurrentBatch[T], factors: T) -> tuple[T, ...]:
        """x + (x of the token before - x) * factor, for each of the (width,) factors that follow one another in
        `factors`.

        inputs: (slots, width). The x before a sequence's first token is read from its source slot; the last x of a
        piece is written to its target slot.
        """

    @abstractmethod
    def mix_heads(self, inputs: HeadInputs[T], weights: HeadWeights[T], states: T, batch: RecurrentBatch[T]) -> T:
        """The time mix between its products: (tokens, width). states: a layer's wkv, read from sources, written to
        targets."""

    def fused_block(
        self, x: T, first_value: T | None, weights: BlockWeights[T], batch: RecurrentBatch[T], layer: StateLayer[T]
    ) -> tuple[T, T] | None:
        """Time mix and channel mix (`models/rwkv7.py`) in a backend's own kernels: the sum, which may use x's memory,
        and the time mix's values. None: the backend has no kernels for such a batch."""
        return None

    def decode_batch(self, inputs: T, state: DecodeState[T]) -> tuple[RecurrentBatch[T], SamplingBatch[T]]:
        """As `Ops.decode_batch`, for a step of decodes over states."""
        raise DeviceError("This backend records no steps of decodes.")
