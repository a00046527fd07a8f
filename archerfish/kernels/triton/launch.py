"""Programmatic dependent launch: a kernel starts before the kernel in front of it has ended (Hopper and newer cards).

A kernel that is launched with `early_start` may load what the kernel in front does not write, and then calls `follow`,
which waits until that kernel has ended and lets the next one start. So only one other kernel can still run before
`follow`: what is loaded there must have been written at least two kernels earlier. A kernel that calls
`invite_and_follow` lets the next one start before it waits itself: what the next one loads early must then be older
than this kernel and the one in front of it. After `follow`, everything that was written before is visible.

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
    """Wait for the kernel in front to end, then let the next kernel start."""
    if is_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def invite_and_follow(is_early: tl.constexpr):
    """As `follow`, but the next kernel may start before this one waits."""
    if is_early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_early(pointers, is_early: tl.constexpr):
    """Prefetch lines of 128 bytes at these addresses into the card's cache; nothing waits for them."""
    if is_early:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that calls `follow`."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
    return {"is_early": is_early, "launch_pdl": is_early}
