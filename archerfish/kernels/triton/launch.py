"""How kernels that follow one another in a decode step keep the card busy between them.

A kernel's programs take their places while the one in front still runs (programmatic dependent launch, from Hopper on). They
may read what that kernel does not write, and wait until it has ended before all else. Only then may programs of the next kernel
come: whatever is read before waiting is thus safe if a kernel before the one in front, or none at all, has written it. Behind
kernels that invite the next one earlier it must be older than all of these and than the one in front of them, which may all
still run. All that comes after waiting sees all before it.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from functools import cache

import torch
import triton
import triton.language as tl

EARLY_CAPABILITY = (9, 0)


@triton.jit
def follow(is_early: tl.constexpr):
    """Wait for the kernel in front; the next one's programs may come."""
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def invite_and_follow(is_early: tl.constexpr):
    """As `follow`, but the next kernel's programs may come before this one waits."""
    if is_early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_early(pointers, is_early: tl.constexpr):
    """Lines of 128 bytes at these addresses on their way into the card's cache; nothing waits for them."""
    if is_early:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch of a kernel that calls `follow`."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
    return {"is_early": is_early, "launch_pdl": is_early}
