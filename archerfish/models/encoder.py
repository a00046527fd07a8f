"""What every encoder architecture provides, and the registry of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from archerfish.errors import UnsupportedModelError, did_you_mean
from archerfish.kernels.ops import Ids, Ops, Segments, T
from archerfish.layers.encoder import BlockShape, ClassifierHead
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.known import ENCODERS, MODELS, class_of


@dataclass(frozen=True)
class TokenBatch:
    """Packed input of one forward pass."""

    token_ids: Ids
    segments: Segments
    type_ids: Ids | None = None


class Encoder(ABC, Generic[T]):
    """One architecture. A subclass reads its configuration and weights in `__init__` and computes in `forward`."""

    prefix: ClassVar[str]  # what its checkpoints put before every name when they carry a head
    is_recordable: ClassVar[bool] = False  # forward sends ids by `ops.ids` and reads nothing else of a batch on the host

    def __init__(self, weights: Weights[T], config: Config) -> None:
        self.ops: Ops[T] = weights.ops
        self.config = config
        self.shape = self.block_shape(config)

    @abstractmethod
    def forward(self, batch: TokenBatch) -> T:
        """Hidden states, (tokens, width)."""

    @classmethod
    @abstractmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        """The head of its sequence classification checkpoints."""

    @classmethod
    def block_shape(cls, config: Config) -> BlockShape:
        return config.block_shape()

    @classmethod
    def max_positions(cls, config: Config) -> int:
        """Longest sequence that its position table allows."""
        return config.integer("max_position_embeddings")


def register_encoder(model_type: str, encoder: type[Encoder[Any]]) -> None:
    """Add an architecture, or replace one, under the `model_type` of its config.json."""
    ENCODERS[model_type] = encoder


def encoder_class(config: Config) -> type[Encoder[Any]]:
    """The class for a configuration; an unknown architecture is refused with the known ones."""
    found = ENCODERS.get(config.model_type)
    if found is None:
        hint = did_you_mean(config.model_type, ENCODERS) or f"Known: {', '.join(ENCODERS)}."
        if config.model_type in MODELS:
            hint = "It writes text: LLMEngine and `archerfish generate` take it."
        raise UnsupportedModelError(f"No encoder for model_type {config.model_type!r}.", hint=hint)
    return class_of(found)
