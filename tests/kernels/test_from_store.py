"""Quantised tensors of the store in the memory of torch: they mean the same there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from archerfish.kernels.formats import Groups
from archerfish.kernels.stored import GPU_TYPES, StoredTensor
from archerfish.kernels.torch.from_store import from_store, stored_parts
from archerfish.kernels.torch.reference import TorchOps
from archerfish.store.format import INTEGER_BYTES, SUPER_SCALES, num_scales, scale_type

Tensor = torch.Tensor


def random_stored(quant_type: str, num_outputs: int = 6, num_inputs: int = 512, group_size: int = 32) -> StoredTensor:
    draw = np.random.default_rng(len(quant_type) + group_size)
    block_size = 256 if quant_type in SUPER_SCALES else 32
    codes = draw.integers(0, 256, (num_outputs * num_inputs // block_size, INTEGER_BYTES[quant_type]), dtype=np.uint8)
    if quant_type in SUPER_SCALES:
        codes[:, SUPER_SCALES[quant_type]] = (
            draw.uniform(0.001, 0.01, (len(codes), 2 if quant_type != "Q6_K" else 1)).astype(np.float16).view(np.uint8)
        )
    if quant_type == "FP8":
        codes[codes & 127 == 127] = 0
    numbers = [
        draw.uniform(0.001, 0.01, num_outputs * num_inputs // group_size).astype(scale_type(quant_type))
        for _ in range(num_scales(quant_type))
    ]
    return StoredTensor((num_outputs, num_inputs), "float32", codes, quant_type, *numbers)


@pytest.mark.parametrize("quant_type", sorted(GPU_TYPES))
@pytest.mark.parametrize("group_size", [32, 128, 512])
def test_they_mean_the_same(quant_type: str, group_size: int) -> None:
    stored = random_stored(quant_type, group_size=group_size)
    weight_format, tensors = from_store(stored)
    found, expected = weight_format.dequantise(tensors, torch.float32), stored.as_floats()
    error = 2e-3 if quant_type in SUPER_SCALES else 1e-6  # their scales become products in float16
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=error * np.abs(expected).max())
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        name: layout.shape(*stored.shape) for name, layout in weight_format.memory.items()
    }


def test_equal_formats_are_stacked_and_others_become_plain() -> None:
    first = random_stored("Q4_1")
    second = random_stored("Q4_1", 10)
    other = random_stored("Q6_K")
    weight_format, same = stored_parts([first, second])
    assert isinstance(weight_format, Groups) and weight_format.num_outputs(weight_format.stack(same)) == 16
    ops, x = TorchOps(), torch.randn(3, 512)
    for each in ([first, second], [first, other], [random_stored("Q5_0"), second]):
        expected = torch.cat([x @ torch.from_numpy(part.as_floats()).t() for part in each], 1)
        parts: list[Any] = list(each)
        found = ops.linear(x, ops.linear_weight(parts, [None, None]))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_a_quantised_table_becomes_plain() -> None:
    stored = random_stored("Q8_0")
    assert torch.equal(TorchOps(dtype="bfloat16").to_device(stored), torch.from_numpy(stored.as_floats()).bfloat16())
