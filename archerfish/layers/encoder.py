"""The transformer block that BERT, RoBERTa, DistilBERT and MPNet share, and the heads on top of it."""

from __future__ import annotations

from typing import Generic, NamedTuple

from archerfish.kernels.ops import Activation, Ops, Segments, T
from archerfish.layers.weights import Weights


class BlockShape(NamedTuple):
    """Sizes of a block and what it computes."""

    width: int
    num_heads: int
    feed_forward: int
    activation: Activation
    eps: float


class BlockNames(NamedTuple):
    """What an architecture calls the parts of a block."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


class EncoderBlock(Generic[T]):
    """Self-attention and feed-forward, each followed by residual and normalisation (post-norm)."""

    def __init__(self, weights: Weights[T], shape: BlockShape, names: BlockNames) -> None:
        self.ops: Ops[T] = weights.ops
        self.shape = shape
        width, hidden = shape.width, shape.feed_forward
        self.qkv = weights.linear((names.query, names.key, names.value), width, width, is_sensitive=True)
        self.attention_out = weights.linear(names.attention_out, width, width)
        self.attention_norm = weights.layer_norm(names.attention_norm, width, shape.eps)
        self.up = weights.linear(names.up, hidden, width)
        self.down = weights.linear(names.down, width, hidden)
        self.output_norm = weights.layer_norm(names.output_norm, width, shape.eps)

    def __call__(self, x: T, segments: Segments, bias: T | None = None) -> T:
        ops, shape = self.ops, self.shape  # nested calls: what has been used is freed before the next product asks for memory
        mixed = ops.attention(ops.linear(x, self.qkv), segments, shape.num_heads, bias=bias)
        x = ops.linear_layer_norm(mixed, self.attention_out, x, self.attention_norm)
        del mixed
        return ops.linear_layer_norm(ops.linear(x, self.up, activation=shape.activation), self.down, x, self.output_norm)


class ClassifierHead(Generic[T]):
    """Scores from the first token: one dense layer with an activation, then one per label."""

    def __init__(self, weights: Weights[T], dense: str, out: str, width: int, num_labels: int, activation: Activation) -> None:
        self.ops = weights.ops
        self.dense = weights.linear(dense, width, width)
        self.out = weights.linear(out, num_labels, width, is_sensitive=True)
        self.activation: Activation = activation

    def __call__(self, first_tokens: T) -> T:
        return self.ops.logits(self.ops.linear(first_tokens, self.dense, activation=self.activation), self.out)
