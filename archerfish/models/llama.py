"""Llama 2 and 3, SmolLM2, and the decoders that differ from them in little: Mistral, Qwen2, Qwen3 and Phi-3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch, Rotary, T
from archerfish.layers.decoder import Attention, BlockNorms, DecoderBlock, GatedMLP, RMSNorm
from archerfish.layers.rotary import RotaryConfig, read_rotary, rotary_table
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ModelAdapter
from archerfish.models.config import Config


class LlamaModel(ModelAdapter[T]):
    gives_kept_rows: ClassVar[bool] = True
    can_divide: ClassVar[bool] = True
    ties_embeddings: ClassVar[bool] = False  # where the configuration does not say
    norm_plus: ClassVar[float] = 0.0  # added to the stored weights of norms
    is_fused: ClassVar[bool] = False  # checkpoints have qkv_proj and gate_up_proj instead of their parts
    has_qkv_bias: ClassVar[bool] = False  # independent of the configuration
    has_head_norms: ClassVar[bool] = False  # each head of queries and keys is normalised
    eps: ClassVar[float] = 1e-6  # of norms, where the configuration does not say
    has_window: ClassVar[bool] = False  # the configuration's sliding_window holds for all layers
    default_window: ClassVar[float] = 4096.0  # of a sliding window in tokens, where the configuration does not say

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.width, vocab_size = config.integer("hidden_size"), self.vocab_size(config)
        self.embedding_scale, self.logit_softcap = 1.0, 0.0
        self.rotaries: dict[tuple[str, float], Rotary[T]] = {}
        body = weights if weights.has("embed_tokens.weight") else weights.scope("model")
        ranks = self.ops.ranks
        self.embedding = body.table("embed_tokens.weight", vocab_size, self.width, adapts=True) if ranks.is_first else None
        self.blocks = [self.block(body.scope(f"layers.{i}"), i) for i in ranks.layers(config.integer("num_hidden_layers"))]
        if not ranks.is_last:
            return
        self.norm, self.vocabulary = self.rms_norm(body, "norm"), ranks.part(vocab_size, what="tokens")
        if config.flag("tie_word_embeddings", self.ties_embeddings):
            self.head = body.tied_linear(self.embedding, self.vocabulary, self.width, "embed_tokens")
        else:
            self.head = weights.linear("lm_head", self.vocabulary, self.width, is_sensitive=True)

    def forward(self, batch: PagedBatch[T], kv: Sequence[KVLayer[T]]) -> T:
        ops, residual = self.ops, None
        if self.embedding is not None:
            x = ops.lookup(self.embedding, batch.token_ids, scale=self.embedding_scale)
            if ops.adapters is not None:
                x = ops.adapters.add_to_lookup(x, batch.token_ids, self.embedding_scale)
        else:
            x = ops.ranks.receive(batch.token_ids.shape[0], self.width, ops.sum_dtype(self.width))
        last = self.blocks[-1] if ops.ranks.is_last else None
        for block, memory in zip(self.blocks, kv, strict=True):
            x, residual = block(x, residual, batch, memory, batch.kept_rows if block is last else None)
        if last is None:
            return self.pass_on(batch, ops.ranks.add_residual(x, residual))
        return ops.rms_norm(x, self.norm.weight, self.norm.eps, residual=residual)[0]

    def logits(self, hidden: T) -> T:
        if not self.ops.ranks.is_last:
            return hidden
        found: T = self.ops.ranks.join(self.ops.logits(hidden, self.head, softcap=self.logit_softcap), self.vocabulary)
        return found

    def block(self, weights: Weights[T], layer: int) -> DecoderBlock[T]:
        attention, mlp = self.attention(weights.scope("self_attn"), layer), self.mlp(weights.scope("mlp"))
        return DecoderBlock(attention, mlp, self.norms(weights))

    def attention(self, weights: Weights[T], layer: int) -> Attention[T]:
        bias, heads = self.config.flag("attention_bias") or None, self.heads(layer)
        names = ("q_norm", "k_norm") if self.has_head_norms else ()
        norms = {name: weights.vector(f"{name}.weight", heads.head_dim, plus=self.norm_plus) for name in names}
        return Attention(
            weights, self.width, heads, self.rotary(layer), is_fused=self.is_fused, qkv_bias=self.has_qkv_bias or bias,
            out_bias=bias, eps=self.config.number("rms_norm_eps", self.eps), **norms,
        )

    def mlp(self, weights: Weights[T]) -> GatedMLP[T] | Callable[[T], T]:
        return GatedMLP(
            weights, self.width, self.config.integer("intermediate_size"), self.config.activation("hidden_act", "silu"),
            is_fused=self.is_fused, bias=self.config.flag("mlp_bias") or None,
        )

    def norms(self, weights: Weights[T]) -> BlockNorms[T]:
        return BlockNorms(self.rms_norm(weights, "input_layernorm"), self.rms_norm(weights, "post_attention_layernorm"))

    def rms_norm(self, weights: Weights[T], name: str) -> RMSNorm[T]:
        return RMSNorm(weights, name, self.width, self.config.number("rms_norm_eps", self.eps), self.norm_plus)

    def heads(self, layer: int) -> HeadShape:
        return self.config.heads(window=self.window(layer))

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0: none."""
        return int(self.config.limit("sliding_window", self.default_window)) if self.has_window else 0

    def rotary(self, layer: int) -> Rotary[T]:
        """Layers with the same configuration share a table."""
        config = self.rotary_config(self.config, layer)
        key = (config.rope_type, config.theta)
        if key not in self.rotaries:
            self.rotaries[key] = self.ops.rotary(*rotary_table(config, self.config.heads().head_dim, self.max_len))
        return self.rotaries[key]

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        return read_rotary(config.values)

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return max(cls.rotary_config(config, layer).longest for layer in range(config.integer("num_hidden_layers")))


class MistralModel(LlamaModel[T]):
    has_window = True


class Phi3Model(LlamaModel[T]):
    is_fused = True
    eps = 1e-5
    has_window = True
    default_window = 0.0


class Qwen2Model(LlamaModel[T]):
    """Qwen2 and Qwen2.5, which have a window over some layers where the configuration asks for it."""

    has_qkv_bias = True

    def window(self, layer: int) -> int:
        config = self.config
        if not config.flag("use_sliding_window"):
            return 0
        if config.values.get("layer_types") is None:
            is_sliding = layer >= config.integer("max_window_layers", 28)
        else:
            is_sliding = config.layer_types()[layer] == "sliding_attention"
        return int(config.limit("sliding_window", self.default_window)) if is_sliding else 0


class Qwen3Model(Qwen2Model[T]):
    has_qkv_bias = False
    has_head_norms = True
