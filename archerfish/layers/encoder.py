"""The transformer blocks of encoders, and the heads on top of them."""

from __future__ import annotations

from typing import Generic, NamedTuple

from archerfish.kernels.batches import Segments, T
from archerfish.kernels.ops import Activation, HeadShape, LinearWeight, NormWeights, Ops, Pooling, Rotary, Rotation
from archerfish.kernels.ranks import Part
from archerfish.layers.weights import Weights


class BlockShape(NamedTuple):
    """Sizes of a block and what it computes."""

    width: int
    num_heads: int
    feed_forward: int
    activation: Activation
    eps: float
    has_norm_bias: bool = True

    def heads(self, window: int = 0) -> HeadShape:
        """Of attention in both directions."""
        head_dim = self.width // self.num_heads
        return HeadShape(self.num_heads, self.num_heads, head_dim, head_dim**-0.5, window, is_causal=False)


class BlockNames(NamedTuple):
    """What an architecture calls the parts of a block. One name for several parts: a tensor that holds them."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str
    gate: str = ""  # of a gated feed-forward
    is_up_first: bool = False  # in a tensor that holds gate and up


class EncoderBlock(Generic[T]):
    """Self-attention and feed-forward, each followed by residual and normalisation (post-norm)."""

    def __init__(
        self,
        weights: Weights[T],
        shape: BlockShape,
        names: BlockNames,
        rotary: Rotary[T] | None = None,
        window: int = 0,
    ) -> None:
        self.ops: Ops[T] = weights.ops
        self.shape = shape
        self.heads = shape.heads(window)
        self.rotary = rotary
        width, hidden = shape.width, shape.feed_forward
        if names.query == names.key:
            self.qkv = weights.linear(names.query, (width,) * 3, width, is_sensitive=True)
        else:
            self.qkv = weights.linear((names.query, names.key, names.value), width, width, is_sensitive=True)
        self.attention_out = weights.linear(names.attention_out, width, width)
        self.attention_norm = weights.layer_norm(names.attention_norm, width, shape.eps, has_bias=shape.has_norm_bias)
        self.is_gated = bool(names.gate)
        self.up = gate_and_up(weights, names, width, hidden) if names.gate else weights.linear(names.up, hidden, width)
        self.down = weights.linear(names.down, width, hidden)
        self.output_norm = weights.layer_norm(names.output_norm, width, shape.eps, has_bias=shape.has_norm_bias)

    def attend(self, x: T, segments: Segments, bias: T | None) -> T:
        qkv = self.ops.linear(x, self.qkv)
        if self.rotary is not None:
            qkv = self.ops.rotated(qkv, self.ops.tensor(segments.positions), self.heads, Rotation(self.rotary))
        return self.ops.attention(qkv, segments, self.heads, bias=bias)

    def spread(self, x: T) -> T:
        """The inputs of the last product."""
        if self.is_gated:
            return self.ops.gated_linear(x, self.up, self.shape.activation)
        return self.ops.linear(x, self.up, activation=self.shape.activation)

    def __call__(self, x: T, segments: Segments, bias: T | None = None) -> T:
        ops = self.ops  # nested calls: what has been used is freed before the next product asks for memory
        x = ops.linear_layer_norm(self.attend(x, segments, bias), self.attention_out, x, self.attention_norm)
        return ops.linear_layer_norm(self.spread(x), self.down, x, self.output_norm)


class PreNormBlock(EncoderBlock[T]):
    """Self-attention and feed-forward of normalised inputs, each added to the sum that runs through the layers."""

    def __init__(
        self,
        weights: Weights[T],
        shape: BlockShape,
        names: BlockNames,
        rotary: Rotary[T] | None,
        window: int,
        *,
        is_first: bool,
    ) -> None:
        """is_first: it has no norm in front, because the embeddings are normalised."""
        names = names._replace(attention_norm=names.output_norm) if is_first else names
        super().__init__(weights, shape, names, rotary, window)
        self.is_first = is_first

    def __call__(self, x: T, segments: Segments, bias: T | None = None) -> T:
        ops = self.ops
        normed = x if self.is_first else ops.layer_norm(x, self.attention_norm)
        x = ops.linear(self.attend(normed, segments, bias), self.attention_out, residual=x)
        del normed
        return ops.linear(self.spread(ops.layer_norm(x, self.output_norm)), self.down, residual=x)


def gate_and_up(weights: Weights[T], names: BlockNames, width: int, hidden: int) -> LinearWeight[T]:
    """One product that gives the gate, and behind it what it multiplies."""
    if names.gate != names.up:
        return weights.linear((names.gate, names.up), hidden, width)
    if not names.is_up_first:
        return weights.linear(names.up, (hidden, hidden), width)
    parts = Part(hidden, 2 * hidden, 2 * hidden), Part(0, hidden, 2 * hidden)
    return weights.linear((names.up, names.up), parts, width)


class ClassifierHead(Generic[T]):
    """Scores from one row for each sequence: one dense layer with an activation and maybe a norm, then one per
    label."""

    def __init__(
        self,
        weights: Weights[T],
        dense: str,
        out: str,
        width: int,
        labels: int | tuple[Part, ...],
        activation: Activation,
        *,
        norm: NormWeights[T] | None = None,
        pooling: Pooling = "cls",
    ) -> None:
        """dense: empty where there is no such layer. labels: how many, or which rows of a larger matrix. pooling: what
        becomes the row."""
        self.ops, self.pooling = weights.ops, pooling
        self.dense = weights.linear(dense, width, width) if dense else None
        self.norm = norm
        names = out if isinstance(labels, int) else (out,) * len(labels)
        self.out = weights.linear(names, labels, width, is_sensitive=True)
        self.activation: Activation = activation

    def __call__(self, x: T) -> T:
        if self.dense is not None:
            x = self.ops.linear(x, self.dense, activation=self.activation)
        if self.norm is not None:
            x = self.ops.layer_norm(x, self.norm)
        return self.ops.logits(x, self.out)


class MaskedHead(Generic[T]):
    """Scores over the vocabulary for each token, as for a word that was masked."""

    def __init__(
        self, weights: Weights[T], names: tuple[str, ...], shape: BlockShape, table: str, vocab_size: int
    ) -> None:
        """names: of the dense layer, its norm, the map onto the vocabulary (whose matrix may be the lookup table), its
        bias."""
        self.ops: Ops[T] = weights.ops
        self.activation: Activation = shape.activation
        dense, norm, out, bias = names
        self.dense = weights.linear(dense, shape.width, shape.width)
        self.norm = weights.layer_norm(norm, shape.width, shape.eps, has_bias=shape.has_norm_bias)
        self.out = weights.vocabulary(out if weights.has(f"{out}.weight") else table, bias, vocab_size, shape.width)

    def __call__(self, x: T) -> T:
        x = self.ops.layer_norm(self.ops.linear(x, self.dense, activation=self.activation), self.norm)
        return self.ops.logits(x, self.out)
