"""Products of many rows with their gate, against the formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, random, untraced

from archerfish.kernels.triton import linear as triton_linear  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.ops import Activation  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import FEW_GATED_ROWS, MAX_GATED_WIDTH, MAX_ROWS, SHARED_BYTES, SOME_GATED_ROWS  # isort: skip
from archerfish.kernels.triton.tiles import GateTile, gate_tile  # isort: skip

pytestmark = untraced
Tensor = torch.Tensor
TYPES = ["float16", "bfloat16"] if HAS_CUDA else ["float16"]
NUM_ROWS = MAX_ROWS + 4
SHAPES = [(20, 56, 72), (FEW_GATED_ROWS + 1, 136, 64), (SOME_GATED_ROWS + 1, 40, 64)]  # rows, outputs, columns
if HAS_CUDA:
    SHAPES += [(256, 3072, 1024), (5000, 3072, 1024), (1400, 1536, 576)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def expected_of(x: Tensor, weight: Tensor, gate: Activation) -> Tensor:
    left, right = (x.float() @ weight.float().t()).chunk(2, dim=1)
    return (functional.silu(left) if gate == "silu" else functional.gelu(left, approximate="tanh")) * right


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("num_rows", "num_outputs", "width"), SHAPES)
def test_the_gate_is_that_of_the_formula(num_rows: int, num_outputs: int, width: int, gate: Activation, dtype: str) -> None:
    x, weight = random(num_rows, width, dtype=dtype), random(2 * num_outputs, width, dtype=dtype) * width**-0.5
    tile = gate_tile(num_rows, weight, SHARED_BYTES)
    assert tile is not None
    y = triton_linear.gate_tiles(x, weight, tile, gate)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.float(), expected_of(x, weight, gate), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_nothing_is_rounded_before_the_gate() -> None:
    """2049 is none of float16's numbers: rounded before, it would be 2048."""
    weight = torch.zeros(32, 64, device=DEVICE, dtype=torch.float16)
    weight[:16, :2], weight[16:, 0] = torch.tensor([2048.0, 1.0], device=DEVICE), 8 / 2049
    x = torch.zeros(NUM_ROWS, 64, device=DEVICE, dtype=torch.float16)
    x[:, :2] = 1.0
    y = triton_linear.gate_tiles(x, weight, GateTile(64, 16, 64, 4, 1), "silu")
    assert torch.equal(y, torch.full_like(y, float(2049 * weight[16, 0].double())))
    assert float(y[0, 0]) != float((2048 * weight[16, 0].double()).to(torch.float16))


def test_a_norm_with_many_rows_is_followed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    gate_tiles = triton_linear.gate_tiles

    def noted(x: Tensor, matrix: Tensor, tile: GateTile, activation: Activation) -> Tensor:
        calls.append(len(x))
        return gate_tiles(x, matrix, tile, activation)

    monkeypatch.setattr(triton_linear, "gate_tiles", noted)
    ops, norm = TritonOps(DEVICE, "float16"), random(64)
    weight = random(48, 64, dtype="float16") * 0.1
    plain, biased = (ops.linear_weight([weight], [bias]) for bias in (None, random(48)))
    rows = random(NUM_ROWS, 64, dtype="float16")
    for x, used in ((rows, plain), (rows[:MAX_ROWS], plain), (rows, biased)):
        y, total = ops.normed_linear(x, norm, 1e-5, used, gate="silu")
        assert torch.equal(total, x)
        normed = ops.rms_norm(x, norm, 1e-5)[0]
        bias = used.get().bias
        left, right = (normed.float() @ weight.float().t() + (0 if bias is None else bias.float())).chunk(2, dim=1)
        torch.testing.assert_close(y.float(), functional.silu(left) * right, atol=2e-3, rtol=2e-3)
    ops.normed_linear(rows, norm, 1e-5, plain)
    assert calls == [NUM_ROWS]


def test_what_descriptors_do_not_take_is_left_to_torch() -> None:
    for shape in ((30, 64), (32, 68), (32, MAX_GATED_WIDTH + 8)):
        assert gate_tile(NUM_ROWS, torch.empty(shape, dtype=torch.float16), SHARED_BYTES) is None
    assert gate_tile(NUM_ROWS, torch.empty(32, 64), SHARED_BYTES) is None
    assert gate_tile(NUM_ROWS, torch.empty(32, 64, dtype=torch.float16), SHARED_BYTES // 2) is None  # as on a smaller card
