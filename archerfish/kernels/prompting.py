"""What a pass over one prompt, or the last part of one, reads of the host: one array of 64-bit words.

All else of such a pass is the same for every prompt of a size, so that a backend can record it once. Rows that fill a prompt up
to that size are computed and thrown away.
"""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """Where in the array what begins. The sequence's blocks follow the tokens of all rows."""

    NUM_NEW = 0  # tokens; the rows behind them are filling
    START = 1  # position of the first
    TOKENS = 2
