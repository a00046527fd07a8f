"""Memory of this process: resident, peak, mapped and in tensors."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc/self")


def status_bytes(key: str) -> int:
    """A size of /proc/self/status: VmRSS (resident now), VmHWM (its peak). 0 where there is no /proc."""
    with suppress(OSError):
        found = re.search(rf"^{key}:\s+(\d+) kB$", (PROC / "status").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def reset_peak() -> None:
    """Make VmHWM start again from what is resident now."""
    with suppress(OSError):
        (PROC / "clear_refs").write_text("5", encoding="ascii")


def map_ranges(file_name: str) -> list[tuple[int, int, int]]:
    """(start, end, resident bytes) of every mapping of a file."""
    found: list[tuple[int, int, int]] = []
    inside: tuple[int, int] | None = None
    with suppress(OSError), (PROC / "smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if head:
                inside = (int(head[1], 16), int(head[2], 16)) if line.rstrip().endswith(file_name) else None
            elif inside and line.startswith("Rss:"):
                found.append((*inside, int(line.split()[1]) * 1024))
    return found


def mapped_resident_bytes(file_name: str) -> int:
    """Bytes of a mapped file that are in memory for this process."""
    return sum(resident for _, _, resident in map_ranges(file_name))


def tensor_bytes(mapped_file: str) -> int:
    """Bytes of all torch tensors of this process, less those that lie in the mapping of a file."""
    import gc

    import torch

    ranges = map_ranges(mapped_file)
    seen: dict[int, int] = {}
    for item in gc.get_objects():
        if not isinstance(item, torch.Tensor):
            continue
        if item.is_mkldnn:
            seen[id(item)] = item.numel() * item.element_size()
            continue
        storage = item.untyped_storage()
        address = storage.data_ptr()
        if not any(start <= address < end for start, end, _ in ranges):
            seen[address] = max(seen.get(address, 0), storage.nbytes())
    return sum(seen.values())
