"""Decoders whose feed-forwards are mixtures of experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from typing import ClassVar

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


class ExpertModel(LlamaModel[T]):
    """Some layers, or all, have experts instead of one feed-forward."""

    expert_names: ClassVar[ExpertNames] = USUAL_NAMES

    def block(self, weights: Weights[T], layer: int) -> DecoderBlock[T]:
        if not self.has_experts(layer):
            return super().block(weights, layer)
        return DecoderBlock(self.attention(weights.scope("self_attn"), layer), self.experts(weights), self.norms(weights))

    def has_experts(self, layer: int) -> bool:
        return True

    def experts(self, weights: Weights[T]) -> MixtureOfExperts[T]:
        """weights: of a layer."""
        return MixtureOfExperts(
            weights.scope("mlp"), self.width, self.hidden_units(), self.config.activation("hidden_act", "silu"), self.routing(),
            names=self.expert_names,
        )

    def hidden_units(self) -> int:
        """Of an expert."""
        return self.config.integer("moe_intermediate_size")

    def routing(self) -> Routing[T]:
        config = self.config
        num_experts = config.integer("num_experts", config.integer("num_local_experts", 0))
        num_chosen = config.integer("num_experts_per_tok")
        return Routing(num_experts, num_chosen, is_normed=config.flag("norm_topk_prob"))


class MixtralModel(ExpertModel[T], MistralModel[T]):
    eps = 1e-5
    default_window = 0.0
    expert_names = ExpertNames("w1", "w3", "w2")

    def experts(self, weights: Weights[T]) -> MixtureOfExperts[T]:
        """Published checkpoints have the experts in block_sparse_moe, those of transformers 5 in mlp."""
        name = "block_sparse_moe" if weights.has("block_sparse_moe.gate.weight") else "mlp"
        return MixtureOfExperts(
            weights.scope(name), self.width, self.config.integer("intermediate_size"),
            self.config.activation("hidden_act", "silu"), self.routing()._replace(is_normed=True), names=self.expert_names,
        )


class OlmoeModel(ExpertModel[T], Olmo2Model[T]):
    """All heads of queries, and all of keys, are normalised together."""

    norm_names = LlamaModel.norm_names

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        if config.values.get("clip_qkv") is not None:
            raise UnsupportedModelError("Clipped queries, keys and values (clip_qkv) are not supported.")
        super().__init__(weights, config, max_len)

    def hidden_units(self) -> int:
        return self.config.integer("intermediate_size")


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

    def experts(self, weights: Weights[T]) -> MixtureOfExperts[T]:
        activation = self.config.activation("hidden_act", "silu")
        size = self.config.integer("shared_expert_intermediate_size")
        body = weights.scope("mlp")
        shared = GatedMLP(body.scope("shared_expert"), self.width, size, activation)
        return MixtureOfExperts(
            body, self.width, self.hidden_units(), activation, self.routing(), shared=shared, shared_gate="shared_expert_gate"
        )


class GptOssModel(ExpertModel[T]):
    """Every other layer has a window, all have sinks and biases. `store/text_parts.py` reads the experts of its checkpoints."""

    has_sinks = True
    full_period = 2
    default_window = 128.0
    eps = 1e-5
    theta = 150_000.0

    def biases(self) -> Biases:
        has_biases = self.config.flag("attention_bias", True)
        return Biases(has_biases, has_biases, None)

    def experts(self, weights: Weights[T]) -> MixtureOfExperts[T]:
        config = self.config
        gate = config.number("swiglu_alpha", SWIGLU_ALPHA), config.number("swiglu_limit", SWIGLU_LIMIT)
        if gate != (SWIGLU_ALPHA, SWIGLU_LIMIT):
            raise UnsupportedModelError(
                f"Experts with swiglu_alpha {gate[0]} and swiglu_limit {gate[1]} are not supported.",
                hint=f"Expected {SWIGLU_ALPHA} and {SWIGLU_LIMIT}, as published gpt-oss models have.",
            )
        return MixtureOfExperts(
            weights.scope("mlp"), self.width, config.integer("intermediate_size"), "swiglu_oai",
            self.routing()._replace(is_normed=True), router="router", has_biases=True,
        )
