"""Decoders that embed or score texts. Each text is one pass, of which nothing is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.ops import Pooling
from archerfish.kernels.ranks import Part
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
            raise UnsupportedModelError(
                f"A model of type {config.model_type!r} cannot embed texts: it has no attention."
            )
        self.model = adapter(replace(weights, takes_head=False), config, self.max_positions(config))
        self.layers = [None] * shape.num_layers

    def forward(self, batch: TokenBatch) -> T:
        on_device: Any = self.ops.tensor(batch.token_ids)
        found: T = self.model.forward(replace(batch, token_ids=on_device), self.layers)
        return found

    @classmethod
    def adapter(cls, config: Config) -> type[ModelAdapter[Any]]:
        return find_model(config)

    @classmethod
    def most_expanded(cls, config: Config) -> int:
        return 0

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        """One layer from the last token; its rows may be those of some tokens in the map onto the vocabulary."""
        names = [name for name in ("lm_head", "model.embed_tokens", "embed_tokens") if weights.has(f"{name}.weight")]
        vocab_size, out = config.integer("vocab_size"), "score"
        sizes: int | tuple[Part, ...] = config.num_labels
        if ids := config.score_token_ids:
            is_tied, out = config.flag("tie_word_embeddings"), names[0] if names else "lm_head"
            out = names[-1] if is_tied and names else out
            sizes = tuple(Part(token_id, token_id + 1, vocab_size) for token_id in ids)
        return ClassifierHead(weights, "", out, cls.width(config), sizes, "none", pooling="lasttoken")

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
        poolings: dict[str, Pooling] = {"bos": "cls", "mean": "mean"}
        pooling = poolings.get(str(config.values.get("classifier_pooling")))
        if pooling is None:
            raise UnsupportedModelError("EuroBERT classifies here with classifier_pooling 'bos' or 'mean' alone.")
        width = cls.width(config)
        return ClassifierHead(weights, "dense", "classifier", width, config.num_labels, "gelu", pooling=pooling)
