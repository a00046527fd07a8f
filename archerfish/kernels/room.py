"""Whether a model fits into the memory of a device, asked before anything of it is allocated."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from archerfish.errors import OutOfMemoryError
from archerfish.kernels.machine import Memory, memory

GIB = 1 << 30


def usable_memory(device: str, share: float = 1.0) -> Memory:
    """The memory of a device. share: how much of a card's memory may be used."""
    if device != "cuda":
        return memory()
    if "torch" in sys.modules:
        import torch

        free, total = torch.cuda.mem_get_info()
    else:  # `archerfish doctor`
        from archerfish.kernels.cards import find_cards

        card = find_cards()[0][0]
        free, total = card.free_bytes, card.total_bytes
    is_limited = total * share < free
    return Memory(total, int(min(free, total * share)), "gpu_memory_utilization" if is_limited else "")


def check_room(
    model: str, device: str, needs: Mapping[str, int], ways_out: Sequence[str], *, share: float = 1.0
) -> None:
    """Raise an OutOfMemoryError if a device has less free memory than the sum of these needs, in bytes by what they are
    for."""
    found = usable_memory(device, share)
    if sum(needs.values()) <= found.available_bytes:
        return
    parts = [f"{size(num_bytes)} for {what}" for what, num_bytes in needs.items() if num_bytes]
    wanted = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    limit = f" ({found.limited_by})" if found.limited_by else ""
    where = "on the card" if device == "cuda" else "here"
    raise OutOfMemoryError(
        f"{model} needs {wanted}; {size(found.available_bytes)} of {size(found.total_bytes)} are free {where}{limit}.",
        hint=f"Choose {', '.join(ways_out[:-1])}{' or ' if ways_out[1:] else ''}{ways_out[-1]}.",
    )


def size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"
