"""Which cards torch will compute on and what torch was built with, without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
from dataclasses import dataclass
from pathlib import Path

from archerfish.errors import DeviceError

CUDA_DRIVER = "libcuda.so.1" if os.name == "posix" else "nvcuda.dll"


@dataclass(frozen=True)
class Card:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built with. Versions are empty where it was built without; None: its files do not
    say it."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None


def torch_build() -> TorchBuild:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    try:
        facts = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    except OSError:
        return TorchBuild()
    return TorchBuild(str(facts["__version__"]), facts.get("cuda") or "", facts.get("hip") or "")


def find_cards() -> tuple[list[Card], str]:
    """The cards that torch will compute on, or why there are none. torch is asked where its files do not say what it is
    for, and for cards of AMD."""
    if importlib.util.find_spec("torch") is None:
        return [], "torch, which cards need, is not installed"
    build = torch_build()
    if build.cuda:
        try:
            cards = ask_driver(int(build.cuda.partition(".")[0]))
        except DeviceError as error:
            return [], error.message
        except OSError:
            return [], f"there is no CUDA driver ({CUDA_DRIVER})"
        return cards, "" if cards else "no CUDA device"
    if build.version and not build.hip:
        return [], f"this torch ({build.version}) has no CUDA"
    import torch

    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    cards = [Card(torch.cuda.get_device_name(index), *reversed(torch.cuda.mem_get_info(index))) for index in indices]
    return cards, "" if cards else "this torch sees no CUDA device"


def ask_driver(cuda_major: int) -> list[Card]:
    """The cards of CUDA's driver, as torch orders them. cuda_major: the version that torch needs.

    Free memory is known in a context alone. The context stays until the process ends, so that the next question is
    quick.
    """
    driver = ctypes.CDLL(CUDA_DRIVER)

    def ask(function: str, *arguments: object) -> None:
        status = getattr(driver, function)(*arguments)
        if status:
            raise DeviceError(f"the CUDA driver answers {function} with error {status}")

    version = ctypes.c_int()
    count = ctypes.c_int()
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    ask("cuInit", 0)
    ask("cuDriverGetVersion", ctypes.byref(version))
    if version.value // 1000 < cuda_major:
        raise DeviceError(f"the driver is for CUDA {version.value // 1000}, this torch for {cuda_major}")
    ask("cuDeviceGetCount", ctypes.byref(count))
    cards = []
    for index in range(count.value):
        ask("cuDeviceGet", ctypes.byref(device), index)
        ask("cuDeviceGetName", name, len(name), device)
        ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        ask("cuCtxSetCurrent", context)
        ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        cards.append(Card(name.value.decode(), total.value, free.value))
    return cards
