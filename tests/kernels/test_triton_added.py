"""Products of a batch of rows that are added to a total, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, random, untraced

from archerfish.kernels.triton import linear as triton_linear  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.ops import PackedWeight  # isort: skip
from archerfish.kernels.quant import quantize_rows  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import (  # isort: skip
    MAX_ADDED_ROWS,
    MIN_SHARES_WIDTH,
    SHARED_BYTES,
    AddTile,
    ShareTile,
    add_tile,
    share_tile,
)

pytestmark = untraced
Tensor = torch.Tensor
ROWS = [17, 70] if not HAS_CUDA else [17, 32, 33, 64, 65, 128]
WIDTHS = [128, 300] if not HAS_CUDA else [128, 300, 1024, 3072]  # one is no multiple of a tile's columns


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def added(total: Tensor, x: Tensor, packed: PackedWeight[Tensor]) -> Tensor:
    tile = add_tile(len(x), packed.matrix, x.element_size(), SHARED_BYTES)
    assert tile is not None
    return triton_linear.add_rows(total, x, packed, tile)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_the_product_is_added_in_place(num_rows: int, width: int, dtype: str) -> None:
    num_outputs = 40
    weight, x = random(num_outputs, width, dtype=dtype) * width**-0.5, random(num_rows, width + 8, dtype=dtype)[:, :width]
    for type_of_total in {dtype, "float32"}:
        total = random(num_rows, num_outputs + 3, dtype=type_of_total)
        expected = total.float()
        expected[:, :num_outputs] += x.float() @ weight.float().t()
        found = added(total[:, :num_outputs], x, PackedWeight(weight))
        assert found.data_ptr() == total.data_ptr()
        torch.testing.assert_close(total.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_int8_weights_have_scales() -> None:
    matrix, scales = quantize_rows([random(40, 256, dtype="float32")], DEVICE)
    x, total = random(20, 256, dtype="float32"), random(20, 40, dtype="float32")
    expected = total + x @ (matrix.float() * scales[:, None]).t()
    torch.testing.assert_close(added(total, x, PackedWeight(matrix, None, scales)), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [300, 1100, 2048])  # of a share, of some and a part of one, and of whole ones
@pytest.mark.parametrize("num_rows", ROWS)
def test_shares_add_up(num_rows: int, width: int, dtype: str) -> None:
    num_outputs = 72
    weight, x = random(num_outputs, width, dtype=dtype) * width**-0.5, random(num_rows, width + 8, dtype=dtype)[:, :width]
    tile = replace(shared(num_rows, weight), span=512)
    shares = triton_linear.multiply_shares(x, PackedWeight(weight), tile)
    assert shares.shape == (-(-width // 512), num_rows, num_outputs)
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(shares.sum(0), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for type_of_sums in {dtype, "float32"}:
        sums = random(num_rows, num_outputs, dtype=type_of_sums)
        found = triton_linear.add_shares(sums, shares)
        assert found.dtype == sums.dtype
        torch.testing.assert_close(found.float(), sums.float() + expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def shared(num_rows: int, weight: Tensor, most_bytes: int = SHARED_BYTES) -> ShareTile:
    wide = torch.empty(weight.shape[0], MIN_SHARES_WIDTH, device="meta")
    tile = share_tile(num_rows, wide, weight.element_size(), most_bytes)
    assert tile is not None and tile.span % tile.columns == 0
    return tile


def test_shares_of_int8_weights_have_scales() -> None:
    matrix, scales = quantize_rows([random(40, 700, dtype="float32")], DEVICE)
    x = random(20, 700, dtype="float32")
    found = triton_linear.multiply_shares(x, PackedWeight(matrix, None, scales), shared(20, x))
    torch.testing.assert_close(found.sum(0), x @ (matrix.float() * scales[:, None]).t(), atol=1e-3, rtol=1e-3)


def test_products_that_are_not_cut_into_shares() -> None:
    for num_rows, shape in [(MAX_ADDED_ROWS + 1, (64, 4096)), (64, (4096, 4096)), (64, (64, MIN_SHARES_WIDTH - 1))]:
        assert share_tile(num_rows, torch.empty(shape, device="meta"), 2, SHARED_BYTES) is None


def test_more_rows_or_outputs_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    add_rows = triton_linear.add_rows

    def noted(total: Tensor, x: Tensor, packed: PackedWeight[Tensor], tile: AddTile) -> Tensor:
        calls.append(len(x))
        return add_rows(total, x, packed, tile)

    monkeypatch.setattr(triton_linear, "add_rows", noted)
    ops, weight = TritonOps(DEVICE, "float32"), random(24, 64, dtype="float32")
    for num_rows in (4, 20, MAX_ADDED_ROWS, MAX_ADDED_ROWS + 1):
        x, total = random(num_rows, 64, dtype="float32"), random(num_rows, 24, dtype="float32")
        expected = total + x @ weight.t()
        torch.testing.assert_close(ops.linear(x, ops.linear_weight([weight], [None]), residual=total), expected)
    assert calls == [20, MAX_ADDED_ROWS]


@pytest.mark.parametrize("num_rows", [17, 32, 33, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_stages_fit(num_rows: int, element_bytes: int) -> None:
    for most_bytes in (SHARED_BYTES, 86_000, 1):
        tile = add_tile(num_rows, torch.empty(1024, 3072, device="meta"), element_bytes, most_bytes)
        assert tile is not None
        assert tile.num_stages == 1 or tile.num_stages * (tile.rows + tile.outputs) * tile.columns * element_bytes <= most_bytes
    assert add_tile(num_rows, torch.empty(4096, 4096, device="meta"), element_bytes, SHARED_BYTES) is None
