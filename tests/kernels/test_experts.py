"""Mixtures of experts against a loop over rows, by every backend: red if a row has another expert, weight, order or place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import PLAIN, WeightFormat, choose_format
from archerfish.kernels.ops import LinearWeight
from archerfish.kernels.stored import StoredTensor, random_stored
from archerfish.kernels.torch.reference import ACTIVATIONS, TorchOps
from tests.kernels.native_support import LEVELS, native_ops
from tests.kernels.test_native import FORMATS, make_matrix, tolerance
from tests.kernels.triton_support import DEVICE, TYPES, assert_near, untraced

from archerfish.kernels.triton.ops import TritonOps  # isort: skip

Tensor = torch.Tensor
ROUTINGS: dict[str, Routing[Any]] = {
    "softmax": Routing(8, 3), "normed": Routing(5, 2, is_normed=True, scale=1.5), "one": Routing(4, 1), "every": Routing(3, 3),
    "sigmoid": Routing(8, 2, is_sigmoid=True, is_normed=True, scale=2.0, bias=torch.linspace(0.0, 0.9, 8).flip(0)),
}
LOGITS: dict[str, Callable[[Tensor], Tensor]] = {  # how they become others
    "random": lambda logits: logits, "on one expert": lambda logits: logits + 100 * torch.eye(logits.shape[1])[2],
    "some experts empty": lambda logits: logits - 100 * (torch.arange(logits.shape[1]) % 2),
}


def expected(
    x: Tensor, logits: Tensor, routing: Routing[Any], gate_up: Tensor, down: Tensor, shared: Tensor | None = None
) -> Tensor:
    """Row by row, expert by expert."""
    rows = []
    for i, row in enumerate(x):
        given = logits[i, : routing.num_experts]
        scores = torch.sigmoid(given) if routing.is_sigmoid else torch.exp(given - given.max())
        if not routing.is_sigmoid:
            scores = scores / scores.sum()
        compared = scores if routing.bias is None else scores + routing.bias
        chosen = sorted(range(routing.num_experts), key=lambda e: -float(compared[e]))[: routing.num_chosen]
        factor = routing.scale / (sum(float(scores[e]) for e in chosen) if routing.is_normed else 1.0)
        total = torch.zeros(x.shape[1])
        for e in chosen:
            gate, up = (gate_up[e] @ row).chunk(2)
            total += factor * scores[e] * (down[e] @ (ACTIVATIONS["silu"](gate) * up))
        if shared is not None:
            total += shared[i] * (torch.sigmoid(logits[i, -1]) if logits.shape[1] > routing.num_experts else 1.0)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def make(
    routing: Routing[Any], num_rows: int, *, has_gate: bool = False, width: int = 96, hidden: int = 48
) -> tuple[Tensor, ...]:
    """Rows, logits, weights of both products, shared rows."""
    num = routing.num_experts
    return (
        torch.randn(num_rows, width), torch.randn(num_rows, num + has_gate), torch.randn(num, 2 * hidden, width) / 6,
        torch.randn(num, width, hidden) / 4, torch.randn(num_rows, width),
    )


def packed(ops: Any, matrices: Tensor, weight_format: WeightFormat = PLAIN) -> LinearWeight[Any]:
    """As one stack, or as a tensor for each expert."""
    parts = [{"weight": each} for each in ([matrices.flatten(0, 1)] if len(matrices) % 2 else matrices)]
    return ops.linear_weight(parts, [None] * len(parts), weight_format)  # type: ignore[no-any-return]


def run(ops: Any, routing: Routing[Any], x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, **options: Any) -> Tensor:
    weight_format = options.pop("weight_format", PLAIN)
    first, second = packed(ops, gate_up, weight_format), packed(ops, down, weight_format)
    return ops.experts(x, logits, routing, first, second, "silu", **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["reference", *LEVELS])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_on_the_cpu(kind: str, level: str) -> None:
    routing, ops = ROUTINGS[kind], TorchOps() if level == "reference" else native_ops(level=level)
    if routing.bias is not None and level != "reference":
        routing = routing._replace(bias=routing.bias.numpy())
    for num_rows in (1, 2, 7, 60, 0):
        for change in LOGITS.values():
            x, logits, gate_up, down, shared = make(routing, num_rows, has_gate=num_rows == 7)
            logits = change(logits)
            given = {"shared": shared if num_rows in (2, 7) else None}
            right = expected(x, logits, ROUTINGS[kind], gate_up, down, **given)
            torch.testing.assert_close(run(ops, routing, x, logits, gate_up, down, **given), right, atol=2e-4, rtol=1e-4)


@untraced
@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize(("kind", "num_rows"), [
    ("softmax", 1), ("softmax", 23), ("normed", 70), ("one", 9), ("every", 2), ("sigmoid", 40), ("sigmoid", 1),
])  # fmt: skip
def test_triton(kind: str, num_rows: int, dtype: str) -> None:
    routing, ops = ROUTINGS[kind], TritonOps(DEVICE, dtype)
    change = list(LOGITS.values())[num_rows % len(LOGITS)]
    x, logits, gate_up, down, shared = make(routing, num_rows, has_gate=num_rows in (1, 9))
    x, gate_up, down, shared = (each.to(getattr(torch, dtype)) for each in (x, gate_up, down, shared))
    right = expected(x.float(), change(logits), routing, gate_up.float(), down.float(), shared.float())
    here = routing._replace(bias=None if routing.bias is None else routing.bias.to(DEVICE))
    found = run(ops, here, x.to(DEVICE), change(logits).to(DEVICE), gate_up, down, shared=shared.to(DEVICE))
    assert_near(found.cpu(), right, dtype, factor=4)


def as_matrices(ops: Any, stored: list[StoredTensor], weight_format: WeightFormat = PLAIN) -> LinearWeight[Any]:
    parts = [{"weight": each} for each in stored]
    return ops.linear_weight(parts, [None] * len(parts), weight_format)  # type: ignore[no-any-return]


KINDS = [("Q4_0", 128), ("Q4_1", 32), ("INT8", 16), ("INT8", 128), ("FP8", 128), ("int8", 0), ("int4", 0)]


def rounded(weight_format: WeightFormat, matrices: Tensor) -> Tensor:
    """The numbers of a format that are meant."""
    made = weight_format.load({"weight": matrices.flatten(0, 1)})
    return weight_format.dequantise(made, torch.float32).view(matrices.shape)


@untraced
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_formats_on_triton(kind: tuple[str, int], num_rows: int) -> None:
    """Codes of 4 and 8 bits in groups, with and without minima, and rows with a scale."""
    routing, (name, group_size), hidden = ROUTINGS["softmax"], kind, 64
    x, logits, gate_up, down, _ = make(routing, num_rows, width=128, hidden=hidden)
    if group_size:
        shapes = [each.shape[1:] for each in (gate_up, down)]
        stored = [[random_stored(tuple(shape), name, min(group_size, shape[1])) for _ in range(8)] for shape in shapes]
        wide = [torch.stack([torch.from_numpy(each.as_floats()) for each in half]) for half in stored]
        first, second = (as_matrices(TritonOps(DEVICE, "float32"), half) for half in stored)
    else:
        made = choose_format(name)
        wide = [rounded(made, each) for each in (gate_up, down)]
        first, second = (packed(TritonOps(DEVICE, "float32"), each, made) for each in (gate_up, down))
    found = TritonOps(DEVICE, "float32").experts(x.to(DEVICE), logits.to(DEVICE), routing, first, second, "silu")
    assert_near(found.cpu(), expected(x, logits, routing, *wide), factor=8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*FORMATS, "int8", "int8 rows", "int4"])
def test_formats_on_the_cpu(name: str, level: str) -> None:
    routing, size = ROUTINGS["softmax"], 256
    made = choose_format(name.partition(" ")[0]) if name.startswith("int") else None
    held = [[make_matrix("float32" if made else name, rows, size, seed) for seed in range(8)] for rows in (2 * size, size)]
    wide = [torch.stack([torch.from_numpy(numbers) for _, numbers in half]) for half in held]
    if made:
        wide = [rounded(made, each) for each in wide]
    ops = native_ops(dtype=name if name in ("float16", "bfloat16") else "float32", level=level)
    ops.inner.rounds_rows = name == "int8 rows"
    weights = [as_matrices(ops, [each for each, _ in half], made or PLAIN) for half in held]
    for num_rows in (1, 90):
        x, logits = torch.randn(num_rows, size), torch.randn(num_rows, routing.num_experts)
        found = ops.experts(x, logits, routing, *weights, "silu")
        right = expected(x, logits, routing, *wide)
        assert (found - right).norm() < (0.02 if made else 2 * tolerance(name, 90, level)) * right.norm()
