"""The native backend for tests that are written over tensors of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("archerfish.kernels.native._native")

from archerfish.kernels.native._native import levels
from archerfish.kernels.native.ops import NativeOps
from archerfish.kernels.native.recorder import Value
from archerfish.kernels.ops import KVLayer, Rotary
from archerfish.kernels.recurrent import StateLayer, StateMemory
from archerfish.kernels.stored import StoredTensor

__all__ = ["LEVELS", "NativeOps", "Translated", "native_ops", "to_arrays"]
LEVELS = levels()
TAKES_TENSORS = ("linear_weight", "to_device", "vector")  # of a checkpoint
GIVEN = (KVLayer, StateLayer, StateMemory)


def to_arrays(x: Any) -> Any:
    """Tensors, also those inside of other things, as arrays of the same memory; types of 16 bits as uint16."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return (x.view(torch.uint16) if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()
    if isinstance(x, (list, tuple)):
        changed = list(map(to_arrays, x))
        return type(x)(*changed) if hasattr(x, "_fields") else type(x)(changed)
    if not is_dataclass(x) or isinstance(x, (type, StoredTensor, Value)):
        return x
    held = {each.name: getattr(x, each.name) for each in fields(x) if each.init}
    made = {name: to_arrays(each) for name, each in held.items()}
    return replace(x, **made) if any(made[name] is not held[name] for name in held) else x


def to_tensors(x: Any, dtype: str) -> Any:
    if isinstance(x, np.ndarray):
        found = torch.from_numpy(x)
        return found.view(getattr(torch, dtype)) if x.dtype == np.uint16 else found
    if type(x) in (list, tuple):
        return type(x)(to_tensors(each, dtype) for each in x)
    if isinstance(x, Rotary):
        return replace(x, cos_sin=to_tensors(x.cos_sin, dtype))
    return type(x)(*(to_tensors(each, dtype) for each in x)) if isinstance(x, GIVEN) else x


class Translated:
    """An object of the native backend whose methods take and give tensors of torch instead of arrays."""

    def __init__(self, inner: Any, dtype: str) -> None:
        self.inner, self.dtype = inner, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return found if not callable(found) or name in TAKES_TENSORS else self._translated(found)

    def _translated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            given = {name: to_arrays(each) for name, each in options.items()}
            return to_tensors(method(*map(to_arrays, args), **given), self.dtype)

        return call

    def recurrent(self) -> Any:
        return Translated(self.inner.recurrent(), self.dtype)

    def replayed(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return self._translated(self.inner.replayed(call))


def native_ops(device: str = "cpu", dtype: str = "float32", level: str = "", kv_dtype: str = "auto") -> Any:
    """As `TorchOps(device, dtype)`."""
    ops = NativeOps(device, dtype, level)
    ops.kv_dtype = kv_dtype
    return Translated(ops, dtype)
