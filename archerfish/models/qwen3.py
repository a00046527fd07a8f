"""Qwen3: Qwen2 that normalises each head of queries and keys instead of adding biases."""

from __future__ import annotations

from archerfish.kernels.ops import T
from archerfish.models.qwen2 import Qwen2Model


class Qwen3Model(Qwen2Model[T]):
    has_qkv_bias = False
    has_head_norms = True
