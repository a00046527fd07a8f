"""Kernels compiled for a Hopper, which needs no card: the interpreter takes much that the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from archerfish.kernels.triton_products import multiply_rows_kernel as kernel

fixed = {
    "width": 256, "outputs": 4, "columns": 128, "num_pieces": 1, "activation": "none", "has_bias": False, "has_residual": True,
    "is_early": False,
}
for type_name in ("fp32", "bf16"):
    for rows, is_normed, is_gated in ((3, True, False), (4, False, False), (4, True, True)):
        given = {**fixed, "rows": rows, "is_normed": is_normed, "is_gated": is_gated}
        numbers = {"eps": "fp32", "num_outputs": "i32", "x_stride": "i32", "residual_stride": "i32", "norm": "*fp32"}
        types = {name: "constexpr" if name in given else numbers.get(name, f"*{type_name}") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in given.items()}
        compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
"""


def test_products_of_few_rows() -> None:
    """In float32, weights and sums have one type: tuples of them must not be taken for one another."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
