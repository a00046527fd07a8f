"""The parts of a decoder block: normalisation, attention over KV blocks, gated feed-forward.

A linear map stands at the beginning and at the end of attention and of feed-forward. The norm in front goes into the
first one (`Ops.normed_linear`), and the last one adds to the sum that runs through the layers: backends fuse both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple

from archerfish.kernels.batches import T
from archerfish.kernels.ops import (
    Activation,
    HeadShape,
    KVLayer,
    LinearWeight,
    NormWeights,
    Ops,
    PagedBatch,
    Rotary,
    Rotation,
)
from archerfish.layers.weights import Weights


class Norm(ABC, Generic[T]):
    """What stands in front of a product, or behind one."""

    ops: Ops[T]

    @abstractmethod
    def __call__(self, x: T, residual: T | None = None) -> tuple[T, T]:
        """The normalised sum of x and residual, and the sum."""

    def linear(
        self, x: T, weight: LinearWeight[T], *, residual: T | None = None, gate: Activation | None = None
    ) -> tuple[T, T]:
        """A product with the normalised sum of x and residual, gated where a gate is given; and the sum."""
        x, total = self(x, residual)
        return self.ops.linear(x, weight) if gate is None else self.ops.gated_linear(x, weight, gate), total


class RMSNorm(Norm[T]):
    """plus is added to the stored weight: Gemma keeps it as a difference from 1. times: a factor of the result."""

    def __init__(
        self, weights: Weights[T], name: str, width: int, eps: float, plus: float = 0.0, times: float = 1.0
    ) -> None:
        self.ops: Ops[T] = weights.ops
        self.weight, self.eps = weights.vector(f"{name}.weight", width, plus=plus, times=times), eps

    def __call__(self, x: T, residual: T | None = None) -> tuple[T, T]:
        return self.ops.rms_norm(x, self.weight, self.eps, residual=residual)

    def linear(
        self, x: T, weight: LinearWeight[T], *, residual: T | None = None, gate: Activation | None = None
    ) -> tuple[T, T]:
        return self.ops.normed_linear(x, self.weight, self.eps, weight, residual=residual, gate=gate)


class LayerNorm(Norm[T]):
    def __init__(self, ops: Ops[T], norm: NormWeights[T]) -> None:
        self.ops, self.norm = ops, norm

    def __call__(self, x: T, residual: T | None = None) -> tuple[T, T]:
        total = x if residual is None else self.ops.add(x, residual)
        return self.ops.layer_norm(total, self.norm), total


class NoNorm(Norm[T]):
    """In place of a norm that an architecture does not have."""

    def __init__(self, ops: Ops[T]) -> None:
        self.ops: Ops[T] = ops

    def __call__(self, x: T, residual: T | None = None) -> tuple[T, T]:
        total = x if residual is None else self.ops.add(x, residual)
        return total, total


class Attention(Generic[T]):
    """Queries, keys and values in one product, attention over the sequence's blocks, and the product that joins the
    heads."""

    def __init__(
        self,
        weights: Weights[T],
        width: int,
        heads: HeadShape,
        rotary: Rotary[T] | None,
        *,
        is_fused: bool = False,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        q_norm: T | None = None,
        k_norm: T | None = None,
        eps: float = 0.0,
        has_sinks: bool = False,
    ) -> None:
        """is_fused: the checkpoint itself has one tensor, qkv_proj. Biases as in `Weights.linear`, norms as in
        `Rotation`, sinks as in `Ops.attention`."""
        self.ops: Ops[T] = weights.ops
        queries, keys = self.ops.ranks.heads(heads.num_heads, heads.num_kv_heads)
        self.heads = heads._replace(num_heads=queries.size, num_kv_heads=keys.size)
        self.rotation = Rotation(rotary, q_norm, k_norm, eps)
        self.sinks = weights.vector("sinks", queries) if has_sinks else None
        queries, keys = queries.times(heads.head_dim), keys.times(heads.head_dim)
        names = "qkv_proj" if is_fused else ("q_proj", "k_proj", "v_proj")
        self.qkv = weights.linear(names, (queries, keys, keys), width, bias=qkv_bias, is_sensitive=True)
        self.out = weights.linear("o_proj", width, queries, bias=out_bias)


class MLP(ABC, Generic[T]):
    """A feed-forward of two products, of which one gives the hidden units and `down` takes them."""

    down: LinearWeight[T]

    @abstractmethod
    def hidden(self, norm: Norm[T], x: T, residual: T | None) -> tuple[T, T]:
        """The hidden units of the normalised sum of x and residual, and the sum."""


class GatedMLP(MLP[T]):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        weights: Weights[T],
        width: int,
        feed_forward: int,
        activation: Activation,
        *,
        is_fused: bool = False,
        bias: bool | None = None,
    ) -> None:
        """is_fused: the checkpoint itself has one tensor, gate_up_proj."""
        self.activation: Activation = activation
        unit = weights.cut_inputs("down_proj", feed_forward)
        hidden = weights.ops.ranks.part(feed_forward, unit, "hidden units")
        names = "gate_up_proj" if is_fused else ("gate_proj", "up_proj")
        self.gate_up = weights.linear(names, (hidden, hidden), width, bias=bias)
        self.down = weights.linear("down_proj", width, hidden, bias=bias)

    def hidden(self, norm: Norm[T], x: T, residual: T | None) -> tuple[T, T]:
        return norm.linear(x, self.gate_up, residual=residual, gate=self.activation)


class PlainMLP(MLP[T]):
    """down(activation(up(x))), as in GPT-2, whose names for them these are."""

    def __init__(
        self, weights: Weights[T], width: int, feed_forward: int, activation: Activation, *, bias: bool | None = None
    ) -> None:
        self.ops: Ops[T] = weights.ops
        self.activation: Activation = activation
        hidden = weights.ops.ranks.part(feed_forward, weights.cut_inputs("c_proj", feed_forward), "hidden units")
        self.up = weights.linear("c_fc", hidden, width, bias=bias)
        self.down = weights.linear("c_proj", width, hidden, bias=bias)

    def hidden(self, norm: Norm[T], x: T, residual: T | None) -> tuple[T, T]:
        x, total = norm(x, residual)
        return self.ops.linear(x, self.up, activation=self.activation), total


class BlockNorms(NamedTuple, Generic[T]):
    """Norms before attention and feed-forward, and after them in architectures that have those."""

    before_attention: Norm[T]
    before_mlp: Norm[T]
    after_attention: Norm[T] | None = None
    after_mlp: Norm[T] | None = None


class DecoderBlock(Generic[T]):
    """Attention and feed-forward, each of a normalised input and added to the sum that runs through the layers
    (pre-norm).

    A block takes and gives this sum, and None; or its last result and the sum without it, the addition being left to
    the next norm. Any other feed-forward is a function of the normalised input.
    """

    def __init__(self, attention: Attention[T], mlp: MLP[T] | Callable[[T], T], norms: BlockNorms[T]) -> None:
        self.ops: Ops[T] = attention.ops
        self.attention = attention
        self.mlp = mlp
        self.norms = norms

    def __call__(
        self, x: T, residual: T | None, batch: PagedBatch[T], kv: KVLayer[T], kept_rows: T | None = None
    ) -> tuple[T, T | None]:
        """kept_rows: all that is wanted of the result, where only keys and values of the others matter."""
        ops = self.ops
        norms = self.norms
        attention = self.attention
        mlp = self.mlp
        x, total = norms.before_attention.linear(x, attention.qkv, residual=residual)
        x = ops.store_and_attend(x, kv, batch, attention.heads, attention.rotation, sinks=attention.sinks)
        if kept_rows is not None:
            x, total = ops.keep_rows(kept_rows, x, total)
        if norms.after_attention is None:
            x, residual = ops.linear(x, attention.out, residual=total), None
        else:
            x, residual = norms.after_attention(ops.linear(x, attention.out))[0], total
        if not isinstance(mlp, MLP):
            x, total = norms.before_mlp(x, residual)
            x = mlp(x)
        else:
            x, total = mlp.hidden(norms.before_mlp, x, residual)
            if norms.after_mlp is None:
                return ops.linear(x, mlp.down, residual=total), None
            x = ops.linear(x, mlp.down)
        return (x if norms.after_mlp is None else norms.after_mlp(x)[0]), total
