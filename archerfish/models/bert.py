"""BERT (MiniLM is a small BERT), and the encoders that differ from it in little: RoBERTa, DistilBERT and MPNet."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import Ids, T
from archerfish.kernels.ops import Activation
from archerfish.layers.encoder import BlockNames, ClassifierHead, EncoderBlock
from archerfish.layers.weights import Weights
from archerfish.models.adapter import Encoder, TokenBatch
from archerfish.models.config import Config

MAX_DISTANCE = 128  # of MPNet: fixed in the architecture, not in its configuration


class BertEncoder(Encoder[T]):
    prefix = "bert"
    is_recordable = True
    names: ClassVar[BlockNames] = BlockNames(
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        attention_out="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        output_norm="output.LayerNorm",
    )
    layers: ClassVar[str] = "encoder.layer"
    num_layers: ClassVar[str] = "num_hidden_layers"  # the name in the configuration
    has_types: ClassVar[bool] = True  # tokens have a type: first or second text
    counts_from_padding: ClassVar[bool] = False  # positions count from the padding id on
    head_parts: ClassVar[tuple[str, str, Activation]] = ("bert.pooler.dense", "classifier", "tanh")  # of a classifier
    masked_parts = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    )

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        if config.values.get("position_embedding_type", "absolute") != "absolute":
            hint = None
            if "lora_adaptations" in config.values:
                hint = "Of Jina v3, take a copy that transformers wrote (jina_embeddings_v3): docs/embed.md."
            raise UnsupportedModelError(f"Only absolute positions are supported for {config.model_type}.", hint=hint)
        ops = self.ops
        shape = self.shape
        num_positions = config.integer("max_position_embeddings")
        embeddings = weights.scope("embeddings")
        self.words = embeddings.table("word_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.positions = self.untyped_positions = embeddings.table(
            "position_embeddings.weight", num_positions, shape.width
        )
        if self.has_types:
            self.types = embeddings.table(
                "token_type_embeddings.weight", config.integer("type_vocab_size", 2), shape.width
            )
            rows = np.arange(num_positions)
            self.untyped_positions = ops.embed((self.positions, self.types), (ops.tensor(rows), ops.tensor(rows * 0)))
        self.norm = embeddings.layer_norm("LayerNorm", shape.width, shape.eps)
        layers = range(config.integer(self.num_layers))
        self.blocks = [EncoderBlock(weights.scope(f"{self.layers}.{i}"), shape, self.names) for i in layers]

    def forward(self, batch: TokenBatch) -> T:
        ops, first = self.ops, self.first_position(self.config)
        token_ids = ops.tensor(batch.token_ids)
        positions = ops.tensor(batch.segments.positions + first if first else batch.segments.positions)
        if self.has_types and batch.type_ids is not None:
            x = ops.embed((self.words, self.positions, self.types), (token_ids, positions, ops.tensor(batch.type_ids)))
        else:
            x = ops.embed((self.words, self.untyped_positions), (token_ids, positions))
        x, bias = ops.layer_norm(x, self.norm), self.attention_bias(batch)
        for block in self.blocks:
            x = block(x, batch.segments, bias)
        return x

    @classmethod
    def first_position(cls, config: Config) -> int:
        return config.integer("pad_token_id", 1) + 1 if cls.counts_from_padding else 0

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings") - cls.first_position(config)

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        dense, out, activation = cls.head_parts
        return ClassifierHead(weights, dense, out, cls.block_shape(config).width, config.num_labels, activation)


class RobertaEncoder(BertEncoder[T]):
    """RoBERTa, XLM-RoBERTa and CamemBERT."""

    prefix = "roberta"
    counts_from_padding = True
    head_parts = ("classifier.dense", "classifier.out_proj", "tanh")
    masked_parts = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


class DistilBertEncoder(BertEncoder[T]):
    prefix = "distilbert"
    names = BlockNames(
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attention_out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        output_norm="output_layer_norm",
    )
    layers = "transformer.layer"
    num_layers = "n_layers"
    shape_names = ("dim", "n_heads", "hidden_dim", "activation")
    has_types = False
    head_parts = ("pre_classifier", "classifier", "relu")
    masked_parts = ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")


class MPNetEncoder(RobertaEncoder[T]):
    """MPNet adds a bias to the scores of attention that depends on the distance between two tokens."""

    prefix = "mpnet"
    is_recordable = False
    names = BlockNames(
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        output_norm="output.LayerNorm",
    )
    has_types = False

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        self.num_buckets = config.integer("relative_attention_num_buckets", 32)
        self.distances = weights.table("encoder.relative_attention_bias.weight", self.num_buckets, self.shape.num_heads)

    @classmethod
    def most_expanded(cls, config: Config) -> int:
        return 0

    def attention_bias(self, batch: TokenBatch) -> T:
        return self.ops.relative_bias(self.distances, distance_buckets(max(batch.segments.lengths), self.num_buckets))


def distance_buckets(length: int, num_buckets: int) -> Ids:
    """(length, length) bucket of key position minus query position: exact when near, logarithmic up to MAX_DISTANCE."""
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    half = num_buckets // 2
    exact = half // 2
    far = np.abs(distance)
    with np.errstate(divide="ignore"):
        scale = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(math.log(MAX_DISTANCE / exact))
    logarithmic = np.where(far < exact, 0, exact + scale * np.float32(half - exact)).astype(np.int64)
    bucket = np.where(far < exact, far, np.minimum(logarithmic, half - 1))
    # a key before the query has a positive "n" in the original formula, and keys after it use the upper half
    result: Ids = (bucket + np.where(distance > 0, half, 0)).astype(np.int64)
    return result
