"""What a recurrent architecture provides: as `ModelAdapter`, with state slots where that has KV blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, cast

from archerfish.kernels.ops import Ops, T
from archerfish.kernels.recurrent import RecurrentBatch, RecurrentOps, StateLayer, StateShape, recurrent_ops
from archerfish.layers.weights import NotedWeights, Weights
from archerfish.models.adapter import NoOps
from archerfish.models.config import Config

UNBOUNDED = 1 << 20  # tokens: a state does not grow, so that a model's length is no more than what it was trained for


class RecurrentAdapter(ABC, Generic[T]):
    """One recurrent architecture. A subclass takes its weights in `__init__` and computes in `forward` and `logits`."""

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        self.ops: Ops[T] = weights.ops
        self.recurrent: RecurrentOps[T] = recurrent_ops(weights.ops)
        self.config = config
        self.max_len = max_len

    @abstractmethod
    def forward(self, batch: RecurrentBatch[T], layers: Sequence[StateLayer[T]]) -> T:
        """Hidden states after the last norm, (rows, width); the states of the batch's slots move past the new tokens."""

    @abstractmethod
    def logits(self, hidden: T) -> T:
        """float32 scores over the vocabulary for rows of hidden states."""

    @classmethod
    @abstractmethod
    def state_shape(cls, config: Config) -> StateShape:
        """What a sequence keeps."""

    @classmethod
    def vocab_size(cls, config: Config) -> int:
        return config.integer("vocab_size")

    @classmethod
    def max_positions(cls, config: Config) -> int:
        """Longest sequence that the model is made for."""
        return config.integer("max_position_embeddings", UNBOUNDED)

    @classmethod
    def dummy_shapes(cls, config: Config) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of all its tensors, found by building it over weights that are not there."""
        weights = NotedWeights({}, cast(Ops[Any], NoOps()))
        cls(weights, config, max_len=1)
        return weights.shapes
