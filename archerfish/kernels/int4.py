"""Int4 weights from float ones: blocks of 32 inputs with a scale and a minimum, as GGUF's type Q4_1 has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.kernels.stored import BLOCK, Floats, widened

LARGEST = 15
Halves = npt.NDArray[np.float16]
PIECE_BLOCKS = 1 << 13  # at a time, so that they stay in the processor's cache
# A block's range is tried as it is and narrower. Three times, numbers are rounded and the line through them is fitted
# anew. Of normal numbers this takes 16 % off the squared error; twice the work would take 3 % more.
SHARES, NUM_FITS = (1.0, 0.9), 3
MORE_SHARES = (1.0, 0.9, 0.8)  # where numbers at the ends of a range may weigh little


def quantise_int4(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint8], Halves, Halves]:
    """Codes, (outputs, inputs / 2), scales and minima, (outputs, inputs / 32), of a matrix as a StoredTensor has it.

    Of a block, input i is in the low bits of byte i, input i + 16 in the high ones. A block with NaN has a scale of
    NaN.
    """
    blocks = rows.reshape(-1, BLOCK)
    codes = np.empty((len(blocks), BLOCK // 2), dtype=np.uint8)
    scales, mins = (np.empty(len(blocks), dtype=np.float16) for _ in range(2))
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), PIECE_BLOCKS):
            piece = slice(first, first + PIECE_BLOCKS)
            weights = np.ascontiguousarray(widened(blocks[piece]).T, dtype=np.float32)
            scales[piece], mins[piece] = scale, low = find_lines(weights)
            found = np.nan_to_num(rounded(weights, scale, low)).astype(np.uint8)
            codes[piece] = (found[: BLOCK // 2] | found[BLOCK // 2 :] << 4).T
    return codes.reshape(len(rows), -1), scales.reshape(len(rows), -1), mins.reshape(len(rows), -1)


def find_lines(weights: Floats, importance: Floats | None = None) -> tuple[Floats, Floats]:
    """Scale and minimum of each column: the best that were found. importance: of an error of each number; None: all
    alike."""

    def weighed(numbers: Floats) -> Floats:
        return numbers if importance is None else numbers * importance

    total, least = (len(weights), 1.0) if importance is None else (importance.sum(0), 1e-6 * importance.mean(0))
    low, mean = weights.min(0), weighed(weights).sum(0) / total
    whole = (weights.max(0) - low) / LARGEST
    best = tried(weights, whole, low, weighed)
    for share in SHARES if importance is None else MORE_SHARES:
        scale, minimum = whole * np.float32(share), low + whole * np.float32((1 - share) * LARGEST / 2)
        for _ in range(NUM_FITS):
            codes = rounded(weights, scale, minimum)
            middle = weighed(codes).sum(0) / total
            codes -= middle
            heavy = weighed(codes)
            scale = np.einsum("ij,ij->j", heavy, weights) / np.maximum(np.einsum("ij,ij->j", heavy, codes), least)
            minimum = mean - scale * middle
        found = tried(weights, scale, minimum, weighed)
        best = np.where(found[0] < best[0], found, best)
    return best[1], best[2]


def tried(weights: Floats, scale: Floats, low: Floats, weighed: Callable[[Floats], Floats]) -> Floats:
    """Squared errors, scales and minima, as float16 holds these."""
    scale, low = (each.astype(np.float16).astype(np.float32) for each in (scale, low))
    off = rounded(weights, scale, low) * scale + low - weights
    return np.stack((np.einsum("ij,ij->j", weighed(off), off), scale, low))


def rounded(weights: Floats, scale: Floats, low: Floats) -> Floats:
    codes = (weights - low) * np.where(scale == 0, 0, 1 / scale)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, LARGEST, out=codes)
