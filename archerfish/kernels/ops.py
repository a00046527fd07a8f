"""The only signatures of numerical work.

Models and layers are written over `Ops` and know tensors only as opaque handles of type T; what a handle is belongs to the
backend. `reference.py` gives every operation its meaning in plain torch, and each faster backend is tested against it.

Activations are packed: the tokens of all sequences of a batch stand one after the other in a (num_tokens, width) tensor, and
`Segments` says where each sequence begins. A backend may append rows after the last token to suit its products; what they hold
means nothing, and `attention` and `pool` leave them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from archerfish.background import Lazy

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu", "tanh"]
Pooling = Literal["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens"]  # as sentence-transformers names them
Ids = npt.NDArray[np.int64]


class Handle(Protocol):
    """All that a model may ask of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Handle)


@dataclass(frozen=True)
class Segments:
    """Lengths of the sequences of a packed batch, in order; every length is at least 1."""

    lengths: tuple[int, ...]

    @cached_property
    def starts(self) -> Ids:
        """Where each sequence begins; one more entry than sequences, the last being the number of tokens."""
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)

    @cached_property
    def positions(self) -> Ids:
        """Position of every token within its sequence, from 0."""
        return np.arange(self.num_tokens, dtype=np.int64) - np.repeat(self.starts[:-1], self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])


class LinearWeight(Lazy[tuple[T, T | None]]):
    """Weight (out, in) and bias (out) of a linear map in whatever form a backend multiplies fastest, made when first used."""


class Ops(ABC, Generic[T]):
    """Operations of one backend on one device, computing in one type."""

    name: str
    device: str
    dtype: str

    def __init__(self) -> None:
        self._linear_weights: list[LinearWeight[T]] = []

    def linear_weight(self, weights: Sequence[T], biases: Sequence[T | None]) -> LinearWeight[T]:
        """One or more (out_i, in) weights, stacked along the outputs, for `linear`."""
        weight: LinearWeight[T] = LinearWeight(lambda: self.pack_linear(weights, biases))
        self._linear_weights.append(weight)
        return weight

    def prepare(self) -> None:
        """Make now what would else be made at the first use. Safe beside running work."""
        for weight in self._linear_weights:
            weight.get()

    @abstractmethod
    def ids(self, values: Ids) -> T:
        """Integers of the host as an index tensor of the device."""

    @abstractmethod
    def to_numpy(self, x: T) -> npt.NDArray[np.float32]:
        """A tensor of the device as a float32 array of the host."""

    @abstractmethod
    def table(self, weight: T) -> T:
        """A lookup table on the device, at its stored size."""

    @abstractmethod
    def vector(self, weight: T) -> T:
        """A small parameter (norm weight, bias) on the device in float32."""

    @abstractmethod
    def pack_linear(self, weights: Sequence[T], biases: Sequence[T | None]) -> tuple[T, T | None]:
        """Stacked weights and biases in the form that `linear` multiplies with."""

    @abstractmethod
    def embed(self, tables: Sequence[T], ids: Sequence[T]) -> T:
        """Sum over the tables of their rows at the given ids, in float32."""

    @abstractmethod
    def layer_norm(self, x: T, weight: T, bias: T, eps: float) -> T:
        """Layer normalisation over the last axis, computed in float32, given in the compute type."""

    @abstractmethod
    def linear(self, x: T, weight: LinearWeight[T], *, activation: Activation = "none", residual: T | None = None) -> T:
        """activation(x @ weight.T + bias), or x @ weight.T + bias + residual."""

    @abstractmethod
    def attention(self, qkv: T, segments: Segments, num_heads: int, *, bias: T | None = None) -> T:
        """Full attention within each sequence. qkv: (tokens, 3 * width); bias: (heads, longest, longest), added to scores."""

    @abstractmethod
    def relative_bias(self, table: T, buckets: Ids) -> T:
        """(n, n) bucket numbers looked up in a (buckets, heads) table, as (heads, n, n) for `attention`."""

    @abstractmethod
    def pool(self, x: T, segments: Segments, mode: Pooling) -> T:
        """One float32 row per sequence."""

    @abstractmethod
    def normalize(self, x: T) -> T:
        """Rows scaled to length 1."""
