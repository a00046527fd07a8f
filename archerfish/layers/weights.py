"""Weights by name, checked for presence and shape as a model takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Generic

import numpy as np

from archerfish.errors import TensorError, did_you_mean
from archerfish.kernels.adapters import is_expert
from archerfish.kernels.batches import T
from archerfish.kernels.formats import PLAIN, WeightFormat
from archerfish.kernels.ops import LinearWeight, NormWeights, Ops
from archerfish.kernels.ranks import ALONE, Part, Ranks
from archerfish.kernels.stored import StoredTensor
from archerfish.types import DTYPE_BYTES

Size = int | Part  # of which a rank has all, or a part


@dataclass(frozen=True)
class Weights(Generic[T]):
    """The tensors of one model below a name prefix.

    Sizes are those of the checkpoint. Where one is a Part, the rank takes this part of the tensor and reads nothing
    else.
    """

    source: Mapping[str, T]
    ops: Ops[T]
    prefix: str = ""
    weight_format: WeightFormat = PLAIN  # of linear maps
    takes_head: bool = True  # False: of a decoder that embeds texts, and so needs no scores over the vocabulary

    def scope(self, name: str) -> Weights[T]:
        scoped = copy(self)  # much quicker than `replace`
        object.__setattr__(scoped, "prefix", f"{self.prefix}{name}.")
        return scoped

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.source

    def tensor(self, name: str, *shape: int) -> T:
        """The stored tensor; a TensorError names what is missing or has another shape than expected."""
        full = f"{self.prefix}{name}"
        if full not in self.source:
            raise TensorError(f"The weights have no tensor {full!r}.", hint=did_you_mean(full, self.source))
        tensor = self.source[full]
        if tuple(tensor.shape) != shape:
            raise TensorError(
                f"Tensor {full!r} has shape {tuple(tensor.shape)}, but the configuration asks for {shape}."
            )
        return tensor

    def table(self, name: str, rows: int, width: int, *, adapts: bool = False) -> T:
        """A lookup table. adapts: adapters may add to it, by `Adapters.add_to_lookup`."""
        if adapts and self.ops.adapters is not None:
            names = [f"{self.prefix}{name}".removesuffix(".weight")]
            self.ops.adapters.lookup = self.ops.adapters.add_product(names, [width], rows, is_lookup=True)
        return self.ops.to_device(self.tensor(name, rows, width))

    def vector(self, name: str, width: Size, *, plus: float = 0.0, times: float = 1.0) -> T:
        return self.ops.vector(self.numbers(name, Part.of(width)), plus=plus, times=times)

    def layer_norm(
        self, name: str, width: int, eps: float, *, has_bias: bool = True, times: float = 1.0
    ) -> NormWeights[T]:
        """times: a factor of its result."""
        bias = (
            self.vector(f"{name}.bias", width, times=times)
            if has_bias
            else self.ops.tensor(np.zeros(width, np.float32))
        )
        return NormWeights(self.vector(f"{name}.weight", width, times=times), bias, eps)

    def linear(
        self,
        names: str | tuple[str, ...],
        out_features: Size | tuple[Size, ...],
        in_features: Size,
        *,
        bias: bool | None = None,
        is_plain: bool = False,
        is_sensitive: bool = False,
    ) -> LinearWeight[T]:
        """A linear map, or several stacked into one product; a tuple gives each its own number of outputs.

        One name with several sizes is one tensor that holds several maps. bias says whether there must be one; None:
        where the weights have one. is_plain: in the plain format at all times. is_sensitive: errors of its numbers
        weigh more than those of others. Of a map with a part of the inputs, each rank gives a part of the sums, and the
        first one adds the bias.
        """
        stated = out_features if isinstance(out_features, tuple) else (out_features,)
        sizes, inputs = [Part.of(size) for size in stated], Part.of(in_features)
        if isinstance(names, str):
            sizes = parts_within(sizes)
            scopes = [self.scope(names)] * len(sizes)
        else:
            scopes, sizes = [self.scope(name) for name in names], sizes * (len(names) if len(sizes) == 1 else 1)
        weight_format = PLAIN if is_plain else self.weight_format.chosen(inputs.total, is_sensitive=is_sensitive)
        parts, biases = list[T](), list[T | None]()
        for scope, size in zip(scopes, sizes, strict=True):
            parts.append(scope.matrix(weight_format, size, inputs))
            has_bias = bias or (bias is None and scope.has("bias"))
            biases.append(scope.numbers("bias", size) if has_bias and inputs.first == 0 else None)
        return self._adapted(
            self.ops.linear_weight(parts, biases, weight_format, is_partial=not inputs.is_whole),
            [scope.prefix.removesuffix(".") for scope in scopes],
            sizes,
            inputs,
        )

    def _adapted(
        self, weight: LinearWeight[T], names: Sequence[str], sizes: Sequence[Part], inputs: Part
    ) -> LinearWeight[T]:
        """A linear map with room for adapters, if there may be some."""
        if self.ops.adapters is not None and (self.ops.adapters.takes_experts or not is_expert(names[0])):
            weight.adapter = self.ops.adapters.add_product(names, sizes, inputs)
        return weight

    def experts(
        self,
        names: tuple[str, ...],
        stacked: str,
        num_experts: int,
        out_features: Size,
        in_features: Size,
        *,
        has_biases: bool = False,
    ) -> LinearWeight[T]:
        """A linear map for each expert, one below the other, of one or more matrices of so many outputs.

        A checkpoint has each expert's matrices ("3.up_proj.weight"), or the matrices of a name for all experts
        ("up_proj.weight", in GGUF), or everything in one tensor, which `stacked` names. Biases are stacked in the same
        way.
        """
        size, inputs = Part.of(out_features), Part.of(in_features)
        weight_format = self.weight_format.chosen(inputs.total)
        if self.has(stacked) or self.has(f"{names[0]}.weight"):
            parts = self._cut_experts(names, stacked, weight_format, num_experts, size, inputs)
        else:
            scopes = [self.scope(f"{expert}.{name}") for expert in range(num_experts) for name in names]
            parts = [scope.matrix(weight_format, size, inputs) for scope in scopes]
        biases: Sequence[T | None] = [None] * len(parts)
        if has_biases and inputs.first == 0:
            biases = self._expert_biases(names, stacked, num_experts, size, len(parts))
        weight = self.ops.linear_weight(parts, biases, weight_format, is_partial=not inputs.is_whole)
        return self._adapted(weight, self._expert_names(names, num_experts), [size] * len(names), inputs)

    def _expert_names(self, names: tuple[str, ...], num_experts: int) -> list[str]:
        return [f"{self.prefix}{expert}.{name}" for expert in range(num_experts) for name in names]

    def _expert_biases(
        self, names: tuple[str, ...], stacked: str, num_experts: int, size: Part, num_parts: int
    ) -> list[T | None]:
        """Those of each matrix of an expert, or of all as one."""
        is_one = self.has(f"{stacked}_bias")
        given = {f"{stacked}_bias": len(names)} if is_one else {f"{name}.bias": 1 for name in names}
        found: list[Any] = []
        for name, count in given.items():
            tensor: Any = self.tensor(name, num_experts, count * size.total)
            tensor = tensor.as_floats() if isinstance(tensor, StoredTensor) else tensor
            found.append(tensor.reshape(num_experts, count, size.total)[..., size.first : size.end])
        ordered = [
            each[expert, place] for expert in range(num_experts) for each in found for place in range(each.shape[1])
        ]
        return [found[0].reshape(-1)] if num_parts == 1 else ordered

    def _cut_experts(
        self,
        names: tuple[str, ...],
        stacked: str,
        weight_format: WeightFormat,
        num_experts: int,
        size: Part,
        inputs: Part,
    ) -> list[T]:
        """The matrices of each expert, over the memory of tensors that hold those of all; all as one if they lie so."""
        given, count = ([stacked], len(names)) if self.has(stacked) else ([f"{name}.weight" for name in names], 1)
        num_rows = num_experts * count * size.total
        stacks: list[Any] = [self.tensor(name, num_experts, count * size.total, inputs.total) for name in given]
        flat: list[Any] = [
            replace(stack, shape=(num_rows, inputs.total))
            if isinstance(stack, StoredTensor)
            else stack.reshape(num_rows, -1)
            for stack in stacks
        ]
        if len(flat) == 1 and size.is_whole and inputs.is_whole:
            return flat
        return [
            weight_format.cut(matrices, size.within((expert * count + place) * size.total, num_rows), inputs)
            for expert in range(num_experts)
            for matrices in flat
            for place in range(count)
        ]

    def tied_linear(self, table: T | None, out_features: Size, in_features: int, name: str = "") -> LinearWeight[T]:
        """The linear map whose matrix is a lookup table. name: the table's, for ranks that take a part of it or that
        have no table."""
        weight_format, rows = self.weight_format.chosen(in_features, is_sensitive=True), Part.of(out_features)
        if table is None or not rows.is_whole:
            table = self.scope(name).matrix(PLAIN, rows, Part.of(in_features))
        weight = self.ops.linear_weight([table], [None], weight_format)
        return self._adapted(weight, ["lm_head"], [rows], Part.of(in_features))

    def vocabulary(self, name: str, bias: str, vocab_size: int, width: int) -> LinearWeight[T]:
        """The map of an encoder onto its vocabulary, which has a bias elsewhere if at all."""
        part = Part.of(vocab_size)
        given = self.numbers(bias, part) if self.has(bias) else None
        return self.ops.linear_weight([self.scope(name).matrix(PLAIN, part, Part.of(width))], [given])

    def cut_inputs(self, name: str, in_features: int) -> int:
        """What the inputs of a part of a matrix should be a multiple of."""
        full = f"{self.prefix}{name}"
        tensor = self.source.get(f"{full}.weight", self.source.get(full))  # a stack has no ".weight" behind its name
        own = tensor.cut_inputs if isinstance(tensor, StoredTensor) else 1
        return max(own, self.weight_format.chosen(in_features).cut_inputs)

    def numbers(self, name: str, part: Part) -> T:
        """The checkpoint's tensor of one dimension."""
        tensor: Any = self.tensor(name, part.total)
        if part.is_whole:
            return tensor  # type: ignore[no-any-return]
        if isinstance(tensor, StoredTensor):
            tensor = tensor.as_floats()
        return tensor[part.first : part.end]  # type: ignore[no-any-return]

    def matrix(self, weight_format: WeightFormat, outputs: Part, inputs: Part) -> T:
        """The checkpoint's matrix, or a rank's part of it."""
        tensor = self.tensor("weight", outputs.total, inputs.total)
        return tensor if outputs.is_whole and inputs.is_whole else weight_format.cut(tensor, outputs, inputs)


def parts_within(sizes: list[Part]) -> list[Part]:
    """The rows of one tensor that holds several matrices one below the other."""
    total = sum(size.total for size in sizes)
    before = 0
    found = list[Part]()
    for size in sizes:
        found.append(size.within(before, total))
        before += size.total
    return [Part.of(total)] if all(size.is_whole for size in sizes) else found


class NoOps:
    """Stands for a backend where nothing is computed: every operation gives None."""

    adapters = None

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@dataclass(frozen=True)
class NotedWeights(Weights[Any]):
    """Weights without tensors: a model that is built over them leaves the names, shapes and sizes of its tensors
    here."""

    source: Mapping[str, Any] = field(default_factory=dict)
    ops: Any = field(default_factory=NoOps)
    dtype: str = "float32"
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)  # in memory, by the name of a tensor or of a linear map
    tables: set[str] = field(default_factory=set)  # names of lookup tables, which a CPU reads from the mapped file
    shared: set[str] = field(default_factory=set)  # those whose memory a linear map has, too
    products: list[tuple[str, ...]] = field(default_factory=list)  # the matrices that are stacked for each
    adapted: dict[str, tuple[int, int, bool]] = field(
        default_factory=dict
    )  # of what adapters may add to: outputs, inputs, and
    # whether it is a lookup table

    def tensor(self, name: str, *shape: int) -> Any:
        self.num_bytes[f"{self.prefix}{name}"] = math.prod(shape) * DTYPE_BYTES[self.dtype]
        return self._noted(name, shape)

    def table(self, name: str, rows: int, width: int, *, adapts: bool = False) -> Any:
        self.tables.add(f"{self.prefix}{name}")
        if adapts:
            self.adapted[f"{self.prefix}{name}".removesuffix(".weight")] = width, rows, True
        return super().table(name, rows, width, adapts=adapts)

    def total_bytes(self, *, with_tables: bool = True) -> int:
        """Memory that they take. with_tables: whether lookup tables are copied from the mapped file, as linear maps
        are."""
        mapped = set() if with_tables else self.tables - self.shared
        return sum(num_bytes for name, num_bytes in self.num_bytes.items() if name not in mapped)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare with the shapes of the tensors in a file, whose names may lack the first part."""
        for name, shape in self.shapes.items():
            found = shapes.get(name, shapes.get(name.partition(".")[2], shape))
            if tuple(found) != shape:
                raise TensorError(f"Tensor {name!r} has shape {tuple(found)}, but the configuration asks for {shape}.")

    def linear(self, names: str | tuple[str, ...], *sizes: Any, **options: Any) -> LinearWeight[Any]:
        self.products.append(
            tuple(f"{self.prefix}{name}.weight" for name in ([names] if isinstance(names, str) else names))
        )
        return super().linear(names, *sizes, **options)

    def experts(
        self,
        names: tuple[str, ...],
        stacked: str,
        num_experts: int,
        out_features: Size,
        in_features: Size,
        *,
        has_biases: bool = False,
    ) -> Any:
        size, inputs = Part.of(out_features), Part.of(in_features)
        if has_biases:
            self.tensor(f"{stacked}_bias", num_experts, len(names) * size.total)
        weight_format, num_outputs = self.weight_format.chosen(inputs.total), num_experts * len(names)
        self.products.append((f"{self.prefix}{stacked}",))
        self.num_bytes[f"{self.prefix}{stacked}"] = weight_format.num_bytes(
            num_outputs * size.size, inputs.size, self.dtype
        )
        self._noted(stacked, (num_experts, len(names) * size.total, inputs.total))
        weight = self.ops.linear_weight([], [], weight_format, is_partial=not inputs.is_whole)
        return self._adapted(weight, self._expert_names(names, num_experts), [size] * len(names), inputs)

    def _adapted(self, weight: Any, names: Sequence[str], sizes: Sequence[Part], inputs: Part) -> Any:
        for name, size in zip(names, cycle(sizes), strict=False):
            self.adapted[name] = self.adapted.get(name, (0,))[0] + size.size, inputs.size, False
        return weight

    def numbers(self, name: str, part: Part) -> Any:
        return self.tensor(name, part.total)

    def matrix(self, weight_format: WeightFormat, outputs: Part, inputs: Part) -> Any:
        name = f"{self.prefix}weight"
        num_bytes = weight_format.num_bytes(outputs.size, inputs.size, self.dtype)
        self.num_bytes[name] = self.num_bytes.get(name, 0) + num_bytes  # several parts of one tensor
        return self._noted("weight", (outputs.total, inputs.total))

    def tied_linear(self, table: Any, out_features: Size, in_features: int, name: str = "") -> LinearWeight[Any]:
        rows = Part.of(out_features)
        self.products.append(tuple(self.tables))
        if self.weight_format.memory != PLAIN.memory or not rows.is_whole:
            chosen = self.weight_format.chosen(in_features, is_sensitive=True)
            self.num_bytes["tied head"] = chosen.num_bytes(rows.size, in_features, self.dtype)
        else:  # the map and the table share their memory; a packed map has its own, in place of the table's
            self.shared.update(self.tables)
        return super().tied_linear(table, out_features, in_features, name)

    def _noted(self, name: str, shape: tuple[int, ...]) -> Any:
        self.shapes[f"{self.prefix}{name}"] = shape
        return SimpleNamespace(shape=shape)
