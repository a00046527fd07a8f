"""The ops of sampling in torch, for any device with float64.

Nothing sorts the vocabulary unless it must. A first pass takes the largest logit of every block of 32 tokens. From those come
the likeliest token and, exactly, the few hundred likeliest: the first n tokens all lie in the first n blocks, when both stand
in the same order. A top_k of a few hundred needs no more; nor do most rows with a top_p, as these candidates hold the mass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from archerfish.kernels import sampling
from archerfish.kernels.decoding import FIRST_FLOAT, Input
from archerfish.kernels.ops import Ids
from archerfish.kernels.sampling import BufferPool, Cuts, Drawn, Logprobs, Penalties, Ranges, SamplingBatch, TokenCounts

Tensor = torch.Tensor
BLOCK = 32  # tokens
CPU_GROUP, GPU_GROUP = 1 << 18, 1 << 24  # tokens
LOW_HALF = (1 << 32) - 1


class TorchSampling:
    """Large arrays are borrowed for the time of a call. One thread at a time may use an object."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.buffers: BufferPool[Tensor] = BufferPool(lambda size: torch.empty(size, dtype=torch.float32, device=device))
        self._borrowed: list[Tensor] = []

    def _buffer(self, num_rows: int, width: int) -> Tensor:
        """Memory with any contents, until it is given back."""
        self._borrowed.append(self.buffers.borrow(num_rows * width))
        return self._borrowed[-1][: num_rows * width].view(num_rows, width)

    def sample(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Drawn[Tensor]:
        """As `Ops.sample`."""
        try:
            report = self._report(logits, batch)
        finally:
            self.buffers.give_back(*self._borrowed)
            self._borrowed.clear()
        if batch.penalties is not None:
            count_tokens(batch.penalties, report[0])
        return Drawn(report[0], report)

    def _report(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
        """The report of `Drawn`."""
        start = 0
        if batch.ranges is not None and batch.ranges.bounds is not None and not batch.changes_logits:
            start, end = batch.ranges.bounds
            start -= start % BLOCK  # so that sums of blocks are the same, whatever other rows choose from
            logits = logits[:, start:end]
        x = self._adjusted(logits, batch, start)
        peaks = torch.amax(x.view(len(x), -1, BLOCK), -1, out=self._buffer(len(x), x.shape[1] // BLOCK))  # of every block
        block = peaks.argmax(-1, keepdim=True)  # of the likeliest token, the lowest id among equals; NaN comes first
        inside = x.gather(1, block * BLOCK + torch.arange(BLOCK, device=x.device)).argmax(-1, keepdim=True)
        tokens = best = (block * BLOCK + inside)[:, 0]
        highest = peaks.gather(1, block)[:, 0]
        failed = torch.where(highest.isfinite(), sampling.CHOSEN, sampling.NOT_FINITE)
        failed.masked_fill_(highest == -math.inf, sampling.NONE_LEFT)
        if batch.temperature is not None:
            tokens = self._draw(x, peaks, highest.masked_fill(failed != sampling.CHOSEN, 0.0), failed, batch)
            if batch.is_greedy is not None:
                tokens = torch.where(batch.is_greedy != 0, best, tokens)
        if batch.ranges is not None:
            tokens = tokens + (batch.ranges.offset + start)
        return torch.stack((tokens.masked_fill(failed != sampling.CHOSEN, 0), failed))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Ids | None) -> Logprobs[Tensor]:
        """As `Ops.token_logprobs`."""
        try:
            if rows is not None:
                part = self._buffer(len(rows), logits.shape[1])
                logits = torch.index_select(logits, 0, torch.from_numpy(rows).to(logits.device), out=part)
            x = self._adjusted(logits, SamplingBatch())
            peaks = torch.amax(x.view(len(x), -1, BLOCK), -1, out=self._buffer(len(x), x.shape[1] // BLOCK))  # of every block
            highest = peaks.amax(-1)
            weights = torch.sub(x, highest[:, None], out=self._buffer(*x.shape)).exp_()
            base = (highest.double() + self._block_sums(weights).sum(-1, dtype=torch.float64).log())[:, None]
            own = x.gather(1, token_ids[:, None])
            ranks = self._block_sums(torch.gt(x, own, out=weights)).sum(-1).long() + 1
            top, top_ids = self._candidates(x, peaks, torch.arange(len(x), device=x.device), min(num_top, logits.shape[1]))
        finally:
            self.buffers.give_back(*self._borrowed)
            self._borrowed.clear()
        return Logprobs((own.double() - base)[:, 0], ranks, top_ids, top.double() - base)

    def _adjusted(self, logits: Tensor, batch: SamplingBatch[Tensor], start: int = 0) -> Tensor:
        """Logits, the first of which is that of token `start`, after bias, bans, masks, ranges and penalties.

        They come in whole blocks, those past the vocabulary -inf: a copy only where that or a change asks for one.
        """
        num_rows, vocab_size = logits.shape
        width = -(-vocab_size // BLOCK) * BLOCK
        is_changed = batch.changes_logits or batch.ranges is not None
        if not is_changed and width == vocab_size and logits.is_contiguous():
            return logits
        x = self._buffer(num_rows, width)
        x[:, :vocab_size].copy_(logits)
        x[:, vocab_size:].fill_(-math.inf)
        if batch.bias is not None and batch.bias_values is not None:
            places = batch.bias.rows * width + batch.bias.token_ids
            x.view(-1).index_add_(0, places, batch.bias_values.float())
        if batch.banned is not None:
            x.view(-1).index_fill_(0, batch.banned.rows * width + batch.banned.token_ids, -math.inf)
        if batch.masks is not None:
            words = batch.masks.bits.view(torch.int32)[:, : width // BLOCK, None]
            bits = torch.arange(BLOCK, dtype=torch.int32, device=x.device)
            for begin, end in self._groups(len(words), width):
                is_ruled_out = ((words[begin:end] >> bits) & 1 == 0).view(end - begin, -1)
                rows = batch.masks.rows[begin:end]
                x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(is_ruled_out, -math.inf))
        if batch.ranges is not None:
            ids = torch.arange(start, start + width, device=x.device)
            x.masked_fill_((ids < batch.ranges.first[:, None]) | (ids >= batch.ranges.end[:, None]), -math.inf)
        if batch.penalties is not None:
            penalise(x, batch.penalties)
        return x

    def _block_sums(self, weights: Tensor) -> Tensor:
        blocks = weights.view(weights.shape[0], -1, BLOCK)
        return torch.sum(blocks, -1, out=self._buffer(*blocks.shape[:2]))

    def _draw(self, x: Tensor, peaks: Tensor, highest: Tensor, failed: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
        assert batch.temperature is not None and batch.keys is not None and batch.positions is not None
        temperature = batch.temperature.float().clamp_min(1e-30)
        min_p = None if batch.min_p is None else batch.min_p.float()
        draws = Draws(uniforms(batch.keys, batch.positions), highest, temperature, min_p, failed)
        tokens = None
        if batch.has_uncut or batch.long_cuts is not None:
            weights = torch.sub(x, highest[:, None], out=self._buffer(*x.shape)).div_(temperature[:, None]).exp_()
            if min_p is not None:
                weights.mul_(torch.ge(weights, min_p[:, None], out=self._buffer(*x.shape)))
            sums = self._block_sums(weights).cumsum(-1, dtype=torch.float64)
            draws.totals = sums[:, -1]
            if batch.has_uncut:
                tokens = pick_in_blocks(weights, sums, draws.numbers)
        if tokens is None:
            tokens = torch.zeros_like(failed)
        if batch.short_cuts is not None:
            count = min(max(64, 1 << (batch.short_cuts.max_top_k - 1).bit_length()), x.shape[1])
            self._draw_from_candidates(x, peaks, draws, batch.short_cuts, count, tokens)
        if batch.long_cuts is not None:
            count = min(sampling.SHORT_TOP_K, x.shape[1])
            left = self._draw_from_candidates(x, peaks, draws, batch.long_cuts, count, tokens)
            self._draw_by_sorting(x, draws, batch.long_cuts, left, tokens)
        return tokens

    def _draw_from_candidates(
        self, x: Tensor, peaks: Tensor, draws: Draws, cuts: Cuts[Tensor], count: int, tokens: Tensor
    ) -> Tensor:
        """Write the tokens of rows whose cuts leave only some of their `count` likeliest tokens; give the indices into cuts of
        the other rows. Rows with a top_k of at most count are never among those."""
        is_settled = torch.empty(len(cuts.rows), dtype=torch.bool, device=x.device)
        places = torch.arange(count, device=x.device)
        for start, end in self._groups(len(cuts.rows), min(x.shape[1], count * BLOCK)):
            rows, top_k, top_p = cuts.rows[start:end], cuts.top_k[start:end], cuts.top_p[start:end]
            values, ids = self._candidates(x, peaks, rows, count)
            weights = draws.weights(rows, values)
            mass = weights.double().mul_(places < top_k[:, None])
            has_all = (top_k <= count) | (weights[:, -1] == 0)
            if draws.min_p is not None:
                mass.mul_(weights >= draws.min_p[rows, None])
                has_all |= weights[:, -1] < draws.min_p[rows]
            sums = mass.cumsum(-1)
            total = sums[:, -1]
            has_all |= draws.failed[rows] != sampling.CHOSEN
            if draws.totals is not None:
                has_top_k = top_k < sampling.TOP_K_OFF
                total = torch.where(has_top_k, total, draws.totals[rows])
                has_all |= ~has_top_k & (sums[:, -1] >= top_p * total)
            mass *= sums - mass < (top_p * total)[:, None]
            keys = first_keys((ids << 32) + places, count)
            place = pick(mass.gather(1, keys & LOW_HALF).cumsum(-1), draws.numbers[rows])
            tokens[rows], is_settled[start:end] = keys.gather(1, place)[:, 0] >> 32, has_all
        return is_settled if cuts.max_top_k <= count else (~is_settled).nonzero()[:, 0]

    def _draw_by_sorting(self, x: Tensor, draws: Draws, cuts: Cuts[Tensor], left: Tensor, tokens: Tensor) -> None:
        """Write the tokens of the rows at some indices into cuts."""
        for start, end in self._groups(len(left), x.shape[1]):
            some = left[start:end]
            rows, top_k, top_p = cuts.rows[some], cuts.top_k[some], cuts.top_p[some]
            values = x[rows]
            negated = first_keys(values.neg(), values.shape[1])
            weights = (negated + draws.highest[rows, None]).div_(-draws.temperature[rows, None]).exp_()
            num_kept = top_k.clamp_max(values.shape[1])[:, None]
            if draws.min_p is not None:
                num_kept = torch.minimum(num_kept, (weights >= draws.min_p[rows, None]).sum(-1, keepdim=True))
            sums = weights.cumsum(-1, dtype=torch.float64)
            total = sums.gather(1, (num_kept - 1).clamp_min_(0))
            num_kept = torch.minimum(num_kept, torch.searchsorted(sums, top_p[:, None] * total) + 1)
            last = negated.gather(1, (num_kept - 1).clamp_min_(0))
            weights = draws.weights(rows, values)
            weights.mul_(torch.ge(values, -last, out=torch.empty_like(values)))
            num_too_many = torch.searchsorted(negated, last, right=True) - num_kept  # equal to the last one kept, but after it
            if num_too_many.any():
                is_equal = values == -last
                weights.mul_(~is_equal | (is_equal.cumsum(-1) <= is_equal.sum(-1, keepdim=True) - num_too_many))
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
        keys = first_keys(keys, count)
        ordered = ~(keys >> 32).to(torch.int32)
        return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), keys & LOW_HALF


@dataclass
class Draws:
    """What the draws of all rows of a batch need."""

    numbers: Tensor  # in [0, 1)
    highest: Tensor  # logit
    temperature: Tensor
    min_p: Tensor | None
    failed: Tensor
    totals: Tensor | None = None  # weight of all tokens that min_p leaves, where it has been summed up

    def weights(self, rows: Tensor, values: Tensor) -> Tensor:
        return (values - self.highest[rows, None]).div_(self.temperature[rows, None]).exp_()


def pick(sums: Tensor, numbers: Tensor) -> Tensor:
    """Where each number in [0, 1) falls in its row of cumulative weights, (rows, 1): never on a weight of 0."""
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, numbers[:, None] * total, right=True)
    return torch.minimum(found, torch.searchsorted(sums, total)).clamp_max_(sums.shape[1] - 1)  # the clamp is for NaN


def pick_in_blocks(weights: Tensor, sums: Tensor, numbers: Tensor) -> Tensor:
    """Tokens at numbers in [0, 1): first the block by the cumulative weights of blocks, then the token inside."""
    block = pick(sums, numbers)
    before = sums.gather(1, (block - 1).clamp_min_(0)).masked_fill_(block == 0, 0.0)
    inner = weights.gather(1, block * BLOCK + torch.arange(BLOCK, device=weights.device)).cumsum(-1, dtype=torch.float64)
    rest = (numbers[:, None] * sums[:, -1:] - before) / inner[:, -1:]
    return (block * BLOCK + pick(inner, rest[:, 0]))[:, 0]


def order_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """64-bit keys that stand in ascending order of falling logit, then rising id; the id is the lower half."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)


def first_keys(keys: Tensor, count: int) -> Tensor:
    """The smallest keys of every row in ascending order; disturbs keys. On a CPU numpy sorts ten times as fast as torch."""
    if keys.device.type == "cpu":
        array = keys.numpy()
        if count < array.shape[1]:
            array.partition(max(0, count - 1), axis=-1)
            array = np.ascontiguousarray(array[:, :count])
        array.sort(axis=-1)
        return torch.from_numpy(array)
    if count == keys.shape[1]:
        return keys.sort(-1).values
    return keys.topk(count, dim=-1, largest=False, sorted=True).values


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """`sampling.uniform` of every row, in integers that wrap around as 64-bit words do. Masks clear what a shift brings in."""
    word = keys + (positions + 1) * sampling.GAMMA
    word = (word ^ ((word >> 30) & (sampling.WORD >> 30))) * sampling.MIX_A
    word = (word ^ ((word >> 27) & (sampling.WORD >> 27))) * sampling.MIX_B
    word = word ^ ((word >> 31) & (sampling.WORD >> 31))
    return ((word >> 11) & (sampling.WORD >> 11)).double() * 2.0**-53


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
    cuts = Cuts(every, inputs[Input.TOP_K], floats[Input.TOP_P - FIRST_FLOAT], sampling.TOP_K_OFF)
    return SamplingBatch(
        temperature=floats[Input.TEMPERATURE - FIRST_FLOAT], is_greedy=inputs[Input.IS_GREEDY], keys=inputs[Input.KEY],
        positions=positions, min_p=floats[Input.MIN_P - FIRST_FLOAT], long_cuts=cuts, has_uncut=True,
        ranges=Ranges(inputs[Input.FIRST], inputs[Input.END], inputs[Input.OFFSET]),
    )
