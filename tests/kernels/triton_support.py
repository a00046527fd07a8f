"""What tests of Triton kernels share. They run on a GPU where there is one, else in Triton's interpreter, without
bfloat16."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import quicken

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
triton = pytest.importorskip("triton")
if not HAS_CUDA and "Interpreted" not in type(triton.language.sum).__name__:
    pytest.skip("triton was imported before it was told to interpret", allow_module_level=True)


if not HAS_CUDA:
    quicken()

from archerfish.kernels.batches import BlockMask  # noqa: E402
from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch  # noqa: E402
from archerfish.kernels.torch.reference import TorchOps  # noqa: E402
from archerfish.kernels.triton.ops import TritonOps  # noqa: E402
from archerfish.kernels.triton.plan import Tile  # noqa: E402
from tests.kernels.paged import batch_over as batch_over  # noqa: E402

Tensor = torch.Tensor
DEVICE = "cuda" if HAS_CUDA else "cpu"
TYPES = ["float32", "float16", "bfloat16"] if HAS_CUDA else ["float32", "float16"]
untraced = pytest.mark.no_cover  # coverage leaves kernels out, and tracing makes the interpreter three times as slow
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}


def combine(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of a choice each, on a GPU; in the interpreter enough of them for every two choices to meet."""
    rows = list(product(*map(range, map(len, choices))))
    if not HAS_CUDA:
        pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
        missing, chosen = set().union(*pairs.values()), []
        while missing:
            chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
            missing -= pairs[chosen[-1]]
        rows = chosen
    return [tuple(choice[i] for choice, i in zip(choices, row, strict=True)) for row in rows]


def random(*shape: int, dtype: str = "float32") -> Tensor:
    return torch.randn(*shape).to(DEVICE, getattr(torch, dtype))


def in_float32(kv: KVLayer[Tensor]) -> KVLayer[Tensor]:
    return KVLayer(kv.keys.float().contiguous(), kv.values.float().contiguous())


def expect_attention(
    q: Tensor,
    kv: KVLayer[Tensor],
    batch: PagedBatch[Tensor],
    heads: HeadShape,
    mask: BlockMask[Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """By the reference, in float32."""
    return TorchOps(DEVICE).paged_attention(q.float(), in_float32(kv), batch, heads, mask=mask, sinks=sinks)


def assert_near(found: Tensor, expected: Tensor, dtype: str = "float32", *, factor: float = 1.0) -> None:
    """As near as a result in a type can be; NaN where NaN is expected."""
    error = factor * TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=error, rtol=error, equal_nan=True)


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of a step, and what it writes to."""
    step()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def small_ops(dtype: str = "float32", step: int = 16) -> TritonOps:
    """Attention in tiles that are small enough for short sequences to have several."""
    ops = TritonOps(DEVICE, dtype)
    ops.decode_tile = ops.prefill_tile = Tile(16, step, 4, 1)
    return ops
