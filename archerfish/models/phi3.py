"""Phi-3: Llama whose checkpoints have queries, keys and values in one tensor, and gate and up in one."""

from __future__ import annotations

from archerfish.kernels.ops import T
from archerfish.models.llama import LlamaModel


class Phi3Model(LlamaModel[T]):
    is_fused = True
    eps = 1e-5

    def window(self, layer: int) -> int:
        return int(self.config.limit("sliding_window"))
