"""What the host sends for a recorded pass: one array of 64-bit words. Everything else stays on the device between steps.

For a step of decodes only, the array is (NUM_INPUTS, rows), with a column for each sequence. So every step of a batch size is
the same work over the same memory, which a backend can record once. Columns without a sequence have FILLING_POSITION, and the
row after the last sequence's.

For a pass over one prompt, or over its last part, the array is laid out as `Word` says. Rows after the prompt's last token are
computed and thrown away.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple

from archerfish.kernels.ops import T

FILLING_POSITION = -1
NO_BLOCK = -1  # instead of the block of a state: the empty state
ON_DEVICE = -1  # instead of a token: the one that was sampled last for the sequence


class Input(IntEnum):
    """Rows of the array; the last three hold float64."""

    TOKEN = 0
    ROW = 1  # of the sequence in DecodeState
    POSITION = 2  # of the token
    BLOCK = 3  # where its key and value go, or the state after it
    NUM_SHARED = 4  # for models with keys, in the first column: tokens whose keys all sequences have in the same blocks
    SOURCE = NUM_SHARED  # for models with states: the block of the state before the token, or NO_BLOCK
    KEY = 5  # this and all that follow are as in SamplingBatch
    IS_GREEDY = 6
    TOP_K = 7
    FIRST = 8  # of the range of tokens; so are the next two
    END = 9
    OFFSET = 10
    TEMPERATURE = 11
    TOP_P = 12
    MIN_P = 13


NUM_INPUTS, FIRST_FLOAT = len(Input), Input.TEMPERATURE


class Word(IntEnum):
    """Where the parts of a prompt's array begin. The sequence's blocks follow the tokens of all rows."""

    NUM_NEW = 0  # number of new tokens; rows after them are filling
    START = 1  # position of the first
    TOKENS = 2


class DecodeState(NamedTuple, Generic[T]):
    """What the device remembers of sequences, one row each."""

    last_tokens: T  # (rows + 1,) int64: the token that was sampled last
    tables: T  # (rows + 1, most blocks) int32: their blocks
