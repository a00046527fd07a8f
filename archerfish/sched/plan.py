"""A plan: the step as plain arrays for the runner, and its sequences for the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from archerfish.sequence import Sequence
from archerfish.step import PENDING, Ids, RowEntry, StepInput

Chunk = tuple[Sequence, int, int, bool]  # sequence, start, count, whether it gets a token


@dataclass(slots=True)
class Plan:
    """What one step computes, and for which sequences, in the order of the StepInput."""

    input: StepInput
    sequences: list[Sequence]
    num_prompt_tokens: int  # of the new tokens: those of sequences that were not caught up


@dataclass(slots=True)
class PlanBuilder:
    """Collects what a step computes: decodes (one token of a sequence that is caught up) first, then chunks."""

    budget: int  # tokens left
    sequences: list[Sequence] = field(default_factory=list)  # decodes
    has_known_tokens: bool = False  # some decode begins with a token that the host knows
    has_masks: bool = False  # some sequence has a grammar
    chunks: list[Chunk] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)  # chunks of sequences that have just got their row
    grown: list[Sequence] = field(default_factory=list)  # decodes that have just got a block
    copies: list[tuple[int, int]] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)  # decodes that found no block
    is_pressed: bool = False  # memory is short: no sequence is admitted

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
        self.has_masks |= seq.mask is not None
        seq.num_computed += count
        seq.num_pending += is_sampled
        seq.num_in_flight += 1
        self.budget -= count
        return is_sampled

    def build(self, step: int, before: Plan | None, handles: Iterator[int] | None) -> Plan | None:
        """The plan, or None if there is nothing to compute.

        before: the last plan, if it had decodes only. handles: for logits at the end of prompts; None: they are not kept.
        """
        sequences, num = self.sequences, len(self.sequences)
        if not num and not self.chunks:
            return None
        tokens: Ids = np.full(num, PENDING, dtype=np.int64)
        if self.has_known_tokens:
            tokens[:] = [seq.tokens[-1] if seq.num_pending == 1 else PENDING for seq in sequences]
        if self.chunks:
            plan = self._build_mixed(step, tokens, handles)
        else:
            if before is not None and before.sequences == sequences:  # the usual step: only positions and tokens change
                same = before.input
                rows, adapters, counts, starts = same.rows, same.adapters, same.counts, same.starts + 1
            else:
                rows = np.array([seq.row for seq in sequences], np.int64)
                adapters = np.array([seq.request.adapter for seq in sequences], np.int64)
                counts = np.ones(num, dtype=np.int64)
                starts = np.array([seq.num_computed - 1 for seq in sequences], np.int64)
            plan = Plan(StepInput(step, rows, starts, counts, counts, adapters, tokens, num), sequences, 0)
        plan.input.copies = self.copies
        if self.grown or self.chunks:
            add_blocks(plan.input, [*self.grown, *(chunk[0] for chunk in self.chunks)])
        if self.has_masks:
            add_masks(plan.input, plan.sequences)
        return plan

    def _build_mixed(self, step: int, tokens: Ids, handles: Iterator[int] | None) -> Plan:
        chunks = [chunk for chunk in self.chunks if chunk[2] == 1]  # one new token first, then more, then none
        chunks += [chunk for chunk in self.chunks if chunk[2] > 1]
        chunks += [chunk for chunk in self.chunks if not chunk[2]]
        num_decodes = len(self.sequences)
        sequences = [*self.sequences, *(chunk[0] for chunk in chunks)]
        starts = [seq.num_computed - 1 for seq in self.sequences] + [chunk[1] for chunk in chunks]
        counts = [1] * num_decodes + [chunk[2] for chunk in chunks]
        samples = [1] * num_decodes + [int(chunk[3]) for chunk in chunks]
        parts = [np.frombuffer(seq.tokens[start : start + count], np.uint32) for seq, start, count, _ in chunks if count]
        made = StepInput(
            step, np.array([seq.row for seq in sequences], np.int64), np.array(starts, np.int64), np.array(counts, np.int64),
            np.array(samples, np.int64), np.array([seq.request.adapter for seq in sequences], np.int64),
            np.concatenate([tokens, *parts], dtype=np.int64), counts.count(1),
            entries=[entry_of(seq) for seq in self.started],
        )
        for index, (seq, start, count, is_sampled) in enumerate(chunks, num_decodes):
            is_end = is_sampled and start + count == seq.num_prompt
            if is_sampled and not count:
                made.reused.append((index, seq.logits_handle))
            elif is_end and handles is not None:
                made.kept.append((index, next(handles)))
            if is_end and seq.request.wants_logits and seq.index == 0:
                made.returned.append(index)
            if count and seq.request.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
                next_tokens = seq.tokens[start + 1 : min(start + count + 1, seq.num_prompt)]
                made.scored[index] = seq.request.params.prompt_logprobs, next_tokens
        return Plan(made, sequences, len(made.tokens) - num_decodes)


def add_blocks(made: StepInput, sequences: list[Sequence]) -> None:
    """The blocks of sequences that the runner does not know yet."""
    rows: list[int] = []
    places: list[int] = []
    ids: list[int] = []
    for seq in sequences:
        blocks, num_sent = seq.blocks, seq.num_sent
        seq.num_sent = num = len(blocks)
        rows += [seq.row] * (num - num_sent)
        places += range(num_sent, num)
        ids += blocks[num_sent:]
    made.block_rows, made.block_places = np.array(rows, np.int64), np.array(places, np.int64)
    made.block_ids = np.array(ids, np.int64)


def add_masks(made: StepInput, sequences: list[Sequence]) -> None:
    masks = [(index, seq.mask) for index, seq in enumerate(sequences) if made.samples[index] and seq.mask is not None]
    if masks:
        made.masked = [index for index, _ in masks]
        made.mask_bits = np.stack([mask.bits for _, mask in masks])


def entry_of(seq: Sequence) -> RowEntry:
    request, params = seq.request, seq.request.params
    return RowEntry(
        seq.row, request.request_id, params, seq.num_prompt, request.seed, seq.index,
        stop_token_ids=tuple(sorted(request.stop_token_ids)) if params.min_tokens else (),
        tokens=seq.tokens[:] if params.has_penalties else array("I"), has_grammar=request.grammar is not None,
    )
