"""Decoders whose feed-forwards are mixtures of experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from typing import Any, ClassVar

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.experts import Routing
from archerfish.kernels.ops import SWIGLU_ALPHA, SWIGLU_LIMIT
from archerfish.layers.decoder import DecoderBlock, GatedMLP
from archerfish.layers.experts import USUAL_NAMES, ExpertNames, MixtureOfExperts
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import Biases, LlamaModel, MistralModel, Qwen2Model, Qwen3Model
from archerfish.models.olmo import Olmo2Model
from archerfish.sizes import MAX_EXPERTS


class ExpertModel(LlamaModel[T]):
    """Some layers, or all, have experts instead of one feed-forward."""

    expert_names: ClassVar[ExpertNames] = USUAL_NAMES
    size_name: ClassVar[str] = "moe_intermediate_size"  # what the configuration calls the hidden units of an expert
    is_normed: ClassVar[bool] = False  # the weights of a row's experts are normed, whatever the configuration says

    def block(self, weights: Weights[T], layer: int) -> DecoderBlock[T]:
        if not self.has_experts(layer):
            return super().block(weights, layer)
        return DecoderBlock(
            self.attention(weights.scope("self_attn"), layer), self.experts(weights), self.norms(weights)
        )

    def has_experts(self, layer: int) -> bool:
        return True

    def experts(self, weights: Weights[T]) -> MixtureOfExperts[T]:
        """weights: of a layer; published checkpoints of Mixtral have the experts in block_sparse_moe, others in mlp."""
        name = "block_sparse_moe" if weights.has("block_sparse_moe.gate.weight") else "mlp"
        options = {"activation": self.config.activation("hidden_act", "silu"), **self.expert_options(weights)}
        size = self.config.integer(self.size_name)
        return MixtureOfExperts(
            weights.scope(name), self.width, size, routing=self.routing(), names=self.expert_names, **options
        )

    def expert_options(self, weights: Weights[T]) -> dict[str, Any]:
        """Arguments of `MixtureOfExperts` beside the usual ones. weights: of a layer."""
        return {}

    def routing(self) -> Routing[T]:
        config = self.config
        num_experts = config.integer("num_experts", config.integer("num_local_experts", 0))
        num_layers = config.integer("num_hidden_layers")
        if num_experts * num_layers > MAX_EXPERTS:
            stated = f"num_experts = {num_experts:,} in num_hidden_layers = {num_layers:,}"
            raise UnsupportedModelError(f"The model's configuration has {stated}: at most {MAX_EXPERTS:,} in all.")
        is_normed = self.is_normed or config.flag("norm_topk_prob")
        return Routing(num_experts, config.integer("num_experts_per_tok"), is_normed=is_normed)


class MixtralModel(ExpertModel[T], MistralModel[T]):
    eps = 1e-5
    default_window = 0.0
    expert_names = ExpertNames("w1", "w3", "w2")
    size_name = "intermediate_size"
    is_normed = True


class OlmoeModel(ExpertModel[T], Olmo2Model[T]):
    """All heads of queries, and all of keys, are normalised together."""

    norm_names = LlamaModel.norm_names
    size_name = "intermediate_size"

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        if config.values.get("clip_qkv") is not None:
            raise UnsupportedModelError("Clipped queries, keys and values (clip_qkv) are not supported.")
        super().__init__(weights, config, max_len)


class Qwen3MoeModel(ExpertModel[T], Qwen3Model[T]):
    """Layers without experts are listed, or those that a step leaves out."""

    def has_experts(self, layer: int) -> bool:
        config = self.config
        step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
        return layer not in dense and step > 0 and (layer + 1) % step == 0


class Qwen2MoeModel(Qwen3MoeModel[T], Qwen2Model[T]):
    """Each row has a gated part of a feed-forward beside its experts."""

    has_qkv_bias = True
    has_head_norms = False

    def expert_options(self, weights: Weights[T]) -> dict[str, Any]:
        size, activation = (
            self.config.integer("shared_expert_intermediate_size"),
            self.config.activation("hidden_act", "silu"),
        )
        shared = GatedMLP(weights.scope("mlp.shared_expert"), self.width, size, activation)
        return {"shared": shared, "shared_gate": "shared_expert_gate"}


class GptOssModel(ExpertModel[T]):
    """Every other layer has a window, all have sinks and biases. `store/text_parts.py` reads the experts of its
    checkpoints."""

    has_sinks = True
    full_period = 2
    default_window = 128.0
    eps = 1e-5
    theta = 150_000.0
    size_name = "intermediate_size"
    is_normed = True

    def biases(self) -> Biases:
        has_biases = self.config.flag("attention_bias", True)
        return Biases(has_biases, has_biases, None)

    def expert_options(self, weights: Weights[T]) -> dict[str, Any]:
        config = self.config
        gate = config.number("swiglu_alpha", SWIGLU_ALPHA), config.number("swiglu_limit", SWIGLU_LIMIT)
        if gate != (SWIGLU_ALPHA, SWIGLU_LIMIT):
            raise UnsupportedModelError(
                f"Experts with swiglu_alpha {gate[0]} and swiglu_limit {gate[1]} are not supported.",
                hint=f"Expected {SWIGLU_ALPHA} and {SWIGLU_LIMIT}, as published gpt-oss models have.",
            )
        return {"activation": "swiglu_oai", "router": "router", "has_biases": True}
