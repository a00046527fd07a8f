"""What a step that is only decodes reads of the host: one (NUM_INPUTS, rows) array of 64-bit words, a column per sequence.

All else lies on the device from step to step. So the same work over the same memory serves every such step of a batch size,
and a backend can record it once. Rows of a batch that are only filling have FILLING_POSITION, and the row after the last
sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic

from archerfish.kernels.handle import T

FILLING_POSITION = -1
ON_DEVICE = -1  # in place of a token: the one that the sequence was given last


class Input(IntEnum):
    """Rows of the array; the last three hold float64."""

    TOKEN = 0
    ROW = 1  # of the sequence in DecodeState
    POSITION = 2  # of the token
    BLOCK = 3  # in which its key and value go
    KEY = 4  # as in SamplingBatch, from here on
    IS_GREEDY = 5
    TOP_K = 6
    NUM_SHARED = 7  # in the first column: tokens whose keys lie in the same blocks for all sequences
    TEMPERATURE = 8
    TOP_P = 9
    MIN_P = 10


NUM_INPUTS, FIRST_FLOAT = len(Input), Input.TEMPERATURE


@dataclass(frozen=True)
class DecodeState(Generic[T]):
    """What the device remembers of sequences, one row each."""

    last_tokens: T  # (rows + 1,) int64: the token that was sampled last
    tables: T  # (rows + 1, most blocks) int32: their blocks
