"""DistilBERT."""

from __future__ import annotations

from archerfish.kernels.ops import T
from archerfish.layers.encoder import BlockNames, BlockShape, ClassifierHead, EncoderBlock, LayerNorm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.encoder import Encoder, TokenBatch

NAMES = BlockNames(
    query="attention.q_lin", key="attention.k_lin", value="attention.v_lin",
    attention_out="attention.out_lin", attention_norm="sa_layer_norm",
    up="ffn.lin1", down="ffn.lin2", output_norm="output_layer_norm",
)


class DistilBertEncoder(Encoder[T]):
    prefix = "distilbert"
    is_recordable = True

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        shape = self.shape
        embeddings = weights.scope("embeddings")
        self.words = embeddings.table("word_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.positions = embeddings.table(
            "position_embeddings.weight", config.integer("max_position_embeddings"), shape.width
        )
        self.norm = LayerNorm(embeddings, "LayerNorm", shape.width, shape.eps)
        layers = range(config.integer("n_layers"))
        self.blocks = [EncoderBlock(weights.scope(f"transformer.layer.{i}"), shape, NAMES) for i in layers]

    def forward(self, batch: TokenBatch) -> T:
        ops = self.ops
        ids = (ops.ids(batch.token_ids), ops.ids(batch.segments.positions))
        x = self.norm(ops.embed((self.words, self.positions), ids))
        for block in self.blocks:
            x = block(x, batch.segments)
        return x

    @classmethod
    def block_shape(cls, config: Config) -> BlockShape:
        return config.block_shape("dim", "n_heads", "hidden_dim", "activation")

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(weights, "pre_classifier", "classifier", config.integer("dim"), config.num_labels, "relu")
