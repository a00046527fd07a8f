"""What this machine can do, found out without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
READ_PEAK = "GB/s from memory"  # what `measure_peaks` calls it
NO_LIMIT_BYTES = 2**60  # cgroup v1 writes a number near 2**63 for "none"


@dataclass(frozen=True)
class Cpu:
    """The processor as this process may use it."""

    model: str
    flags: frozenset[str]
    num_cores: int  # that this process may use


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    return Cpu(*read_cpu(Path("/proc/cpuinfo")), num_usable_cores())


def read_cpu(info: Path) -> tuple[str, frozenset[str]]:
    """Name and flags of the first processor; those of ARM have numbers for names."""
    if not info.is_file():
        return "unknown", frozenset()
    found: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = frozenset((found.get("flags") or found.get("Features", "")).split())
    maker, part = found.get("CPU implementer"), found.get("CPU part", "unknown")
    if "model name" in found or maker is None:
        return found.get("model name", "unknown"), flags
    name = ARM_PARTS.get(part) if maker == "0x41" else None
    return f"ARM {name}" if name else f"ARM, implementer {maker}, part {part}", flags


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    return (
        sorted(os.sched_getaffinity(os.getpid()))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def num_usable_cores() -> int:
    """Cores that the scheduler gives this process: its affinity, and the quota of its cgroup."""
    cores = len(usable_cores())
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text(encoding="ascii").partition(" ")
        if limit.strip() != "max":
            cores = min(cores, max(1, round(int(limit) / int(period))))
    return max(1, cores)


def num_free_cores(num_cores: int, busy_s: float, own_s: float, wall_s: float) -> int:
    """Cores that other processes leave to this one, of those that were busy for busy_s together, own_s of that by this
    process.

    A process that shares a core with a thread of ours gets half of it: that core counts as taken.
    """
    others = max(0.0, busy_s - own_s) / wall_s
    return max(1, min(num_cores, int(num_cores - others + 0.499)))


class FreeCores:
    """How many cores other processes leave to this one; looked up every now and then, while passes are computed."""

    def __init__(self, stat: Path = Path("/proc/stat"), interval_s: float = 0.25) -> None:
        self._stat, self._interval_s = stat, interval_s
        self._cores = usable_cores()
        self._found, self._last = len(self._cores), self._read()

    def count(self) -> int:
        before = self._last  # another thread may look it up meanwhile
        if time.monotonic() - before[0] >= self._interval_s:
            self._last = last = self._read()
            wall_s, busy_s, own_s = (now - then for now, then in zip(last, before, strict=True))
            is_old = wall_s > 4 * max(self._interval_s, own_s)  # little was computed meanwhile
            self._found = len(self._cores) if is_old else num_free_cores(len(self._cores), busy_s, own_s, wall_s)
        return self._found

    def _read(self) -> tuple[float, float, float]:
        """The time, the time for which our cores have been busy, and the part of it that was this process's."""
        busy = 0
        with contextlib.suppress(OSError):
            for line in self._stat.read_text(encoding="ascii").splitlines():
                name, *counts = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cores:
                    busy += (
                        sum(map(int, counts[:8])) - int(counts[3]) - int(counts[4])
                    )  # less idle and waiting for a disk
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def fast_cpu_dtype() -> str:
    """The 16-bit type that this CPU multiplies in, or can widen at no cost."""
    flags = cpu().flags
    return "bfloat16" if "avx512_bf16" in flags or {"amx_tile", "amx_bf16"} <= flags else "float16"


@dataclass(frozen=True)
class Memory:
    """Memory in bytes as this process may use it: of the machine, or of its cgroup where that is less."""

    total_bytes: int
    available_bytes: int
    limited_by: str = ""  # what limits it, if not the machine itself


def memory(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> Memory:
    """Total and available memory, the limits of the process, of the cgroup and of all its parents honoured."""
    found = of_machine(proc)
    for directory in cgroup_directories(proc, cgroup):
        limit, used = cgroup_usage(directory)
        if limit is not None and limit < min(found.total_bytes, NO_LIMIT_BYTES):
            found = Memory(limit, min(found.available_bytes, max(0, limit - used)), "cgroup")
    limit, used = process_usage(proc / "self")
    if limit is not None and limit - used < found.available_bytes:
        found = Memory(min(limit, found.total_bytes), max(0, limit - used), "ulimit -v")
    return found


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps most of it otherwise; other libraries have no such call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def of_machine(proc: Path) -> Memory:
    info = proc / "meminfo"
    if info.is_file():
        values: dict[str, str] = dict(
            re.findall(r"^(\w+):\s+(\d+) kB$", info.read_text(encoding="ascii"), re.MULTILINE)
        )
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


def process_usage(directory: Path) -> tuple[int | None, int]:
    """The limit of this process's address space (None: none) and what is in use."""
    try:
        limits = (directory / "limits").read_text(encoding="ascii")
        num_pages = int((directory / "statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return None, 0
    found = re.search(r"^Max address space +(\d+)", limits, re.MULTILINE)
    return (int(found[1]) if found else None), num_pages * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> None:
    """Return the memory of an engine that nothing refers to any more to the system."""
    gc.unfreeze()  # a loaded engine freezes all objects, those of the dropped one too
    gc.collect()
    gc.freeze()
    trim_heap()
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.empty_cache()
