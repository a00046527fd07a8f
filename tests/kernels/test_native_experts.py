"""Mixtures of experts on the CPU: red if a row has another expert, weight, order or place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archerfish.kernels.formats import PLAIN, choose_format
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.expert_cases import LOGITS, ROUTINGS, as_matrices, check_biases, expected, make, rounded, run
from tests.kernels.native_support import LEVELS, native_ops
from tests.kernels.test_native import FORMATS, make_matrix, tolerance


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
            given: dict[str, Any] = {"shared": shared if num_rows in (2, 7) else None}
            right = expected(x, logits, ROUTINGS[kind], gate_up, down, **given)
            torch.testing.assert_close(
                run(ops, routing, x, logits, gate_up, down, **given), right, atol=2e-4, rtol=1e-4
            )


@pytest.mark.parametrize("name", [*FORMATS, "int8", "int8 rows", "int4"])
def test_formats_on_the_cpu(name: str) -> None:
    routing, size = ROUTINGS["softmax"], 256
    made = choose_format(name.partition(" ")[0]) if name.startswith("int") else None
    held = [
        [make_matrix("float32" if made else name, rows, size, seed) for seed in range(8)] for rows in (2 * size, size)
    ]
    wide = [torch.stack([torch.from_numpy(numbers) for _, numbers in half]) for half in held]
    if made:
        wide = [rounded(made, each) for each in wide]
    for num_rows in (1, 90):
        x, logits = torch.randn(num_rows, size), torch.randn(num_rows, routing.num_experts)
        right = expected(x, logits, routing, *wide)
        for level in LEVELS:
            ops = native_ops(dtype=name if name in ("float16", "bfloat16") else "float32", level=level)
            ops.inner.rounds_rows = name == "int8 rows"
            weights = [as_matrices(ops, [each for each, _ in half], made or PLAIN) for half in held]
            found = ops.experts(x, logits, routing, *weights, "silu")
            error = (found - right).norm() / right.norm()
            assert error < (0.02 if made else 2 * tolerance(name, 90, level)), level


@pytest.mark.parametrize("level", ["reference", *LEVELS])
def test_biases_on_the_cpu(level: str) -> None:
    for num_rows in (1, 60):
        check_biases(TorchOps() if level == "reference" else native_ops(level=level), num_rows)
