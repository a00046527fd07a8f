"""The ops of sampling by our own kernels (csrc/sample.cpp), over arrays of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.kernels.batches import Ids
from archerfish.kernels.native._native import Sampler
from archerfish.kernels.native.recorder import TapeRunner
from archerfish.kernels.sampling import Drawn, Logprobs, Penalties, PoolStats, SamplingBatch, TokenCounts

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
FIRST_CAPACITY = 256  # of ListedCounts.token_ids


@dataclass
class ListedCounts(TokenCounts[Array]):
    """The tokens that are counted, too, so that a row's penalties need not look at the whole vocabulary."""

    token_ids: Ids  # (rows, capacity): every token that is counted, some more than once; what follows them does no harm
    num_ids: Ids  # (rows,)


class NativeSampling:
    """Memory of the kernels is kept from call to call."""

    def __init__(self, runner: TapeRunner) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.level)

    def sample(self, logits: Array, batch: SamplingBatch[Array]) -> Drawn[Array]:
        """As `Ops.sample`."""
        report = np.empty((2, len(logits)), dtype=np.int64)
        self._sampler.sample(
            self._runner.threads, self._runner.num_threads, plain_rows(logits), parts_of(batch), report
        )
        if batch.penalties is not None:
            count_tokens(batch.penalties, report[0])
        return Drawn(report[0], report)

    def token_logprobs(self, logits: Array, token_ids: Ids, num_top: int, rows: Ids | None) -> Logprobs[Array]:
        """As `Ops.token_logprobs`."""
        num_rows, num_top = len(token_ids), min(num_top, logits.shape[1])
        found: Logprobs[Array] = Logprobs(
            np.empty(num_rows),
            np.empty(num_rows, dtype=np.int64),
            np.empty((num_rows, num_top), dtype=np.int64),
            np.empty((num_rows, num_top)),
        )
        self._sampler.score(
            self._runner.threads,
            self._runner.num_threads,
            plain_rows(logits),
            np.asarray(token_ids, np.int64),
            None if rows is None else np.asarray(rows),
            found.logprobs,
            found.ranks,
            found.top_ids,
            found.top_logprobs,
        )
        return found

    def new_counts(self, num_rows: int, vocab_size: int) -> ListedCounts:
        counts, token_ids = np.zeros((num_rows, vocab_size), np.int32), np.zeros((num_rows, FIRST_CAPACITY), np.int64)
        return ListedCounts(counts, token_ids, np.zeros(num_rows, np.int64))

    def set_counts(self, counts: TokenCounts[Array], row: int, prompt: Ids, output: Ids) -> None:
        assert isinstance(counts, ListedCounts)
        found = 2 * np.bincount(output, minlength=counts.counts.shape[1]).astype(np.int32)
        found[prompt] += 1
        ids = np.flatnonzero(found)
        make_room(counts, len(ids) + 1)
        counts.counts[row] = found
        counts.token_ids[row, : len(ids)] = ids
        counts.num_ids[row] = len(ids)

    def add_counts(self, counts: TokenCounts[Array], row: int, output: Ids, source: int | None) -> None:
        assert isinstance(counts, ListedCounts)
        if source is not None:
            counts.counts[row], counts.num_ids[row] = counts.counts[source], counts.num_ids[source]
            counts.token_ids[row] = counts.token_ids[source]
        np.add.at(counts.counts[row], output, 2)
        num_ids = int(counts.num_ids[row])
        make_room(counts, num_ids + len(output) + 1)
        counts.token_ids[row, num_ids : num_ids + len(output)] = output
        counts.num_ids[row] += len(output)

    def pool_stats(self) -> PoolStats:
        sampler = self._sampler
        num_misses, num_idle = sampler.num_allocations, sampler.num_bytes // 4
        return PoolStats(
            sampler.num_calls, sampler.num_calls, sampler.num_calls - num_misses, num_misses, num_idle, num_idle
        )


def plain_rows(logits: Array) -> Floats:
    """Logits in float32 whose rows are contiguous: a copy only where they are not."""
    if logits.dtype == np.float32 and logits.strides[1] == 4:
        return logits
    return np.ascontiguousarray(logits, dtype=np.float32)


def parts_of(batch: SamplingBatch[Array]) -> list[Array | None]:
    """The arrays of a batch in the order of `Part` in csrc/bind_sample.cpp."""
    parts = [batch.temperature, batch.is_greedy, batch.keys, batch.positions, batch.min_p, *columns(batch.cuts, 3)]
    parts += [*columns(batch.bias, 2), batch.bias_values, *columns(batch.banned, 2)]
    parts += [*columns(batch.masks, 2), *columns(batch.ranges, 3)]
    if batch.penalties is None:
        parts += [None] * 8
    else:
        rows, known, slots, _, *factors = batch.penalties
        assert isinstance(known, ListedCounts)
        parts += [rows, slots, known.counts, known.token_ids, known.num_ids, *factors]
    return [None if part is None else np.ascontiguousarray(part) for part in parts]


def columns(group: Sequence[Array] | None, count: int) -> Sequence[Array | None]:
    return [None] * count if group is None else group


def make_room(known: ListedCounts, length: int) -> None:
    extra = (1 << (length - 1).bit_length()) - known.token_ids.shape[1]
    if extra > 0:
        known.token_ids = np.pad(known.token_ids, ((0, 0), (0, extra)))


def count_tokens(penalties: Penalties[Array], tokens: Ids) -> None:
    """Count one more token of the output in every penalised row."""
    known, slots = penalties.counts, penalties.slots
    assert isinstance(known, ListedCounts)
    places = known.num_ids[slots]
    make_room(known, int(places.max(initial=0)) + 1)
    new = tokens[penalties.rows]
    known.token_ids[slots, places] = new
    known.counts[slots, new] += 2
    known.num_ids[slots] = places + 1
