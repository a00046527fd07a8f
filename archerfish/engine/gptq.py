"""GPTQ: points of a grid for a matrix, chosen so that its products with the inputs of real text change least.

One pass of the calibration text through the model does it. Whenever a product is about to be computed, its inputs,
which come from quantised products already, tell how much errors of each input weigh; its matrices are quantised, and
the pass goes on with the result. Finished matrices are kept in a work directory: a stopped conversion takes them from
there and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archerfish.engine.streamed_model import StreamedModel, Unread
from archerfish.kernels.batches import Ids
from archerfish.kernels.stored import FP8_LARGEST, Floats
from archerfish.kernels.torch.reference import Tensor
from archerfish.store.files import sibling, sync
from archerfish.store.format import Quantization, Row, TensorInfo, dequantize
from archerfish.store.quantiser import CODE_RANGES, ZERO_CODES, Grid, find_grid, make_row, rounded_row
from archerfish.store.source import SourceTensor
from archerfish.types import Progress

DAMPING = 0.01  # of the mean weight of an input, added to all, as in the paper
BLOCK_COLUMNS = 128  # whose errors are spread inside of the block at once, and over the rest together


def quantise_by_text(
    model: StreamedModel, texts: Sequence[Ids], wanted: Mapping[str, Quantization], work: Path, progress: Progress
) -> None:
    """Leave a row for each matrix of the model's layers in the work directory."""
    done = 0

    def on_product(parts: Sequence[Unread], x: Tensor, matrix: Tensor) -> Tensor:
        nonlocal done
        kinds = {wanted.get(part.name) for part in parts}
        kind = next(iter(kinds))
        if kind is None or len(kinds) > 1:
            return matrix
        progress(done, len(wanted), f"quantising {parts[0].name}")
        done += len(parts)
        infos = [TensorInfo(part.name, "float32", part.shape, kind) for part in parts]
        if not all(row_path(work, info.name).is_file() for info in infos):
            save_rows(work, infos, *gptq(matrix, x, kind))
        return torch.from_numpy(np.concatenate([dequantize(read_row(work, info)) for info in infos])).to(matrix.device)

    model.hidden(texts, on_product)


def save_rows(work: Path, infos: Sequence[TensorInfo], values: Floats, grid: Grid) -> None:
    """Matrices that are stacked, each in a file of its own."""
    num_groups, first = values.shape[1] // grid.kind.group_size, 0
    for info in infos:
        last = first + info.shape[0]
        groups = slice(first * num_groups, last * num_groups)
        row = make_row(info, values[first:last], Grid(grid.kind, grid.scales[groups], grid.mins[groups]))
        buffers = {name: each for name, each in row._asdict().items() if name != "info" and each is not None}
        save_arrays(row_path(work, info.name), buffers)
        first = last


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a file whole, or not at all."""
    with (temporary := sibling(path, "tmp")).open("xb") as file:
        np.savez(file, **arrays)
        sync(file)
    temporary.replace(path)


def row_path(work: Path, name: str) -> Path:
    return work / f"{name}.npz"


def read_row(work: Path, info: TensorInfo) -> Row:
    with np.load(row_path(work, info.name), allow_pickle=False) as file:
        return Row(info, **{name: file[name] for name in file.files})


def kept_row(work: Path, tensor: SourceTensor, info: TensorInfo) -> Row:
    """The row of a matrix that was quantised by text; the pass does not reach heads, which are rounded."""
    return read_row(work, info) if row_path(work, info.name).is_file() else rounded_row(tensor, info)


def points_of(steps: Tensor, quant_type: str) -> Tensor:
    """The nearest steps that codes stand for, as `Grid.nearest` finds them."""
    if quant_type == "FP8":
        return steps.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float()
    zero = ZERO_CODES[quant_type]
    return (steps.round() + zero).clamp(*CODE_RANGES[quant_type]) - zero


def gptq(matrix: Tensor, x: Tensor, kind: Quantization) -> tuple[Floats, Grid]:
    """Points of a grid that suits the matrix best where its inputs weigh most, and the grid. Those inputs are rounded
    first."""
    hessian = (x.T @ x).float()
    weights = hessian.diagonal()
    weights += torch.where(weights == 0, 1.0, DAMPING * weights.mean())  # an input that is always 0 may be anything
    grid = find_grid(matrix.cpu().numpy(), kind, weights.cpu().numpy())
    order = weights.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    num_groups = matrix.shape[1] // kind.group_size
    scales, mins = (torch.from_numpy(each).to(matrix.device).view(-1, num_groups) for each in (grid.scales, grid.mins))
    left = matrix[:, order].clone()
    found = torch.empty_like(matrix)
    groups = order // kind.group_size
    for first in range(0, len(order), BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, len(order))
        errors = torch.empty(len(left), last - first, device=left.device)
        for column in range(first, last):
            scale, minimum = scales[:, groups[column]], mins[:, groups[column]]
            number = left[:, column]
            point = points_of((number - minimum) / scale, kind.quant_type) * scale + minimum
            found[:, order[column]] = point
            error = (number - point) / upper[column, column]
            left[:, column:last] -= torch.outer(error, upper[column, column:last])
            errors[:, column - first] = error
        left[:, last:] -= errors @ upper[first:last, last:]
    return found.cpu().numpy(), grid
