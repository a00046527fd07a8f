"""What this machine can do, found out without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    """The processor as this process may use it."""

    model: str
    flags: frozenset[str]
    num_cores: int  # that this process may use

    @property
    def has_amx(self) -> bool:
        return {"amx_tile", "amx_bf16"} <= self.flags

    @property
    def has_fast_bfloat16(self) -> bool:
        return self.has_amx or "avx512_bf16" in self.flags

    @property
    def has_fast_float16(self) -> bool:
        return "avx512_fp16" in self.flags or "amx_fp16" in self.flags


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    model, flags = "unknown", frozenset[str]()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and model == "unknown":
                model = value.strip()
            elif key.strip() in ("flags", "Features") and not flags:
                flags = frozenset(value.split())
    return Cpu(model, flags, num_usable_cores())


def num_usable_cores() -> int:
    """Cores that the scheduler gives this process: its affinity, and the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text(encoding="ascii").partition(" ")
        if limit.strip() != "max":
            cores = min(cores, max(1, round(int(limit) / int(period))))
    return max(1, cores)


def fast_cpu_dtype() -> str:
    """The type in which this CPU multiplies fastest without losing more than embeddings can bear."""
    return "bfloat16" if cpu().has_fast_bfloat16 else "float32"
