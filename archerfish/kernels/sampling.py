"""The parameters of the op `sample`: for each row, as tensors of the device, None where no row uses them.

They apply in this order: logit bias; bans, masks and ranges; repetition penalty; presence and frequency penalties;
temperature; min_p; top_k; top_p over what these leave; the draw; the offset of the range. Tokens rank by their penalised logit,
the lower id first among equals, so that every filter keeps a definite set. min_p keeps a token that is at least min_p times as
likely as the likeliest, top_p the fewest of the likeliest tokens whose share reaches top_p.

A draw is one uniform number, looked up in the cumulative probabilities of the tokens that are left, in the order of their ids.
The number is a hash (splitmix64) of the row's key and position: it depends on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from archerfish.kernels.ops import Ids, T

WORD = (1 << 64) - 1
# splitmix64's constants as signed words, which tensors can be multiplied with
GAMMA, MIX_A, MIX_B = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
TOP_K_OFF, SHORT_TOP_K = 1 << 40, 256
CHOSEN, NOT_FINITE, NONE_LEFT = 0, 1, 2  # how a row went: a token; NaN or infinite logits; every token is ruled out


@dataclass(frozen=True)
class Entries(Generic[T]):
    """Single places of the (rows, vocabulary) logits; no place stands twice."""

    rows: T  # (entries,) int64
    token_ids: T  # (entries,) int64


@dataclass(frozen=True)
class Masks(Generic[T]):
    """The only tokens that some rows may choose."""

    rows: T  # (n,) int64: which rows of the batch, none twice
    bits: T  # (n, words) int64: a bit for every token of the vocabulary, 64 to a word, the lowest first; 0: ruled out


@dataclass(frozen=True)
class Ranges(Generic[T]):
    """The part of the vocabulary that each row chooses from. Logits outside of it are not read."""

    first: T  # (rows,) int64
    end: T  # (rows,) int64: beyond the last
    offset: T  # (rows,) int64: added to the chosen id
    bounds: tuple[int, int] | None = None  # between which all of them lie, where the host knows it


@dataclass
class TokenCounts(Generic[T]):
    """How often tokens stand in prompt and output of sequences, one row each. Backends write into it."""

    counts: T  # (rows, vocabulary) int32: twice the number in the output, and 1 more for a token of the prompt
    token_ids: T  # (rows, capacity) int64: every token that is counted, some more than once; what follows them does no harm
    lengths: T  # (rows,) int64: how many token_ids
    num_ids: Ids  # the same on the host


@dataclass(frozen=True)
class Penalties(Generic[T]):
    """Penalties of some rows; None where no row has one."""

    rows: T  # (n,) int64: which rows of the batch
    counts: TokenCounts[T]
    slots: Ids  # (n,): their rows of counts
    slots_on_device: T
    repetition: T | None  # (n,) float64, 1: off
    presence: T | None
    frequency: T | None


@dataclass(frozen=True)
class Cuts(Generic[T]):
    """Rows with a top_k or top_p."""

    rows: T  # (n,) int64: which rows of the batch
    top_k: T  # (n,) int64; TOP_K_OFF: off
    top_p: T  # (n,) float64; infinite: off
    max_top_k: int  # the largest of top_k


@dataclass(frozen=True)
class SamplingBatch(Generic[T]):
    """How to choose one token for each row of logits. Without any of these: the likeliest, the lowest id among equals."""

    temperature: T | None = None  # (rows,) float64, 1 where a row is greedy; None: all rows are greedy
    is_greedy: T | None = None  # (rows,) int64, not 0 where a row is greedy; None: none is, if there is a temperature
    keys: T | None = None  # (rows,) int64: of `stream_key`; needed with a temperature, as are the positions
    positions: T | None = None  # (rows,) int64: tokens before the one to choose
    min_p: T | None = None  # (rows,) float64, 0: off
    short_cuts: Cuts[T] | None = None  # rows with a top_k of at most SHORT_TOP_K
    long_cuts: Cuts[T] | None = None  # the other rows with a top_k or a top_p
    has_uncut: bool = False  # some row is neither cut nor greedy
    bias: Entries[T] | None = None
    bias_values: T | None = None  # (entries,) float64
    banned: Entries[T] | None = None
    masks: Masks[T] | None = None
    penalties: Penalties[T] | None = None
    ranges: Ranges[T] | None = None

    @property
    def changes_logits(self) -> bool:
        return any(part is not None for part in (self.bias, self.banned, self.masks, self.penalties))


@dataclass(frozen=True)
class Drawn(Generic[T]):
    """Chosen tokens, with the offset of their range; 0 in rows that failed."""

    tokens: T  # (rows,) int64
    report: T  # (2, rows) int64: the tokens again, and CHOSEN, NOT_FINITE or NONE_LEFT


@dataclass(frozen=True)
class Logprobs(Generic[T]):
    """Log-probabilities of given tokens and of the likeliest tokens."""

    logprobs: T  # (rows,) float64
    ranks: T  # (rows,) int64: 1 + the number of tokens that are likelier
    top_ids: T  # (rows, num_top) int64, likeliest first, the lower id first among equals
    top_logprobs: T  # (rows, num_top) float64


def stream_key(seed: int, index: int) -> int:
    """The key of a sequence's draws, as a signed 64-bit number: of its request's seed and its index within it."""
    key = mix((mix(seed + GAMMA) + index) & WORD)
    return key - (1 << 64) if key >> 63 else key


def mix(word: int) -> int:
    """splitmix64's finaliser."""
    word &= WORD
    word = ((word ^ (word >> 30)) * MIX_A) & WORD
    word = ((word ^ (word >> 27)) * MIX_B) & WORD
    return word ^ (word >> 31)


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) that a draw uses: what every backend must compute."""
    return (mix(key + (position + 1) * GAMMA) >> 11) * 2.0**-53
