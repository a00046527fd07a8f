"""What tests of Triton kernels share. They run on a GPU where there is one, else in Triton's interpreter, without bfloat16."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
triton = pytest.importorskip("triton")
if not HAS_CUDA and "Interpreted" not in type(triton.language.sum).__name__:
    pytest.skip("triton was imported before it was told to interpret", allow_module_level=True)


def teach_interpreter_new_numpy() -> None:
    """Its scalars are arrays of one element, which numpy 2.5 no longer takes for numbers."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def patch_once_a_kernel() -> None:
    """The interpreter redefines the language at every call of a function inside of a kernel, which was half of its time."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    interpreter._patch_lang = lambda fn: original(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def describe_types_when_asked() -> None:
    """The interpreter writes out the type of every shape and makes a table of numpy's at every look: a third of its time."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = triton.language.core

    def make(self: Any, args: Sequence[Any], stated: Any = None) -> None:
        self.values = list(args)
        self._type = stated if stated is None or isinstance(stated, core.tuple_type) else core.tuple_type(stated)

    def find_type(self: Any) -> Any:
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = make
    core.tuple.type = property(find_type, lambda self, value: setattr(self, "_type", value))
    original, found = interpreter._get_np_dtype, dict[str, Any]()

    def find_numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in found:
            found[name] = original(of.scalar)
        return found[name]

    interpreter._get_np_dtype = find_numpy_type


if not HAS_CUDA:
    teach_interpreter_new_numpy()
    patch_once_a_kernel()
    describe_types_when_asked()

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
    q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, mask: BlockMask[Tensor] | None = None,
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
