"""RWKV-7 ("Goose"): every layer mixes a token with the one before it, and with a matrix of state for each head.

Tensors have the names of Hugging Face's files. The norm of the embedding (ln0) is not here: whoever reads a checkpoint applies
it to the table, once (`store/rwkv_source.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import Ops, T
from archerfish.kernels.recurrent import HeadInputs, HeadWeights, RecurrentBatch, RecurrentOps, StateLayer, StateShape
from archerfish.layers.encoder import LayerNorm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.recurrent import RecurrentAdapter

MIXES = "rwkvag"  # what the time mix computes from a token and the one before it, in this order
HEAD_DIM = 64
HEAD_NORM_EPS = 64e-5  # of 64 dimensions, whatever the head's size and the other norms
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}


class Rwkv7Model(RecurrentAdapter[T]):
    gives_kept_rows: ClassVar[bool] = True

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
        x, first_value = self.ops.lookup(self.embedding, batch.token_ids), None
        last = self.blocks[-1]
        for block, layer in zip(self.blocks, layers, strict=True):
            x, first_value = block(x, first_value, batch, layer, batch.kept_rows if block is last else None)
        return self.norm(x)

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
        eps = config.number("norm_eps", 1e-5)
        self.time_norm = LayerNorm(weights, "attn_norm", shape.width, eps)
        self.time_mix = TimeMix(weights.scope("attn"), config, shape, layer)
        self.channel_norm = LayerNorm(weights, "ffn_norm", shape.width, eps)
        self.channel_mix = ChannelMix(weights.scope("ffn"), shape.width, config.integer("intermediate_size", 4 * shape.width))

    def __call__(
        self, x: T, first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None
    ) -> tuple[T, T]:
        """kept_rows: all that is wanted of the result, where only the states of the others matter."""
        x, first_value = self.time_mix(self.time_norm(x), x, first_value, batch, layer)
        return self.channel_mix(self.channel_norm(x), x, batch, layer, kept_rows), first_value


class LowRank(Generic[T]):
    """up(activation(down(x))), the way between being narrow."""

    def __init__(self, weights: Weights[T], width: int, rank: int, *, activation: str = "none", bias: bool = True) -> None:
        self.ops: Ops[T] = weights.ops
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        self.activation = activation
        self.down = weights.linear("lora.0", rank, width, bias=False)
        self.up = weights.linear("lora.2", width, rank, bias=bias)

    def __call__(self, x: T) -> T:
        x = self.ops.linear(x, self.down, activation="tanh" if self.activation == "tanh" else "none")
        return self.ops.linear(self.recurrent.sigmoid(x) if self.activation == "sigmoid" else x, self.up)


class TimeMix(Generic[T]):
    def __init__(self, weights: Weights[T], config: Config, shape: StateShape, layer: int) -> None:
        width = shape.width
        self.ops: Ops[T] = weights.ops
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        self.factors = self.ops.concat([weights.vector(f"x_{name}", width) for name in MIXES])
        self.receptance, self.key, self.value, self.out = (
            weights.linear(f"{name}_proj", width, width, bias=False) for name in "rkvo"
        )
        ranks = {name: config.integer(RANKS[name]) for name in ("wavg" if layer else "wag")}
        self.decay = LowRank(weights.scope("w_lora"), width, ranks["w"], activation="tanh")
        self.rate = LowRank(weights.scope("a_lora"), width, ranks["a"])
        self.gate = LowRank(weights.scope("g_lora"), width, ranks["g"], activation="sigmoid", bias=False)
        self.value_mix = LowRank(weights.scope("v_lora"), width, ranks["v"]) if layer else None
        self.heads = HeadWeights(
            removal=weights.vector("k_k", width), replacement=weights.vector("k_a", width), bonus=weights.vector("r_k", width),
            norm=weights.vector("g_norm.weight", width), norm_bias=weights.vector("g_norm.bias", width), eps=HEAD_NORM_EPS,
        )

    def __call__(
        self, x: T, residual: T, first_value: T | None, batch: RecurrentBatch[T], layer: StateLayer[T]
    ) -> tuple[T, T]:
        """Added to the residual; and the first layer's values, which later layers mix into theirs."""
        ops = self.ops
        r, w, k, v, a, g = self.recurrent.shift(x, layer.time_input, batch, self.factors)
        value = ops.linear(v, self.value)
        inputs = HeadInputs(
            receptance=ops.linear(r, self.receptance), decay=self.decay(w), key=ops.linear(k, self.key), value=value,
            rate=self.rate(a), gate=self.gate(g), first_value=first_value,
            value_mix=None if self.value_mix is None else self.value_mix(v),
        )
        mixed = self.recurrent.mix_heads(inputs, self.heads, layer.wkv, batch)
        return ops.linear(mixed, self.out, residual=residual), value if first_value is None else first_value


class ChannelMix(Generic[T]):
    """value(relu(key(x))^2)."""

    def __init__(self, weights: Weights[T], width: int, feed_forward: int) -> None:
        self.ops: Ops[T] = weights.ops
        self.recurrent: RecurrentOps[T] = weights.ops.recurrent()
        self.factor = weights.vector("x_k", width)
        self.key = weights.linear("key", feed_forward, width, bias=False)
        self.value = weights.linear("value", width, feed_forward, bias=False)

    def __call__(self, x: T, residual: T, batch: RecurrentBatch[T], layer: StateLayer[T], kept_rows: T | None) -> T:
        (x,) = self.recurrent.shift(x, layer.channel_input, batch, self.factor)
        if kept_rows is not None:
            x, residual = self.ops.lookup(x, kept_rows), self.ops.lookup(residual, kept_rows)
        x = self.recurrent.square(self.ops.linear(x, self.key, activation="relu"))
        return self.ops.linear(x, self.value, residual=residual)
