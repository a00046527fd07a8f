"""How products of few rows are cut: what was measured for the shapes of known models, and what is good for most
others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

FEW_ADDED_ROWS = 32
MAX_ADDED_ROWS = 128
MAX_ADDED_OUTPUTS = 2048  # of a product that is added to a total
LONG_WIDTH, MAX_ADDED_WIDTH = 3072, 4096  # likewise
MIN_BLOCK = 16  # columns of a tile that tl.dot takes
DIRECT_ROWS = 2  # of activations, up to which a product is as quick without tensor cores
NORMED_WIDTH = (
    2048  # up to which normalising in every program, if it is not persistent, costs less than a kernel for it
)
UNROLLED_COLUMNS = 14336  # of all rows together: what the registers hold of sums and reads on the way
COLUMNS_PER_WARP = 256  # at least, or a row and the weights are spread over threads in different ways
HOPPER_BYTES = 227 << 10  # of shared memory
SHARED_BYTES = 198_000  # of a program's stages, at most; what a Hopper has
STREAMED_WIDTH = 16384  # of a row that the registers of a program hold
FEW_OUTPUTS = 2048  # of a product, up to which persistent programs would have too few rounds
ROUND_BYTES = 16 << 10  # of weights, that a persistent program reads in a round
MAX_ROUNDS = 6  # that are loading at once
PERSISTENT_PROGRAMS = 264  # two for each processor of a Hopper


@dataclass(frozen=True)
class LinearTile:
    """How a product is cut."""

    outputs: int  # of a program; with a gate, each is two rows of weights
    columns: int  # read at a time
    num_warps: int
    num_stages: int  # pieces of so many columns in flight; 1 without tensor cores: as many as the registers hold
    is_dot: bool = False  # on tensor cores
    num_programs: int = (
        0  # persistent ones, each with a tile of whole rows of weights in every round; 0: one for each tile
    )


@dataclass(frozen=True)
class AddTile:
    """How a product of a batch of rows that is added to a total is cut."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int
    parts: int  # of the columns: 1, or one for each warp


def dot_tile(outputs: int, columns: int, num_stages: int) -> LinearTile:
    return LinearTile(outputs, columns, 4, num_stages, is_dot=True)


# On an H200; by rows and columns of the weights, and by rows of activations (a power of 2).
TUNED: dict[tuple[int, int], dict[int, LinearTile]] = {
    (4096, 1024): {1: LinearTile(8, 512, 2, 1), 4: dot_tile(16, 256, 6), 16: dot_tile(32, 256, 5)},
    (1024, 2048): {1: LinearTile(4, 512, 4, 1), 4: dot_tile(16, 256, 6), 16: dot_tile(16, 256, 6)},
    (6144, 1024): {1: LinearTile(4, 512, 2, 1), 4: dot_tile(32, 256, 5), 16: dot_tile(32, 256, 5)},
    (1024, 3072): {1: LinearTile(1, 1024, 8, 1), 4: dot_tile(16, 512, 4), 16: dot_tile(16, 512, 4)},
    (151936, 1024): {1: LinearTile(4, 1024, 4, 1), 4: dot_tile(32, 512, 3)},
    (1024, 4096): {1: LinearTile(4, 1024, 4, 1)},
    (6144, 4096): {1: LinearTile(2, 0, 2, 4, num_programs=528), 4: dot_tile(16, 512, 4)},
    (4096, 4096): {1: LinearTile(2, 0, 2, 4, num_programs=528), 4: dot_tile(32, 256, 5), 16: dot_tile(32, 256, 5)},
    (28672, 4096): {4: dot_tile(16, 512, 4)},
    (4096, 14336): {4: dot_tile(16, 512, 4), 16: dot_tile(32, 512, 3)},
    (128256, 4096): {1: LinearTile(2, 1024, 4, 1), 4: dot_tile(32, 256, 5), 16: dot_tile(32, 512, 3)},
}


def add_tile(num_rows: int, weight: torch.Tensor, element_bytes: int, most_bytes: int) -> AddTile | None:
    """The best of twenty on an H200, with as many stages as there is room for; None where cuBLAS is as quick."""
    num_outputs, width = weight.shape
    if not 0 < num_rows <= MAX_ADDED_ROWS or num_outputs > MAX_ADDED_OUTPUTS or width > MAX_ADDED_WIDTH:
        return None
    rows = 32
    outputs = 16
    stage_columns = 512
    max_stages = 6
    parts = 1
    if num_rows > FEW_ADDED_ROWS and width > LONG_WIDTH:
        parts = 4  # A program of 64 rows would read so much that reading bounds it.
    elif num_rows > FEW_ADDED_ROWS:
        rows = 64
        stage_columns = 256
        max_stages = 8
    elif width > LONG_WIDTH:
        return None
    num_stages = most_bytes // ((rows + outputs) * stage_columns)
    return AddTile(rows, outputs, stage_columns // element_bytes, 4, max(1, min(max_stages, num_stages)), parts)


def cdiv(number: int, divisor: int) -> int:
    """As triton.cdiv, which takes ten times as long."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def dot_block(size: int) -> int:
    """The least power of 2 for a size that is one of a tile's that tl.dot takes."""
    return max(MIN_BLOCK, next_power_of_2(size))


def choose_tile(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, is_gated: bool = False) -> LinearTile:
    """Integer weights are cut as weights of the compute type are, which they become in shared memory."""
    return tile_of(len(x), *weight.shape, is_gated, dtype.itemsize, shared_bytes(x.device))


@cache
def shared_bytes(device: torch.device) -> int:
    """What the stages of a program may take."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return min(SHARED_BYTES, most * 7 // 8)


@cache
def tile_of(
    num_rows: int, num_weights: int, width: int, is_gated: bool, element_bytes: int, most_bytes: int = SHARED_BYTES
) -> LinearTile:
    """The measured tile of a shape, or one that is good for most. num_weights: rows of the weights.

    For one wide row programs are persistent; up to DIRECT_ROWS rows are multiplied without tensor cores, more rows with
    them.
    """
    rows = next_power_of_2(num_rows)
    copies = 2 if is_gated else 1
    tuned = TUNED.get((num_weights, width), {}).get(rows) if element_bytes == 2 and most_bytes == SHARED_BYTES else None
    if (
        tuned
        and tuned.num_stages * (max(8, rows) + tuned.outputs * copies) * tuned.columns * element_bytes <= HOPPER_BYTES
    ):
        return tuned
    widest = next_power_of_2(width)
    if num_rows == 1 and NORMED_WIDTH < widest <= STREAMED_WIDTH and num_weights > FEW_OUTPUTS:
        outputs = max(1, ROUND_BYTES // (widest * element_bytes * copies))
        num_stages = max(1, min(MAX_ROUNDS, 1 + most_bytes // (2 * outputs * widest * element_bytes * copies)))
        return LinearTile(outputs, 0, 4 if widest <= 8192 else 8, num_stages, num_programs=PERSISTENT_PROGRAMS)
    if num_rows <= DIRECT_ROWS:
        outputs = 2 if num_weights <= FEW_OUTPUTS or is_gated else 4
        columns = min(widest, 1024 if most_bytes == SHARED_BYTES else 512)
        num_stages = 1 if num_rows * width <= UNROLLED_COLUMNS else 3
        return LinearTile(outputs, columns, max(1, columns // COLUMNS_PER_WARP), num_stages)
    outputs, columns = (16 if num_weights <= 4096 else 32), max(64, min(widest, 1024 // element_bytes))
    stage_bytes = (max(8, rows) + outputs * copies) * columns * element_bytes
    return dot_tile(outputs, columns, max(1, min(4, most_bytes // stage_bytes)))
