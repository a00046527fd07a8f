"""RWKV-7 ("Goose"): every layer mixes a token with the one before it, and with a matrix of state for each head.

Of weights in int8 only the wide ends of low ranks stay as they are: they are a fiftieth of all, and what they add to the error
of logits is more than the narrow ends do.

Tensors have the names of Hugging Face's files. The norm of the embedding (ln0) is not here: whoever reads a checkpoint applies
it to the table, once (`store/rwkv_source.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, Literal

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import T
from archerfish.kernels.recurrent import (
    ChannelWeights,
    HeadWeights,
    LowRankWeights,
    NormWeights,
    RecurrentBatch,
    RecurrentOps,
    StateLayer,
    StateShape,
    Stream,
    TimeWeights,
)
from archerfish.layers.encoder import LayerNorm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.recurrent import RecurrentAdapter
from archerfish.types import INT8

MIXES = "rwkvag"  # what the time mix computes from a token and the one before it, in this order
HEAD_DIM = 64
HEAD_NORM_EPS = 64e-5  # of 64 dimensions, whatever the head's size and the other norms
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}


class Rwkv7Model(RecurrentAdapter[T]):
    gives_kept_rows: ClassVar[bool] = True
    weight_formats: ClassVar[tuple[str, ...]] = ("auto", INT8)

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        shape, vocab_size = self.memory_shape(config), self.vocab_size(config)
        eps = config.number("norm_eps", 1e-5)
        body = weights.scope("model")
        self.embedding = body.table("embeddings.weight", vocab_size, shape.width)
        self.blocks = [Rwkv7Block(body.scope(f"layers.{i}"), config, shape, i) for i in range(shape.num_layers)]
        self.norm = LayerNorm(body, "norm", shape.width, eps)
        self.head = weights.linear("lm_head", vocab_size, shape.width, bias=False)

    def forward(self, batch: RecurrentBatch[T], layers: Sequence[StateLayer[T]]) -> T:
        stream, first_value = Stream(self.ops.lookup(self.embedding, batch.token_ids)), None
        last = self.blocks[-1]
        for block, layer in zip(self.blocks, layers, strict=True):
            stream, first_value = block(stream, first_value, batch, layer, batch.kept_rows if block is last else None)
        return self.norm(self.recurrent.total(stream))

    def logits(self, hidden: T) -> T:
        return self.ops.logits(hidden, self.head)

    @classmethod
    def memory_shape(cls, config: Config) -> StateShape:
        width, head_dim = config.integer("hidden_size"), config.integer("head_dim", HEAD_DIM)
        if not head_dim or width % head_dim:
            raise UnsupportedModelError(f"A width of {width} does not divide into heads of {head_dim}.")
        return StateShape(config.integer("num_hidden_layers"), width // head_dim, head_dim)


class Rwkv7Block(Generic[T]):
    """Time mix and channel mix, each of a normalised input and added to the stream that runs past it."""

    def __init__(self, weights: Weights[T], config: Config, shape: StateShape, layer: int) -> None:
        eps, width = config.number("norm_eps", 1e-5), shape.width
        time_norm, channel_norm = (norm_weights(weights, name, width, eps) for name in ("attn_norm", "ffn_norm"))
        feed_forward = config.integer("intermediate_size", 4 * width)
        self.time_mix = TimeMix(weights.scope("attn"), time_norm, config, shape, layer)
        self.channel_mix = ChannelMix(weights.scope("ffn"), channel_norm, width, feed_forward)

    def __call__(
        self, stream: Stream[T], first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None
    ) -> tuple[Stream[T], T]:
        """kept_rows: all that is wanted of the result, where only the states of the others matter."""
        stream, first_value = self.time_mix(stream, first_value, batch, layer)
        return self.channel_mix(stream, batch, layer, kept_rows), first_value


def norm_weights(weights: Weights[T], name: str, width: int, eps: float) -> NormWeights[T]:
    scope = weights.scope(name)
    return NormWeights(scope.vector("weight", width), scope.vector("bias", width), eps)


def low_rank(
    weights: Weights[T], width: int, rank: int, *, activation: Literal["none", "tanh", "sigmoid"] = "none", bias: bool = True
) -> LowRankWeights[T]:
    down = weights.linear("lora.0", rank, width, bias=False)
    up = weights.linear("lora.2", width, rank, bias=bias, is_quantized=False)
    return LowRankWeights(down, up, activation)


class TimeMix(Generic[T]):
    def __init__(self, weights: Weights[T], input_norm: NormWeights[T], config: Config, shape: StateShape, layer: int) -> None:
        width = shape.width
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        factors = weights.ops.concat([weights.vector(f"x_{name}", width) for name in MIXES])
        receptance, key, value, out = (weights.linear(f"{name}_proj", width, width, bias=False) for name in "rkvo")
        ranks = {name: config.integer(RANKS[name]) for name in ("wavg" if layer else "wag")}
        self.weights = TimeWeights(
            norm=input_norm, factors=factors, receptance=receptance, key=key, value=value, out=out,
            decay=low_rank(weights.scope("w_lora"), width, ranks["w"], activation="tanh"),
            rate=low_rank(weights.scope("a_lora"), width, ranks["a"]),
            gate=low_rank(weights.scope("g_lora"), width, ranks["g"], activation="sigmoid", bias=False),
            value_mix=low_rank(weights.scope("v_lora"), width, ranks["v"]) if layer else None,
            heads=HeadWeights(
                removal=weights.vector("k_k", width), replacement=weights.vector("k_a", width),
                bonus=weights.vector("r_k", width), norm=weights.vector("g_norm.weight", width),
                norm_bias=weights.vector("g_norm.bias", width), eps=HEAD_NORM_EPS,
            ),
        )

    def __call__(
        self, stream: Stream[T], first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T]
    ) -> tuple[Stream[T], T]:
        """Added to the stream; and the first layer's values, which later layers mix into theirs."""
        stream, value = self.recurrent.mix_time(stream, self.weights, first_value, batch, layer)
        return stream, value if first_value is None else first_value


class ChannelMix(Generic[T]):
    def __init__(self, weights: Weights[T], input_norm: NormWeights[T], width: int, feed_forward: int) -> None:
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        self.weights = ChannelWeights(
            norm=input_norm, factor=weights.vector("x_k", width), key=weights.linear("key", feed_forward, width, bias=False),
            value=weights.linear("value", width, feed_forward, bias=False),
        )

    def __call__(
        self, stream: Stream[T], batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None
    ) -> Stream[T]:
        return self.recurrent.mix_channels(stream, self.weights, batch, layer, kept_rows)
