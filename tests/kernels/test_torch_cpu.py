"""The oneDNN backend against the reference: red if a fused product, a grouped row or a mask changes a result."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.kernels.ops import Activation, Segments
from archerfish.kernels.reference import TorchOps
from archerfish.kernels.torch_cpu import ROW_TOKENS, TorchCpuOps, attention_rows, is_available, row_mask

TYPES = [name for name in ("float32", "bfloat16", "float16") if is_available(name)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=30).map(tuple)


def random(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(*shape).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_with_activation(dtype: str, activation: Activation, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weights = random(37, 48, dtype=dtype), [random(40, 48, dtype=dtype) / 7, random(40, 48, dtype=dtype) / 7]
    biases = [random(40, dtype=dtype), None] if has_bias else [None, None]
    reference, fast = TorchOps(dtype="float32"), TorchCpuOps(dtype=dtype)
    expected = reference.linear(x, reference.linear_weight(weights, biases), activation=activation)
    actual = fast.linear(x, fast.linear_weight(weights, biases), activation=activation)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_linear_with_residual_leaves_its_inputs_alone(dtype: str) -> None:
    torch.manual_seed(0)
    x, weight, residual = random(37, 48, dtype=dtype), random(40, 48, dtype=dtype) / 7, random(37, 40, dtype=dtype)
    before = residual.clone()
    reference, fast = TorchOps(dtype="float32"), TorchCpuOps(dtype=dtype)
    expected = reference.linear(x, reference.linear_weight([weight], [None]), residual=residual)
    actual = fast.linear(x, fast.linear_weight([weight], [None]), residual=residual)
    torch.testing.assert_close(actual.float(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm(dtype: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = random(20, 48, dtype=dtype), random(48), random(48)
    expected = TorchOps(dtype="float32").layer_norm(x, weight, bias, 1e-12)
    actual = TorchCpuOps(dtype=dtype).layer_norm(x, weight, bias, 1e-12)
    assert actual.dtype == getattr(torch, dtype)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.booleans())
def test_attention_in_shared_rows_equals_attention_one_by_one(lengths: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    segments = Segments(lengths)
    qkv = random(segments.num_tokens, 3 * 32)
    bias = random(4, max(lengths), max(lengths)) if biased else None
    expected = TorchOps().attention(qkv, segments, 4, bias=bias)
    actual = TorchCpuOps().attention(qkv, segments, 4, bias=bias)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [t for t in TYPES if t != "float32"])
def test_half_precision_attention(dtype: str) -> None:
    torch.manual_seed(0)
    segments = Segments((130, 64, 10, 10, 10, 3, 1))
    qkv = random(segments.num_tokens, 3 * 64, dtype=dtype)
    expected = TorchOps().attention(qkv.float(), segments, 2)
    actual = TorchCpuOps(dtype=dtype).attention(qkv, segments, 2)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@given(LENGTHS)
def test_rows_keep_every_sequence_whole_and_in_order(lengths: tuple[int, ...]) -> None:
    rows = attention_rows(Segments(lengths))
    flat = [length for row, count in rows for _ in range(count) for length in row]
    assert tuple(flat) == lengths
    assert all(len(row) == 1 or sum(row) <= ROW_TOKENS for row, _ in rows)


def test_equal_short_texts_become_one_call() -> None:
    assert attention_rows(Segments((10,) * 40)) == (((10, 10, 10, 10), 10),)


def test_a_row_of_one_sequence_has_no_mask() -> None:
    assert row_mask((5,), torch.float32) is None
    mask = row_mask((2, 1), torch.float32)
    assert mask is not None
    assert mask.isinf().tolist() == [[False, False, True], [False, False, True], [True, True, False]]
