"""Decoders that embed or score texts. Each text is one pass, of which nothing is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import T
from archerfish.layers.encoder import ClassifierHead
from archerfish.layers.weights import Weights
from archerfish.models.adapter import Encoder, KVShape, ModelAdapter, TokenBatch, find_model
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel


class DecoderEncoder(Encoder[T]):
    """Any decoder with keys and values; the class is that of its model_type."""

    prefix = ""
    is_recordable = True

    def __init__(self, weights: Weights[T], config: Config) -> None:
        self.ops, self.config = weights.ops, config
        adapter = self.adapter(config)
        shape = adapter.memory_shape(config)
        if not isinstance(shape, KVShape):
            raise UnsupportedModelError(f"A model of type {config.model_type!r} cannot embed texts: it has no attention.")
        self.model = adapter(replace(weights, takes_head=False), config, self.max_positions(config))
        self.layers = [None] * shape.num_layers

    def forward(self, batch: TokenBatch) -> T:
        on_device: Any = self.ops.tensor(batch.token_ids)  # type: ignore[arg-type]  # ids of the host, or symbols of them
        return self.model.forward(replace(batch, token_ids=on_device), self.layers)

    @classmethod
    def adapter(cls, config: Config) -> type[ModelAdapter[Any]]:
        return find_model(config)

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(weights, "", "score", cls.width(config), config.num_labels, "none", pooling="lasttoken")

    @classmethod
    def width(cls, config: Config) -> int:
        return config.integer("hidden_size")

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return cls.adapter(config).max_positions(config)


class EuroBertEncoder(DecoderEncoder[T]):
    """A Llama that sees both directions."""

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, Config({**config.values, "is_causal": False}))

    @classmethod
    def adapter(cls, config: Config) -> type[ModelAdapter[Any]]:
        return LlamaModel

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        pooling = {"bos": "cls", "mean": "mean"}.get(str(config.values.get("classifier_pooling")))
        if pooling is None:
            raise UnsupportedModelError("Of EuroBERT's classifiers, those with classifier_pooling 'bos' or 'mean' are supported.")
        width = cls.width(config)
        return ClassifierHead(weights, "dense", "classifier", width, config.num_labels, "gelu", pooling=pooling)
