"""The arithmetic of the kernels' benchmark, and that what it measures against computes what our kernels compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from archerfish.bench import kernels
from archerfish.bench.kernels import KernelRow, as_json, as_row, as_table, compiled_us
from archerfish.kernels.ops import HeadShape
from archerfish.kernels.torch.reference import TorchOps, rotate

Tensor = torch.Tensor


def test_a_row_knows_rate_share_and_ratios() -> None:
    moved = as_row("copy", "large", 100.0, 250.0, 150.0, num_bytes=4.26e8)
    assert moved.unit == "GB/s" and (moved.rate, moved.share) == pytest.approx((4260, 1.0))
    assert (moved.ratio, moved.compiled_ratio) == (2.5, 1.5)
    multiplied = as_row("product", "large", 100.0, 50.0, flops=785e12 * 50e-6)
    assert multiplied.unit == "TFLOP/s" and (multiplied.rate, multiplied.share) == pytest.approx((392.5, 0.5))
    assert (multiplied.ratio, multiplied.compiled_ratio) == (0.5, None)


def test_the_table_leaves_out_what_was_not_compiled() -> None:
    rows = [KernelRow("one", "8 x 4", 1.5, 100.0, "GB/s", 0.84, 11.8, 1.04), KernelRow("two", "8", 2.0, 9.0, "GB/s", 0.5, 3.0)]
    header, first, second = as_table(rows).splitlines()
    assert header.endswith("x compiled")
    assert first.split()[-3:] == ["84%", "11.80", "1.04"]
    assert second.split()[-2:] == ["50%", "3.00"]
    assert [row["compiled_ratio"] for row in json.loads(as_json(rows))["rows"]] == [1.04, None]


def test_a_compiler_that_fails_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(calls: list[Callable[[], object]]) -> float:
        return float(sum(call() for call in calls))  # type: ignore[misc]

    def failing(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert compiled_us(measure, [partial(max, 3, 4), partial(max, 5, 4)]) == 9.0
    monkeypatch.setattr(torch, "compile", failing)
    assert compiled_us(measure, [partial(max, 3, 4)]) is None


def test_formulas_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    ops = TorchOps()
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    assert_close(kernels.eager_norm(x, weight), ops.rms_norm(x, weight, 1e-5)[0])
    for found, expected in zip(
        kernels.eager_norm_of_sum(x, residual, weight), ops.rms_norm(x, weight, 1e-5, residual=residual), strict=True
    ):
        assert_close(found, expected)
    assert_close(kernels.eager_gated(x), ops.gated(x, "silu"))


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_rotation_is_that_of_the_reference(is_normed: bool) -> None:
    torch.manual_seed(0)
    heads = HeadShape(4, 2, 6, 1.0)
    q, k, angles, norm = torch.randn(5, 4, 6), torch.randn(5, 2, 6), torch.randn(5, 3), torch.randn(6)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cos, sin = (torch.cat((x, x), dim=1)[None] for x in (angles.cos(), angles.sin()))
    theirs = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    if is_normed:
        found = kernels.eager_normed_rope(*theirs, norm, cos, sin)
        q, k = (TorchOps().rms_norm(x, norm, 1e-5)[0] for x in (q, k))
    else:
        found = kernels.eager_rope(*theirs, cos, sin)
    for x, turned in zip((q, k), found, strict=True):
        assert_close(turned[0].transpose(0, 1), rotate(x, cos_sin, heads.head_dim))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "num"), [(0.0, 0, 1.0, 1), (0.8, 3, 1.0, 3), (0.8, 0, 0.5, 1), (1.0, 4, 0.7, 2)]
)
def test_sampling_draws_what_may_be_drawn(temperature: float, top_k: int, top_p: float, num: int) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 4.0, 1.0, 3.5, -2.0, 3.0]]).repeat(500, 1)
    drawn = set(kernels.eager_sample(logits, temperature, top_k, top_p).tolist())
    likeliest = [1, 3, 5, 2, 0, 4]
    assert drawn == set(likeliest[:num])
