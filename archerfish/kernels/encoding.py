"""What the host sends for a recorded pass of an encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from archerfish.kernels.batches import Ids, Segments, T


class EncoderInputs(ABC, Generic[T]):
    """Memory of the device for the inputs of passes that are recorded: room for some tokens, filled anew for each
    pass."""

    token_ids: T
    type_ids: T
    segments: Segments  # its positions lie on the device too

    @abstractmethod
    def fill(self, token_ids: Ids, segments: Segments, type_ids: Ids | None) -> bool:
        """Send a batch's inputs, whose sequences become the first ones here; False, and nothing sent, where they do not
        fit."""
