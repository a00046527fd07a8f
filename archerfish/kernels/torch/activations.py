"""Activations in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (the name that every torch reader expects)

from archerfish.kernels.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def clamped_silu(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(max=SWIGLU_LIMIT)
    return x * torch.sigmoid(SWIGLU_ALPHA * x)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square_(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "swiglu_oai": clamped_silu,
}


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `Ops.gated`."""
    if activation == "swiglu_oai":
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return ACTIVATIONS[activation](gate) * up
