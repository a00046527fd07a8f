"""RWKV-7 ("Goose"): every layer mixes a token with the one before it, and with a matrix of state for each head.

With x the sum that runs through the layers, and for each factor m: shift_m(h) = h + (h of the token before - h) * m,

    time mix       h = norm(x)
                   r, k, v = receptance(shift_r(h)), key(shift_k(h)), value(shift_v(h))
                   w, a, g, u = decay(shift_w(h)), rate(shift_a(h)), gate(shift_g(h)), value_mix(shift_v(h))     (low
                   rank) x = x + out(heads(r, w, k, v, a, g, u, v of the first layer))
    channel mix    x = x + value(relu(key(shift_k(norm(x))))^2)

`heads` is the operation `RecurrentOps.mix_heads`. With s the logistic function, it computes for each head

    v = v + (first v - v) s(u)        z = normalised(k k_k)          k = k (1 + (s(a) - 1) k_a)        w = exp(-e^-0.5
    s(w)) S = S diag(w) - (S z) (z s(a))^T + v k^T                         y = (group_norm(S r) + (r . k r_k) v) g

A backend may compute a whole layer in kernels of its own (`RecurrentOps.fused_block`), which are tested against this
file.

In a quantised format the wide ends of low ranks stay plain: they are a fiftieth of all weights, and would add more to
the error of logits than the narrow ends do.

Tensors have the names of Hugging Face's files. The norm of the embedding (ln0) is not here: the reader of a checkpoint
applies it to the table, once (`store/rwkv_source.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.ops import Activation, NormWeights, Ops
from archerfish.kernels.ranks import ALONE, Part, Ranks
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
    can_divide: ClassVar[bool] = True

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        shape, vocab_size = self.memory_shape(config), self.vocab_size(config)
        body = weights.scope("model")
        ranks = self.ops.ranks
        self.width = shape.width
        self.embedding = body.table("embeddings.weight", vocab_size, shape.width) if ranks.is_first else None
        self.blocks = [Rwkv7Block(body.scope(f"layers.{i}"), config, shape, i) for i in ranks.layers(shape.num_layers)]
        self.value_width = own_channels(ranks, shape).size
        if ranks.is_last:
            self.norm = body.layer_norm("norm", shape.width, config.number("norm_eps", NORM_EPS))
            self.vocabulary = ranks.part(vocab_size, what="tokens")
            self.head = weights.linear("lm_head", self.vocabulary, shape.width, bias=False, is_sensitive=True)

    def forward(self, batch: RecurrentBatch[T], layers: Sequence[StateLayer[T]]) -> T:
        ops, num_rows = self.ops, batch.token_ids.shape[0]
        first_value: T | None = None
        if self.embedding is not None:
            x = ops.lookup(self.embedding, batch.token_ids)
        else:
            x = ops.ranks.receive(num_rows, self.width, ops.sum_dtype(self.width))
            first_value = ops.ranks.receive(num_rows, self.value_width, ops.activation_dtype or ops.dtype)
        last = self.blocks[-1] if ops.ranks.is_last else None
        for block, layer in zip(self.blocks, layers, strict=True):
            x, first_value = block(x, first_value, batch, layer, batch.kept_rows if block is last else None)
        if last is None:
            assert first_value is not None
            return self.pass_on(batch, x, first_value)
        return ops.layer_norm(x, self.norm)

    def logits(self, hidden: T) -> T:
        if not self.ops.ranks.is_last:
            return hidden
        found: T = self.ops.ranks.join(self.ops.logits(hidden, self.head), self.vocabulary)
        return found

    @classmethod
    def memory_shape(cls, config: Config, ranks: Ranks = ALONE) -> StateShape:
        width, head_dim = config.integer("hidden_size"), config.integer("head_dim", HEAD_DIM)
        if not head_dim or width % head_dim:
            raise UnsupportedModelError(f"A width of {width} does not divide into heads of {head_dim}.")
        layers, num_heads = ranks.layers(config.integer("num_hidden_layers")), width // head_dim
        own = ranks.heads(num_heads, num_heads)[0].size
        return StateShape(len(layers), own, head_dim, num_heads if own < num_heads else 0)

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
        hidden = weights.ops.ranks.part(feed_forward, ffn.cut_inputs("value", feed_forward), "hidden units")
        time_norm, channel_norm = (weights.layer_norm(name, width, eps) for name in ("attn_norm", "ffn_norm"))
        self.weights = BlockWeights(
            time=time_weights(weights.scope("attn"), time_norm, config, shape, layer),
            channel=ChannelWeights(
                norm=channel_norm,
                factor=ffn.vector("x_k", width),
                key=ffn.linear("key", hidden, width, bias=False),
                value=ffn.linear("value", width, hidden, bias=False),
            ),
        )

    def __call__(
        self, x: T, first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None
    ) -> tuple[T, T]:
        """The sum with both mixes, and the first layer's values, which later layers mix into theirs.

        kept_rows: the only rows of the sum that are wanted; the states are those of all rows.
        """
        can_fuse = kept_rows is None and self.ops.ranks.size == 1 and self.ops.adapted(self.weights.time.out) is None
        fused = self.recurrent.fused_block(x, first_value, self.weights, batch, layer) if can_fuse else None
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
            receptance=ops.linear(r, weights.receptance),
            decay=self.low_rank(w, weights.decay),
            key=ops.linear(k, weights.key),
            value=value,
            rate=self.low_rank(a, weights.rate),
            gate=self.low_rank(g, weights.gate),
            first_value=first_value,
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
            k, x = ops.keep_rows(kept_rows, k, x)
        return ops.linear(ops.linear(k, weights.key, activation="relu_squared"), weights.value, residual=x)

    def low_rank(self, x: T, weights: LowRankWeights[T]) -> T:
        return self.ops.linear(self.ops.linear(x, weights.down, activation=weights.activation), weights.up)


def own_channels(ranks: Ranks, shape: StateShape) -> Part:
    """Those of a rank's heads."""
    return ranks.heads(shape.num_heads, shape.num_heads)[0].times(shape.head_dim)


def low_rank_weights(
    weights: Weights[T], width: int, own: Part, rank: int, *, activation: Activation = "none", bias: bool = True
) -> LowRankWeights[T]:
    down = weights.linear("lora.0", rank, width, bias=False)
    return LowRankWeights(down, weights.linear("lora.2", own, rank, bias=bias, is_plain=True), activation)


def time_weights(
    weights: Weights[T], norm: NormWeights[T], config: Config, shape: StateShape, layer: int
) -> TimeWeights[T]:
    width = shape.width
    own = own_channels(weights.ops.ranks, shape)
    receptance, key, value = (weights.linear(f"{name}_proj", own, width, bias=False) for name in "rkv")
    out = weights.linear("o_proj", width, own, bias=False)
    ranks = {name: config.integer(RANKS[name]) for name in ("wavg" if layer else "wag")}
    return TimeWeights(
        norm=norm,
        factors=weights.ops.concat([weights.vector(f"x_{name}", width) for name in MIXES]),
        receptance=receptance,
        key=key,
        value=value,
        out=out,
        decay=low_rank_weights(weights.scope("w_lora"), width, own, ranks["w"], activation="tanh"),
        rate=low_rank_weights(weights.scope("a_lora"), width, own, ranks["a"]),
        gate=low_rank_weights(weights.scope("g_lora"), width, own, ranks["g"], activation="sigmoid", bias=False),
        value_mix=low_rank_weights(weights.scope("v_lora"), width, own, ranks["v"]) if layer else None,
        heads=HeadWeights(
            removal=weights.vector("k_k", own),
            replacement=weights.vector("k_a", own),
            bonus=weights.vector("r_k", own),
            norm=weights.vector("g_norm.weight", own),
            norm_bias=weights.vector("g_norm.bias", own),
            eps=HEAD_NORM_EPS,
        ),
    )
