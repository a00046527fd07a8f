"""The ops of sampling by our own kernels (csrc/sample.cpp), over arrays of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.kernels.native._native import Sampler
from archerfish.kernels.native.recorder import TapeRunner
from archerfish.kernels.ops import Ids
from archerfish.kernels.sampling import Cuts, Drawn, Entries, Logprobs, Penalties, PoolStats, SamplingBatch, TokenCounts

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
FIRST_CAPACITY = 256  # of TokenCounts.token_ids


class NativeSampling:
    """Memory of the kernels is kept from call to call."""

    def __init__(self, runner: TapeRunner) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.level)

    def sample(self, logits: Array, batch: SamplingBatch[Array]) -> Drawn[Array]:
        """As `Ops.sample`."""
        report = np.empty((2, len(logits)), dtype=np.int64)
        self._sampler.sample(self._runner.threads, self._runner.num_threads, plain_rows(logits), parts_of(batch), report)
        if batch.penalties is not None:
            count_tokens(batch.penalties, report[0])
        return Drawn(report[0], report)

    def token_logprobs(self, logits: Array, token_ids: Ids, num_top: int, rows: Ids | None) -> Logprobs[Array]:
        """As `Ops.token_logprobs`."""
        num_rows, num_top = len(token_ids), min(num_top, logits.shape[1])
        found: Logprobs[Array] = Logprobs(
            np.empty(num_rows), np.empty(num_rows, dtype=np.int64),
            np.empty((num_rows, num_top), dtype=np.int64), np.empty((num_rows, num_top)),
        )  # fmt: skip
        self._sampler.score(
            self._runner.threads, self._runner.num_threads, plain_rows(logits), np.asarray(token_ids, np.int64),
            plain(rows, np.int64), found.logprobs, found.ranks, found.top_ids, found.top_logprobs,
        )
        return found

    def new_counts(self, num_rows: int, vocab_size: int) -> TokenCounts[Array]:
        lengths = np.zeros(num_rows, dtype=np.int64)
        counts = np.zeros((num_rows, vocab_size), dtype=np.int32)
        return TokenCounts(counts, np.zeros((num_rows, FIRST_CAPACITY), dtype=np.int64), lengths, lengths)

    def set_counts(self, counts: TokenCounts[Array], row: int, prompt: Ids, output: Ids) -> None:
        found = 2 * np.bincount(output, minlength=counts.counts.shape[1]).astype(np.int32)
        found[prompt] += 1
        ids = np.flatnonzero(found)
        make_room(counts, len(ids) + 1)
        counts.counts[row] = found
        counts.token_ids[row, : len(ids)] = ids
        counts.num_ids[row] = counts.lengths[row] = len(ids)

    def pool_stats(self) -> PoolStats:
        sampler = self._sampler
        num_misses, num_idle = sampler.num_allocations, sampler.num_bytes // 4
        return PoolStats(sampler.num_calls, sampler.num_calls, sampler.num_calls - num_misses, num_misses, num_idle, num_idle)


def plain(array: Array | None, dtype: Any) -> Array | None:
    return None if array is None else np.ascontiguousarray(array, dtype=dtype)


def plain_rows(logits: Array) -> Floats:
    """Logits in float32 whose rows are contiguous: a copy only where they are not."""
    if logits.dtype == np.float32 and logits.strides[1] == 4:
        return logits
    return np.ascontiguousarray(logits, dtype=np.float32)


def parts_of(batch: SamplingBatch[Array]) -> list[Array | None]:
    """The arrays of a batch in the order of `Part` in csrc/bind_sample.cpp."""
    ids, numbers = np.int64, np.float64
    masks, ranges, penalties = batch.masks, batch.ranges, batch.penalties
    parts = [
        plain(batch.temperature, numbers), plain(batch.is_greedy, ids), plain(batch.keys, ids), plain(batch.positions, ids),
        plain(batch.min_p, numbers), *cut_parts(batch.cuts), *cut_parts(None), *entry_parts(batch.bias),
        plain(batch.bias_values, numbers), *entry_parts(batch.banned),
    ]  # fmt: skip
    parts += [None, None] if masks is None else [plain(masks.rows, ids), plain(masks.bits, ids)]
    parts += [None] * 3 if ranges is None else [plain(each, ids) for each in (ranges.first, ranges.end, ranges.offset)]
    return parts + ([None] * 8 if penalties is None else penalty_parts(penalties))


def cut_parts(cuts: Cuts[Array] | None) -> tuple[Array | None, ...]:
    if cuts is None:
        return None, None, None
    return plain(cuts.rows, np.int64), plain(cuts.top_k, np.int64), plain(cuts.top_p, np.float64)


def entry_parts(entries: Entries[Array] | None) -> tuple[Array | None, ...]:
    return (None, None) if entries is None else (plain(entries.rows, np.int64), plain(entries.token_ids, np.int64))


def penalty_parts(penalties: Penalties[Array]) -> list[Array | None]:
    known = penalties.counts
    factors = penalties.repetition, penalties.presence, penalties.frequency
    return [
        plain(penalties.rows, np.int64), plain(penalties.slots, np.int64), plain(known.counts, np.int32),
        plain(known.token_ids, np.int64), plain(known.num_ids, np.int64), *(plain(each, np.float64) for each in factors),
    ]  # fmt: skip


def make_room(known: TokenCounts[Array], length: int) -> None:
    num_rows, capacity = known.token_ids.shape
    if length > capacity:
        wider = np.zeros((num_rows, 1 << (length - 1).bit_length()), dtype=np.int64)
        wider[:, :capacity] = known.token_ids
        known.token_ids = wider


def count_tokens(penalties: Penalties[Array], tokens: Ids) -> None:
    """Count one more token of the output in every penalised row."""
    known, slots = penalties.counts, penalties.slots
    places = known.num_ids[slots]
    make_room(known, int(places.max(initial=0)) + 1)
    new = tokens[penalties.rows]
    known.token_ids[slots, places] = new
    known.counts[slots, new] += 2
    known.num_ids[slots] = places + 1
