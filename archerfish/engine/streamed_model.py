"""A model in torch whose matrices are read from a source one product at a time, and seen by a function before they are
used.

So a model that does not fit into memory can be calibrated and compared: activations of the texts, lookup tables and one
product are in memory. The model is the adapter's own definition, over TorchOps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from archerfish.kernels.batches import Ids, Segments
from archerfish.kernels.formats import PLAIN, WeightFormat
from archerfish.kernels.ops import Activation, LinearWeight, PackedWeight
from archerfish.kernels.stored import Floats
from archerfish.kernels.torch.reference import Tensor, TorchOps
from archerfish.layers.weights import Weights
from archerfish.models.adapter import Encoder, KVShape, ModelAdapter, TokenBatch, encoder_class, is_encoder, model_class
from archerfish.models.config import Config
from archerfish.runtime.batch import build_batch
from archerfish.runtime.kv_pool import KVCachePool, StatePool
from archerfish.store.quantiser import read_floats
from archerfish.store.source import ModelSource


class Unread(NamedTuple):
    """A matrix that is still in its file."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Floats]


# Called with the matrices of a product, its inputs (rows, inputs) and the numbers of the matrices, one below the other;
# gives the numbers to multiply with.
OnProduct = Callable[[Sequence[Unread], Tensor, Tensor], Tensor]


class StreamedWeight(PackedWeight[Tensor]):
    """A product whose matrices are read for each use."""

    def __init__(self, ops: StreamedOps, parts: Sequence[Any], biases: Sequence[Tensor | None]) -> None:
        self.ops = ops
        self.parts = parts
        self.biases = biases

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        packed = self.ops.pack_linear(self.parts, self.biases, PLAIN)
        matrices: list[Any] = list(self.parts)
        if all(isinstance(each, Unread) for each in matrices):  # a tied head has the table itself
            packed.tensors = {"weight": self.ops.on_product(matrices, x, packed.tensors["weight"])}
        return packed.multiply(x, activation, residual)


class StreamedOps(TorchOps):
    name = "torch, streamed"

    def __init__(self, device: str, on_product: OnProduct) -> None:
        super().__init__(device, "float32")
        self.on_product = on_product

    def to_device(self, tensor: Any) -> Tensor:
        return super().to_device(torch.from_numpy(np.array(tensor.load())) if isinstance(tensor, Unread) else tensor)

    def linear_weight(
        self,
        parts: Sequence[Any],
        biases: Sequence[Tensor | None],
        weight_format: WeightFormat = PLAIN,
        *,
        is_partial: bool = False,
    ) -> LinearWeight[Tensor]:
        return LinearWeight(lambda: StreamedWeight(self, parts, biases))


class StreamedModel:
    """The model of a source."""

    def __init__(self, source: ModelSource, device: str, max_len: int) -> None:
        self.ops = StreamedOps(device, lambda parts, x, matrix: matrix)
        self.config = Config(source.config)
        self.pooling: Any = (source.embedding or {}).get("pooling_mode", "mean")
        tensors: dict[str, Any] = {}
        for tensor in source.tensors:
            unread = Unread(tensor.info.name, tensor.info.shape, partial(read_floats, tensor))
            tensors[unread.name] = unread if len(unread.shape) > 1 else torch.from_numpy(np.array(unread.load()))
        self.model = self._build(tensors, max_len)

    def _build(self, tensors: Mapping[str, Any], max_len: int) -> Encoder[Tensor] | ModelAdapter[Tensor]:
        weights = Weights(tensors, self.ops)
        if not is_encoder(self.config):
            return model_class(self.config)(weights, self.config, max_len)
        kind = encoder_class(self.config)
        has_prefix = any(name.startswith(f"{kind.prefix}.") for name in tensors)
        return kind(weights.scope(kind.prefix) if has_prefix else weights, self.config)

    @property
    def is_encoder(self) -> bool:
        return isinstance(self.model, Encoder)

    def hidden(self, texts: Sequence[Ids], on_product: OnProduct) -> Tensor:
        """Hidden states of all tokens of some texts, in one pass."""
        self.ops.on_product = on_product
        with torch.inference_mode():
            if isinstance(self.model, Encoder):
                return self.model.forward(TokenBatch(np.concatenate(texts), Segments(tuple(map(len, texts)))))
            texts = sorted(texts, key=len)  # those of one token must stand first
            shape, size = self.model.memory_shape(self.config), max(map(len, texts))
            pool: Any
            if isinstance(shape, KVShape):  # each layer reads what it has just written: all share the memory of one
                pool = KVCachePool(self.ops, replace(shape, num_layers=1), len(texts), size)
                layers = list(pool.layers) * shape.num_layers
            else:
                pool = StatePool(self.ops, shape, len(texts), size)
                layers = list(pool.layers)
            batch = build_batch(
                self.ops,
                tokens=texts,
                starts=[0] * len(texts),
                blocks=[[i] for i in range(len(texts))],
                block_size=size,
                pack=pool.pack_batch,
            )
            return self.model.forward(batch, layers)

    def logits(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.model, ModelAdapter)
        with torch.inference_mode():
            return self.model.logits(hidden)

    def vectors(self, hidden: Tensor, texts: Sequence[Ids]) -> Tensor:
        """What an encoder makes of each text, of length 1."""
        with torch.inference_mode():
            return self.ops.normalize(self.ops.pool(hidden, Segments(tuple(map(len, texts))), self.pooling))
