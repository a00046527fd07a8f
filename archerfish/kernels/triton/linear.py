"""Linear maps on a GPU: products by the kernels of `triton/products.py` for few rows of activations, by cuBLAS for
more; and the way of weights onto the card."""
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, cast

import torch

from archerfish.kernels.formats import Groups, Tensors, WeightFormat
from archerfish.kernels.ops import Activation
from archerfish.kernels.torch.activations import ACTIVATIONS
from archerfish.kernels.torch.reference import TorchOps, TorchWeight
from archerfish.kernels.triton import norm as triton_norm
from archerfish.kernels.triton.group_products import FEW_ROWS, dequantise, multiply_groups, pack
from archerfish.kernels.triton.launch import early_start
from archerfish.kernels.triton.products import (
    add_rows_kernel,
    multiply_rows_kernel,
    multiply_tiles_kernel,
    stream_kernel,
)
from archerfish.kernels.triton.tiles import (
    AddTile,
    LinearTile,
    add_tile,
    cdiv,
    choose_tile,
    next_power_of_2,
    shared_bytes,
)

Tensor = torch.Tensor
NUM_THREADS = 8  # of uploads
PIECE_BYTES = 4 << 20  # of a copy on its way, of which every thread has two
MANY_ROWS = 512  # up to which quantised matrices are multiplied as they are
MIN_SPAN = 16  # inputs that tensor cores take at a time, at least
GATES = (None, "silu", "gelu_tanh")  # that `triton_norm.gated` has
ROW_STEP = 64  # of outputs: with an odd number of them cuBLAS takes four to six times as long


class FewRowsWeight(TorchWeight):
    """A matrix that kernels of ours multiply with a few rows of activations."""

    max_rows: int  # of activations, up to which they are quicker than cuBLAS with the dequantised matrix

    def takes(self, x: Tensor) -> bool:
        """Whether a product of these rows, which may be float32 until they are normalised, is for our kernels."""
        return 0 < len(x) <= self.max_rows and x.dtype in (self.ops.torch_dtype, torch.float32) and x.stride(-1) == 1

    @abstractmethod
    def multiply_few(
        self,
        x: Tensor,
        activation: Activation = "none",
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As `linear`."""

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        can_add = residual is None or (residual.dtype in (x.dtype, torch.float32) and residual.stride(-1) == 1)
        if x.dtype != self.ops.torch_dtype or not can_add:
            return super().multiply(x, activation, residual)
        if self.takes(x):
            return self.multiply_few(x, activation, residual, dtype=x.dtype if residual is None else residual.dtype)
        if residual is None or self.bias is not None or activation != "none":
            return self.multiply_many(x, activation, residual)
        return self.add_many(residual, x)

    def multiply_many(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        return super().multiply(x, activation, residual)

    def add_many(self, total: Tensor, x: Tensor) -> Tensor:
        """total + x @ matrix.T, maybe in total's memory."""
        return add_product(total, x, self.dequantised())


class RowsWeight(FewRowsWeight):
    """A matrix as Triton's kernels read it: rows of one type, maybe with a float32 scale for each."""

    tile: LinearTile | None = None  # instead of the chosen one, for tests and measurements

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        self.matrix, self.scales = tensors["weight"].contiguous(), tensors.get("scales")

    def tile_for(self, x: Tensor, *, is_gated: bool = False) -> LinearTile:
        return self.tile or choose_tile(x, self.matrix, self.ops.torch_dtype, is_gated=is_gated)

    def multiply_few(
        self,
        x: Tensor,
        activation: Activation = "none",
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        tile = self.tile_for(x, is_gated=is_gated)
        return linear(x, self, tile, activation=activation, residual=residual, is_gated=is_gated, dtype=dtype)

    def add_many(self, total: Tensor, x: Tensor) -> Tensor:
        added = add_tile(len(x), self.matrix, x.element_size(), shared_bytes(x.device))
        if added and x.stride(-1) == 1:
            return add_rows(total, x, self, added)
        return self.add_wide(total, x)

    def add_wide(self, total: Tensor, x: Tensor) -> Tensor:
        """As `add_many`, for so many rows and outputs that `add_rows` is no quicker."""
        return super().add_many(total, x)


class PlainRowsWeight(RowsWeight):
    """A matrix in the compute type, so that products need not convert it."""

    max_rows = 16

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        kept = with_room(weight_format.dequantise(tensors, ops.torch_dtype))
        super().__init__(ops, weight_format, {"weight": kept}, bias)


class Int8RowsWeight(RowsWeight):
    """int8 rows with their scales; cuBLAS would have to be given another type, so it is only for very many rows."""

    max_rows = 64

    def multiply_many(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if len(x) > MANY_ROWS or x.stride(-1) != 1 or self.scales is None or x.shape[1] % MIN_SPAN:
            return super().multiply_many(x, activation, residual)
        whole = Groups(str(self.matrix.dtype).removeprefix("torch."), "float32", self.matrix.shape[1])
        return multiply_groups(
            x,
            whole,
            {"weight": self.matrix, "scales": self.scales.unsqueeze(0)},
            self.bias,
            activation=activation,
            residual=residual,
            dtype=x.dtype if residual is None else residual.dtype,
        )

    def add_wide(self, total: Tensor, x: Tensor) -> Tensor:
        return self.multiply_many(x, "none", total) if len(x) <= MANY_ROWS else super().add_wide(total, x)


class ByteRowsWeight(Int8RowsWeight):
    """Rows of bytes with their scales. Many rows of activations become bytes, too, each with a scale of its own.

    The library is quicker where it need not apply scales, so these are left to a kernel that follows in any case.
    """

    size_step: ClassVar[int]  # of the sizes of matrices that the library multiplies with

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        assert self.scales is not None
        self.column_scales = self.scales.unsqueeze(0)
        self.is_narrow = any(size % self.size_step for size in self.matrix.shape)  # for the library
        self.can_split = not self.is_narrow and bias is None

    @abstractmethod
    def multiply_unscaled(self, codes: Tensor) -> Tensor:
        """Codes with codes."""

    def multiply_codes(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of codes, with all scales."""
        return triton_norm.add_scaled(
            None, self.multiply_unscaled(codes), scales, self.column_scales, self.ops.torch_dtype
        )

    def multiply_many(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if self.is_narrow:
            return FewRowsWeight.multiply_many(self, x, activation, residual)
        y = self.multiply_codes(*triton_norm.quantise_rows(x, self.matrix.dtype))
        if self.bias is not None:
            y += self.bias
        return ACTIVATIONS[activation](y if residual is None else residual + y)

    def add_many(self, total: Tensor, x: Tensor) -> Tensor:
        if not self.can_split:
            return self.multiply_many(x, "none", total)
        codes, scales = triton_norm.quantise_rows(x, self.matrix.dtype)
        return triton_norm.add_scaled(total, self.multiply_unscaled(codes), scales, self.column_scales, total.dtype)

    def takes_normed(self, x: Tensor, gate: Activation | None) -> bool:
        """Whether `multiply_normed` takes rows."""
        return self.can_split and gate in GATES and len(x) > 0 and x.shape[1] <= triton_norm.MAX_WIDTH

    def multiply_normed(
        self, x: Tensor, norm: Tensor, eps: float, residual: Tensor | None, gate: Activation | None
    ) -> tuple[Tensor, Tensor]:
        """As `Ops.normed_linear`."""
        scales = triton_norm.new_scales(x)
        codes, total = triton_norm.rms_norm(x, norm, eps, residual, self.matrix.dtype, scales)
        if gate is None:
            return self.multiply_codes(codes, scales), total
        y = self.multiply_unscaled(codes)
        return triton_norm.gated(y, gate == "silu", scales, self.column_scales, self.ops.torch_dtype), total


class Fp8RowsWeight(ByteRowsWeight):
    """FP8 rows: two rows of activations are many."""

    max_rows, size_step = 1, 16

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        super().__init__(ops, weight_format, tensors, bias)
        self.one = self.column_scales.new_ones(())
        self.can_split &= ops.torch_dtype == torch.bfloat16 and self.matrix.is_cuda  # float16 cannot hold sums of codes

    def multiply_unscaled(self, codes: Tensor) -> Tensor:
        return torch._scaled_mm(
            codes, self.matrix.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def multiply_codes(self, codes: Tensor, scales: Tensor) -> Tensor:
        dtype = self.ops.torch_dtype
        return torch._scaled_mm(
            codes, self.matrix.t(), scales, self.column_scales, out_dtype=dtype, use_fast_accum=True
        )


class Int8BothWeight(ByteRowsWeight):
    """int8 rows of a checkpoint that is made for int8 activations. The library takes no fewer than 17 of them."""

    max_rows, size_step = 16, 8

    def multiply_unscaled(self, codes: Tensor) -> Tensor:
        return torch._int_mm(codes, self.matrix.t())


class GroupsWeight(FewRowsWeight):
    """Codes in groups of inputs. Many rows are multiplied by our kernels, too; very many with the dequantised
    matrix."""

    max_rows = FEW_ROWS

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        assert isinstance(weight_format, Groups)
        super().__init__(ops, weight_format, pack(weight_format, tensors), bias)

    @property
    def groups(self) -> Groups:
        assert isinstance(self.weight_format, Groups)
        return self.weight_format

    def multiply_few(
        self,
        x: Tensor,
        activation: Activation = "none",
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return multiply_groups(
            x,
            self.groups,
            self.tensors,
            self.bias,
            activation=activation,
            residual=residual,
            is_gated=is_gated,
            dtype=dtype or x.dtype,
        )

    def multiply_many(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if len(x) > MANY_ROWS or x.stride(-1) != 1:
            return super().multiply_many(x, activation, residual)
        return self.multiply_few(x, activation, residual, dtype=x.dtype if residual is None else residual.dtype)

    def add_many(self, total: Tensor, x: Tensor) -> Tensor:
        return self.multiply_many(x, "none", total) if len(x) <= MANY_ROWS else super().add_many(total, x)

    def dequantised(self) -> Tensor:
        return dequantise(self.groups, self.tensors, self.ops.torch_dtype)


def with_room(matrix: Tensor) -> Tensor:
    """A copy of a matrix in memory with room for a multiple of ROW_STEP rows."""
    num_rows, width = matrix.shape
    if num_rows % ROW_STEP == 0:
        return matrix
    room = torch.empty((cdiv(num_rows, ROW_STEP) * ROW_STEP, width), dtype=matrix.dtype, device=matrix.device)
    return room[:num_rows].copy_(matrix)


def expand_queries(matrix: Tensor) -> Tensor:
    """A matrix from `with_room` with its room as further rows; any other matrix as it is."""
    num_rows, width = matrix.shape
    num_filled = cdiv(num_rows, ROW_STEP) * ROW_STEP
    num_held = matrix.untyped_storage().nbytes() // matrix.element_size() - matrix.storage_offset()
    has_room = matrix.is_contiguous() and num_held >= num_filled * width
    return matrix.as_strided((num_filled, width), (width, 1)) if has_room else matrix


def add_product(total: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """total + x @ matrix.T in total's memory, by cuBLAS; the sum is rounded once."""
    if total.dtype == x.dtype:
        return total.addmm_(x, matrix.t())
    if not x.is_cuda:  # Triton's interpreter: only a card multiplies into another type
        return total.addmm_(x.to(total.dtype), matrix.to(total.dtype).t())
    return torch.addmm(total, x, matrix.t(), out_dtype=total.dtype, out=total)


def linear(
    x: Tensor,
    packed: RowsWeight,
    tile: LinearTile,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    is_gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`Ops.linear` for the rows that `packed.takes`, in x's type or in another one.

    is_gated: `Ops.gated` with the activation follows. norm: x, which may be float32, is normalised first, by these
    factors; not with is_dot tiles. residual: is read before the kernel in front has ended, so that kernel must not
    write it.
    """
    weight = packed.matrix
    bias = packed.bias
    (num_rows, width) = x.shape
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=dtype or x.dtype, device=x.device)
    num_tiles = cdiv(num_outputs, tile.outputs)
    given: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "scales": packed.scales,
        "bias": x if bias is None else bias,
        "residual": x if residual is None else residual,
        "out": out,
        "num_outputs": num_outputs,
        "width": width,
        "outputs": tile.outputs,
        "activation": activation,
        "has_bias": bias is not None,
        "has_residual": residual is not None,
        "is_gated": is_gated,
        "num_warps": tile.num_warps,
        **early_start(x.device),
    }
    if not tile.is_dot:
        given |= {"norm": x if norm is None else norm, "eps": eps, "is_normed": norm is not None}
        given |= {"num_pieces": tile.num_stages, "num_stages": 1}
    if tile.num_programs:
        num_programs = min(num_tiles, tile.num_programs)
        stream_kernel[(num_programs,)](
            num_rounds=cdiv(num_tiles, num_programs), columns=next_power_of_2(width), **given
        )
        return out
    given |= {"x_stride": x.stride(0), "residual_stride": x.stride(0) if residual is None else residual.stride(0)}
    if tile.is_dot:
        multiply_tiles_kernel[(num_tiles,)](
            num_rows=num_rows,
            rows=max(8, next_power_of_2(num_rows)),
            columns=tile.columns,
            parts=tile.num_warps,
            num_stages=tile.num_stages,
            **given,
        )
    else:
        multiply_rows_kernel[(num_tiles,)](rows=num_rows, columns=tile.columns, **given)
    return out


def add_rows(total: Tensor, x: Tensor, packed: RowsWeight, tile: AddTile) -> Tensor:
    """total + x @ matrix.T, in total's memory."""
    (num_rows, width), num_outputs = x.shape, len(packed.matrix)
    add_rows_kernel[(cdiv(num_outputs, tile.outputs), cdiv(num_rows, tile.rows))](
        x,
        packed.matrix,
        packed.scales,
        total,
        num_rows,
        num_outputs,
        x.stride(0),
        total.stride(0),
        width=width,
        rows=tile.rows,
        outputs=tile.outputs,
        columns=tile.columns,
        parts=tile.parts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_start(x.device),
    )
    return total


class Uploads:
    """Copies to one CUDA device: threads bring pieces of mapped files into pinned memory, and the card fetches them
    from there.

    The threads end with `close`.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device, torch.cuda.current_device())
        self._threads = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="archerfish-upload", initializer=self._start_thread
        )
        self._own = threading.local()

    def send(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        is_ours = torch.cuda.Event()  # the target may lie where an earlier tensor did, which queued work still reads
        is_ours.record()
        source, flat = tensor.reshape(-1), target.view(-1)
        step = max(1, PIECE_BYTES // tensor.element_size())
        copies: list[Future[torch.cuda.Event]] = [
            self._threads.submit(self._copy, source[first : first + step], flat[first : first + step], is_ours)
            for first in range(0, source.numel(), step)
        ]
        for copy in copies:
            copy.result().synchronize()
        return target

    def close(self) -> None:
        self._threads.shutdown()

    def _start_thread(self) -> None:
        torch.set_num_threads(1)
        torch.cuda.set_device(self._device)
        own = self._own
        own.stream = torch.cuda.Stream(self._device)
        own.buffers = [  # pinned memory, and when it may be written
            (torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
        ]

    def _copy(self, source: Tensor, target: Tensor, is_ours: torch.cuda.Event) -> torch.cuda.Event:
        own = self._own
        own.buffers.reverse()
        buffer, is_free = cast(tuple[Tensor, torch.cuda.Event], own.buffers[0])
        is_free.synchronize()
        pinned = buffer[: target.nbytes].view(target.dtype)
        pinned.copy_(source)
        own.stream.wait_event(is_ours)
        with torch.cuda.stream(own.stream):
            target.copy_(pinned, non_blocking=True)
            is_free.record()
        return is_free
