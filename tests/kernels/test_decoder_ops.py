"""The decoder operations: the reference against its formulas written out, the CPU backend against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.kernels.ops import Activation, HeadShape, KVLayer, Rotation
from archerfish.kernels.torch.activations import ACTIVATIONS
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.native_support import native_ops
from tests.kernels.paged import CPU_TYPES as TYPES
from tests.kernels.paged import batch_over, check_copied_blocks, random

BACKENDS = [TorchOps, native_ops]
Backend = Callable[..., Any]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
# (new tokens, context) of sequences
SEQUENCES = st.lists(
    st.integers(1, 70).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), min_size=1, max_size=8
)


def activation_type(backend: Backend, dtype: str) -> str:
    return dtype if backend is TorchOps else "float32"  # native activations are float32 at all times


def test_reference_attention_written_out() -> None:
    """softmax(cap(q k * scale)) v over what causality and the window leave, head by head."""
    heads = HeadShape(4, 2, 8, scale=0.3, window=5, softcap=2.0)
    ops = TorchOps()
    batch, kv = batch_over(ops, [(3, 9)], 4, heads)
    q = random(3, 32)
    out = ops.paged_attention(q, kv, batch, heads)
    keys, values = (memory[batch.block_tables[0]].flatten(0, 1) for memory in (kv.keys, kv.values))
    for row, position in enumerate((6, 7, 8)):
        for head in range(4):
            seen = range(position - 4, position + 1)
            scores = [
                2.0 * math.tanh(float(q[row, head * 8 : head * 8 + 8] @ keys[i, head // 2]) * 0.3 / 2.0) for i in seen
            ]
            weights = torch.softmax(torch.tensor(scores), 0)
            expected = sum(weight * values[i, head // 2] for weight, i in zip(weights, seen, strict=True))
            torch.testing.assert_close(out[row, head * 8 : head * 8 + 8], expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 4, 16, 24]), st.sampled_from([0, 1, 10, 64]))
def test_cpu_attention_equals_the_reference(sequences: list[tuple[int, int]], block_size: int, window: int) -> None:
    heads = HeadShape(6, 2, 16, scale=0.25, window=window)
    fast = native_ops()
    batch, kv = batch_over(fast, sequences, block_size, heads)
    q = random(batch.num_tokens, 96)
    out = fast.paged_attention(q, kv, batch, heads)
    torch.testing.assert_close(out, TorchOps().paged_attention(q, kv, batch, heads), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_attention(dtype: str, backend: Backend) -> None:
    heads = HeadShape(6, 2, 64, scale=0.125)
    ops = backend(dtype=dtype)
    batch, kv = batch_over(ops, [(1, 100), (1, 3), (40, 40), (5, 60)], 16, heads)
    q = random(batch.num_tokens, 384, dtype=activation_type(backend, dtype))
    wide = KVLayer(kv.keys.float(), kv.values.float())
    expected = TorchOps().paged_attention(q.float(), wide, batch, heads)
    actual = ops.paged_attention(q, kv, batch, heads)
    assert actual.dtype == q.dtype
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
@pytest.mark.parametrize("is_normed", [True, False])
def test_store_kv_written_out(backend: Backend, rotary_dim: int, is_normed: bool) -> None:
    heads = HeadShape(4, 2, 16, scale=0.25)
    ops = backend()
    batch, kv = batch_over(ops, [(1, 5), (3, 9), (4, 4)], 4, heads)
    before = [memory.clone() for memory in (kv.keys, kv.values)]
    table = np.random.default_rng(0).normal(size=(9, max(rotary_dim, 1))).astype(np.float32)
    rotary = ops.rotary(table, rotary_dim) if rotary_dim else None
    norms = (random(16), random(16)) if is_normed else (None, None)
    qkv = random(8, 8 * 16)
    out = ops.store_kv(qkv, kv, batch, heads, Rotation(rotary, norms[0], norms[1], 1e-3))
    assert out.shape == (len(qkv), 64)
    written = set()
    for row, (position, slot) in enumerate(zip((4, 6, 7, 8, 0, 1, 2, 3), batch.slots.tolist(), strict=False)):
        assert batch.positions[row] == position
        written.add(slot)
        for head in range(8):
            x = qkv[row, head * 16 : head * 16 + 16].clone()
            if head < 6:
                if norms[0] is not None and norms[1] is not None:
                    x = x / (x.square().mean() + 1e-3).sqrt() * (norms[0] if head < 4 else norms[1])
                x = turned(x, table[position], rotary_dim)
            memory = kv.keys if head < 6 else kv.values
            place = out[row].view(4, 16)[head] if head < 4 else memory.view(-1, 2, 16)[slot, head % 2]
            torch.testing.assert_close(place, x, atol=1e-5, rtol=1e-4)
    untouched = [slot for slot in range(kv.keys.shape[0] * 4) if slot not in written]
    for memory, old in zip((kv.keys, kv.values), before, strict=True):
        same = memory.view(-1, 2, 16)[untouched], old.view(-1, 2, 16)[untouched]
        torch.testing.assert_close(*same, atol=0, rtol=0, equal_nan=True)


def turned(x: torch.Tensor, row: np.ndarray[tuple[int], np.dtype[np.float32]], rotary_dim: int) -> torch.Tensor:
    half, out = rotary_dim // 2, x.clone()
    for i in range(half):
        cos, sin = float(row[i]), float(row[half + i])
        out[i], out[half + i] = x[i] * cos - x[half + i] * sin, x[half + i] * cos + x[i] * sin
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_copied_blocks_are_equal_in_every_layer_and_others_stay(backend: Backend) -> None:
    check_copied_blocks(backend(), 2, 8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_residual", [True, False])
def test_rms_norm(dtype: str, backend: Backend, has_residual: bool) -> None:
    used = activation_type(backend, dtype)
    x = random(5, 48, dtype=used) * 3
    residual = random(5, 48, dtype=used)
    weight = random(48)
    normed, total = backend(dtype=dtype).rms_norm(x, weight, 1e-2, residual=residual if has_residual else None)
    expected_total = (x.float() + residual.float() if has_residual else x.float()).to(x.dtype)
    expected = expected_total.float() / (expected_total.float().square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    assert normed.dtype == total.dtype == x.dtype
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_of_zeros_and_of_large_numbers(backend: Backend, dtype: str) -> None:
    ops, x = backend(dtype=dtype), torch.zeros(3, 48, dtype=getattr(torch, activation_type(backend, dtype)))
    x[1], x[2, 5] = 3e4, -3e4
    kept = x.clone()
    normed, total = ops.rms_norm(x, torch.ones(48), 1e-5)
    assert torch.equal(x, kept) and torch.equal(total, kept)
    expected = torch.zeros(3, 48)
    expected[1], expected[2, 5] = 1.0, -(48**0.5)
    torch.testing.assert_close(normed.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated(backend: Backend, activation: Activation) -> None:
    x = random(5, 24) * (5 if activation == "swiglu_oai" else 1)
    expected = ACTIVATIONS[activation](x[:, :12]) * x[:, 12:]
    if activation == "swiglu_oai":
        gate, up = (
            x[:, :12].minimum(torch.tensor(7.0)),
            x[:, 12:].minimum(torch.tensor(7.0)).maximum(torch.tensor(-7.0)),
        )
        expected = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    torch.testing.assert_close(backend().gated(x, activation), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 17])
def test_logits_are_float32_and_capped(backend: Backend, num_rows: int) -> None:
    ops = backend(dtype=TYPES[-1])
    x, weight = random(num_rows, 32, dtype=activation_type(backend, TYPES[-1])), random(50, 32, dtype=TYPES[-1])
    head = ops.linear_weight([weight], [None])
    plain, capped = ops.logits(x, head), ops.logits(x, head, softcap=2.0)
    assert plain.dtype == capped.dtype == torch.float32
    torch.testing.assert_close(plain, x.float() @ weight.float().T, atol=0.1, rtol=0.02)
    torch.testing.assert_close(capped, 2.0 * torch.tanh(plain / 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_put_concat_and_lookup(backend: Backend) -> None:
    ops = backend(dtype="bfloat16")
    x = torch.arange(12.0).view(6, 2)
    for indices in (np.array([4, 0, 4]), torch.tensor([4, 0, 4])):
        found = ops.rows(x, indices)
        assert found.dtype == torch.float32
        assert found.tolist() == [[8, 9], [0, 1], [8, 9]]
    ops.put(x, np.array([5, 1]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert x[[1, 5]].tolist() == [[2, 2], [1, 1]]
    assert ops.concat([x[:1], x[5:]]).tolist() == [[0, 1], [1, 1]]
    table = ops.to_device(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = ops.lookup(table, torch.tensor([1, 0]), scale=2.0)
    assert found.dtype == getattr(torch, activation_type(backend, "bfloat16"))
    assert found.tolist() == [[6, 8], [2, 4]]
