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
CGROUP_ROOT = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 2**60  # cgroup v1 writes a number near 2**63 for "none"


@dataclass(frozen=True)
class Memory:
    """Memory in bytes as this process may use it: of the machine, or of its cgroup where that is less."""

    total_bytes: int
    available_bytes: int
    limited_by: str = ""  # what limits it, if not the machine itself


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


def memory(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> Memory:
    """Total and available memory, the limits of the cgroup and of all its parents honoured."""
    found = of_machine(proc)
    for directory in cgroup_directories(proc, cgroup):
        limit, used = cgroup_usage(directory)
        if limit is not None and limit < min(found.total_bytes, NO_LIMIT_BYTES):
            found = Memory(limit, min(found.available_bytes, max(0, limit - used)), "cgroup")
    return found


def of_machine(proc: Path) -> Memory:
    info = proc / "meminfo"
    if info.is_file():
        values: dict[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB$", info.read_text(encoding="ascii"), re.MULTILINE))
        total = int(values.get("MemTotal", 0)) * 1024
        return Memory(total, int(values.get("MemAvailable", "0")) * 1024)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(total, total)


def cgroup_directories(proc: Path, root: Path) -> list[Path]:
    """The directories of this process's memory cgroup, innermost first, for version 2 and for version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = []
    for line in lines or ["0::/"]:
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        inner = base / place.strip("/")
        found += [path for path in (inner, *inner.parents) if path == base or base in path.parents]
    return found


def cgroup_usage(directory: Path) -> tuple[int | None, int]:
    """The limit (None: none) and what is in use, less the file pages that the kernel can drop."""
    for limit_name, used_name, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (directory / limit_name).read_text(encoding="ascii").strip()
            used = int((directory / used_name).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        return (None if limit == "max" else int(limit)), used - int(stat.get(stat_key, 0))
    return None, 0


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
