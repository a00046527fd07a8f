"""The parts of a decoder block: normalisation, attention over KV blocks, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from archerfish.kernels.ops import Activation, HeadShape, KVLayer, LinearWeight, Ops, PagedBatch, Rotary, T
from archerfish.layers.weights import Weights


class RMSNorm(Generic[T]):
    """plus is added to the stored weight: Gemma keeps it as a difference from 1."""

    def __init__(self, weights: Weights[T], name: str, width: int, eps: float, plus: float = 0.0) -> None:
        self.ops: Ops[T] = weights.ops
        self.weight, self.eps = weights.vector(f"{name}.weight", width, plus=plus), eps

    def __call__(self, x: T, residual: T | None = None) -> tuple[T, T]:
        """The normalised sum of x and residual, and the sum."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual=residual)

    def linear(self, x: T, residual: T | None, weight: LinearWeight[T], *, gate: Activation | None = None) -> tuple[T, T]:
        """A linear map of the normalised sum of x and residual, gated where a gate is given, and the sum."""
        return self.ops.normed_linear(x, self.weight, self.eps, weight, residual=residual, gate=gate)


@dataclass(frozen=True)
class HeadNorms(Generic[T]):
    """Normalisation of each head of queries and keys."""

    query: T
    key: T
    eps: float


class Attention(Generic[T]):
    """Queries, keys and values in one product, attention over the sequence's blocks, and the product that joins the heads."""

    def __init__(
        self, weights: Weights[T], width: int, heads: HeadShape, rotary: Rotary[T] | None, *,
        is_fused: bool = False, qkv_bias: bool | None = None, out_bias: bool | None = None, norms: HeadNorms[T] | None = None,
    ) -> None:
        """is_fused: the checkpoint itself has one tensor, qkv_proj. Biases as in `Weights.linear`."""
        self.ops: Ops[T] = weights.ops
        self.heads, self.rotary, self.norms = heads, rotary, norms
        queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        if is_fused:
            self.qkv = weights.linear("qkv_proj", queries + 2 * keys, width, bias=qkv_bias)
        else:
            self.qkv = weights.linear(("q_proj", "k_proj", "v_proj"), (queries, keys, keys), width, bias=qkv_bias)
        self.out = weights.linear("o_proj", width, queries, bias=out_bias)

    def __call__(self, x: T, batch: PagedBatch[T], kv: KVLayer[T]) -> T:
        return self.ops.linear(self._attend(self.ops.linear(x, self.qkv), batch, kv), self.out)

    def of_sum(
        self, norm: RMSNorm[T], x: T, residual: T | None, batch: PagedBatch[T], kv: KVLayer[T], *, adds: bool,
        kept_rows: T | None = None,
    ) -> tuple[T, T | None]:
        """Attention of the normalised sum of x and residual, and that sum; or the two added up, and None."""
        x, total = norm.linear(x, residual, self.qkv)
        x = self._attend(x, batch, kv)
        if kept_rows is not None:
            x, total = self.ops.rows(x, kept_rows), self.ops.rows(total, kept_rows)
        return (self.ops.linear(x, self.out, residual=total), None) if adds else (self.ops.linear(x, self.out), total)

    def _attend(self, qkv: T, batch: PagedBatch[T], kv: KVLayer[T]) -> T:
        norms = self.norms
        if norms is None:
            return self.ops.store_and_attend(qkv, kv, batch, self.heads, self.rotary)
        return self.ops.store_and_attend(
            qkv, kv, batch, self.heads, self.rotary, q_norm=norms.query, k_norm=norms.key, eps=norms.eps
        )


class GatedMLP(Generic[T]):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self, weights: Weights[T], width: int, feed_forward: int, activation: Activation, *,
        is_fused: bool = False, bias: bool | None = None,
    ) -> None:
        """is_fused: the checkpoint itself has one tensor, gate_up_proj."""
        self.ops: Ops[T] = weights.ops
        self.activation: Activation = activation
        if is_fused:
            self.gate_up = weights.linear("gate_up_proj", 2 * feed_forward, width, bias=bias)
        else:
            self.gate_up = weights.linear(("gate_proj", "up_proj"), feed_forward, width, bias=bias)
        self.down = weights.linear("down_proj", width, feed_forward, bias=bias)

    def __call__(self, x: T) -> T:
        ops = self.ops  # nested calls: what has been used is freed before the next product asks for memory
        return ops.linear(ops.gated(ops.linear(x, self.gate_up), self.activation), self.down)

    def of_sum(self, norm: RMSNorm[T], x: T, residual: T | None, *, adds: bool) -> tuple[T, T | None]:
        """The feed-forward of the normalised sum of x and residual, and that sum; or the two added up, and None."""
        x, total = norm.linear(x, residual, self.gate_up, gate=self.activation)
        return (self.ops.linear(x, self.down, residual=total), None) if adds else (self.ops.linear(x, self.down), total)


@dataclass(frozen=True)
class BlockNorms(Generic[T]):
    """Norms before attention and feed-forward, and after them in architectures that have those."""

    before_attention: RMSNorm[T]
    before_mlp: RMSNorm[T]
    after_attention: RMSNorm[T] | None = None
    after_mlp: RMSNorm[T] | None = None


class DecoderBlock(Generic[T]):
    """Attention and feed-forward, each of a normalised input and added to the stream that runs past it (pre-norm).

    A block takes and gives its last result and the stream without it, the addition being left to the next norm; or the sum,
    and None. On a backend that fuses norms, the parts of this file take theirs into their first product and add the stream in
    their last; parts of other types are called as they are.
    """

    def __init__(self, attention: Attention[T], mlp: Callable[[T], T], norms: BlockNorms[T]) -> None:
        self.attention, self.mlp, self.norms = attention, mlp, norms
        self._fused_attention = attention if type(attention) is Attention and fuses(norms.before_attention) else None
        self._fused_mlp = mlp if type(mlp) is GatedMLP and fuses(norms.before_mlp) else None

    def __call__(
        self, x: T, residual: T | None, batch: PagedBatch[T], kv: KVLayer[T], kept_rows: T | None = None
    ) -> tuple[T, T | None]:
        """kept_rows: all that is wanted of the result, where only keys and values of the others matter."""
        norms = self.norms
        if self._fused_attention is not None:
            x, residual = self._fused_attention.of_sum(
                norms.before_attention, x, residual, batch, kv, adds=norms.after_attention is None, kept_rows=kept_rows
            )
        else:
            x, residual = norms.before_attention(x, residual)
            x = self.attention(x, batch, kv)
            if kept_rows is not None:
                rows = norms.before_attention.ops.rows
                x, residual = rows(x, kept_rows), rows(residual, kept_rows)
        if norms.after_attention is not None:
            x, _ = norms.after_attention(x)
        if self._fused_mlp is not None:
            x, residual = self._fused_mlp.of_sum(norms.before_mlp, x, residual, adds=norms.after_mlp is None)
        else:
            x, residual = norms.before_mlp(x, residual)
            x = self.mlp(x)
        if norms.after_mlp is not None:
            x, _ = norms.after_mlp(x)
        return x, residual


def fuses(norm: RMSNorm[T]) -> bool:
    return type(norm) is RMSNorm and norm.ops.fuses_norms
