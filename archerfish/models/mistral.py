"""Mistral: Llama that looks back over a window."""

from __future__ import annotations

from archerfish.kernels.ops import T
from archerfish.models.llama import LlamaModel


class MistralModel(LlamaModel[T]):
    def window(self, layer: int) -> int:
        return int(self.config.limit("sliding_window", 4096))
