"""Which backend computes: by device and type, with the reason, for the engines and for `archerfish doctor`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from archerfish.errors import DeviceError
from archerfish.kernels.cards import find_cards, torch_build
from archerfish.kernels.machine import cpu, fast_cpu_dtype

if TYPE_CHECKING:
    from archerfish.kernels.ops import Ops

logger = logging.getLogger("archerfish.kernels")
CARD_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")  # of NVIDIA, its Jetsons, WSL, AMD
SLOW = "this CPU has no {} products that are used: float32 is far quicker"


@dataclass(frozen=True)
class OpsBackend:
    """One implementation of `Ops`. Nothing of it is imported before `load`."""

    name: str
    why_not: Callable[[str, str], str]  # (device, dtype) -> why it cannot compute there; empty: it can
    load: Callable[[str, str], Ops[Any]]  # (device, dtype)
    strength: str  # in one phrase, for people to read


@dataclass(frozen=True)
class FastPath:
    """One optional way to be faster, whether it is on, and why or why not."""

    name: str
    is_on: bool
    reason: str


@dataclass(frozen=True)
class Device:
    """The device that computes, and why it was chosen. As text, for example "cuda: NVIDIA H200, 139 GiB"."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_device(wanted: str) -> Device:
    """The device for the option `device`; a device that torch does not have is a DeviceError.

    "auto" is a card where there is one. torch, which takes a second to import, is asked only if this machine has a driver.
    """
    if wanted == "cpu":
        return Device("cpu", "as the option device says")
    has_driver = os.name != "posix" or any(map(os.path.exists, CARD_DRIVERS))
    if wanted == "auto" and not has_driver and "torch" not in sys.modules:
        return Device("cpu", "no CUDA device")
    import torch

    if wanted in ("cuda", "auto") and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device("cuda", f"{card.name}, {card.total_memory >> 30} GiB")
    if wanted == "auto":
        is_without = has_driver and not torch.version.cuda and not torch.version.hip
        return Device("cpu", f"this torch ({torch.__version__}) has no CUDA" if is_without else "no CUDA device")
    if wanted == "mps" and torch.backends.mps.is_available():
        return Device("mps", "as the option device says")
    raise DeviceError(f"Device {wanted!r} was asked for, but this torch ({torch.__version__}) sees none.")


def log_device(model: str, wanted: str, dtype: str) -> None:
    logger.info("%s computes on %s, in %s.", model, choose_device(wanted), dtype)


def choose_dtype(wanted: str, device: str) -> str:
    """The type to compute in on a device; float32 in place of a type that a CPU has no products in, which would take a hundred
    times as long."""
    if wanted != "auto":
        if device != "cpu" or wanted == "float32" or not without_onednn(wanted):
            return wanted
        logger.warning("This CPU has no products in %s, which was asked for: computing in float32.", wanted)
        return "float32"
    if device == "cuda":
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return fast_cpu_dtype() if device == "cpu" else "float32"


def without_onednn(dtype: str) -> str:
    """Why oneDNN has no products in a type; empty: it has. torch's files and the CPU's flags mostly say it without torch."""
    has_flags = {"bfloat16": cpu().has_fast_bfloat16, "float16": cpu().has_fast_float16}.get(dtype, True)
    if "torch" in sys.modules or not has_flags or not torch_build().has_onednn:
        from archerfish.kernels.torch.cpu import is_available

        return "" if is_available(dtype) else f"this torch has no oneDNN products in {dtype} for this machine"
    return ""


def without_triton(device: str, dtype: str) -> str:
    if device != "cuda":
        return "it computes on CUDA devices"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def without_torch_cpu(device: str, dtype: str) -> str:
    if device != "cpu":
        return "it computes on a CPU"
    return without_onednn(dtype) or (SLOW.format(dtype) if dtype == "bfloat16" and not cpu().has_fast_bfloat16 else "")


def loader(place: str) -> Callable[[str, str], Ops[Any]]:
    """What imports a backend, "module:class", when it is called, and makes one for a device and a type."""
    module, _, name = place.partition(":")
    return lambda device, dtype: getattr(import_module(f"archerfish.kernels.{module}"), name)(device, dtype)


BACKENDS = [  # the fastest first
    OpsBackend("torch + Triton", without_triton, loader("triton.ops:TritonOps"), "norms, rotary and attention in own kernels"),
    OpsBackend("torch + oneDNN", without_torch_cpu, loader("torch.cpu:TorchCpuOps"), "packed products, bias, activation fused"),
    OpsBackend("torch reference", lambda device, dtype: "", loader("torch.reference:TorchOps"), "any device and type of torch"),
]


def register_backend(backend: OpsBackend) -> None:
    """Add a backend, which is preferred to the others wherever it can compute."""
    BACKENDS.insert(0, backend)


def choose_ops(device: str, dtype: str) -> Ops[Any]:
    """The fastest backend for a device and a type."""
    return next(backend for backend in BACKENDS if not backend.why_not(device, dtype)).load(device, dtype)


def fast_paths() -> list[FastPath]:
    """Every optional path and every backend with its state, for people to read."""
    found, (_, without_cuda) = cpu(), find_cards()
    bf16 = f"CPU has {'avx512_bf16' if 'avx512_bf16' in found.flags else 'AMX'}"
    has_float16 = found.has_fast_float16 and not without_onednn("float16")
    device, dtype = ("cpu", choose_dtype("auto", "cpu")) if without_cuda else ("cuda", "bfloat16")
    paths = [
        FastPath("AMX bfloat16", found.has_amx, "oneDNN runs it on AMX tiles" if found.has_amx else "this CPU has no amx_bf16"),
        FastPath("bfloat16 by default", found.has_fast_bfloat16, bf16 if found.has_fast_bfloat16 else SLOW.format("bfloat16")),
        FastPath("float16 products", has_float16, "on request: --dtype float16" if has_float16 else SLOW.format("float16")),
        FastPath("CUDA", not without_cuda, without_cuda or "products by torch"),
    ]
    for backend in BACKENDS:
        why_not = backend.why_not(device, dtype)
        paths.append(FastPath(f"backend {backend.name}", not why_not, why_not or backend.strength))
    return paths
