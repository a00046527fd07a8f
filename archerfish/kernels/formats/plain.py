"""The plain format: a matrix of float32, float16 or bfloat16, as most checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from archerfish.kernels.formats.format import TensorLayout, Tensors, WeightFormat

if TYPE_CHECKING:
    import torch


class Plain(WeightFormat):
    name = "plain"
    memory: ClassVar[Mapping[str, TensorLayout]] = {"weight": TensorLayout()}

    def load(self, tensors: Tensors) -> Tensors:
        return tensors

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return tensors["weight"].to(dtype)

    def work_bytes(self, shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
        return 0


PLAIN = Plain()
