"""Rounding to the quantised forms of the store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from archerfish.errors import ValidationError
from archerfish.kernels.stored import FP8_VALUES
from archerfish.store.format import Quantization, TensorInfo, buffer_bytes, dequantize
from archerfish.store.quantiser import find_grid, make_row, to_fp8

KINDS = [Quantization(*kind) for kind in (("Q4_0", 1, 128), ("Q4_1", 1, 64), ("INT8", 1, 256), ("FP8", 1, 256))]
# Relative errors of normal numbers that were measured, and a tenth more.
ERRORS = {"Q4_0": 0.112, "Q4_1": 0.091, "INT8": 0.0075, "FP8": 0.029}


def random_matrix(num_outputs: int = 96) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(0, 0.05, (num_outputs, 256)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.quant_type)
def test_rows_mean_nearly_the_matrix(kind: Quantization) -> None:
    matrix = random_matrix()
    matrix[3], matrix[4, :128] = 0.0, 0.25
    info = TensorInfo("x", "float32", matrix.shape, kind)
    row = make_row(info, matrix, grid := find_grid(matrix, kind))
    assert [each.nbytes for each in row[1:] if each is not None] == buffer_bytes(info)
    meant = dequantize(row)
    assert np.linalg.norm(meant - matrix) < ERRORS[kind.quant_type] * np.linalg.norm(matrix)
    assert not meant[3].any()
    again = make_row(info, meant, grid)  # points of the grid stay where they are
    assert np.array_equal(again.data, row.data)


def test_minima_pay_for_groups_that_are_not_centred() -> None:
    matrix = random_matrix() + np.float32(0.1)
    errors = []
    for kind in (Quantization("Q4_0", 1, 64), Quantization("Q4_1", 1, 64)):
        row = make_row(TensorInfo("x", "float32", matrix.shape, kind), matrix, find_grid(matrix, kind))
        errors.append(np.linalg.norm(dequantize(row) - matrix))
    assert errors[1] < 0.7 * errors[0]


def test_fp8_rounds_as_torch_does() -> None:
    draw = np.random.default_rng(0)
    numbers = FP8_VALUES[np.isfinite(FP8_VALUES)]
    ties = (FP8_VALUES[:126] + FP8_VALUES[1:127]) / 2
    values = np.concatenate([numbers, ties, -ties, draw.normal(0, 90, 4000), draw.normal(0, 0.01, 4000)])
    values = values.astype(np.float32).clip(-448, 448)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_fp8(values), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.quant_type.startswith("Q4")])
def test_numbers_that_do_not_fit_are_refused(bad: float, kind: Quantization) -> None:
    matrix = random_matrix(2)
    matrix[1, 7] = bad
    with pytest.raises(ValidationError, match=f"'x' has numbers that {kind.quant_type} cannot hold"):
        make_row(TensorInfo("x", "float32", matrix.shape, kind), matrix, find_grid(matrix, kind))
