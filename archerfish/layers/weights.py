"""Weights by name, checked for presence and shape as a model takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from archerfish.errors import TensorError, did_you_mean
from archerfish.kernels.ops import LinearWeight, Ops, T


@dataclass(frozen=True)
class Weights(Generic[T]):
    """The tensors of one model below a name prefix."""

    source: Mapping[str, T]
    ops: Ops[T]
    prefix: str = ""

    def scope(self, name: str) -> Weights[T]:
        return Weights(self.source, self.ops, f"{self.prefix}{name}.")

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

    def vector(self, name: str, width: int) -> T:
        return self.ops.vector(self.tensor(name, width))

    def linear(self, names: str | tuple[str, ...], out_features: int, in_features: int) -> LinearWeight[T]:
        """A linear map, or several of equal shape stacked into one product."""
        scopes = [self.scope(name) for name in ([names] if isinstance(names, str) else names)]
        weights = [scope.tensor("weight", out_features, in_features) for scope in scopes]
        biases = [scope.tensor("bias", out_features) if scope.has("bias") else None for scope in scopes]
        return self.ops.linear_weight(weights, biases)
