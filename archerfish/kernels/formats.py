"""Weight formats: everything about how the matrix of a linear map is stored, one object per format.

A format says which tensors are kept in memory for a matrix of a checkpoint, and what they mean (`dequantise`). Stacking
and sizes follow from the layouts of these tensors. A backend multiplies with a format in a product of its own
(`Ops.products`), or with the dequantised matrix where it has none. Nothing else asks which format a weight has.

A format that is made while a model is loaded has a name for the option `weights`; matrices that the store has quantised
have theirs in spite of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from archerfish.errors import InvalidOptionError, did_you_mean
from archerfish.kernels.int4 import LARGEST, quantise_int4
from archerfish.kernels.ranks import Part
from archerfish.kernels.stored import BLOCK, FP4_VALUES, LARGEST_INT8, StoredTensor, to_int8
from archerfish.types import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]  # the tensors of one matrix, by their names in a format
Axis = Literal["outputs", "inputs"]
Coding = Literal["signed", "mins", "mxfp4"]  # what codes of 4 bits stand for; "mins": groups have minima
ITEM_BYTES = DTYPE_BYTES | {"int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
AUTO = "auto"
PIECE_ELEMENTS = 1 << 20  # weights that are converted at a time


class TensorLayout(NamedTuple):
    """How one tensor of a format covers a matrix of (outputs, inputs)."""

    dtype: str = ""  # empty: the type that the model computes in
    axes: tuple[Axis, ...] = ("outputs", "inputs")
    inputs_per_item: int = 1  # inputs that an element stands for, such as the size of a group that shares a scale

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        sizes = {"outputs": num_outputs, "inputs": -(-num_inputs // self.inputs_per_item)}
        return tuple(sizes[axis] for axis in self.axes)


class WeightFormat(ABC):
    """One way to store the matrices of linear maps."""

    name: ClassVar[str]
    memory: Mapping[str, TensorLayout]  # tensors that are kept

    def chosen(self, num_inputs: int, *, is_sensitive: bool = False) -> WeightFormat:
        """The format for a matrix of a model in this format: another one where this would cost too much, or cannot
        be."""
        return self

    def load(self, weight: torch.Tensor) -> Tensors:
        """The tensors in memory from a plain matrix, on its device."""
        return {"weight": weight}

    @abstractmethod
    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The (outputs, inputs) matrix that the tensors in memory stand for: the reference for every product."""

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Memory that a matrix takes in a model that computes in dtype."""
        layouts = self.memory.values()
        return sum(math.prod(each.shape(num_outputs, num_inputs)) * ITEM_BYTES[each.dtype or dtype] for each in layouts)

    def work_bytes(self, shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
        """Memory that a step takes to dequantise the largest of some matrices: the result, and a byte a number beside
        it."""
        return max(math.prod(shape) for shape in shapes) * (DTYPE_BYTES[dtype] + 1)

    @property
    def cut_inputs(self) -> int:
        """The inputs of a part of a matrix are a multiple of so many."""
        return math.lcm(*(layout.inputs_per_item for layout in self.memory.values()))

    def num_outputs(self, tensors: Tensors) -> int:
        name, layout = next((name, layout) for name, layout in self.memory.items() if "outputs" in layout.axes)
        return tensors[name].shape[layout.axes.index("outputs")]

    def cut(self, weight: Any, outputs: Part, inputs: Part) -> Any:
        """A rank's part of a checkpoint's matrix. Nothing else of it is read, unless all of a row decides on its
        numbers."""
        if isinstance(weight, StoredTensor):
            return weight.cut(outputs, inputs)
        return weight[outputs.first : outputs.end, inputs.first : inputs.end]

    def stack(self, parts: Sequence[Tensors]) -> Tensors:
        """Matrices one below the other: their outputs follow one another. What all outputs share must be equal."""
        if len(parts) == 1:
            return parts[0]
        import torch

        return {
            name: torch.cat([part[name] for part in parts], layout.axes.index("outputs"))
            if "outputs" in layout.axes
            else parts[0][name]
            for name, layout in self.memory.items()
        }


class Plain(WeightFormat):
    """A matrix of float32, float16 or bfloat16, as most checkpoints have it."""

    name = "plain"
    memory: Mapping[str, TensorLayout] = {"weight": TensorLayout()}

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return tensors["weight"].to(dtype)

    def work_bytes(self, shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
        return 0


class Int8Rows(WeightFormat):
    """Symmetric int8 numbers with a float32 scale for each output, made from a plain matrix while it is loaded.

    Integers up to 127 are exact in every type that backends compute in. So a product may be taken of the integers and
    its outputs scaled afterwards, or of the numbers that they stand for. Matrices whose inputs are no multiple of 32
    stay plain.
    """

    name = "int8"
    memory: Mapping[str, TensorLayout] = {
        "weight": TensorLayout("int8"),
        "scales": TensorLayout("float32", ("outputs",)),
    }
    cut_inputs = BLOCK  # the native backend has a scale for each

    def chosen(self, num_inputs: int, *, is_sensitive: bool = False) -> WeightFormat:
        return PLAIN if num_inputs % BLOCK else self

    def cut(self, weight: Any, outputs: Part, inputs: Part) -> Any:
        """Scales are those of whole rows."""
        if inputs.is_whole:
            return super().cut(weight, outputs, inputs)
        rows = super().cut(weight, outputs, Part.of(inputs.total))
        if isinstance(rows, StoredTensor):
            rows = to_int8(rows)
        else:
            codes, scales = (each.cpu().numpy() for each in self.load(rows).values())
            rows = StoredTensor(codes.shape, "float32", codes, "INT8", scales[:, None])
        return rows.cut(Part.of(outputs.size), inputs)

    def load(self, weight: torch.Tensor) -> Tensors:
        """A row of zeros stays zero; a row with NaN becomes NaN."""
        import torch

        matrix = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        size = max(1, PIECE_ELEMENTS // weight.shape[1])
        for first in range(0, len(weight), size):
            piece = slice(first, first + size)
            rows = weight[piece].float()
            largest = rows.abs().amax(1, keepdim=True)
            scale = torch.where(largest == 0, 1.0, largest / LARGEST_INT8)
            matrix[piece] = (rows / scale).round_()
            scales[piece] = scale.squeeze(1)
        return {"weight": matrix, "scales": scales}

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        import torch

        matrix, scales = tensors["weight"], tensors["scales"]
        return torch.mul(matrix, scales.unsqueeze(1), out=torch.empty(matrix.shape, dtype=dtype, device=matrix.device))


class Fp8Rows(Int8Rows):
    """Numbers of float8_e4m3fn with a float32 scale for each output, as checkpoints have them."""

    name = "fp8"
    memory: Mapping[str, TensorLayout] = {**Int8Rows.memory, "weight": TensorLayout("float8_e4m3fn")}

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return (tensors["weight"].float() * tensors["scales"].unsqueeze(1)).to(dtype)


class Groups(WeightFormat):
    """Codes with a scale, and maybe a minimum, for each group of inputs.

    Codes of 4 bits lie as in GGUF: of 32 inputs, the first 16 in the lower halves of 16 bytes. Those of MXFP4 stand for
    `stored.FP4_VALUES`; others count from 8 below zero where there is no minimum, and from zero where there is one.
    Codes of 8 bits are int8 or float8_e4m3fn.
    """

    name = "groups"

    def __init__(self, code_type: str, scale_type: str, group_size: int, coding: Coding = "signed") -> None:
        """code_type: uint8 for two codes of 4 bits, int8 or float8_e4m3fn."""
        self.group_size = group_size
        self.coding = coding
        self.is_packed = code_type == "uint8"
        scales = TensorLayout(scale_type, inputs_per_item=group_size)
        self.memory = {"weight": TensorLayout(code_type, inputs_per_item=2 if self.is_packed else 1), "scales": scales}
        if coding == "mins":
            self.memory["mins"] = scales

    def dequantise(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        import torch

        codes = tensors["weight"]
        scales = tensors["scales"].float().unsqueeze(2)
        if self.is_packed:
            packed = codes.view(len(codes), -1, BLOCK // 2)
            codes = torch.cat((packed & LARGEST, packed >> 4), 2).view(torch.int8)
            if self.coding == "mxfp4":
                codes = torch.from_numpy(FP4_VALUES).to(codes.device)[codes.int()]
            elif self.coding == "signed":
                codes = codes - 8
        grouped = codes.reshape(*scales.shape[:2], self.group_size).float()
        found = (
            torch.addcmul(tensors["mins"].float().unsqueeze(2), grouped, scales)
            if "mins" in tensors
            else grouped * scales
        )
        return found.flatten(1).to(dtype)


class Int4Groups(Groups):
    """Numbers of 4 bits with a float16 scale and minimum for each 32 inputs, made from a plain matrix while it is
    loaded.

    Matrices whose inputs are no multiple of 32 stay plain. Those where 4 bits would cost most are int8: heads, and
    projections to queries, keys and values (the perplexity of stories15M is then 4.4 % higher than in float32, else 7.0
    %).
    """

    name = "int4"

    def __init__(self) -> None:
        super().__init__("uint8", "float16", BLOCK, "mins")

    def chosen(self, num_inputs: int, *, is_sensitive: bool = False) -> WeightFormat:
        return INT8.chosen(num_inputs) if is_sensitive or num_inputs % BLOCK else self

    def load(self, weight: torch.Tensor) -> Tensors:
        import torch

        found = quantise_int4(weight.float().cpu().numpy())
        return {name: torch.from_numpy(each).to(weight.device) for name, each in zip(self.memory, found, strict=True)}


PLAIN = Plain()
INT8 = Int8Rows()
FP8 = Fp8Rows()
FORMATS: dict[str, WeightFormat] = {
    "int8": INT8,
    "int4": Int4Groups(),
}  # by the name that the option `weights` has for them


def choose_format(name: str) -> WeightFormat:
    """The format that the option `weights` names; "auto" is the plain one."""
    if name == AUTO:
        return PLAIN
    if name not in FORMATS:
        hint = did_you_mean(name, (AUTO, *FORMATS))
        raise InvalidOptionError(f"There is no weight format {name!r} (option weights).", hint=hint)
    return FORMATS[name]
