"""What recurrent architectures share: a ModelAdapter over states of sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from archerfish.kernels.ops import T
from archerfish.kernels.recurrent import RecurrentBatch, RecurrentOps, StateLayer, StateShape
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ModelAdapter
from archerfish.models.config import Config

UNBOUNDED = 1 << 20  # tokens: a state does not grow, so that a model's length is no more than what it was trained for


class RecurrentAdapter(ModelAdapter[T]):
    """One recurrent architecture."""

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()

    @abstractmethod
    def forward(self, batch: RecurrentBatch[T], layers: Sequence[StateLayer[T]]) -> T: ...

    @classmethod
    @abstractmethod
    def memory_shape(cls, config: Config) -> StateShape: ...

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings", UNBOUNDED)
