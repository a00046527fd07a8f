"""Gemma 3, text only: Gemma 2 with normalised queries and keys instead of caps, and another rotary base in windowed layers."""

from __future__ import annotations

from collections.abc import Mapping

from archerfish.kernels.ops import T
from archerfish.layers.rotary import RotaryConfig, read_rotary
from archerfish.models.config import Config
from archerfish.models.gemma2 import Gemma2Model


class Gemma3Model(Gemma2Model[T]):
    has_head_norms = True
    score_cap = 0.0
    logit_cap = 0.0

    @classmethod
    def layer_type(cls, config: Config, layer: int) -> str:
        return config.layer_types(config.integer("sliding_window_pattern", 6))[layer]

    @classmethod
    def rotary_config(cls, config: Config, layer: int) -> RotaryConfig:
        layer_type = cls.layer_type(config, layer)
        if layer_type == "full_attention":
            return read_rotary(config.values, layer_type, theta=1_000_000.0)
        if isinstance(config.values.get("rope_parameters"), Mapping):
            return read_rotary(config.values, layer_type)
        return read_rotary(config.values, layer_type).with_theta(config.number("rope_local_base_freq", 10_000.0))
