"""RWKV-7 ("Goose"): every layer mixes a token with the one before it, and with a matrix of state for each head.

With x the sum that runs through the layers, and for each factor m: shift_m(h) = h + (h of the token before - h) * m,

    time mix       h = norm(x)
                   r, k, v = receptance(shift_r(h)), key(shift_k(h)), value(shift_v(h))
                   w, a, g, u = decay(shift_w(h)), rate(shift_a(h)), gate(shift_g(h)), value_mix(shift_v(h))     (low rank)
                   x = x + out(heads(r, w, k, v, a, g, u, v of the first layer))
    channel mix    x = x + value(relu(key(shift_k(norm(x))))^2)

`heads` is the operation `RecurrentOps.mix_heads`. With s the logistic function, it computes for each head

    v = v + (first v - v) s(u)        z = normalised(k k_k)          k = k (1 + (s(a) - 1) k_a)        w = exp(-e^-0.5 s(w))
    S = S diag(w) - (S z) (z s(a))^T + v k^T                         y = (group_norm(S r) + (r . k r_k) v) g

A backend may compute a whole layer in kernels of its own (`RecurrentOps.fused_block`), which are tested against this file.

In a quantised format the wide ends of low ranks stay plain: they are a fiftieth of all weights, and would add more to the error
of logits than the narrow ends do.

Tensors have the names of Hugging Face's files. The norm of the embedding (ln0) is not here: the reader of a checkpoint applies
it to the table, once (`store/rwkv_source.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import Activation, NormWeights, Ops, T
from archerfish.kernels.recurrent import (
    BlockWeights,
    ChannelWeights,
    HeadInputs,
    HeadWeights,
    LowRankWeights,
    RecurrentBatch,
    RecurrentOps,
    StateLayer,
    StateShape,
    TimeWeights,
)
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ModelAdapter
from archerfish.models.config import Config

MIXES = "rwkvag"  # what the time mix computes from a token and the one before it, in this order
HEAD_DIM = 64
NORM_EPS = 1e-5  # where the configuration does not say
HEAD_NORM_EPS = 64e-5  # for heads of any size, and independent of the other norms
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}
UNBOUNDED = 1 << 20  # tokens: a state does not grow, so that a model's length is no more than what it was trained for


class Rwkv7Model(ModelAdapter[T]):
    gives_kept_rows: ClassVar[bool] = True

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        shape, vocab_size = self.memory_shape(config), self.vocab_size(config)
        body = weights.scope("model")
        self.embedding = body.table("embeddings.weight", vocab_size, shape.width)
        self.blocks = [Rwkv7Block(body.scope(f"layers.{i}"), config, shape, i) for i in range(shape.num_layers)]
        self.norm = body.layer_norm("norm", shape.width, config.number("norm_eps", NORM_EPS))
        self.head = weights.linear("lm_head", vocab_size, shape.width, bias=False, is_sensitive=True)

    def forward(self, batch: RecurrentBatch[T], layers: Sequence[StateLayer[T]]) -> T:
        x, first_value = self.ops.lookup(self.embedding, batch.token_ids), None
        last = self.blocks[-1]
        for block, layer in zip(self.blocks, layers, strict=True):
            x, first_value = block(x, first_value, batch, layer, batch.kept_rows if block is last else None)
        return self.ops.layer_norm(x, self.norm)

    def logits(self, hidden: T) -> T:
        return self.ops.logits(hidden, self.head)

    @classmethod
    def memory_shape(cls, config: Config) -> StateShape:
        width, head_dim = config.integer("hidden_size"), config.integer("head_dim", HEAD_DIM)
        if not head_dim or width % head_dim:
            raise UnsupportedModelError(f"A width of {width} does not divide into heads of {head_dim}.")
        return StateShape(config.integer("num_hidden_layers"), width // head_dim, head_dim)

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return config.integer("max_position_embeddings", UNBOUNDED)


class Rwkv7Block(Generic[T]):
    """Time mix and channel mix, each of a normalised input and added to the sum that runs through the layers."""

    def __init__(self, weights: Weights[T], config: Config, shape: StateShape, layer: int) -> None:
        self.ops: Ops[T] = weights.ops
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        eps = config.number("norm_eps", NORM_EPS)
        width, ffn = shape.width, weights.scope("ffn")
        feed_forward = config.integer("intermediate_size", 4 * width)
        time_norm, channel_norm = (weights.layer_norm(name, width, eps) for name in ("attn_norm", "ffn_norm"))
        self.weights = BlockWeights(
            time=time_weights(weights.scope("attn"), time_norm, config, shape, layer),
            channel=ChannelWeights(
                norm=channel_norm, factor=ffn.vector("x_k", width), key=ffn.linear("key", feed_forward, width, bias=False),
                value=ffn.linear("value", width, feed_forward, bias=False),
            ),
        )

    def __call__(
        self, x: T, first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None
    ) -> tuple[T, T]:
        """The sum with both mixes, and the first layer's values, which later layers mix into theirs.

        kept_rows: the only rows of the sum that are wanted; the states are those of all rows.
        """
        fused = self.recurrent.fused_block(x, first_value, self.weights, batch, layer) if kept_rows is None else None
        if fused is None:
            x, value = self.mix_time(x, first_value, batch, layer)
            x = self.mix_channels(x, batch, layer, kept_rows)
        else:
            x, value = fused
        return x, value if first_value is None else first_value

    def mix_time(self, x: T, first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T]) -> tuple[T, T]:
        """The sum with the time mix, and the mix's values, before any of the first layer's."""
        ops, weights = self.ops, self.weights.time
        h = ops.layer_norm(x, weights.norm)
        r, w, k, v, a, g = self.recurrent.shift(h, layer.time_input, batch, weights.factors)
        value = ops.linear(v, weights.value)
        inputs = HeadInputs(
            receptance=ops.linear(r, weights.receptance), decay=self.low_rank(w, weights.decay),
            key=ops.linear(k, weights.key), value=value, rate=self.low_rank(a, weights.rate),
            gate=self.low_rank(g, weights.gate), first_value=first_value,
            value_mix=None if weights.value_mix is None else self.low_rank(v, weights.value_mix),
        )
        mixed = self.recurrent.mix_heads(inputs, weights.heads, layer.wkv, batch)
        return ops.linear(mixed, weights.out, residual=x), value

    def mix_channels(self, x: T, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None) -> T:
        """The sum with the channel mix."""
        ops, weights = self.ops, self.weights.channel
        h = ops.layer_norm(x, weights.norm)
        (k,) = self.recurrent.shift(h, layer.channel_input, batch, weights.factor)
        if kept_rows is not None:
            k, x = ops.rows(k, kept_rows), ops.rows(x, kept_rows)
        return ops.linear(ops.linear(k, weights.key, activation="relu_squared"), weights.value, residual=x)

    def low_rank(self, x: T, weights: LowRankWeights[T]) -> T:
        return self.ops.linear(self.ops.linear(x, weights.down, activation=weights.activation), weights.up)


def low_rank_weights(
    weights: Weights[T], width: int, rank: int, *, activation: Activation = "none", bias: bool = True
) -> LowRankWeights[T]:
    down = weights.linear("lora.0", rank, width, bias=False)
    return LowRankWeights(down, weights.linear("lora.2", width, rank, bias=bias, is_plain=True), activation)


def time_weights(weights: Weights[T], norm: NormWeights[T], config: Config, shape: StateShape, layer: int) -> TimeWeights[T]:
    width = shape.width
    receptance, key, value, out = (weights.linear(f"{name}_proj", width, width, bias=False) for name in "rkvo")
    ranks = {name: config.integer(RANKS[name]) for name in ("wavg" if layer else "wag")}
    return TimeWeights(
        norm=norm, factors=weights.ops.concat([weights.vector(f"x_{name}", width) for name in MIXES]),
        receptance=receptance, key=key, value=value, out=out,
        decay=low_rank_weights(weights.scope("w_lora"), width, ranks["w"], activation="tanh"),
        rate=low_rank_weights(weights.scope("a_lora"), width, ranks["a"]),
        gate=low_rank_weights(weights.scope("g_lora"), width, ranks["g"], activation="sigmoid", bias=False),
        value_mix=low_rank_weights(weights.scope("v_lora"), width, ranks["v"]) if layer else None,
        heads=HeadWeights(
            removal=weights.vector("k_k", width), replacement=weights.vector("k_a", width),
            bonus=weights.vector("r_k", width), norm=weights.vector("g_norm.weight", width),
            norm_bias=weights.vector("g_norm.bias", width), eps=HEAD_NORM_EPS,
        ),
    )
