"""Which backend computes: by device and type, with the reason, for the engines and for `archerfish doctor`."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archerfish.errors import DeviceError
from archerfish.kernels.machine import cpu, fast_cpu_dtype

if TYPE_CHECKING:
    from archerfish.kernels.torch.reference import TorchOps

logger = logging.getLogger("archerfish.kernels")


@dataclass(frozen=True)
class FastPath:
    """One optional way to be faster, whether it is on, and why or why not."""

    name: str
    is_on: bool
    reason: str


def choose_device(wanted: str) -> str:
    """The device that will be used; one that torch does not have is a DeviceError."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available.get(wanted, False):
        raise DeviceError(f"Device {wanted!r} was asked for, but this torch ({torch.__version__}) sees none.")
    return wanted


def choose_dtype(wanted: str, device: str) -> str:
    """The type to compute in on a device; float32 in place of one that a CPU has no products in, which would take a hundred
    times as long."""
    if wanted != "auto":
        if device != "cpu" or wanted == "float32":
            return wanted
        from archerfish.kernels.torch.cpu import is_available

        if is_available(wanted):
            return wanted
        logger.warning("This CPU has no products in %s, which was asked for: computing in float32.", wanted)
        return "float32"
    if device == "cuda":
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return fast_cpu_dtype() if device == "cpu" else "float32"


def choose_ops(device: str, dtype: str) -> TorchOps:
    """The fastest backend for a device and a type."""
    if device == "cpu":
        from archerfish.kernels.torch.cpu import TorchCpuOps, is_available

        if is_available(dtype) and (dtype != "bfloat16" or cpu().has_fast_bfloat16):
            return TorchCpuOps(device, dtype)
    if device == "cuda" and has_triton():
        from archerfish.kernels.triton.ops import TritonOps

        return TritonOps(device, dtype)
    from archerfish.kernels.torch.reference import TorchOps

    return TorchOps(device, dtype)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fast_paths() -> list[FastPath]:
    """Every optional path with its state, for people to read."""
    import torch

    from archerfish.kernels.torch.cpu import is_available

    found = cpu()
    amx = "oneDNN runs bfloat16 products on AMX tiles" if found.has_amx else "this CPU has no amx_bf16"
    slow = "this CPU has no {} products that are used: float32 is far quicker"
    bf16 = f"CPU has {'avx512_bf16' if 'avx512_bf16' in found.flags else 'AMX'}"
    has_float16 = found.has_fast_float16 and is_available("float16")
    cuda = torch.cuda.is_available()
    cuda_reason = "products by torch" if cuda else "this torch sees no CUDA device"
    triton_reason = "norms, rotary, KV and attention in our own kernels" if has_triton() else "triton is not installed"
    return [
        FastPath("AMX bfloat16", found.has_amx, amx),
        FastPath("bfloat16 by default", found.has_fast_bfloat16, bf16 if found.has_fast_bfloat16 else slow.format("bfloat16")),
        FastPath("packed oneDNN products", is_available("float32"), "bias, activation and residual fused"),
        FastPath("float16 products", has_float16, "on request: --dtype float16" if has_float16 else slow.format("float16")),
        FastPath("CUDA", cuda, cuda_reason),
        FastPath("Triton kernels", cuda and has_triton(), triton_reason if cuda else cuda_reason),
    ]
