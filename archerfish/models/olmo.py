"""OLMo 2 and 3, whose norms stand behind attention and feed-forward; and EXAONE 4, which is alike."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from archerfish.kernels.batches import T
from archerfish.kernels.ops import HeadShape, Rotary
from archerfish.layers.rotary import RotaryConfig, read_rotary
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel

NORMS_BEHIND = ("", "", "post_attention_layernorm", "post_feedforward_layernorm")


class Olmo2Model(LlamaModel[T]):
    """All heads of queries, and all of keys, are normalised together."""

    can_divide: ClassVar[bool] = False
    norm_names: ClassVar[tuple[str, ...]] = NORMS_BEHIND
    eps = 1e-5

    def query_norms(self, weights: Weights[T], heads: HeadShape) -> tuple[T | None, T | None]:
        widths = (("q_norm", heads.num_heads), ("k_norm", heads.num_kv_heads))
        q_norm, k_norm = (weights.vector(f"{name}.weight", num * heads.head_dim) for name, num in widths)
        return q_norm, k_norm


class Olmo3Model(Olmo2Model[T]):
    """With windows in three of four layers, whose rotary embedding is never scaled."""

    full_period = 4
    theta = 500_000.0

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        layer_type = cls.layer_type(config, layer)
        found = read_rotary(config.values, layer_type, theta=cls.theta)
        if layer_type == "full_attention" or config.values.get("rope_parameters"):
            return found
        return replace(found, rope_type="default", parameters={})


class Exaone4Model(LlamaModel[T]):
    """Where some layers have windows, the others have no rotary embedding."""

    norm_names = NORMS_BEHIND
    has_head_norms = True
    eps = 1e-5
    full_period = 4
    default_window = 0.0

    def rotary(self, layer: int) -> Rotary[T] | None:
        return super().rotary(layer) if self.window(layer) or not self.config.limit("sliding_window") else None
