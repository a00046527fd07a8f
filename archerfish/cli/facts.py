"""What this machine has: memory, disk, GPUs, compilers, packages. Nothing here uses the network or loads a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("cc", "c++", "nvcc")
PEERS = ("sentence-transformers", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Package:
    """A Python package that archerfish uses; `version` is empty if it is not installed."""

    name: str
    version: str
    needed_for: str  # empty: always

    @property
    def is_missing(self) -> bool:
        return not self.version and not self.needed_for


def gpus() -> list[Gpu]:
    """The CUDA devices that torch sees; none if there is no torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return found


def packages() -> list[Package]:
    """Every package that archerfish's own metadata names, and the peers that `bench` can measure."""
    wanted: dict[str, str] = {}
    for requirement in importlib.metadata.requires("archerfish") or []:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        if extra is None or extra[1] != "test":
            wanted.setdefault(re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0], extra[1] if extra else "")
    for name in PEERS:
        wanted.setdefault(name, "bench")
    wanted.setdefault("triton", "gpu kernels")
    return [Package(name, installed_version(name), needed_for) for name, needed_for in wanted.items()]


def installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compilers() -> dict[str, str]:
    """Where each compiler is; empty if it is not on the path."""
    return {name: shutil.which(name) or "" for name in COMPILERS}


def total_cores() -> int:
    return os.cpu_count() or 1


def system() -> str:
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def is_writable(path: Path) -> bool:
    return os.access(existing_parent(path), os.W_OK)


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free
