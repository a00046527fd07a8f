"""What a weight format is: everything about how the matrix of a linear map is stored, in one object.

A format says which tensors a checkpoint has for a matrix, which tensors are kept in memory, and what they mean (`dequantise`).
Stacking, slicing and sizes follow from the layouts of these tensors. A backend multiplies with a format in a product of its own
(`Ops.products`), or with the dequantised matrix where it has none. Nothing else asks which format a weight has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from archerfish.errors import TensorError
from archerfish.types import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]  # the tensors of one matrix, by their names in a format
Axis = Literal["outputs", "inputs"]
ITEM_BYTES = DTYPE_BYTES | {"int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor of a format covers a matrix of (outputs, inputs)."""

    dtype: str = ""  # empty: the type that the model computes in
    axes: tuple[Axis, ...] = ("outputs", "inputs")
    outputs_per_item: int = 1  # outputs that an element stands for, such as 8 where 4-bit outputs are packed in an int32
    inputs_per_item: int = 1  # inputs that an element stands for, such as the size of a group that shares a scale
    block: tuple[int, ...] = ()  # further axes, such as the bytes of a block

    def per_item(self, axis: Axis) -> int:
        return self.outputs_per_item if axis == "outputs" else self.inputs_per_item

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        sizes = {"outputs": num_outputs, "inputs": num_inputs}
        return (*(-(-sizes[axis] // self.per_item(axis)) for axis in self.axes), *self.block)

    def cut(self, tensor: torch.Tensor, axis: Axis, first: int, last: int) -> torch.Tensor:
        """The part of a tensor for some outputs or inputs; the whole tensor if all of them share it."""
        if axis not in self.axes:
            return tensor
        items = self.per_item(axis)
        if first % items:
            raise TensorError(f"The {axis} of a packed weight cannot be cut at {first}: {items} share an element.")
        return tensor.narrow(self.axes.index(axis), first // items, -(-last // items) - first // items)


class WeightFormat(ABC):
    """One way to store the matrices of linear maps."""

    name: ClassVar[str]
    checkpoint: ClassVar[Mapping[str, TensorLayout]] = {"weight": TensorLayout()}  # tensors that are read of a checkpoint
    memory: ClassVar[Mapping[str, TensorLayout]]  # tensors that are kept

    @abstractmethod
    def load(self, tensors: Tensors) -> Tensors:
        """The tensors in memory from those of a checkpoint, on the device of these."""

    @abstractmethod
    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The (outputs, inputs) matrix that the tensors in memory stand for: the reference for every product."""

    def shapes(self, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors for a matrix."""
        return {name: layout.shape(num_outputs, num_inputs) for name, layout in self.checkpoint.items()}

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Memory that a matrix takes in a model that computes in dtype."""
        layouts = self.memory.values()
        return sum(math.prod(each.shape(num_outputs, num_inputs)) * ITEM_BYTES[each.dtype or dtype] for each in layouts)

    def work_bytes(self, shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
        """Memory that a step takes to dequantise the largest of some matrices."""
        return max(math.prod(shape) for shape in shapes) * DTYPE_BYTES[dtype]

    def num_outputs(self, tensors: Tensors) -> int:
        name, layout = next((name, layout) for name, layout in self.memory.items() if "outputs" in layout.axes)
        return tensors[name].shape[layout.axes.index("outputs")] * layout.outputs_per_item

    def stack(self, parts: Sequence[Tensors]) -> Tensors:
        """Matrices one below the other: their outputs follow one another. What all outputs share must be equal."""
        if len(parts) == 1:
            return parts[0]
        import torch

        return {
            name: torch.cat([part[name] for part in parts], layout.axes.index("outputs"))
            if "outputs" in layout.axes else parts[0][name]
            for name, layout in self.memory.items()
        }  # fmt: skip

    def cut(self, tensors: Tensors, axis: Axis, first: int, last: int) -> Tensors:
        """A matrix of some of the outputs or inputs, as a rank of a tensor parallel model holds it."""
        return {name: layout.cut(tensors[name], axis, first, last) for name, layout in self.memory.items()}
