"""Which backend computes: by device and type, with the reason, for the engines and for `archerfish doctor`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from archerfish.errors import DeviceError
from archerfish.kernels.machine import fast_cpu_dtype

if TYPE_CHECKING:
    from archerfish.kernels.ops import Ops

logger = logging.getLogger("archerfish.kernels")
INSTALL_TORCH = "Install it: pip install 'archerfish[torch]'."
CARD_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")  # of NVIDIA, its Jetsons, WSL, AMD


class OpsBackend(NamedTuple):
    """One implementation of `Ops`. Nothing of it is imported before `load`."""

    name: str
    why_not: Callable[[str, str], str]  # (device, dtype) -> why it cannot compute there; empty: it can
    load: Callable[[str, str], Ops[Any]]  # (device, dtype)
    strength: str  # in one phrase, for people to read
    reads_stored: bool = False  # as `Ops.reads_stored`
    keeps_quantised: bool = False  # multiplies with quantised matrices as they are stored
    kv_types: tuple[str, ...] = ()  # that keys and values may have beside the compute type


class FastPath(NamedTuple):
    """One optional way to be faster, whether it is on, and why or why not."""

    name: str
    is_on: bool
    reason: str


class Device(NamedTuple):
    """The device that computes, and why it was chosen. As text, for example "cuda: NVIDIA H200, 139 GiB"."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_device(wanted: str) -> Device:
    """The device for the option `device`; a device that torch does not have is a DeviceError.

    "auto" is a card where there is one. torch, which takes a second to import, is asked only if this machine has a
    driver.
    """
    if wanted == "cpu":
        return Device("cpu", "as the option device says")
    has_driver = os.name != "posix" or any(map(os.path.exists, CARD_DRIVERS))
    if wanted == "auto" and not has_driver and "torch" not in sys.modules:
        return Device("cpu", "no CUDA device")
    if wanted == "auto" and not importlib.util.find_spec("torch"):
        return Device("cpu", "torch, which cards need, is not installed")
    torch = import_torch(f"Device {wanted!r}")
    if wanted in ("cuda", "auto") and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device("cuda", f"{card.name}, {card.total_memory >> 30} GiB")
    if wanted == "auto":
        is_without = has_driver and not torch.version.cuda and not torch.version.hip
        return Device("cpu", f"this torch ({torch.__version__}) has no CUDA" if is_without else "no CUDA device")
    if wanted == "mps" and torch.backends.mps.is_available():
        return Device("mps", "as the option device says")
    raise DeviceError(f"Device {wanted!r} was asked for, but this torch ({torch.__version__}) sees none.")


def import_torch(what: str = "A tensor") -> Any:
    """torch, or an error that names what needs it."""
    if not importlib.util.find_spec("torch"):
        raise DeviceError(f"{what} needs torch, which is not installed.", hint=INSTALL_TORCH)
    return import_module("torch")


def log_device(model: str, wanted: str, dtype: str) -> None:
    logger.info("%s computes on %s, in %s.", model, choose_device(wanted), dtype)


def choose_dtype(wanted: str, device: str) -> str:
    """The type to compute in on a device; of the native CPU backend, the one of keys, values and matrices."""
    if device == "cuda" and wanted == "auto":
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device == "cpu" and without_native(
        device
    ):  # torch takes a hundred times as long where the CPU has no such products
        if wanted not in ("auto", "float32"):
            logger.warning("Without its native backend, archerfish computes in float32 on this CPU, not in %s.", wanted)
        return "float32"
    return wanted if wanted != "auto" else fast_cpu_dtype() if device == "cpu" else "float32"


@lru_cache(maxsize=1)
def native_error() -> str:
    """Why the native backend cannot be loaded; empty: it can."""
    try:
        import_module("archerfish.kernels.native._native")
    except ImportError as error:
        return f"it was not compiled when archerfish was installed ({error})"
    return ""


def without_native(device: str, dtype: str = "") -> str:
    return native_error() if device == "cpu" else "it computes on a CPU"


def without_torch(device: str, dtype: str) -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def without_triton(device: str, dtype: str) -> str:
    if device != "cuda":
        return "it computes on CUDA devices"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def loader(place: str) -> Callable[[str, str], Ops[Any]]:
    """What imports a backend, "module:class", when it is called, and makes one for a device and a type."""
    module, _, name = place.partition(":")
    return lambda device, dtype: getattr(import_module(f"archerfish.kernels.{module}"), name)(device, dtype)


BACKENDS = [  # the fastest first
    OpsBackend(
        "torch + Triton",
        without_triton,
        loader("triton.ops:TritonOps"),
        "norms, rotary and attention in own kernels",
        keeps_quantised=True,
        kv_types=("fp8",),
    ),
    OpsBackend(
        "native",
        without_native,
        loader("native.ops:NativeOps"),
        "own kernels over tapes",
        reads_stored=True,
        keeps_quantised=True,
        kv_types=("int8",),
    ),
    OpsBackend(
        "torch reference",
        without_torch,
        loader("torch.reference:TorchOps"),
        "any device and type of torch",
        kv_types=("fp8",),
    ),
]


def register_backend(backend: OpsBackend) -> None:
    """Add a backend, which is preferred to the others wherever it can compute."""
    BACKENDS.insert(0, backend)


def choose_backend(device: str, dtype: str) -> OpsBackend:
    """The fastest backend for a device and a type."""
    found = next((backend for backend in BACKENDS if not backend.why_not(device, dtype)), None)
    if found is None:
        raise DeviceError(
            f"Nothing can compute here: {native_error()}, and torch is not installed.", hint=INSTALL_TORCH
        )
    return found


def choose_ops(device: str, dtype: str) -> Ops[Any]:
    return choose_backend(device, dtype).load(device, dtype)


def fast_paths() -> list[FastPath]:
    """Every optional path and every backend with its state, for people to read."""
    from archerfish.kernels.cards import find_cards

    _, without_cuda = find_cards()
    device, dtype = ("cpu", choose_dtype("auto", "cpu")) if without_cuda else ("cuda", "bfloat16")
    paths = [FastPath("CUDA", not without_cuda, without_cuda or "products by torch")]
    for backend in BACKENDS:
        why_not = backend.why_not(device, dtype)
        paths.append(FastPath(f"backend {backend.name}", not why_not, why_not or backend.strength))
    return paths
