"""What the ops of sampling mean, in plain torch, for any device with float64: a cut sorts the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import pad

from archerfish.kernels import sampling
from archerfish.kernels.batches import Ids
from archerfish.kernels.decoding import FIRST_FLOAT, DecodeState, Input
from archerfish.kernels.sampling import BufferPool, Cuts, Drawn, Logprobs, Masks, Penalties, Ranges, SamplingBatch

Tensor = torch.Tensor
BLOCK = 32  # tokens
NO_SLOTS: Ids = np.zeros(0, dtype=np.int64)  # on the host, of rows that the device alone knows


class TorchSampling:
    """Large arrays are borrowed for the time of a call. One thread at a time may use an object."""

    def __init__(self, device: str) -> None:
        self.buffers: BufferPool[Tensor] = BufferPool(
            lambda size: torch.empty(size, dtype=torch.float32, device=device)
        )
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
        x = self._adjusted(logits, batch)
        highest, best = x.max(-1)  # the lowest id among equals; NaN comes first
        failed = torch.where(highest.isfinite(), sampling.CHOSEN, sampling.NOT_FINITE)
        failed.masked_fill_(highest == -math.inf, sampling.NONE_LEFT)
        tokens = best if batch.temperature is None else draw(x, highest, batch.temperature, batch)
        if batch.is_greedy is not None:
            tokens = torch.where(batch.is_greedy != 0, best, tokens)
        if batch.ranges is not None:
            tokens = tokens + batch.ranges.offset
        return torch.stack((tokens.masked_fill(failed != sampling.CHOSEN, 0), failed))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Ids | None) -> Logprobs[Tensor]:
        """As `Ops.token_logprobs`."""
        x = logits if rows is None else logits[torch.from_numpy(rows).to(logits.device)]
        own, base = x.gather(1, token_ids[:, None]), x.double().logsumexp(-1, keepdim=True)
        top, top_ids = (each[:, :num_top] for each in x.sort(dim=-1, descending=True, stable=True))
        return Logprobs((own.double() - base)[:, 0], (x > own).sum(-1) + 1, top_ids, top.double() - base)

    def _adjusted(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
        """Logits after bias, bans, masks, ranges and penalties.

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
            self._mask(x, batch.masks)
        if batch.ranges is not None:
            ids = torch.arange(width, device=x.device)
            x.masked_fill_((ids < batch.ranges.first[:, None]) | (ids >= batch.ranges.end[:, None]), -math.inf)
        if batch.penalties is not None:
            self._penalise(x, batch.penalties)
        return x

    def _mask(self, x: Tensor, masks: Masks[Tensor]) -> None:
        """Rule tokens out, in place."""
        bits = torch.arange(BLOCK, dtype=torch.int32, device=x.device)
        words = masks.bits.view(torch.int32)[:, : x.shape[1] // BLOCK, None]
        is_ruled_out = ((words >> bits) & 1 == 0).view(len(words), -1)
        x.index_copy_(0, masks.rows, x.index_select(0, masks.rows).masked_fill_(is_ruled_out, -math.inf))

    def _penalise(self, x: Tensor, penalties: Penalties[Tensor]) -> None:
        """Change the logits of counted tokens in place."""
        counts = penalties.counts.counts[penalties.slots_on_device]
        logits = x[penalties.rows, : counts.shape[1]]
        if penalties.repetition is not None:
            factor = penalties.repetition.float()[:, None]
            logits = torch.where(counts > 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
        num_output = counts >> 1
        if penalties.presence is not None:
            logits = logits - penalties.presence.float()[:, None] * (num_output > 0)
        if penalties.frequency is not None:
            logits = logits - penalties.frequency.float()[:, None] * num_output
        x[penalties.rows, : counts.shape[1]] = logits


def draw(x: Tensor, highest: Tensor, temperature: Tensor, batch: SamplingBatch[Tensor]) -> Tensor:
    """A token for each row of adjusted logits; any token where the highest is not finite."""
    assert batch.keys is not None and batch.positions is not None
    weights = ((x - highest[:, None]) / temperature.float().clamp_min(1e-30)[:, None]).exp_()
    if batch.min_p is not None:
        weights.mul_(weights >= batch.min_p.float()[:, None])
    if batch.cuts is not None:
        rows, top_k, top_p = batch.cuts
        ids = x[rows].sort(dim=-1, descending=True, stable=True).indices  # among equals the lowest first
        ranked = weights[rows].gather(1, ids) * (torch.arange(x.shape[1], device=x.device) < top_k[:, None])
        sums = ranked.cumsum(-1, dtype=torch.float64)
        ranked *= pad(sums[:, :-1], (1, 0)) < top_p[:, None] * sums[:, -1:]
        weights[rows] = torch.empty_like(ranked).scatter_(1, ids, ranked)
    return pick(weights.cumsum(-1, dtype=torch.float64), uniforms(batch.keys, batch.positions))


def pick(sums: Tensor, numbers: Tensor) -> Tensor:
    """Where each number in [0, 1) falls in its row of cumulative weights: never on a weight of 0."""
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, numbers[:, None] * total, right=True)
    return torch.minimum(found, torch.searchsorted(sums, total)).clamp_max_(sums.shape[1] - 1)[
        :, 0
    ]  # the clamp is for NaN


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """`sampling.uniform` of every row, in integers that wrap around as 64-bit words do. Masks clear what a shift brings
    in."""
    word = keys + (positions + 1) * sampling.GAMMA
    word = (word ^ ((word >> 30) & (sampling.WORD >> 30))) * sampling.MIX_A
    word = (word ^ ((word >> 27) & (sampling.WORD >> 27))) * sampling.MIX_B
    word = word ^ ((word >> 31) & (sampling.WORD >> 31))
    return ((word >> 11) & (sampling.WORD >> 11)).double() * 2.0**-53


def count_tokens(penalties: Penalties[Tensor], tokens: Tensor) -> None:
    """Count one more token of the output in every penalised row, but for those whose penalties are all off."""
    counts = penalties.counts.counts
    at = penalties.slots_on_device * counts.shape[1] + tokens[penalties.rows]
    added = torch.full_like(at, 2, dtype=torch.int32)
    repetition, presence, frequency = penalties[-3:]
    if repetition is not None and presence is not None and frequency is not None:
        added *= (repetition != 1) | (presence != 0) | (frequency != 0)
    counts.view(-1).index_add_(0, at, added)


def sampling_batch(
    inputs: Tensor, positions: Tensor, every: Tensor, state: DecodeState[Tensor]
) -> SamplingBatch[Tensor]:
    """How inputs of decodes say to sample, as views of them. every: the numbers of all rows."""
    floats = inputs[FIRST_FLOAT:].view(torch.float64)
    cuts, penalties = Cuts(every, inputs[Input.TOP_K], floats[Input.TOP_P - FIRST_FLOAT]), None
    if state.counts is not None:
        factors = floats[Input.REPETITION - FIRST_FLOAT :]
        penalties = Penalties(every, state.counts, NO_SLOTS, inputs[Input.ROW], *factors)
    return SamplingBatch(
        temperature=floats[Input.TEMPERATURE - FIRST_FLOAT],
        is_greedy=inputs[Input.IS_GREEDY],
        keys=inputs[Input.KEY],
        positions=positions,
        min_p=floats[Input.MIN_P - FIRST_FLOAT],
        cuts=cuts,
        ranges=Ranges(inputs[Input.FIRST], inputs[Input.END], inputs[Input.OFFSET]),
        penalties=penalties,
        may_overwrite=True,
    )
