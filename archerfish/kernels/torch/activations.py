"""Activations in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (the name that every torch reader expects)

from archerfish.kernels.ops import Activation

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square_(), "sigmoid": torch.sigmoid, "silu": F.silu, "tanh": torch.tanh,
}
