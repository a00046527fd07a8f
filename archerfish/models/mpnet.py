"""MPNet: BERT with a bias on the attention scores that depends on the distance between two tokens."""

from __future__ import annotations

import math

import numpy as np

from archerfish.kernels.ops import Ids, T
from archerfish.layers.encoder import BlockNames, ClassifierHead, EncoderBlock, LayerNorm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.encoder import Encoder, TokenBatch

NAMES = BlockNames(
    query="attention.attn.q", key="attention.attn.k", value="attention.attn.v",
    attention_out="attention.attn.o", attention_norm="attention.LayerNorm",
    up="intermediate.dense", down="output.dense", output_norm="output.LayerNorm",
)
MAX_DISTANCE = 128  # fixed in the architecture, not in its configuration


class MPNetEncoder(Encoder[T]):
    prefix = "mpnet"

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        shape = self.shape
        embeddings = weights.scope("embeddings")
        self.words = embeddings.table("word_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.positions = embeddings.table(
            "position_embeddings.weight", config.integer("max_position_embeddings"), shape.width
        )
        self.norm = LayerNorm(embeddings, "LayerNorm", shape.width, shape.eps)
        self.num_buckets = config.integer("relative_attention_num_buckets", 32)
        self.distances = weights.table("encoder.relative_attention_bias.weight", self.num_buckets, shape.num_heads)
        blocks = range(config.integer("num_hidden_layers"))
        self.blocks = [EncoderBlock(weights.scope(f"encoder.layer.{i}"), shape, NAMES) for i in blocks]

    def forward(self, batch: TokenBatch) -> T:
        ops = self.ops
        first_position = self.config.integer("pad_token_id", 1) + 1
        ids = (ops.ids(batch.token_ids), ops.ids(batch.segments.positions + first_position))
        x = self.norm(ops.embed((self.words, self.positions), ids))
        bias = ops.relative_bias(self.distances, distance_buckets(max(batch.segments.lengths), self.num_buckets))
        for block in self.blocks:
            x = block(x, batch.segments, bias)
        return x

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings") - config.integer("pad_token_id", 1) - 1

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(
            weights, "classifier.dense", "classifier.out_proj", config.integer("hidden_size"), config.num_labels, "tanh"
        )


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
