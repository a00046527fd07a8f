"""The ops of sampling in torch, for any device with float64.

Nothing sorts the vocabulary unless it must. A first pass takes the largest logit of every block of 32 tokens. From those come
the likeliest token and, exactly, the few hundred likeliest: the first n tokens all lie in the first n blocks, when both stand
in the same order. A top_k of a few hundred needs no more; nor do most rows with a top_p, as these candidates hold the mass.
A GPU is not asked whether they do, as the answer would stop the host: it sorts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from archerfish.kernels.buffers import BufferPool
from archerfish.kernels.decoding import FIRST_FLOAT, Input
from archerfish.kernels.ops import Ids
from archerfish.kernels.sampling import (
    CHOSEN,
    GAMMA,
    MIX_A,
    MIX_B,
    NONE_LEFT,
    NOT_FINITE,
    SHORT_TOP_K,
    TOP_K_OFF,
    WORD,
    Cuts,
    Drawn,
    Entries,
    Logprobs,
    Masks,
    Penalties,
    Ranges,
    SamplingBatch,
    TokenCounts,
)

Tensor = torch.Tensor
BLOCK = 32  # tokens
CPU_GROUP, GPU_GROUP = 1 << 18, 1 << 24  # tokens
FIRST_CAPACITY = 256  # of TokenCounts.token_ids
LOW_HALF = (1 << 32) - 1


class TorchSampling:
    """Large arrays are borrowed for the time of a call. One thread at a time may use an object."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.buffers: BufferPool[Tensor] = BufferPool(lambda size: torch.empty(size, dtype=torch.float32, device=device))

    def sample(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Drawn[Tensor]:
        with self.buffers.lease() as self._borrow:
            return self._sample(logits, batch)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Ids | None) -> Logprobs[Tensor]:
        with self.buffers.lease() as self._borrow:
            return self._token_logprobs(logits, token_ids, num_top, rows)

    def _sample(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Drawn[Tensor]:
        start = 0
        if batch.ranges is not None and batch.ranges.bounds is not None and not batch.changes_logits:
            start, end = batch.ranges.bounds
            start -= start % BLOCK  # so that sums of blocks are the same, whatever other rows choose from
            logits = logits[:, start:end]
        x = self._adjusted(logits, batch, start)
        peaks = self._peaks(x)
        best, highest = likeliest(x, peaks)
        failed = torch.where(highest == -math.inf, NONE_LEFT, torch.where(highest.isfinite(), CHOSEN, NOT_FINITE))
        tokens = best
        if batch.temperature is not None:
            tokens = self._draw(x, peaks, highest.masked_fill(failed != CHOSEN, 0.0), failed, batch)
            if batch.is_greedy is not None:
                tokens = torch.where(batch.is_greedy != 0, best, tokens)
        if batch.ranges is not None:
            tokens = tokens + (batch.ranges.offset + start)
        report = torch.stack((tokens.masked_fill(failed != CHOSEN, 0), failed))
        if batch.penalties is not None:
            count_tokens(batch.penalties, report[0])
        return Drawn(report[0], report)

    def _token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Ids | None) -> Logprobs[Tensor]:
        if rows is not None:
            part = self._buffer(len(rows), logits.shape[1])
            logits = torch.index_select(logits, 0, torch.from_numpy(rows).to(logits.device), out=part)
        x = self._padded(logits, is_changed=False)
        peaks = self._peaks(x)
        highest = peaks.amax(-1)
        weights = torch.sub(x, highest[:, None], out=self._buffer(*x.shape)).exp_()
        base = (highest.double() + self._block_sums(weights).sum(-1, dtype=torch.float64).log())[:, None]
        own = x.gather(1, token_ids[:, None])
        ranks = self._block_sums(torch.gt(x, own, out=weights)).sum(-1).long() + 1
        top, top_ids = self._candidates(x, peaks, torch.arange(len(x), device=x.device), min(num_top, logits.shape[1]))
        return Logprobs((own.double() - base)[:, 0], ranks, top_ids, top.double() - base)

    def _buffer(self, num_rows: int, width: int) -> Tensor:
        return self._borrow(num_rows * width).view(num_rows, width)

    def _padded(self, logits: Tensor, *, is_changed: bool) -> Tensor:
        """Logits in whole blocks, those past the vocabulary -inf; a copy only where that or a change asks for one."""
        num_rows, vocab_size = logits.shape
        width = -(-vocab_size // BLOCK) * BLOCK
        if not is_changed and width == vocab_size and logits.is_contiguous():
            return logits
        x = self._buffer(num_rows, width)
        x[:, :vocab_size].copy_(logits)
        x[:, vocab_size:].fill_(-math.inf)
        return x

    def _adjusted(self, logits: Tensor, batch: SamplingBatch[Tensor], start: int = 0) -> Tensor:
        """Logits, the first of which is that of token `start`, after bias, bans, masks, ranges and penalties."""
        x = self._padded(logits, is_changed=batch.changes_logits or batch.ranges is not None)
        if batch.bias is not None and batch.bias_values is not None:
            x.view(-1).index_add_(0, places(batch.bias, x.shape[1]), batch.bias_values.float())
        if batch.banned is not None:
            x.view(-1).index_fill_(0, places(batch.banned, x.shape[1]), -math.inf)
        if batch.masks is not None:
            self._mask(x, batch.masks)
        if batch.ranges is not None:
            leave_range(x, batch.ranges, start)
        if batch.penalties is not None:
            penalise(x, batch.penalties)
        return x

    def _mask(self, x: Tensor, masks: Masks[Tensor]) -> None:
        """Logits of tokens whose bit is 0 become -inf."""
        words = masks.bits.view(torch.int32)[:, : x.shape[1] // BLOCK, None]
        places = torch.arange(BLOCK, dtype=torch.int32, device=x.device)
        for start, end in self._groups(len(words), x.shape[1]):
            is_ruled_out = ((words[start:end] >> places) & 1 == 0).view(end - start, -1)
            rows = masks.rows[start:end]
            x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(is_ruled_out, -math.inf))

    def _peaks(self, x: Tensor) -> Tensor:
        """The largest logit of every block."""
        blocks = x.view(x.shape[0], -1, BLOCK)
        return torch.amax(blocks, -1, out=self._buffer(*blocks.shape[:2]))

    def _block_sums(self, weights: Tensor) -> Tensor:
        blocks = weights.view(weights.shape[0], -1, BLOCK)
        return torch.sum(blocks, -1, out=self._buffer(*blocks.shape[:2]))

    def _draw(self, x: Tensor, peaks: Tensor, highest: Tensor, failed: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
        assert batch.temperature is not None and batch.keys is not None and batch.positions is not None
        numbers = uniforms(batch.keys, batch.positions)
        temperature = batch.temperature.float().clamp_min(1e-30)
        min_p = None if batch.min_p is None else batch.min_p.float()
        draws = _Draws(numbers, highest, temperature, min_p, failed)
        is_cpu = x.device.type == "cpu"
        tokens = None
        if batch.has_uncut or (batch.long_cuts is not None and is_cpu):
            weights = torch.sub(x, highest[:, None], out=self._buffer(*x.shape)).div_(temperature[:, None]).exp_()
            if min_p is not None:
                weights.mul_(torch.ge(weights, min_p[:, None], out=self._buffer(*x.shape)))
            sums = self._block_sums(weights).cumsum(-1, dtype=torch.float64)
            draws.totals = sums[:, -1]
            if batch.has_uncut:
                tokens = pick_in_blocks(weights, sums, numbers)
        if tokens is None:
            tokens = torch.zeros_like(failed)
        if batch.short_cuts is not None:
            count = min(max(64, 1 << (batch.short_cuts.max_top_k - 1).bit_length()), x.shape[1])
            self._draw_from_candidates(x, peaks, draws, batch.short_cuts, count, tokens)
        if batch.long_cuts is not None:
            cuts = batch.long_cuts
            left = torch.arange(len(cuts.rows), device=x.device)
            if is_cpu:
                left = self._draw_from_candidates(x, peaks, draws, cuts, min(SHORT_TOP_K, x.shape[1]), tokens)
            self._draw_by_sorting(x, draws, cuts, left, tokens)
        return tokens

    def _draw_from_candidates(
        self, x: Tensor, peaks: Tensor, draws: _Draws, cuts: Cuts[Tensor], count: int, tokens: Tensor
    ) -> Tensor:
        """Write the tokens of rows that so many of their likeliest tokens settle; give the indices into cuts of the other rows.

        Rows with a top_k of at most count are always settled.
        """
        is_settled = torch.empty(len(cuts.rows), dtype=torch.bool, device=x.device)
        for start, end in self._groups(len(cuts.rows), min(x.shape[1], count * BLOCK)):
            rows = cuts.rows[start:end]
            values, ids = self._candidates(x, peaks, rows, count)
            tokens[rows], is_settled[start:end] = draws.from_candidates(
                rows, values, ids, cuts.top_k[start:end], cuts.top_p[start:end]
            )
        return is_settled if cuts.max_top_k <= count else (~is_settled).nonzero()[:, 0]

    def _draw_by_sorting(self, x: Tensor, draws: _Draws, cuts: Cuts[Tensor], left: Tensor, tokens: Tensor) -> None:
        for start, end in self._groups(len(left), x.shape[1]):
            some = left[start:end]
            rows = cuts.rows[some]
            values = x[rows]
            weights = draws.by_sorting(rows, values, cuts.top_k[some], cuts.top_p[some])
            sums = weights.view(len(rows), -1, BLOCK).sum(-1).cumsum(-1, dtype=torch.float64)
            tokens[rows] = pick_in_blocks(weights, sums, draws.numbers[rows])

    def _groups(self, num_rows: int, width: int) -> list[tuple[int, int]]:
        """Rows to work on at a time, so that what is sorted stays in a cache, or in a corner of a GPU's memory."""
        step = max(1, (CPU_GROUP if self.device == "cpu" else GPU_GROUP) // width)
        return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def _candidates(self, x: Tensor, peaks: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of some rows, in order: logits and ids, (rows, count) each."""
        width = x.shape[1]
        if count * BLOCK * 2 <= width:
            chosen = first_keys(order_keys(peaks[rows], torch.arange(peaks.shape[1], device=x.device)), count) & LOW_HALF
            ids = chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)
            keys = order_keys(x.view(x.shape[0], -1, BLOCK)[rows[:, None], chosen], ids).view(len(rows), -1)
        else:
            keys = order_keys(x[rows], torch.arange(width, device=x.device))
        return split_keys(first_keys(keys, count))


@dataclass
class _Draws:
    """What the draws of all rows of a batch need."""

    numbers: Tensor  # in [0, 1)
    highest: Tensor  # logit
    temperature: Tensor
    min_p: Tensor | None
    failed: Tensor
    totals: Tensor | None = None  # weight of all tokens that min_p leaves, where it has been summed up

    def from_candidates(
        self, rows: Tensor, values: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens drawn from the likeliest ones, and whether those settle which tokens are left."""
        count = values.shape[1]
        places = torch.arange(count, device=ids.device)
        weights = self._weights(rows, values)
        mass = weights.double().mul_(places < top_k[:, None])
        has_all = (top_k <= count) | (weights[:, -1] == 0)
        if self.min_p is not None:
            mass.mul_(weights >= self.min_p[rows, None])
            has_all |= weights[:, -1] < self.min_p[rows]
        sums = mass.cumsum(-1)
        total, is_settled = sums[:, -1], has_all | (self.failed[rows] != CHOSEN)
        if self.totals is not None:
            has_top_k = top_k < TOP_K_OFF
            total = torch.where(has_top_k, total, self.totals[rows])
            is_settled |= ~has_top_k & (sums[:, -1] >= top_p * total)
        mass *= sums - mass < (top_p * total)[:, None]
        keys = first_keys((ids << 32) + places, count)
        place = pick(mass.gather(1, keys & LOW_HALF).cumsum(-1), self.numbers[rows])
        return keys.gather(1, place)[:, 0] >> 32, is_settled

    def by_sorting(self, rows: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Weights of whole rows of logits, 0 for tokens that the cuts leave out."""
        negated = sort_rising(values.neg())
        weights = (negated + self.highest[rows, None]).div_(-self.temperature[rows, None]).exp_()
        num_kept = top_k.clamp_max(values.shape[1])[:, None]
        if self.min_p is not None:
            num_kept = torch.minimum(num_kept, (weights >= self.min_p[rows, None]).sum(-1, keepdim=True))
        sums = weights.cumsum(-1, dtype=torch.float64)
        total = sums.gather(1, (num_kept - 1).clamp_min_(0))
        num_kept = torch.minimum(num_kept, torch.searchsorted(sums, top_p[:, None] * total) + 1)
        last = negated.gather(1, (num_kept - 1).clamp_min_(0))
        weights = self._weights(rows, values)
        weights.mul_(torch.ge(values, -last, out=torch.empty_like(values)))
        num_too_many = torch.searchsorted(negated, last, right=True) - num_kept  # as likely as the last one kept, but after it
        if values.device.type != "cpu" or num_too_many.any():
            is_equal = values == -last
            weights.mul_(~is_equal | (is_equal.cumsum(-1) <= is_equal.sum(-1, keepdim=True) - num_too_many))
        return weights

    def _weights(self, rows: Tensor, values: Tensor) -> Tensor:
        return (values - self.highest[rows, None]).div_(self.temperature[rows, None]).exp_()


def likeliest(x: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row the id and the logit of its likeliest token, the lowest id among equals. A NaN comes first."""
    block = peaks.argmax(-1, keepdim=True)
    inside = block_of(x, block).argmax(-1, keepdim=True)
    return (block * BLOCK + inside)[:, 0], peaks.gather(1, block)[:, 0]


def block_of(x: Tensor, block: Tensor) -> Tensor:
    """One block of every row, (rows, BLOCK), for block numbers (rows, 1)."""
    return x.gather(1, block * BLOCK + torch.arange(BLOCK, device=x.device))


def pick(sums: Tensor, numbers: Tensor) -> Tensor:
    """Where each number in [0, 1) falls in its row of cumulative weights, (rows, 1): never on a weight of 0."""
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, numbers[:, None] * total, right=True)
    return torch.minimum(found, torch.searchsorted(sums, total)).clamp_max_(sums.shape[1] - 1)  # the clamp is for NaN


def pick_in_blocks(weights: Tensor, sums: Tensor, numbers: Tensor) -> Tensor:
    """Tokens at numbers in [0, 1): first the block by the cumulative weights of blocks, then the token inside."""
    block = pick(sums, numbers)
    before = sums.gather(1, (block - 1).clamp_min_(0)).masked_fill_(block == 0, 0.0)
    inner = block_of(weights, block).cumsum(-1, dtype=torch.float64)
    rest = (numbers[:, None] * sums[:, -1:] - before) / inner[:, -1:]
    return (block * BLOCK + pick(inner, rest[:, 0]))[:, 0]


def order_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """64-bit keys that stand in ascending order of falling logit, then rising id; the id is the lower half."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids of keys."""
    ordered = ~(keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), keys & LOW_HALF


def first_keys(keys: Tensor, count: int) -> Tensor:
    """The smallest keys of every row in ascending order; disturbs keys. On a CPU numpy sorts ten times as fast as torch."""
    if keys.device.type == "cpu":
        array = keys.numpy()
        if 0 < count < array.shape[1]:
            array.partition(count - 1, axis=-1)
        first = np.ascontiguousarray(array[:, :count])
        first.sort(axis=-1)
        return torch.from_numpy(first)
    if count == keys.shape[1]:
        return keys.sort(-1).values
    return keys.topk(count, dim=-1, largest=False, sorted=True).values


def sort_rising(values: Tensor) -> Tensor:
    """Every row in rising order; may work in place."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    values.numpy().sort(axis=-1)
    return values


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """`sampling.uniform` of every row, in integers that wrap around as 64-bit words do."""
    word = keys + (positions + 1) * signed(GAMMA)
    word = (word ^ shifted(word, 30)) * signed(MIX_A)
    word = (word ^ shifted(word, 27)) * signed(MIX_B)
    word = word ^ shifted(word, 31)
    return shifted(word, 11).double() * 2.0**-53


def shifted(word: Tensor, count: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (word >> count) & (WORD >> count)


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def places(entries: Entries[Tensor], width: int) -> Tensor:
    return entries.rows * width + entries.token_ids


def leave_range(x: Tensor, ranges: Ranges[Tensor], start: int) -> None:
    """Logits outside of the rows' ranges become -inf, the first of them being that of token `start`."""
    ids = torch.arange(start, start + x.shape[1], device=x.device)
    x.masked_fill_((ids < ranges.first[:, None]) | (ids >= ranges.end[:, None]), -math.inf)


def penalise(x: Tensor, penalties: Penalties[Tensor]) -> None:
    """Change the logits of counted tokens in place. A token that is listed twice gets the same logit twice."""
    known, slots = penalties.counts, penalties.slots_on_device
    ids = known.token_ids[slots, : max(1, int(known.num_ids[penalties.slots].max()))]
    at = penalties.rows[:, None] * x.shape[1] + ids
    logits = x.view(-1)[at]
    counts = known.counts.view(-1)[slots[:, None] * known.counts.shape[1] + ids]
    if penalties.repetition is not None:
        factor = penalties.repetition.float()[:, None]
        logits = torch.where(counts > 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
    num_output = counts >> 1
    if penalties.presence is not None:
        logits = logits - penalties.presence.float()[:, None] * (num_output > 0)
    if penalties.frequency is not None:
        logits = logits - penalties.frequency.float()[:, None] * num_output
    x.view(-1)[at] = logits


def new_counts(num_rows: int, vocab_size: int, device: str) -> TokenCounts[Tensor]:
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
    token_ids = torch.zeros(num_rows, FIRST_CAPACITY, dtype=torch.int64, device=device)
    return TokenCounts(counts, token_ids, token_ids.new_zeros(num_rows), np.zeros(num_rows, dtype=np.int64))


def set_counts(known: TokenCounts[Tensor], row: int, prompt: Ids, output: Ids) -> None:
    counts = 2 * np.bincount(output, minlength=known.counts.shape[1]).astype(np.int32)
    counts[prompt] += 1
    ids = np.flatnonzero(counts)
    known.num_ids[row] = len(ids)
    make_room(known, len(ids) + 1)
    known.counts[row].copy_(torch.from_numpy(counts))
    known.token_ids[row, : len(ids)].copy_(torch.from_numpy(ids))
    known.lengths[row] = len(ids)


def make_room(known: TokenCounts[Tensor], length: int) -> None:
    num_rows, capacity = known.token_ids.shape
    if length > capacity:
        wider = known.token_ids.new_zeros(num_rows, 1 << (length - 1).bit_length())
        wider[:, :capacity] = known.token_ids
        known.token_ids = wider


def count_tokens(penalties: Penalties[Tensor], tokens: Tensor) -> None:
    """Count one more token of the output in every penalised row."""
    known, slots = penalties.counts, penalties.slots_on_device
    make_room(known, int(known.num_ids[penalties.slots].max()) + 1)
    new = tokens[penalties.rows]
    known.token_ids[slots, known.lengths[slots]] = new
    at = slots * known.counts.shape[1] + new
    known.counts.view(-1).index_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))
    known.lengths.index_add_(0, slots, torch.ones_like(slots))
    known.num_ids[penalties.slots] += 1


def sampling_batch(inputs: Tensor, positions: Tensor, every: Tensor) -> SamplingBatch[Tensor]:
    """How inputs of decodes say to sample, as views of them. every: the numbers of all rows."""
    floats = inputs[FIRST_FLOAT:].view(torch.float64)
    cuts = Cuts(every, inputs[Input.TOP_K], floats[Input.TOP_P - FIRST_FLOAT], TOP_K_OFF)
    return SamplingBatch(
        temperature=floats[Input.TEMPERATURE - FIRST_FLOAT], is_greedy=inputs[Input.IS_GREEDY], keys=inputs[Input.KEY],
        positions=positions, min_p=floats[Input.MIN_P - FIRST_FLOAT], long_cuts=cuts, has_uncut=True,
        ranges=Ranges(inputs[Input.FIRST], inputs[Input.END], inputs[Input.OFFSET]),
    )
