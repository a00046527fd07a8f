"""The meaning of the operations of `recurrent.py` in plain torch, and a faster way for a CPU.

A head of RWKV-7 keeps a matrix S (values down, keys across). With a token's receptance r, decay w, removal key z (of length 1),
learning rate a, key k and value v it becomes, and the token gives:

    S' = S diag(w) - (S z) (z * a)^T + v k^T        y = S' r

`wkv_together` computes just that for several sequences. `wkv_chunked` takes some tokens at once. With D_t the product of the
decays of a chunk's first t tokens, S_t = R_t diag(D_t), where

    R_t = R_(t-1) + u_t (z_t a_t / D_t)^T + v_t (k_t / D_t)^T        u_t = -R_(t-1) (D_(t-1) z_t)

So the u of a chunk solve a triangular system, and S at its end is linear in S at its start: only that is left to do chunk by
chunk. A decay is above 0.545, so that 1 / D stays within float32 for over 100 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.background import WeakCache
from archerfish.errors import OutOfMemoryError
from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input
from archerfish.kernels.ops import Ids
from archerfish.kernels.recurrent import (
    EMPTY_SLOT,
    FIRST_SLOT,
    HeadInputs,
    HeadWeights,
    RecurrentBatch,
    RecurrentOps,
    StateLayer,
    StateMemory,
    StateShape,
)
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.torch.sampling import sampling_batch

if TYPE_CHECKING:
    from archerfish.kernels.torch.reference import TorchOps

Tensor = torch.Tensor
DECAY_SCALE = -0.6065306597126334  # -exp(-0.5), times a number between 0 and 1: the logarithm of a decay
LEAST_LENGTH = 1e-12  # that a removal key is divided by
CHUNK = 32  # tokens
TOGETHER = 32  # sequences


class WkvInputs(NamedTuple):
    """Float32 rows of tokens, (tokens, heads, head_dim) each."""

    receptance: Tensor
    log_decay: Tensor
    key: Tensor
    value: Tensor
    removal: Tensor  # z
    added: Tensor  # z * a

    def part(self, begin: int, end: int | None = None) -> WkvInputs:
        return WkvInputs(*(each[begin:end] for each in self))


@dataclass(frozen=True)
class StepGroup:
    """Pieces of some sequences that are computed together, a token of each at a time. The longest come first."""

    sources: Tensor
    targets: Tensor
    place: slice | None  # of states that stay where they are, one behind the other
    rows: Tensor  # first tokens of all, second tokens of those that have one, and so on
    run: slice | None  # of rows that stand one behind the other
    nums: list[int]  # how many have a first token, a second one, and so on

    @classmethod
    def all_of(cls, batch: RecurrentBatch[Tensor], num_sequences: int) -> list[StepGroup]:
        """The groups of the first sequences: of their first pieces, of their second ones, and so on."""
        lengths, counts = batch.piece_lens, batch.piece_counts[:num_sequences]
        sources, targets = batch.sources.cpu().numpy(), batch.targets.cpu().numpy()
        begins, firsts = np.cumsum(lengths) - lengths, np.cumsum(counts) - counts
        groups: list[StepGroup] = []
        for number in range(int(counts.max(initial=0))):
            pieces = firsts[counts > number] + number
            pieces = pieces[np.lexsort((targets[pieces], -lengths[pieces]))]
            for group in np.split(pieces, range(TOGETHER, len(pieces), TOGETHER)):
                has_token = lengths[group] > np.arange(lengths[group[0]])[:, None]
                times, members = has_token.nonzero()
                rows = begins[group[members]] + times
                place = run_of(targets[group]) if (sources[group] == targets[group]).all() else None
                source, target, row = (
                    torch.from_numpy(each).to(batch.sources.device) for each in (sources[group], targets[group], rows)
                )
                groups.append(cls(source, target, place, row, run_of(rows), has_token.sum(1).tolist()))
        return groups


def run_of(numbers: Ids) -> slice | None:
    """Numbers that count up one by one, as a slice."""
    first = int(numbers[0])
    return slice(first, first + len(numbers)) if (numbers == first + np.arange(len(numbers))).all() else None


def wkv_together(inputs: WkvInputs, states: Tensor, groups: Sequence[StepGroup]) -> Tensor:
    """y of all tokens, some sequences at a time: few calls, each with enough to do for all cores.

    What a token gives does not depend on other sequences, nor on how its own is cut into steps.
    """
    out = torch.empty_like(inputs.value)
    for group in groups:
        mine = WkvInputs(*(each[group.run] if group.run else each.index_select(0, group.rows) for each in inputs))
        results = out[group.run] if group.run else torch.empty_like(mine.value)
        state = states[group.place] if group.place else states.index_select(0, group.sources)
        place = 0
        for num in group.nums:
            advance(state[:num], mine.part(place, place + num), results[place : place + num])
            place += num
        if not group.place:
            states.index_copy_(0, group.targets, state)
        if not group.run:
            out.index_copy_(0, group.rows, results)
    return out


def advance(state: Tensor, inputs: WkvInputs, out: Tensor) -> None:
    """Each state by one token. Passes over vectors: a CPU takes longer for products with a single column."""
    removed = torch.linalg.vecdot(state, inputs.removal.unsqueeze(-2)).neg_()
    state.mul_(inputs.log_decay.exp().unsqueeze(-2))
    state.addcmul_(removed.unsqueeze(-1), inputs.added.unsqueeze(-2))
    state.addcmul_(inputs.value.unsqueeze(-1), inputs.key.unsqueeze(-2))
    torch.linalg.vecdot(state, inputs.receptance.unsqueeze(-2), out=out)


def wkv_chunked(
    inputs: WkvInputs, states: Tensor, sources: Tensor, targets: Tensor, lengths: Ids, counts: Ids, chunk: int = CHUNK
) -> Tensor:
    """As `wkv_together`, in chunks of some tokens. lengths: of pieces; counts: pieces of each sequence."""
    device = states.device
    num_chunks = -(-lengths // chunk)
    first_chunks = np.cumsum(num_chunks) - num_chunks
    begins = np.cumsum(lengths) - lengths
    place = np.arange(int(lengths.sum())) + np.repeat(first_chunks * chunk - begins, lengths)
    places = torch.from_numpy(place).to(device)
    laid = WkvInputs(*(lay_chunks(each, places, int(num_chunks.sum()), chunk) for each in inputs))
    carry, gain, reader, own = chunk_steps(laid)
    last_pieces = np.cumsum(counts) - 1
    heads = last_pieces - counts + 1  # the first piece of each sequence
    num_steps = np.add.reduceat(num_chunks, heads)
    state = states.index_select(0, sources[torch.from_numpy(heads).to(device)])
    befores = state.new_empty((len(carry), *state.shape[1:]))  # the state in front of each chunk
    for number in range(int(num_steps.max())):
        is_active = num_steps > number
        chunks = torch.from_numpy(first_chunks[heads[is_active]] + number).to(device)
        whole = bool(is_active.all())
        active = torch.from_numpy(np.flatnonzero(is_active)).to(device)
        before = state if whole else state.index_select(0, active)
        befores.index_copy_(0, chunks, before)
        after = torch.matmul(before, carry.index_select(0, chunks)).add_(gain.index_select(0, chunks))
        state = after if whole else state.index_copy(0, active, after)
    states.index_copy_(0, targets[torch.from_numpy(last_pieces).to(device)], state)
    inner = np.delete(np.arange(len(lengths)), last_pieces)
    if len(inner):  # what stands behind a piece stands in front of the next one
        behind = befores.index_select(0, torch.from_numpy(first_chunks[inner + 1]).to(device))
        states.index_copy_(0, targets[torch.from_numpy(inner).to(device)], behind)
    out = torch.matmul(reader, befores.transpose(-1, -2)).add_(own)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def lay_chunks(rows: Tensor, places: Tensor, num_chunks: int, chunk: int) -> Tensor:
    """(tokens, heads, dim) as (chunks, heads, chunk, dim); places past a sequence's end are zeros, which change no state."""
    laid = rows.new_zeros((num_chunks * chunk, *rows.shape[1:])).index_copy_(0, places, rows)
    return laid.view(num_chunks, chunk, *rows.shape[1:]).transpose(1, 2).contiguous()


def chunk_steps(laid: WkvInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """carry, gain, reader, own: what a chunk does with the state S in front of it. S after it is S @ carry + gain, and y of its
    tokens is reader @ S^T + own."""
    receptance, log_decay, key, value, removal, added = laid
    total = log_decay.cumsum(-2)
    removal = removal * (total - log_decay).exp()
    receptance = receptance * total.exp()
    grown = (-total).exp()
    writes = torch.cat((added * grown, key * grown), -2)
    among, from_keys = (removal @ writes.transpose(-1, -2)).chunk(2, -1)
    # u of all tokens is, of S in front, solved @ S^T, and of the chunk's own values the rest
    right = torch.cat((removal, from_keys.tril(-1) @ value), -1).neg_()
    solved = torch.linalg.solve_triangular(among.tril(-1), right, upper=False, unitriangular=True)
    on_state, on_values = solved.chunk(2, -1)
    seen, seen_keys = (receptance @ writes.transpose(-1, -2)).chunk(2, -1)
    seen, seen_keys = seen.tril(), seen_keys.tril()
    last = total[..., -1:, :].exp()
    added, key = writes.chunk(2, -2)
    carry = on_state.transpose(-1, -2) @ added
    carry.diagonal(dim1=-2, dim2=-1).add_(1.0)
    gain = on_values.transpose(-1, -2) @ added + value.transpose(-1, -2) @ key
    return carry * last, gain * last, receptance + seen @ on_state, seen @ on_values + seen_keys @ value


@dataclass(frozen=True)
class Ends:
    """Where pieces and sequences begin and end, found once for all layers."""

    first_rows: Tensor  # of each sequence
    first_sources: Tensor
    last_rows: Tensor  # of each piece

    @classmethod
    def of(cls, batch: RecurrentBatch[Tensor]) -> Ends:
        heads = batch.first_pieces[:-1]
        return cls(batch.starts[heads], batch.sources[heads], batch.starts[1:] - 1)


find_groups = WeakCache(StepGroup.all_of)
find_ends = WeakCache(Ends.of)


class TorchRecurrentOps(RecurrentOps[Tensor]):
    """The reference, which computes the recurrence in chunks if this machine multiplies many small matrices in one call."""

    has_batched_products = torch._C.has_mkl  # elsewhere PyTorch calls its products one by one

    def __init__(self, ops: TorchOps) -> None:
        self.ops: TorchOps = ops

    def new_states(self, num_slots: int, shape: StateShape) -> StateMemory[Tensor]:
        layers, heads, dim = shape.num_layers, shape.num_heads, shape.head_dim
        try:
            wkv = torch.empty(num_slots, layers, heads, dim, dim, device=self.ops.device)  # pages come when they are written
            inputs = torch.empty(num_slots, layers, 2, shape.width, dtype=self.ops.torch_dtype, device=self.ops.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"The device has no memory for {num_slots:,} state slots.") from error
        for memory in (wkv, inputs):
            memory[EMPTY_SLOT].zero_()
        views = tuple(StateLayer(wkv[:, i], inputs[:, i, 0], inputs[:, i, 1]) for i in range(layers))
        return StateMemory(wkv, inputs, views)

    def shift(self, x: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor], factors: Tensor) -> tuple[Tensor, ...]:
        ends = find_ends(batch)
        before = x.roll(1, 0).index_copy_(0, ends.first_rows, inputs.index_select(0, ends.first_sources))
        inputs.index_copy_(0, batch.targets, x.index_select(0, ends.last_rows))
        wide = x.float()
        mixed = torch.addcmul(wide, before.float() - wide, factors.view(-1, 1, x.shape[1]))
        return mixed.to(x.dtype).unbind(0)

    def mix_heads(
        self, inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], states: Tensor, batch: RecurrentBatch[Tensor]
    ) -> Tensor:
        num_tokens, num_heads, head_dim = batch.num_tokens, states.shape[1], states.shape[2]
        if not num_tokens:
            return torch.zeros_like(inputs.value)
        prepared = prepare_heads(inputs, weights, num_tokens, num_heads, head_dim)
        y = self.wkv(prepared, states, batch).reshape(num_tokens, -1)
        y = F.group_norm(y, num_heads, weights.norm, weights.norm_bias, weights.eps)
        bonus = (prepared.receptance * prepared.key * weights.bonus.view(num_heads, head_dim)).sum(-1, keepdim=True)
        y = (y + (bonus * prepared.value).view(num_tokens, -1)) * inputs.gate[:num_tokens].float()
        return F.pad(y.to(inputs.value.dtype), (0, 0, 0, inputs.value.shape[0] - num_tokens))

    def wkv(self, inputs: WkvInputs, states: Tensor, batch: RecurrentBatch[Tensor]) -> Tensor:
        num_stepped = self._num_stepped(batch)
        if num_stepped == batch.num_sequences:
            return wkv_together(inputs, states, find_groups(batch, num_stepped))
        decodes = wkv_together(inputs.part(0, num_stepped), states, find_groups(batch, num_stepped))
        rest = batch.sources[num_stepped:], batch.targets[num_stepped:], batch.piece_lens[num_stepped:]
        return torch.cat((decodes, wkv_chunked(inputs.part(num_stepped), states, *rest, batch.piece_counts[num_stepped:])))

    def _num_stepped(self, batch: RecurrentBatch[Tensor]) -> int:
        """Leading sequences that are computed token by token; the others are computed in chunks."""
        is_chunked = not batch.is_deterministic and (self.has_batched_products or self.ops.device != "cpu")
        return batch.num_decodes if is_chunked else batch.num_sequences

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor]
    ) -> tuple[RecurrentBatch[Tensor], SamplingBatch[Tensor]]:
        rows, positions = inputs[Input.ROW], inputs[Input.POSITION]
        num_real = int((positions >= 0).sum())  # they stand first
        every, ones = torch.arange(inputs.shape[1] + 1, device=inputs.device), np.ones(num_real, dtype=np.int64)
        sources = inputs[Input.SOURCE, :num_real] + FIRST_SLOT
        previous = torch.zeros_like(rows)
        previous[:num_real] = -1 - sources
        batch = RecurrentBatch(
            num_tokens=num_real, num_decodes=num_real, query_lens=ones, piece_counts=ones, piece_lens=ones,
            token_ids=torch.where(inputs[Input.TOKEN] == ON_DEVICE, state.last_tokens[rows], inputs[Input.TOKEN]),
            previous=previous, sources=sources, targets=inputs[Input.BLOCK, :num_real] + FIRST_SLOT,
            starts=every[: num_real + 1], first_pieces=every[: num_real + 1],
        )
        return batch, sampling_batch(inputs, positions + 1, every[:-1])


def prepare_heads(
    inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], num_tokens: int, num_heads: int, head_dim: int
) -> WkvInputs:
    """Float32 inputs of the recurrence from the products of a time mix."""

    def heads(x: Tensor) -> Tensor:
        return x[:num_tokens].float().view(num_tokens, num_heads, head_dim)

    key, value, rate = heads(inputs.key), heads(inputs.value), heads(inputs.rate).sigmoid()
    if inputs.first_value is not None and inputs.value_mix is not None:
        value = torch.lerp(value, heads(inputs.first_value), heads(inputs.value_mix).sigmoid())
    removal = F.normalize(key * weights.removal.view(num_heads, head_dim), dim=-1, eps=LEAST_LENGTH)
    key = key * (1.0 + (rate - 1.0) * weights.replacement.view(num_heads, head_dim))
    return WkvInputs(
        heads(inputs.receptance), DECAY_SCALE * heads(inputs.decay).sigmoid(), key, value, removal, removal * rate
    )
