"""What every encoder architecture provides, and the registry of them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from archerfish.errors import UnsupportedModelError, did_you_mean
from archerfish.kernels.ops import Activation, Ids, Ops, Segments, T
from archerfish.layers.encoder import BlockShape, ClassifierHead
from archerfish.layers.weights import Weights

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}


@dataclass(frozen=True)
class TokenBatch:
    """Packed input of one forward pass."""

    token_ids: Ids
    segments: Segments
    type_ids: Ids | None = None


class Encoder(ABC, Generic[T]):
    """One architecture. A subclass reads its configuration and weights in `__init__` and computes in `forward`."""

    prefix: ClassVar[str]  # what its checkpoints put before every name when they carry a head

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


@dataclass(frozen=True)
class Config:
    """A model's config.json, read with clear errors."""

    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UnsupportedModelError(f"The model's configuration needs a whole number {name!r}, but has {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModelError(f"The model's configuration needs a number {name!r}, but has {value!r}.")
        return float(value)

    def activation(self, name: str) -> Activation:
        value = self.values.get(name, "gelu")
        if value not in ACTIVATIONS:
            raise UnsupportedModelError(f"Unknown activation {value!r} in the model's configuration ({name}).")
        return ACTIVATIONS[value]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    @property
    def is_classifier(self) -> bool:
        return any("ForSequenceClassification" in str(name) for name in self.values.get("architectures") or [])

    @property
    def num_labels(self) -> int:
        labels = self.values.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else self.integer("num_labels", 2)

    def block_shape(
        self, width: str = "hidden_size", heads: str = "num_attention_heads", feed_forward: str = "intermediate_size",
        activation: str = "hidden_act",
    ) -> BlockShape:
        shape = BlockShape(
            self.integer(width), self.integer(heads), self.integer(feed_forward), self.activation(activation),
            self.number("layer_norm_eps", 1e-12),
        )
        if shape.num_heads == 0 or shape.width % shape.num_heads:
            raise UnsupportedModelError(f"A width of {shape.width} does not divide into {shape.num_heads} heads.")
        return shape


_ENCODERS: dict[str, str | type[Encoder[Any]]] = {
    "bert": "archerfish.models.bert:BertEncoder",
    "distilbert": "archerfish.models.distilbert:DistilBertEncoder",
    "roberta": "archerfish.models.roberta:RobertaEncoder",
    "xlm-roberta": "archerfish.models.roberta:RobertaEncoder",
    "camembert": "archerfish.models.roberta:RobertaEncoder",
    "mpnet": "archerfish.models.mpnet:MPNetEncoder",
}


def register_encoder(model_type: str, encoder: type[Encoder[Any]]) -> None:
    """Add an architecture, or replace one, under the `model_type` of its config.json."""
    _ENCODERS[model_type] = encoder


def encoder_class(config: Config) -> type[Encoder[Any]]:
    """The class for a configuration; an unknown architecture is refused with the known ones."""
    found = _ENCODERS.get(config.model_type)
    if found is None:
        hint = did_you_mean(config.model_type, _ENCODERS) or f"Known: {', '.join(_ENCODERS)}."
        raise UnsupportedModelError(f"No encoder for model_type {config.model_type!r}.", hint=hint)
    if isinstance(found, str):
        module, _, name = found.partition(":")
        loaded: type[Encoder[Any]] = getattr(importlib.import_module(module), name)
        return loaded
    return found
