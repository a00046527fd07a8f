"""Handles of tensors, and what a batch says about them: lengths of sequences, and blocks that are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError

Ids = npt.NDArray[np.int64]
MASK_STEP = 16  # tokens that a mask's blocks are a multiple of


class Handle(Protocol):
    """All that a model may ask of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Handle)


@dataclass(frozen=True)
class Segments:
    """Lengths of the sequences of a packed batch, in order; every length is at least 1."""

    lengths: tuple[int, ...]

    @cached_property
    def starts(self) -> Ids:
        """Where each sequence begins; one more entry than sequences, the last being the number of tokens."""
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)

    @cached_property
    def positions(self) -> Ids:
        """Position of every token within its sequence, from 0."""
        return np.arange(self.num_tokens, dtype=np.int64) - np.repeat(self.starts[:-1], self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])


@dataclass(frozen=True)
class BlockMask(Generic[T]):
    """Which blocks of keys the queries of a block see, by positions in a sequence. Causality and a window hold as well.

    Every query always sees its own block. Blocks past the last row or column are like that row or column.
    """

    size: int  # tokens of a block of queries or keys, a multiple of MASK_STEP
    visible: T  # (blocks of queries, blocks of keys) booleans or integers on the device, read anew by each call

    def __post_init__(self) -> None:
        if self.size <= 0 or self.size % MASK_STEP:
            raise InvalidInputError(f"A mask has blocks of {self.size} tokens, which is not a multiple of {MASK_STEP}.")
