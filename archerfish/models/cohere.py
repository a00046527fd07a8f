"""Cohere's Command R and Command R7B: attention and feed-forward of one input, and layer norms without biases."""

from __future__ import annotations

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.ops import KVLayer, PagedBatch, Rotary
from archerfish.layers.decoder import MLP, BlockNorms, DecoderBlock, LayerNorm, NoNorm, Norm
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel


class ParallelBlock(DecoderBlock[T]):
    """Attention and feed-forward take the same normalised input, and both add to the sum."""

    def __call__(
        self, x: T, residual: T | None, batch: PagedBatch[T], kv: KVLayer[T], kept_rows: T | None = None
    ) -> tuple[T, T | None]:
        ops = self.ops
        attention = self.attention
        mlp = self.mlp
        assert isinstance(mlp, MLP)
        normed, total = self.norms.before_attention(x, residual)
        x = ops.store_and_attend(ops.linear(normed, attention.qkv), kv, batch, attention.heads, attention.rotation)
        if kept_rows is not None:
            x, normed, total = ops.keep_rows(kept_rows, x, normed, total)
        total = ops.linear(x, attention.out, residual=total)
        return ops.linear(mlp.hidden(NoNorm(ops), normed, None)[0], mlp.down, residual=total), None


class CohereModel(LlamaModel[T]):
    ties_embeddings = is_interleaved = True
    norm_names = ("input_layernorm",)
    theta = 500_000.0

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        if config.flag("use_qk_norm"):
            hint = "Command R, R7B and A have none and are supported."
            raise UnsupportedModelError("Layer norms of queries and keys (use_qk_norm) are not supported.", hint=hint)
        super().__init__(weights, config, max_len)

    def block(self, weights: Weights[T], layer: int) -> DecoderBlock[T]:
        attention, mlp = self.attention(weights.scope("self_attn"), layer), self.mlp(weights.scope("mlp"))
        return ParallelBlock(attention, mlp, BlockNorms(self.make_norm(weights, "input_layernorm"), NoNorm(self.ops)))

    def make_norm(self, weights: Weights[T], name: str, times: float = 1.0) -> Norm[T]:
        eps = self.config.number("layer_norm_eps", 1e-5)
        return LayerNorm(self.ops, weights.layer_norm(name, self.width, eps, has_bias=False, times=times))

    def logit_scale(self) -> float:
        return self.config.number("logit_scale", 0.0625)


class Cohere2Model(CohereModel[T]):
    """With windows in three of four layers; the others have no rotary embedding."""

    full_period = 4
    theta = 10_000.0

    def rotary(self, layer: int) -> Rotary[T] | None:
        return super().rotary(layer) if self.is_sliding(layer) else None
