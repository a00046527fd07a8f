"""Gemma, Gemma 2 and the text model of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from archerfish.kernels.batches import T
from archerfish.kernels.ops import HeadShape
from archerfish.layers.decoder import GatedMLP
from archerfish.layers.rotary import RotaryConfig, read_rotary
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel


class GemmaModel(LlamaModel[T]):
    """Llama with scaled embeddings, another activation, and norms whose weights are differences from 1."""

    ties_embeddings = True
    norm_plus = 1.0

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.embedding_scale = self.width**0.5

    def mlp(self, weights: Weights[T]) -> GatedMLP[T]:
        activation = self.config.activation("hidden_activation", "gelu_pytorch_tanh")
        return GatedMLP(weights, self.width, self.config.integer("intermediate_size"), activation)


class Gemma2Model(GemmaModel[T]):
    """Gemma with norms before and after attention and feed-forward, windows in every other layer, capped scores and
    logits."""

    norm_names = (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )
    score_cap: ClassVar[float] = 50.0  # these two where the configuration does not say
    logit_cap: ClassVar[float] = 30.0
    full_period = 2

    def __init__(self, weights: Weights[T], config: Config, max_len: int) -> None:
        super().__init__(weights, config, max_len)
        self.logit_softcap = config.limit("final_logit_softcapping", self.logit_cap)

    def heads(self, layer: int) -> HeadShape:
        return self.config.heads(
            window=self.window(layer),
            softcap=self.config.limit("attn_logit_softcapping", self.score_cap),
            scale=self.config.number("query_pre_attn_scalar", 256) ** -0.5,
        )

    def window(self, layer: int) -> int:
        stated = super().window(layer)  # one that reaches to both sides is stated as their sum
        return stated // 2 + 1 if stated and not self.config.is_causal else stated


class Gemma3Model(Gemma2Model[T]):
    """Gemma 2 with normalised queries and keys instead of caps, and another rotary base in layers with a window."""

    has_head_norms = True
    score_cap = logit_cap = 0.0
    full_period = 6

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        layer_type = cls.layer_type(config, layer)
        if layer_type == "full_attention":
            return read_rotary(config.values, layer_type, theta=1_000_000.0)
        if isinstance(config.values.get("rope_parameters"), Mapping):
            return read_rotary(config.values, layer_type)
        theta = config.number("rope_local_base_freq", 10_000.0)  # without any scaling
        return replace(read_rotary(config.values, layer_type), rope_type="default", theta=theta, parameters={})
