"""The Triton backend against the reference: norms, rotary embedding, lookups and copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, TYPES, assert_near, batch_over, in_float32, random, untraced

from archerfish.kernels.ops import Activation, HeadShape, Rotation  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.ops import FLOAT32_WIDTH, TritonOps  # isort: skip
from tests.kernels.paged import check_copied_blocks  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "normed", "block_size", "is_interleaved"),
    [
        (4, 2, 64, 64, "", 16, False),
        (6, 2, 128, 128, "heads", 1, False),
        (3, 3, 96, 96, "heads", 4, True),
        (8, 1, 64, 16, "", 64, True),
        (4, 4, 80, 20, "heads", 16, False),
        (9, 3, 64, 0, "heads", 16, False),
        (2, 1, 16, 0, "", 256, False),
        (3, 3, 80, 20, "all", 16, False),
        (6, 2, 64, 64, "all", 4, True),
    ],
)
def test_store_kv(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    normed: str,
    block_size: int,
    is_interleaved: bool,
    dtype: str,
) -> None:
    heads = HeadShape(num_heads, num_kv_heads, head_dim, 1.0)
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    batch, kv = batch_over(ops, ((1, 5), (1, 30), (3, 9), (4, 4)), block_size, heads, num_rows=11)
    wide = in_float32(kv)
    table = np.random.default_rng(0).normal(size=(30, max(rotary_dim, 1))).astype(np.float32)
    sizes = (head_dim * num_heads, head_dim * num_kv_heads) if normed == "all" else (head_dim, head_dim)
    norms = [random(size) if normed else None for size in sizes]
    rotary = ops.rotary(table, rotary_dim, is_interleaved=is_interleaved) if rotary_dim else None
    rotation = Rotation(rotary, norms[0], norms[1], 1e-3)
    qkv = random(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q = ops.store_kv(qkv, kv, batch, heads, rotation)
    expected = reference.store_kv(qkv.float(), wide, batch, heads, rotation)
    assert q.dtype == qkv.dtype
    num = batch.num_tokens
    for found, wanted in ((q[:num], expected[:num]), (kv.keys, wide.keys), (kv.values, wide.values)):
        assert_near(found, wanted, dtype)


def test_a_negative_slot_is_not_stored() -> None:
    heads = HeadShape(2, 1, 16, 1.0)
    ops = TritonOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 5), (1, 3)), 4, heads)
    batch.slots[1] = -1
    before = kv.values.clone()
    qkv = random(2, 64)
    ops.store_kv(qkv, kv, batch, heads, Rotation())
    slot = int(batch.slots[0])
    before[slot // 4, slot % 4] = qkv[0, 48:]
    torch.testing.assert_close(kv.values, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [48, 576, 4096, 16384])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rms_norm(dtype: str, width: int, has_residual: bool) -> None:
    x, weight = random(7, 2 * width, dtype=dtype)[:5, :width] * 3, random(width)
    residual = random(5, width, dtype=dtype) if has_residual else None
    normed, total = TritonOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    expected, expected_total = TorchOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    assert normed.dtype == total.dtype == x.dtype
    assert torch.equal(total, expected_total)
    assert_near(normed, expected, dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype != "float32"])
@pytest.mark.parametrize("x_type", ["float32", "half"])
@pytest.mark.parametrize("residual_type", ["float32", "half", None])
def test_rms_norm_of_sums_in_float32(
    x_type: str, residual_type: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is not rounded, what is normalised has the compute type."""
    x, weight = random(3, 2 * 300, dtype=dtype if x_type == "half" else x_type)[:, :300] * 3, random(300)
    residual = (
        None if residual_type is None else random(3, 300, dtype=dtype if residual_type == "half" else residual_type)
    )
    expected, expected_total = TorchOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    monkeypatch.setattr(TorchOps, "rms_norm", None)
    normed, total = TritonOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    assert normed.dtype == getattr(torch, dtype)
    assert total.dtype == expected_total.dtype
    assert total is x if residual is None else torch.equal(total, expected_total)
    assert_near(normed, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_narrow_models_look_up_in_float32(num_rows: int, stored: str, dtype: str) -> None:
    """Nothing is rounded, not even what is stored in a wider type than the compute type."""
    table, ids = random(9, 100, dtype=stored), torch.tensor([8, 0, 3, 3, 1], device=DEVICE)[:num_rows]
    ops = TritonOps(DEVICE, dtype)
    found = ops.lookup(table, ids)
    assert found.dtype == torch.float32
    assert torch.equal(found, table.float()[ids])
    torch.testing.assert_close(ops.lookup(table, ids, scale=1152**0.5), table.float()[ids] * 1152**0.5)


def test_wide_models_look_up_in_the_compute_type() -> None:
    table, ids = random(4, FLOAT32_WIDTH + 8), torch.tensor([3, 1], device=DEVICE)
    assert torch.equal(TritonOps(DEVICE, "float16").lookup(table, ids), table[ids].half())


def test_wider_rows_and_other_types_are_left_to_torch() -> None:
    x = random(2, 16400)
    ops = TritonOps(DEVICE, "float32")
    torch.testing.assert_close(
        ops.rms_norm(x, torch.ones(16400, device=DEVICE), 1e-5)[0],
        x / x.square().mean(-1, keepdim=True).sqrt(),
        atol=1e-4,
        rtol=1e-4,
    )
    double = ops.rms_norm(x[:, :64].double(), torch.ones(64, device=DEVICE), 1e-5, residual=x[:, :64])[1]
    assert double.dtype == torch.float64


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [12, 5000])
def test_gated(activation: Activation, dtype: str, width: int) -> None:
    x = random(3, 2 * width, dtype=dtype) * 4
    x[0, 0], x[0, 1] = 60, -60
    out = TritonOps(DEVICE, dtype).gated(x, activation)
    assert out.dtype == x.dtype
    expected = TorchOps(DEVICE).gated(x.float(), activation)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_copied_blocks_are_equal_in_every_layer_and_others_stay(dtype: str) -> None:
    check_copied_blocks(TritonOps(DEVICE, dtype), 3, 176)
