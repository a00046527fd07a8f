"""int8 weights on a CPU: what quantising keeps, and products of them against the reference."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.kernels import quant
from archerfish.kernels.ops import Activation, LinearWeight
from archerfish.kernels.quant import PIECE_ELEMENTS, dequantize_rows, quantize_rows, row_pieces
from archerfish.kernels.torch.cpu import INT8_ROWS, TorchCpuOps, is_available
from archerfish.kernels.torch.reference import TorchOps
from archerfish.types import INT8

Tensor = torch.Tensor
TYPES = [name for name in ("float32", "bfloat16", "float16") if is_available(name)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
SIZES = [(40, 64), (37, 100), (3, 33), (130, 192)]  # torch's kernel reads past the end of rows of 100 or 33


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights_of(
    ops: TorchOps, num_outputs: int, width: int, dtype: str = "float32", *, has_bias: bool = False
) -> tuple[LinearWeight[Tensor], LinearWeight[Tensor]]:
    """For a backend, and for the reference in float32: the same integers."""
    weight = (torch.randn(num_outputs, width) * width**-0.5).to(getattr(torch, dtype))
    bias = torch.randn(num_outputs).to(weight.dtype) if has_bias else None
    wide = TorchOps().linear_weight([weight], [None if bias is None else bias.float()], weight_format=INT8)
    return ops.linear_weight([weight], [bias], weight_format=INT8), wide


def check(y: Tensor, expected: Tensor, dtype: str) -> None:
    assert y.dtype == getattr(torch, dtype)
    assert float((y.float() - expected).norm()) <= TOLERANCE[dtype] * float(expected.norm())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 70), st.integers(0, 1000), st.floats(1e-20, 1e20),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_no_number_is_off_by_more_than_half_a_step(num_rows: int, width: int, seed: int, scale: float, dtype: str) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(num_rows, width) * (1.0 if dtype == "float16" else scale)).to(getattr(torch, dtype))
    weight[::3] = 0.0
    matrix, scales = quantize_rows([weight], "cpu")
    assert (matrix.dtype, scales.dtype, matrix.shape, scales.shape) == (torch.int8, torch.float32, weight.shape, (num_rows,))
    wide = dequantize_rows(matrix, scales, torch.float32)
    assert bool(((wide - weight.float()).abs() <= 0.5001 * scales[:, None]).all())
    assert not wide[::3].any()
    largest = matrix.abs().amax(1)
    assert bool(((largest == 127) | (weight == 0).all(1)).all())
    again, same_scales = quantize_rows([wide], "cpu")  # what int8 can hold stays as it is
    assert torch.equal(again, matrix)
    torch.testing.assert_close(same_scales, scales, rtol=1e-6, atol=0.0)


def test_stacked_weights_are_quantised_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(150, 20), 100 * torch.randn(7, 20), torch.randn(64, 20).bfloat16()]
    alone = [quantize_rows([part], "cpu") for part in parts]
    for elements in (PIECE_ELEMENTS, 100):
        monkeypatch.setattr(quant, "PIECE_ELEMENTS", elements)
        matrix, scales = quantize_rows(parts, "cpu")
        assert torch.equal(matrix, torch.cat([each[0] for each in alone]))
        assert torch.equal(scales, torch.cat([each[1] for each in alone]))


def test_what_is_no_number_is_not_hidden() -> None:
    weight = torch.randn(2, 8)
    weight[1, 3] = float("nan")
    ops = TorchCpuOps()
    y = ops.linear(torch.ones(1, 8), ops.linear_weight([weight], [None], weight_format=INT8))
    assert y.isnan().tolist() == [[False, True]]


@given(st.integers(0, 5000), st.integers(1, 1 << 21))
def test_pieces_cover_all_rows_once(num_rows: int, width: int) -> None:
    pieces = list(row_pieces(num_rows, width))
    assert [row for first, last in pieces for row in (first, last)] == [
        *([0] if num_rows else []), *(edge for first, _ in pieces[1:] for edge in (first, first)),
        *([num_rows] if num_rows else []),
    ]  # fmt: skip
    assert all((last - first) * width <= PIECE_ELEMENTS + 64 * width for first, last in pieces)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, INT8_ROWS, INT8_ROWS + 1, 40])
def test_products(num_rows: int, size: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant, "PIECE_ELEMENTS", 64 * 192)  # so that some have several pieces
    ops = TorchCpuOps(dtype=dtype)
    weight, wide = weights_of(ops, *size, dtype, has_bias=True)
    x, residual = (torch.randn(num_rows, width).to(ops.torch_dtype) for width in reversed(size))
    before = residual.clone()
    check(ops.linear(x, weight), TorchOps().linear(x.float(), wide), dtype)
    check(ops.linear(x, weight, residual=residual), TorchOps().linear(x.float(), wide, residual=residual.float()), dtype)
    assert torch.equal(residual, before)
    assert ops.logits(x, weight).dtype == torch.float32


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations(activation: Activation, dtype: str) -> None:
    for ops in (TorchOps(dtype=dtype), TorchCpuOps(dtype=dtype)):
        weight, wide = weights_of(ops, 40, 64, dtype)
        x = torch.randn(5, 64).to(ops.torch_dtype)
        check(ops.linear(x, weight, activation=activation), TorchOps().linear(x.float(), wide, activation=activation), dtype)


@pytest.mark.parametrize("backend", [TorchOps, TorchCpuOps])
def test_sums_of_integers_do_not_leave_the_range_of_float16(backend: type[TorchOps]) -> None:
    """127 * 127 * 64 is beyond it; the outputs are not."""
    ops = backend(dtype="float16")
    weight = ops.linear_weight([torch.full((8, 64), 1e-3)], [None], weight_format=INT8)
    torch.testing.assert_close(
        ops.linear(torch.full((2, 64), 127.0).half(), weight).float(), torch.full((2, 8), 8.128), rtol=2e-3, atol=0.0
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_a_deterministic_row_does_not_depend_on_how_many_there_are(dtype: str) -> None:
    ops = TorchCpuOps(dtype=dtype)
    ops.is_deterministic = True
    weight, _ = weights_of(ops, 200, 192, dtype)
    x = torch.randn(40, 192).to(ops.torch_dtype)
    together = ops.linear(x, weight)
    assert all(torch.equal(ops.linear(x[i : i + 1], weight)[0], together[i]) for i in range(4))


def test_one_row_is_not_filled_up_where_weights_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for dtype in TYPES:
        ops = TorchCpuOps(dtype=dtype)
        weights_of(ops, 40, 64, dtype)
        ops.prepare()
        assert ops.padded_rows(1) == (1 if dtype == "bfloat16" else 4)
        assert ops.padded_rows(9) == 16
        ops = TorchCpuOps(dtype=dtype)
        ops.is_deterministic = True
        weights_of(ops, 40, 64, dtype)
        ops.prepare()
        assert ops.padded_rows(1) == 4


def test_weights_take_a_byte_each() -> None:
    for ops in (TorchOps(dtype="bfloat16"), TorchCpuOps(dtype="bfloat16")):
        packed = ops.linear_weight([torch.randn(40, 64), torch.randn(8, 64)], [None, None], weight_format=INT8).get()
        assert packed.scales is not None and packed.scales.nbytes == 48 * 4
        assert packed.matrix.untyped_storage().nbytes() == 48 * 64
