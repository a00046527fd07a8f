"""Weights and a configuration made into a function from token ids to vectors or scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.ops import Pooling, Segments
from archerfish.kernels.select import choose_device, choose_dtype, choose_ops
from archerfish.layers.weights import Weights
from archerfish.models.config import Config
from archerfish.models.encoder import TokenBatch, encoder_class

if TYPE_CHECKING:
    import torch

Vectors = npt.NDArray[np.float32]


class InferenceCore:
    """One encoder on one device. `run` takes packed batches; `forward` takes the rectangles that other libraries use."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        device: str = "cpu",
        *,
        dtype: str = "auto",
        pooling: str = "mean",
    ) -> None:
        if pooling not in get_args(Pooling):
            raise UnsupportedModelError(f"Unknown pooling {pooling!r}.", hint=f"Known: {', '.join(get_args(Pooling))}.")
        self.config = Config(config)
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        self.ops = choose_ops(self.device, self.dtype)
        self.pooling: Pooling = pooling  # type: ignore[assignment]  # checked above
        architecture = encoder_class(self.config)
        everything = Weights(weights, self.ops)
        has_prefix = any(name.startswith(f"{architecture.prefix}.") for name in weights)
        self.encoder = architecture(everything.scope(architecture.prefix) if has_prefix else everything, self.config)
        self.head = architecture.head(everything, self.config) if self.config.is_classifier else None
        self.max_positions = architecture.max_positions(self.config)
        self.dimension = self.encoder.shape.width

    def run(self, batch: TokenBatch, *, normalize: bool = False) -> Vectors:
        """One vector per sequence; for a cross-encoder one row of raw scores per sequence."""
        import torch

        with torch.inference_mode():
            hidden = self.encoder.forward(batch)
            if self.head is not None:
                return self.ops.to_numpy(self.head(self.ops.pool(hidden, batch.segments, "cls")))
            pooled = self.ops.pool(hidden, batch.segments, self.pooling)
            return self.ops.to_numpy(self.ops.normalize(pooled) if normalize else pooled)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids and mask to (batch, width) vectors; masked tokens are dropped, not computed."""
        import torch

        mask = attention_mask.cpu().bool()
        lengths = mask.sum(1).tolist()
        packed = input_ids.cpu()[mask].to(torch.int64).numpy()
        return torch.from_numpy(self.run(TokenBatch(packed, Segments(tuple(lengths)))))

    def mean_pooling(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Mean over the unmasked tokens of (batch, length, width)."""
        mask = attention_mask.unsqueeze(-1).to(token_embeddings.dtype)
        return (token_embeddings * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
