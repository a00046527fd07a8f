"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a window over some layers where it is asked for."""

from __future__ import annotations

from archerfish.kernels.ops import T
from archerfish.models.llama import LlamaModel


class Qwen2Model(LlamaModel[T]):
    has_qkv_bias = True

    def window(self, layer: int) -> int:
        config = self.config
        if not config.flag("use_sliding_window"):
            return 0
        if config.values.get("layer_types") is None:
            is_sliding = layer >= config.integer("max_window_layers", 28)
        else:
            is_sliding = config.layer_types()[layer] == "sliding_attention"
        return int(config.limit("sliding_window", 4096)) if is_sliding else 0
