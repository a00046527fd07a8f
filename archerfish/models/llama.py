"""Llama 2 and 3, SmolLM2, and the decoders that differ from them in little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from archerfish.kernels.batches import T
from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch, Rotary
from archerfish.layers.decoder import MLP, Attention, BlockNorms, DecoderBlock, GatedMLP, NoNorm, Norm, RMSNorm
from archerfish.layers.rotary import RotaryConfig, read_rotary, rotary_table
from archerfish.layers.weights import Weights
from archerfish.models.adapter import ModelAdapter
from archerfish.models.config import Config
from archerfish.sizes import check_size

NO_FULL_LAYER = 1 << 30  # a full_period longer than any model


class Biases(NamedTuple):
    """Whether the products of a block have biases; None: where the weights have them."""

    qkv: bool | None
    out: bool | None
    mlp: bool | None


class LlamaModel(ModelAdapter[T]):
    gives_kept_rows: ClassVar[bool] = True
    can_divide: ClassVar[bool] = True
    ties_embeddings: ClassVar[bool] = False  # where the configuration does not say
    norm_plus: ClassVar[float] = 0.0  # added to the stored weights of norms
    norm_names: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
    )  # as in BlockNorms; empty: none
    has_fused_qkv: ClassVar[bool] = False  # checkpoints have qkv_proj instead of its parts
    has_fused_gate: ClassVar[bool] = False  # checkpoints have gate_up_proj instead of its parts
    has_qkv_bias: ClassVar[bool] = False  # independent of the configuration
    has_head_norms: ClassVar[bool] = False  # each head of queries and keys is normalised
    has_sinks: ClassVar[bool] = False  # a learnt score of each head takes part in the softmax
    is_interleaved: ClassVar[bool] = False  # neighbouring dimensions of a head are rotated together
    eps: ClassVar[float] = 1e-6  # of norms, where the configuration does not say
    theta: ClassVar[float] = 10_000.0  # base of the rotary embedding, where the configuration does not say
    full_period: ClassVar[int] = (
        0  # every so many layers one sees everything, the others a window; 0: all see everything
    )
    default_window: ClassVar[float] = 4096.0  # of a sliding window in tokens, where the configuration does not say

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.width, vocab_size = config.integer("hidden_size"), self.vocab_size(config)
        self.embedding_scale, self.logit_softcap = 1.0, 0.0
        self.rotaries: dict[tuple[str, float], Rotary[T]] = {}
        body = weights if weights.has("embed_tokens.weight") else weights.scope("model")
        ranks = self.ops.ranks
        self.embedding = (
            body.table("embed_tokens.weight", vocab_size, self.width, adapts=True) if ranks.is_first else None
        )
        self.blocks = [
            self.block(body.scope(f"layers.{i}"), i) for i in ranks.layers(config.integer("num_hidden_layers"))
        ]
        if not ranks.is_last:
            return
        gives_logits = weights.takes_head or bool(config.score_token_ids)
        self.norm = self.make_norm(body, "norm", times=self.logit_scale() if gives_logits else 1.0)
        self.vocabulary = ranks.part(vocab_size, what="tokens")
        if not weights.takes_head:
            return
        if config.flag("tie_word_embeddings", self.ties_embeddings):
            self.head = body.tied_linear(self.embedding, self.vocabulary, self.width, "embed_tokens")
        else:
            self.head = weights.linear("lm_head", self.vocabulary, self.width, is_sensitive=True)

    def forward(self, batch: PagedBatch[T], kv: Sequence[KVLayer[T]]) -> T:
        ops, residual = self.ops, None
        if self.embedding is not None:
            x = self.embed(self.embedding, batch)
            if ops.adapters is not None:
                x = ops.adapters.add_to_lookup(x, batch.token_ids, self.embedding_scale)
        else:
            x = ops.ranks.receive(batch.token_ids.shape[0], self.width, ops.sum_dtype(self.width))
        last = self.blocks[-1] if ops.ranks.is_last else None
        for block, memory in zip(self.blocks, kv, strict=True):
            x, residual = block(x, residual, batch, memory, batch.kept_rows if block is last else None)
        if last is None:
            return self.pass_on(batch, ops.ranks.add_residual(x, residual))
        return self.norm(x, residual)[0]

    def embed(self, table: T, batch: PagedBatch[T]) -> T:
        return self.ops.lookup(table, batch.token_ids, scale=self.embedding_scale)

    def logits(self, hidden: T) -> T:
        if not self.ops.ranks.is_last:
            return hidden
        found: T = self.ops.ranks.join(self.ops.logits(hidden, self.head, softcap=self.logit_softcap), self.vocabulary)
        return found

    def logit_scale(self) -> float:
        """A factor of the logits, which the last norm applies."""
        return 1.0

    def block(self, weights: Weights[T], layer: int) -> DecoderBlock[T]:
        attention, mlp = self.attention(weights.scope("self_attn"), layer), self.mlp(weights.scope("mlp"))
        return DecoderBlock(attention, mlp, self.norms(weights))

    def attention(self, weights: Weights[T], layer: int) -> Attention[T]:
        heads, biases = self.heads(layer), self.biases()
        q_norm, k_norm = self.query_norms(weights, heads)
        return Attention(
            weights,
            self.width,
            heads,
            self.rotary(layer),
            is_fused=self.has_fused_qkv,
            qkv_bias=biases.qkv,
            out_bias=biases.out,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.config.number("rms_norm_eps", self.eps),
            has_sinks=self.has_sinks,
        )

    def query_norms(self, weights: Weights[T], heads: HeadShape) -> tuple[T | None, T | None]:
        """Norms of queries and keys, as in `Rotation`."""
        if not self.has_head_norms:
            return None, None
        q_norm, k_norm = (
            weights.vector(f"{name}.weight", heads.head_dim, plus=self.norm_plus) for name in ("q_norm", "k_norm")
        )
        return q_norm, k_norm

    def mlp(self, weights: Weights[T]) -> MLP[T] | Callable[[T], T]:
        return GatedMLP(
            weights,
            self.width,
            self.config.integer("intermediate_size"),
            self.config.activation("hidden_act", "silu"),
            is_fused=self.has_fused_gate,
            bias=self.biases().mlp,
        )

    def biases(self) -> Biases:
        stated = self.config.flag("attention_bias") or None
        return Biases(self.has_qkv_bias or stated, stated, self.config.flag("mlp_bias") or None)

    def norms(self, weights: Weights[T]) -> BlockNorms[T]:
        return BlockNorms(*(self.make_norm(weights, name) if name else NoNorm(self.ops) for name in self.norm_names))

    def make_norm(self, weights: Weights[T], name: str, times: float = 1.0) -> Norm[T]:
        """times: a factor of its result."""
        return RMSNorm(weights, name, self.width, self.config.number("rms_norm_eps", self.eps), self.norm_plus, times)

    def heads(self, layer: int) -> HeadShape:
        return self.config.heads(window=self.window(layer))

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0: none."""
        if not self.is_sliding(layer):
            return 0
        return check_size("sliding_window", int(self.config.limit("sliding_window", self.default_window)))

    def is_sliding(self, layer: int) -> bool:
        return self.layer_type(self.config, layer) == "sliding_attention"

    @classmethod
    def layer_type(cls, config: Config, layer: int) -> str:
        return config.layer_types(cls.full_period)[layer]

    def rotary(self, layer: int) -> Rotary[T] | None:
        """Layers with the same configuration share a table; None: without a rotary embedding."""
        config = self.rotary_config(self.config, layer)
        key = (config.rope_type, config.theta)
        if key not in self.rotaries:
            table, dim = rotary_table(config, self.config.heads().head_dim, self.max_len)
            self.rotaries[key] = self.ops.rotary(table, dim, is_interleaved=self.is_interleaved)
        return self.rotaries[key]

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        return read_rotary(config.values, theta=cls.theta)

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return max(cls.rotary_config(config, layer).usual for layer in range(config.integer("num_hidden_layers")))

    @classmethod
    def most_positions(cls, config: Config) -> int:
        return max(cls.max_positions(config), cls.rotary_config(config, 0).longest)


class MistralModel(LlamaModel[T]):
    """Mistral, and Ministral, whose configuration says which layers have a window."""

    full_period = NO_FULL_LAYER


class Ministral3Model(MistralModel[T]):
    """Beyond the length of training its queries grow with their positions, which is not supported."""

    @classmethod
    def max_positions(cls, config: Config) -> int:
        rotary = cls.rotary_config(config, 0)
        return rotary.original_max_positions if rotary.parameters.get("llama_4_scaling_beta") else rotary.longest

    @classmethod
    def most_positions(cls, config: Config) -> int:
        return cls.max_positions(config)


class Phi3Model(LlamaModel[T]):
    """Phi-3 and Phi-4."""

    has_fused_qkv = has_fused_gate = True
    eps = 1e-5
    full_period = NO_FULL_LAYER
    default_window = 0.0


class Qwen2Model(LlamaModel[T]):
    """Qwen2 and Qwen2.5, which have a window over some layers where the configuration asks for it."""

    has_qkv_bias = True

    def is_sliding(self, layer: int) -> bool:
        config = self.config
        if not config.flag("use_sliding_window"):
            return False
        if config.values.get("layer_types") is None:
            return layer >= config.integer("max_window_layers", 28)
        return super().is_sliding(layer)


class Qwen3Model(Qwen2Model[T]):
    has_qkv_bias = False
    has_head_norms = True


class SmolLM3Model(LlamaModel[T]):
    """Llama without a rotary embedding in every fourth layer, or in those that the configuration names."""

    theta = 2_000_000.0
    ties_embeddings = True
    default_window = 0.0

    def has_rotary(self, layer: int) -> bool:
        period = self.config.integer("no_rope_layer_interval", 4)
        stated = self.config.values.get("no_rope_layers")  # 1 for a layer that has one
        return bool(stated[layer]) if isinstance(stated, list) and layer < len(stated) else (layer + 1) % period != 0

    def rotary(self, layer: int) -> Rotary[T] | None:
        return super().rotary(layer) if self.has_rotary(layer) else None

    def is_sliding(self, layer: int) -> bool:
        is_stated = self.config.values.get("layer_types") is not None
        is_sliding = super().is_sliding(layer) if is_stated else not self.has_rotary(layer)
        return is_sliding and self.config.flag("use_sliding_window")


class GraniteModel(LlamaModel[T]):
    """Llama with factors of embeddings, of what blocks add, of scores and of logits.

    The sum that runs through the layers is kept divided by the factor of what is added to it, which norms take away
    again.
    """

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.embedding_scale = config.number("embedding_multiplier", 1.0) / self.residual_scale(config)

    @staticmethod
    def residual_scale(config: Config) -> float:
        return config.number("residual_multiplier", 1.0)

    def make_norm(self, weights: Weights[T], name: str, times: float = 1.0) -> Norm[T]:
        eps = self.config.number("rms_norm_eps", self.eps) / self.residual_scale(self.config) ** 2
        return RMSNorm(weights, name, self.width, eps, times=times)

    def logit_scale(self) -> float:
        return 1.0 / self.config.number("logits_scaling", 1.0)

    def heads(self, layer: int) -> HeadShape:
        return self.config.heads(scale=self.config.number("attention_multiplier", 1.0))


class GlmModel(LlamaModel[T]):
    """GLM-4 of 2024: part of each head rotated by neighbours, gate and up in one tensor."""

    is_interleaved = has_fused_gate = True
    eps = 1.5625e-7

    def biases(self) -> Biases:
        return super().biases()._replace(out=None)

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        return read_rotary({"partial_rotary_factor": 0.5, **config.values})


class Glm4Model(GlmModel[T]):
    """GLM-4 of 2025: with norms behind attention and feed-forward too."""

    eps = 1e-5
    norm_names = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
