"""Quantised tensors of the store in the memory of torch: which format they have there, and its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from archerfish.kernels.formats import FP8, INT8, PLAIN, Coding, Groups, Tensors, WeightFormat
from archerfish.kernels.stored import GPU_BITS, GPU_TYPES, SUPER_BLOCK, StoredTensor

Bytes = npt.NDArray[np.uint8]


@cache
def groups(code_type: str, scale_type: str, group_size: int, coding: Coding) -> Groups:
    """Equal formats are one object, so that matrices in them can be stacked."""
    return Groups(code_type, scale_type, group_size, coding)


def stored_parts(
    parts: Sequence[Any], kept: Collection[str] = GPU_TYPES
) -> tuple[WeightFormat, list[Mapping[str, Any]]]:
    """The format of matrices that are stacked, some of which are quantised, and their tensors. They become plain where
    they differ, and where their type is not one that is kept."""
    kinds = {part.quant_type if isinstance(part, StoredTensor) else "" for part in parts}
    found = [from_store(part) for part in parts] if kinds <= set(kept) else []
    if len({weight_format for weight_format, _ in found}) == 1:
        return found[0][0], [tensors for _, tensors in found]
    return PLAIN, [{"weight": part} for part in parts]


def from_store(stored: StoredTensor) -> tuple[WeightFormat, Tensors]:
    """The format of a quantised matrix, and its tensors, over the same memory where they lie alike."""
    num_outputs, num_inputs = stored.shape
    kind = stored.quant_type
    codes = stored.data
    scales = stored.scales
    mins = stored.mins
    if kind == "Q4_K":
        codes, scales, mins = split_q4_k(codes)
    elif kind == "Q6_K":
        codes, scales = split_q6_k(codes)
    assert scales is not None
    code_type = "uint8" if GPU_BITS[kind] == 4 else "float8_e4m3fn" if kind == "FP8" else "int8"
    found = {
        "weight": torch.from_numpy(codes.reshape(num_outputs, -1).view(np.uint8)).view(getattr(torch, code_type)),
        "scales": torch.from_numpy(scales.reshape(num_outputs, -1)),
    }
    if mins is not None:
        found["mins"] = torch.from_numpy(mins.reshape(num_outputs, -1))
    if found["scales"].shape[1] == 1 and mins is None and found["scales"].dtype == torch.float32:
        return (FP8 if kind == "FP8" else INT8), {**found, "scales": found["scales"].flatten()}
    group_size = num_inputs // found["scales"].shape[1]
    coding: Coding = "mxfp4" if kind == "MXFP4" else "signed" if mins is None else "mins"
    return groups(code_type, str(scales.dtype), group_size, coding), found


def split_q4_k(blocks: Bytes) -> tuple[Bytes, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Codes as in Q4_1, and the scale and the minimum of each 32 numbers."""
    blocks = blocks.reshape(-1, 144)
    halves = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    low = blocks[:, 4:8]
    high = blocks[:, 8:12]
    mixed = blocks[:, 12:16]
    scales = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1) * halves[:, :1]
    mins = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1) * -halves[:, 1:]
    pairs = blocks[:, 16:].reshape(-1, 4, 32)  # 32 low halves, then 32 high ones
    values = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(-1, 2, 16)
    return values[:, 0] | values[:, 1] << 4, scales.astype(np.float16), mins.astype(np.float16)


def split_q6_k(blocks: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """int8, and the scale of each 16 numbers."""
    blocks = blocks.reshape(-1, 210)
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    tops = high >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1) & 3
    codes = (nibbles | tops << 4).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8) * np.ascontiguousarray(blocks[:, 208:]).view(np.float16).astype(
        np.float32
    )
    return codes.reshape(-1, SUPER_BLOCK).view(np.uint8), scales.astype(np.float16)
