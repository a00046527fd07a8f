"""BERT, and MiniLM, which is a small BERT."""

from __future__ import annotations

import numpy as np

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import T
from archerfish.layers.encoder import BlockNames, ClassifierHead, EncoderBlock, LayerNorm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.encoder import Encoder, TokenBatch

NAMES = BlockNames(
    query="attention.self.query", key="attention.self.key", value="attention.self.value",
    attention_out="attention.output.dense", attention_norm="attention.output.LayerNorm",
    up="intermediate.dense", down="output.dense", output_norm="output.LayerNorm",
)


class BertEncoder(Encoder[T]):
    prefix = "bert"
    is_recordable = True

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        if config.values.get("position_embedding_type", "absolute") != "absolute":
            raise UnsupportedModelError("Only absolute positions are supported for BERT.")
        shape = self.shape
        embeddings = weights.scope("embeddings")
        self.words = embeddings.table("word_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.positions = embeddings.table(
            "position_embeddings.weight", config.integer("max_position_embeddings"), shape.width
        )
        self.types = embeddings.table("token_type_embeddings.weight", config.integer("type_vocab_size", 2), shape.width)
        rows = np.arange(config.integer("max_position_embeddings"))
        self.untyped_positions = self.ops.embed((self.positions, self.types), (self.ops.ids(rows), self.ops.ids(rows * 0)))
        self.norm = LayerNorm(embeddings, "LayerNorm", shape.width, shape.eps)
        blocks = range(config.integer("num_hidden_layers"))
        self.blocks = [EncoderBlock(weights.scope(f"encoder.layer.{i}"), shape, NAMES) for i in blocks]

    def position_ids(self, batch: TokenBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return batch.segments.positions

    def forward(self, batch: TokenBatch) -> T:
        ops = self.ops
        token_ids, positions = ops.ids(batch.token_ids), ops.ids(self.position_ids(batch))
        if batch.type_ids is None:
            x = ops.embed((self.words, self.untyped_positions), (token_ids, positions))
        else:
            x = ops.embed((self.words, self.positions, self.types), (token_ids, positions, ops.ids(batch.type_ids)))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, batch.segments)
        return x

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(
            weights, "bert.pooler.dense", "classifier", config.integer("hidden_size"), config.num_labels, "tanh"
        )
