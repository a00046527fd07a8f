"""Weights by name, checked for presence and shape as a model takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Generic

from archerfish.errors import TensorError, did_you_mean
from archerfish.kernels.ops import LinearWeight, Ops, T
from archerfish.types import DTYPE_BYTES, INT8, SCALE_BYTES


@dataclass(frozen=True)
class Weights(Generic[T]):
    """The tensors of one model below a name prefix."""

    source: Mapping[str, T]
    ops: Ops[T]
    prefix: str = ""
    weight_format: str = "auto"  # of linear maps: "auto" or INT8

    def scope(self, name: str) -> Weights[T]:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.source

    def tensor(self, name: str, *shape: int) -> T:
        """The stored tensor; a TensorError names what is missing or has another shape than expected."""
        full = f"{self.prefix}{name}"
        if full not in self.source:
            raise TensorError(f"The weights have no tensor {full!r}.", hint=did_you_mean(full, self.source))
        tensor = self.source[full]
        if tuple(tensor.shape) != shape:
            raise TensorError(f"Tensor {full!r} has shape {tuple(tensor.shape)}, but the configuration asks for {shape}.")
        return tensor

    def table(self, name: str, rows: int, width: int) -> T:
        return self.ops.table(self.tensor(name, rows, width))

    def vector(self, name: str, width: int, *, plus: float = 0.0) -> T:
        return self.ops.vector(self.tensor(name, width), plus=plus)

    def linear(
        self, names: str | tuple[str, ...], out_features: int | tuple[int, ...], in_features: int, *, bias: bool | None = None,
        is_quantized: bool = True,
    ) -> LinearWeight[T]:
        """A linear map, or several stacked into one product; a tuple gives each its own number of outputs.

        bias says whether there must be one; None: where the weights have one. is_quantized: in a format that quantises.
        """
        scopes = [self.scope(name) for name in ([names] if isinstance(names, str) else names)]
        sizes = (out_features,) * len(scopes) if isinstance(out_features, int) else out_features
        parts = list(zip(scopes, sizes, strict=True))
        weights = [scope.tensor("weight", size, in_features) for scope, size in parts]
        biases = [
            scope.tensor("bias", size) if bias or (bias is None and scope.has("bias")) else None for scope, size in parts
        ]
        return self.ops.linear_weight(weights, biases, weight_format=self.weight_format if is_quantized else "auto")


@dataclass(frozen=True)
class NotedWeights(Weights[Any]):
    """Weights that are not there: a model that is built over them leaves the names and shapes of its tensors in `shapes`."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    quantized: set[str] = field(default_factory=set)  # names of those that formats may quantise

    def has(self, name: str) -> bool:
        return False

    def tensor(self, name: str, *shape: int) -> Any:
        self.shapes[f"{self.prefix}{name}"] = shape
        return SimpleNamespace(shape=shape)

    def linear(
        self, names: str | tuple[str, ...], out_features: int | tuple[int, ...], in_features: int, *, bias: bool | None = None,
        is_quantized: bool = True,
    ) -> LinearWeight[Any]:
        if is_quantized:
            self.quantized.update(f"{self.prefix}{name}.weight" for name in ([names] if isinstance(names, str) else names))
        return super().linear(names, out_features, in_features, bias=bias, is_quantized=is_quantized)

    def num_bytes(self, name: str, dtype: str, weight_format: str) -> int:
        """What a noted tensor takes in memory."""
        shape = self.shapes[name]
        if weight_format == INT8 and name in self.quantized:
            return math.prod(shape) + SCALE_BYTES * shape[0]
        return math.prod(shape) * DTYPE_BYTES[dtype]
