"""What recorded passes read of the host, in one array of 64-bit words; all else lies on the device from step to step.

A step that is only decodes has a (NUM_INPUTS, rows) array with a column for each sequence. So the same work over the same
memory serves every such step of a batch size, and a backend can record it once. Rows of a batch that are only filling have
FILLING_POSITION, and the row after the last sequence's.

A pass over one prompt, or the last part of one, has an array that begins as `Word` says. Rows that fill a prompt up to a
recorded size are computed and thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic

from archerfish.kernels.ops import T

FILLING_POSITION = -1
NO_BLOCK = -1  # in place of one that is in front of a sequence: the empty state
ON_DEVICE = -1  # in place of a token: the one that the sequence was given last


class Input(IntEnum):
    """Rows of the array; the last three hold float64."""

    TOKEN = 0
    ROW = 1  # of the sequence in DecodeState
    POSITION = 2  # of the token
    BLOCK = 3  # in which its key and value go, or the state behind it
    KEY = 4  # as in SamplingBatch, from here on
    IS_GREEDY = 5
    TOP_K = 6
    FIRST = 7  # of the range, as the next two
    END = 8
    OFFSET = 9
    NUM_SHARED = 10  # of models with keys, in the first column: tokens whose keys lie in the same blocks for all sequences
    SOURCE = NUM_SHARED  # of models with states: the block of the state in front of the token, or NO_BLOCK
    TEMPERATURE = 11
    TOP_P = 12
    MIN_P = 13


NUM_INPUTS, FIRST_FLOAT = len(Input), Input.TEMPERATURE


class Word(IntEnum):
    """Where the parts of a prompt's array begin. The sequence's blocks follow the tokens of all rows."""

    NUM_NEW = 0  # tokens; the rows behind them are filling
    START = 1  # position of the first
    TOKENS = 2


@dataclass(frozen=True)
class DecodeState(Generic[T]):
    """What the device remembers of sequences, one row each."""

    last_tokens: T  # (rows + 1,) int64: the token that was sampled last
    tables: T  # (rows + 1, most blocks) int32: their blocks
