"""The oneDNN backend against the reference: red if a fused product, a grouped row or a mask changes a result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.kernels.ops import Activation, NormWeights, Pooling, Segments
from archerfish.kernels.torch.cpu import ROW_STEP, TorchCpuOps, best_width, fill_rows, lay_rows, padded_rows
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.paged import CPU_TYPES as TYPES
from tests.kernels.paged import random

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=30).map(tuple)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_linear(dtype: str, activation: Activation, has_bias: bool, has_residual: bool) -> None:
    x, weights = random(37, 48, dtype=dtype), [random(40, 48, dtype=dtype) / 7, random(40, 48, dtype=dtype) / 7]
    biases = [random(40, dtype=dtype), None] if has_bias else [None, None]
    residual = random(37, 80, dtype=dtype) if has_residual else None
    before = None if residual is None else residual.clone()
    parts = [{"weight": weight} for weight in weights]
    reference, fast = TorchOps(dtype="float32"), TorchCpuOps(dtype=dtype)
    expected = reference.linear(x, reference.linear_weight(parts, biases), activation=activation, residual=before)
    actual = fast.linear(x, fast.linear_weight(parts, biases), activation=activation, residual=residual)
    torch.testing.assert_close(actual.float(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert residual is None or before is None or torch.equal(residual, before)


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm(dtype: str) -> None:
    x, weight, bias = random(20, 48, dtype=dtype), random(48), random(48)
    expected = TorchOps(dtype="float32").layer_norm(x, NormWeights(weight, bias, 1e-12))
    actual = TorchCpuOps(dtype=dtype).layer_norm(x, NormWeights(weight, bias, 1e-12))
    assert actual.dtype == getattr(torch, dtype)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.booleans(), st.booleans())
def test_attention_in_shared_rows_equals_attention_one_by_one(lengths: tuple[int, ...], biased: bool, padded: bool) -> None:
    """Rows behind the last token change nothing."""
    torch.manual_seed(0)
    segments = Segments(lengths)
    num_tokens, ops = segments.num_tokens, TorchCpuOps()
    qkv = random(padded_rows(num_tokens) if padded else num_tokens, 3 * 32)
    bias = random(4, max(lengths), max(lengths)) if biased else None
    out = ops.attention(qkv, segments, 4, bias=bias)
    assert out.shape[0] == qkv.shape[0]
    expected = TorchOps().attention(qkv[:num_tokens], segments, 4, bias=bias)
    torch.testing.assert_close(out[:num_tokens], expected, atol=1e-5, rtol=1e-4)
    for mode in get_args(Pooling):
        pooled = TorchOps().pool(expected, segments, mode)
        torch.testing.assert_close(ops.pool(out, segments, mode), pooled, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [t for t in TYPES if t != "float32"])
def test_half_precision_attention(dtype: str) -> None:
    segments = Segments((130, 64, 10, 10, 10, 3, 1))
    qkv = random(segments.num_tokens, 3 * 64, dtype=dtype)
    expected = TorchOps().attention(qkv.float(), segments, 2)
    actual = TorchCpuOps(dtype=dtype).attention(qkv, segments, 2)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@given(LENGTHS)
def test_rows_hold_every_sequence_whole_and_once(lengths: tuple[int, ...]) -> None:
    rows = [(width, row) for width, rows in fill_rows(lengths).items() for row in rows]
    assert sorted(i for _, row in rows for i in row) == list(range(len(lengths)))
    for width, row in rows:
        assert width % ROW_STEP == 0
        assert sum(lengths[i] for i in row) <= width


def test_short_texts_share_rows_and_full_rows_are_not_masked() -> None:
    assert fill_rows((10,) * 7) == {32: [[0, 1, 2], [3, 4, 5], [6]]}
    assert (best_width(20), best_width(200)) == (64, 224)
    rows = lay_rows(Segments((128, 128, 64)), 320, torch.float32)
    assert rows.groups == ((128, 2, None), (64, 1, None))
    assert rows.gather is None and rows.restore is None


@given(st.integers(1, 5000))
def test_few_numbers_of_rows(num_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform.machine", lambda: "x86_64")
        padded = padded_rows(num_rows)
        assert num_rows <= padded < num_rows + max(16, num_rows / 4 + 1, 256 * (num_rows > 1024))
        assert padded_rows(padded) == padded
        assert len({padded_rows(n) for n in range(1, 1025)}) <= 24


def test_many_rows_are_not_filled_up_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [padded_rows(num_rows) for num_rows in (3, 7, 9, 170, 1500)] == [4, 8, 9, 170, 1500]


def test_reference_attention_sees_each_sequence_alone() -> None:
    """The reference itself, against softmax(q k / sqrt(d)) v written out."""
    segments = Segments((3, 3, 5, 1))
    qkv = random(segments.num_tokens, 3 * 8)
    out = TorchOps().attention(qkv, segments, 2)
    for start, length in zip(segments.starts.tolist(), segments.lengths, strict=False):
        block = qkv[start : start + length].view(length, 3, 2, 4)
        for head in range(2):
            q, k, v = block[:, 0, head], block[:, 1, head], block[:, 2, head]
            expected = torch.softmax(q @ k.T / 2.0, dim=-1) @ v
            actual = out[start : start + length, head * 4 : head * 4 + 4]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


ROUNDS = """
import resource
import torch
from archerfish.kernels.torch.cpu import TorchCpuOps

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def print_faults_of_a_round():
    for _ in range(4):
        before = num_faults()
        parts = [torch.ones(5 << 20) for _ in range(3)]  # 60 MiB
        del parts
    print(num_faults() - before)

torch.set_num_threads(1)
print_faults_of_a_round()
TorchCpuOps().start_thread(1)
print_faults_of_a_round()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_thread_that_computes_keeps_the_memory_of_activations() -> None:
    steady = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # else what the usual does depends on what was freed before
    done = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, check=True, env=steady)
    usual, kept = map(int, done.stdout.split())
    if not usual:
        pytest.skip("this torch keeps what it has freed in any case")
    assert kept + 10 < usual  # a fault may bring 4 KiB or 2 MiB
