"""The parameters of the op `sample`: for each row, as tensors of the device, None where no row uses them.

They apply in this order: logit bias; bans, masks and ranges; repetition penalty; presence and frequency penalties;
temperature; min_p; top_k; top_p over what these leave; the draw; the offset of the range. Tokens rank by their
penalised logit, the lower id first among equals, so that every filter keeps a definite set. min_p keeps a token that is
at least min_p times as likely as the likeliest, top_p the fewest of the likeliest tokens whose share reaches top_p.

A draw is one uniform number, looked up in the cumulative probabilities of the tokens that are left, in the order of
their ids. The number is a hash (splitmix64) of the row's key and position: it depends on nothing else in the batch.

BufferPool lends the large arrays that backends sample with.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from archerfish.kernels.batches import Ids, T
from archerfish.kernels.ops import Ops

A = TypeVar("A", bound=Any)  # an array of one dimension
WORD = (1 << 64) - 1
# splitmix64's constants as signed words, which tensors can be multiplied with
GAMMA, MIX_A, MIX_B = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
TOP_K_OFF = 1 << 40
CHOSEN = 0
NOT_FINITE = 1
NONE_LEFT = 2  # how a row went: a token; NaN or infinite logits; every token is ruled out


class Entries(NamedTuple, Generic[T]):
    """Single places of the (rows, vocabulary) logits; no place stands twice."""

    rows: T  # (entries,) int64
    token_ids: T  # (entries,) int64


class Masks(NamedTuple, Generic[T]):
    """The only tokens that some rows may choose."""

    rows: T  # (n,) int64: which rows of the batch, none twice
    bits: T  # (n, words) int64: a bit for every token of the vocabulary, 64 to a word, the lowest first; 0: ruled out


class Ranges(NamedTuple, Generic[T]):
    """The part of the vocabulary that each row chooses from. Logits outside of it are not read."""

    first: T  # (rows,) int64
    end: T  # (rows,) int64: beyond the last
    offset: T  # (rows,) int64: added to the chosen id


@dataclass
class TokenCounts(Generic[T]):
    """How often tokens stand in prompt and output of sequences, one row each. Backends write into it."""

    counts: T  # (rows, vocabulary) int32: twice the number in the output, and 1 more for a token of the prompt


class Penalties(NamedTuple, Generic[T]):
    """Penalties of some rows; None where no row has one."""

    rows: T  # (n,) int64: which rows of the batch
    counts: TokenCounts[T]
    slots: Ids  # (n,): their rows of counts
    slots_on_device: T
    repetition: T | None  # (n,) float64, 1: off
    presence: T | None
    frequency: T | None


class Cuts(NamedTuple, Generic[T]):
    """Rows with a top_k or top_p."""

    rows: T  # (n,) int64: which rows of the batch
    top_k: T  # (n,) int64; TOP_K_OFF: off
    top_p: T  # (n,) float64; infinite: off


@dataclass(frozen=True)
class SamplingBatch(Generic[T]):
    """How to choose one token for each row of logits. Without any of these: the likeliest, the lowest id among
    equals."""

    temperature: T | None = None  # (rows,) float64, 1 where a row is greedy; None: all rows are greedy
    is_greedy: T | None = None  # (rows,) int64, not 0 where a row is greedy; None: none is, if there is a temperature
    keys: T | None = None  # (rows,) int64: of `stream_key`; needed with a temperature, as are the positions
    positions: T | None = None  # (rows,) int64: tokens before the one to choose
    min_p: T | None = None  # (rows,) float64, 0: off
    cuts: Cuts[T] | None = None
    bias: Entries[T] | None = None
    bias_values: T | None = None  # (entries,) float64
    banned: Entries[T] | None = None
    masks: Masks[T] | None = None
    penalties: Penalties[T] | None = None
    ranges: Ranges[T] | None = None
    may_overwrite: bool = False  # penalties may be written into the logits; the only change that there is, then

    @property
    def changes_logits(self) -> bool:
        return any(part is not None for part in (self.bias, self.banned, self.masks, self.penalties))


class Drawn(NamedTuple, Generic[T]):
    """Chosen tokens, with the offset of their range; 0 in rows that failed."""

    tokens: T  # (rows,) int64
    report: T  # (2, rows) int64: the tokens again, and CHOSEN, NOT_FINITE or NONE_LEFT


def draw(ops: Ops[T], logits: T, batch: SamplingBatch[T]) -> Drawn[T]:
    """`Ops.sample` in the last stage, and the tokens of rank 0 on all ranks."""
    if ops.ranks.is_last:
        drawn = ops.sample(logits, batch)
    else:
        report = ops.ranks.empty_report(logits.shape[0])
        drawn = Drawn(report[0], report)
    return drawn._replace(tokens=ops.ranks.share(drawn.tokens))


class Logprobs(NamedTuple, Generic[T]):
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


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of a BufferPool. In a steady state cache_misses does not grow: nothing is allocated."""

    total_gets: int = 0
    total_returns: int = 0
    cache_hits: int = 0
    cache_misses: int = 0  # arrays that had to be allocated
    num_elements: int = 0  # of the idle arrays
    peak_usage: int = 0  # the most elements that were lent at the same time


class BufferPool(Generic[A]):
    """Lends arrays of `allocate(size)`, of the host or of a device; safe to use from any thread.

    Sizes are powers of two. `borrow` gives the smallest idle array that is large enough; when there is none, idle
    arrays that are too small are released before a new one is allocated, so that a pool does not keep every size that
    it ever lent.
    """

    def __init__(self, allocate: Callable[[int], A]) -> None:
        self._allocate = allocate
        self._idle: list[A] = []  # by size
        self._lock = threading.Lock()
        self._num_gets = self._num_returns = self._num_misses = self._num_lent = self._peak = 0

    def borrow(self, min_size: int) -> A:
        """An array of at least min_size elements with any contents. It belongs to the caller until `give_back`."""
        size = 1 << max(0, min_size - 1).bit_length()
        with self._lock:
            place = bisect_left(self._idle, size, key=len)
            array = self._idle.pop(place) if place < len(self._idle) else None
            if array is None:
                self._idle.clear()
                self._num_misses += 1
            self._num_gets += 1
            self._num_lent += size if array is None else len(array)
            self._peak = max(self._peak, self._num_lent)
        return self._allocate(size) if array is None else array

    def give_back(self, *arrays: A) -> None:
        with self._lock:
            for array in arrays:
                insort(self._idle, array, key=len)
                self._num_lent -= len(array)
            self._num_returns += len(arrays)

    def clear(self) -> None:
        """Release all idle arrays."""
        with self._lock:
            self._idle.clear()

    def pool_stats(self) -> PoolStats:
        with self._lock:
            num_hits, num_idle = self._num_gets - self._num_misses, sum(map(len, self._idle))
            return PoolStats(self._num_gets, self._num_returns, num_hits, self._num_misses, num_idle, self._peak)
