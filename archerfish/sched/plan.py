"""A plan: the step as plain arrays for the runner, and its sequences for the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from archerfish.sequence import Sequence
from archerfish.step import NO_IDS, PENDING, Ids, RowEntry, StepInput

Chunk = tuple[Sequence, int, int, bool]  # sequence, start, count, whether it gets a token


@dataclass(slots=True)
class Plan:
    """What one step computes, and for which sequences, in the order of the StepInput."""

    input: StepInput
    sequences: list[Sequence]
    num_prompt_tokens: int  # of the new tokens: those of sequences that were not caught up


class PlanBuilder:
    """Collects what a step computes: decodes (one token of a sequence that is caught up) first, then chunks."""

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "grown",
        "has_known_tokens",
        "has_masks",
        "is_pressed",
        "sequences",
        "stalled",
        "started",
    )  # fmt: skip

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.sequences: list[Sequence] = []  # decodes
        self.has_known_tokens = False  # some decode begins with a token that the host knows
        self.has_masks = False  # some decode has a grammar
        self.chunks: list[Chunk] = []
        self.started: list[Sequence] = []  # chunks of sequences that have just got their row
        self.grown: list[Sequence] = []  # decodes that have just got a block
        self.copies: list[tuple[int, int]] = []
        self.stalled: list[Sequence] = []  # decodes that found no block
        self.is_pressed = False  # memory is short: no sequence is admitted

    def add_decode(self, seq: Sequence) -> None:
        """A decode that got its block after the others."""
        self.sequences.append(seq)
        self.grown.append(seq)
        self.has_known_tokens |= not seq.num_pending
        self.has_masks |= seq.mask is not None
        seq.num_computed += 1
        seq.num_pending += 1
        seq.num_in_flight += 1
        self.budget -= 1

    def add_chunk(self, seq: Sequence, count: int) -> bool:
        """True if the sequence is caught up with this, and gets a token."""
        start = seq.num_computed
        is_sampled = start + count == len(seq.tokens)
        self.chunks.append((seq, start, count, is_sampled))
        seq.num_computed += count
        seq.num_pending += is_sampled
        seq.num_in_flight += 1
        self.budget -= count
        return is_sampled

    def build(self, step: int, before: Plan | None, new_handle: Callable[[], int] | None) -> Plan | None:
        """The plan, or None if there is nothing to compute.

        before: the last plan, if it had decodes only. new_handle: gives handles for logits at the end of prompts; None: they
        are not kept.
        """
        if self.chunks:
            return self._build_mixed(step, new_handle)
        if not self.sequences:
            return None
        sequences, num = self.sequences, len(self.sequences)
        if before is not None and before.sequences == sequences:  # the usual step: all that changes are positions and tokens
            same = before.input
            rows, counts, adapters, starts = same.rows, same.counts, same.adapters, same.starts + 1
        else:
            rows, adapters = rows_of(sequences), adapters_of(sequences)
            counts = np.ones(num, dtype=np.int64)
            starts = np.fromiter([seq.num_computed - 1 for seq in sequences], np.int64, num)
        made = StepInput(step, rows, starts, counts, counts, adapters, self._decode_tokens(), num, copies=self.copies)
        if self.grown:
            self._add_block_each(made)
        if self.has_masks:
            add_masks(made, sequences, range(num))
        return Plan(made, sequences, 0)

    def _build_mixed(self, step: int, new_handle: Callable[[], int] | None) -> Plan:
        chunks = sorted(self.chunks, key=_place)
        num_decodes = len(self.sequences)
        sequences = [*self.sequences, *(chunk[0] for chunk in chunks)]
        starts = [seq.num_computed - 1 for seq in self.sequences] + [chunk[1] for chunk in chunks]
        counts = [1] * num_decodes + [chunk[2] for chunk in chunks]
        samples = [1] * num_decodes + [int(chunk[3]) for chunk in chunks]
        tokens = [self._decode_tokens()]
        tokens += [np.frombuffer(seq.tokens[start : start + count], np.uint32) for seq, start, count, _ in chunks if count]
        made = StepInput(
            step, rows_of(sequences), as_ids(starts), as_ids(counts), as_ids(samples), adapters_of(sequences),
            np.concatenate(tokens, dtype=np.int64), counts.count(1), copies=self.copies,
            entries=[entry_of(seq) for seq in self.started],
        )
        for index, (seq, start, count, is_sampled) in enumerate(chunks, num_decodes):
            if is_sampled and not count:
                made.reused.append((index, seq.logits_handle))
            elif is_sampled and new_handle is not None and start + count == seq.num_prompt:
                made.kept.append((index, new_handle()))
            if is_sampled and seq.request.wants_logits and seq.index == 0 and start + count == seq.num_prompt:
                made.returned.append(index)
            if count and seq.request.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
                next_tokens = seq.tokens[start + 1 : min(start + count + 1, seq.num_prompt)]
                made.scored[index] = seq.request.params.prompt_logprobs, next_tokens
        self._add_blocks(made, [*self.grown, *(chunk[0] for chunk in chunks)])
        add_masks(made, sequences, np.flatnonzero(made.samples).tolist())
        return Plan(made, sequences, len(made.tokens) - num_decodes)

    def _decode_tokens(self) -> Ids:
        num = len(self.sequences)
        if not self.has_known_tokens:
            return np.full(num, PENDING, dtype=np.int64)
        return np.fromiter([seq.tokens[-1] if seq.num_pending == 1 else PENDING for seq in self.sequences], np.int64, num)

    def _add_block_each(self, made: StepInput) -> None:
        """The one new block of each decode that has grown."""
        places = []
        for seq in self.grown:
            places.append(seq.num_sent)
            seq.num_sent += 1
        made.block_places = as_ids(places)
        made.block_rows = as_ids([seq.row for seq in self.grown])
        made.block_ids = as_ids([seq.blocks[-1] for seq in self.grown])

    def _add_blocks(self, made: StepInput, sequences: list[Sequence]) -> None:
        new = [(seq.row, seq.num_sent, seq.blocks[seq.num_sent :]) for seq in sequences if len(seq.blocks) > seq.num_sent]
        if not new:
            return
        for seq in sequences:
            seq.num_sent = len(seq.blocks)
        made.block_rows = np.repeat([row for row, _, _ in new], [len(blocks) for _, _, blocks in new])
        made.block_places = as_ids(list(chain.from_iterable(range(first, first + len(blocks)) for _, first, blocks in new)))
        made.block_ids = as_ids(list(chain.from_iterable(blocks for _, _, blocks in new)))


def entry_of(seq: Sequence) -> RowEntry:
    request, params = seq.request, seq.request.params
    return RowEntry(
        seq.row, request.request_id, params, seq.num_prompt, request.seed, seq.index,
        stop_token_ids=tuple(sorted(request.stop_token_ids)) if params.min_tokens else (),
        tokens=seq.tokens[:] if params.has_penalties else array("I"), has_grammar=request.grammar is not None,
    )


def add_masks(made: StepInput, sequences: list[Sequence], sampled: range | list[int]) -> None:
    masks = [(index, sequences[index].mask) for index in sampled]
    made.masked = [index for index, mask in masks if mask is not None]
    if made.masked:
        made.mask_bits = np.stack([mask.bits for _, mask in masks if mask is not None])


def rows_of(sequences: list[Sequence]) -> Ids:
    return np.fromiter([seq.row for seq in sequences], np.int64, len(sequences))


def adapters_of(sequences: list[Sequence]) -> Ids:
    return np.fromiter([seq.request.adapter for seq in sequences], np.int64, len(sequences))


def as_ids(values: list[int]) -> Ids:
    return np.asarray(values, dtype=np.int64) if values else NO_IDS


def _place(chunk: Chunk) -> int:
    """One new token first, then more, then none (a stable sort keeps the order of admission otherwise)."""
    count = chunk[2]
    return 0 if count == 1 else 1 if count else 2
