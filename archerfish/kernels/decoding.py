"""What the host sends for a recorded pass: one array of 64-bit words. Everything else stays on the device between
steps.

For a step of decodes only, the array is (NUM_INPUTS, rows), with a column for each sequence. So every step of a batch
size is the same work over the same memory, which a backend can record once. Columns without a sequence have
FILLING_POSITION, and the row after the last sequence's.

A pass over prompts, with decodes beside them, has the same columns, decodes first, and behind them the new tokens of
all
sequences: `PassSize` says how many there is room for. What is left over is computed and thrown away.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple

from archerfish.kernels.batches import T
from archerfish.kernels.sampling import TokenCounts

FILLING_POSITION = -1
NO_BLOCK = -1  # instead of the block of a state: the empty state
ON_DEVICE = -1  # instead of a token: the one that was sampled last for the sequence


class Input(IntEnum):
    """Rows of the array; those from FIRST_FLOAT on hold float64."""

    TOKEN = 0
    ROW = 1  # of the sequence in DecodeState
    POSITION = 2  # of the token
    BLOCK = 3  # where its key and value go, or the state after it
    COUNT = BLOCK  # of a pass over prompts: the number of new tokens, the last of which has the position
    NUM_SHARED = 4  # for models with keys, in the first column: tokens whose keys all sequences have in the same blocks
    SOURCE = NUM_SHARED  # for models with states: the block of the state before the token, or NO_BLOCK
    ADAPTER = 5  # the slot of its adapter, or 0
    KEY = 6  # this and all that follow are as in SamplingBatch
    IS_GREEDY = 7
    TOP_K = 8
    FIRST = 9  # of the range of tokens; so are the next two
    END = 10
    OFFSET = 11
    TEMPERATURE = 12
    TOP_P = 13
    MIN_P = 14
    REPETITION = 15  # penalties, of sequences that count their tokens in DecodeState
    PRESENCE = 16
    FREQUENCY = 17


NUM_INPUTS, FIRST_FLOAT = len(Input), Input.TEMPERATURE


class PassSize(NamedTuple):
    """What a pass over prompts has room for. A decode without a sequence has one new token, a prompt without one has
    none."""

    num_decodes: int
    num_prompts: int
    num_tokens: int  # of all prompts

    @property
    def num_columns(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_tokens

    @property
    def num_words(self) -> int:
        return NUM_INPUTS * self.num_columns + self.num_rows


class DecodeState(NamedTuple, Generic[T]):
    """What the device remembers of sequences, one row each."""

    last_tokens: T  # (rows + 1,) int64: the token that was sampled last
    tables: T  # (rows + 1, most blocks) int32: their blocks
    counts: TokenCounts[T] | None = None  # of their tokens, once there is a sequence with penalties
