"""A plan: the step as plain arrays for the runner, its sequences for the scheduler, and which prompts are computed in
it."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidOptionError, InvariantError
from archerfish.sched.cost import StepCost
from archerfish.sched.live import LiveSequences
from archerfish.sequence import Sequence
from archerfish.step import PENDING, Ids, RowEntry, StepInput

MAX_OVERTAKEN = 64  # waiting sequences that another one may overtake in one plan
MIN_CHUNK = 16  # prompt tokens, however slow the machine is: below, a token costs more (lab/2026-11-19-overload)
MAX_LEADERS = 16  # running sequences that a waiting one is compared with
MAX_WAITS = 4  # times that one sequence waits for another
Chunk = tuple[Sequence, int, int, int]  # sequence, start, count, and how many tokens it gets


@dataclass(slots=True)
class Plan:
    """What one step computes, and for which sequences, in the order of the StepInput."""

    input: StepInput
    sequences: list[Sequence]
    num_prompt_tokens: int  # of the new tokens: those of sequences that were not caught up
    num_pairs: float = 0.0  # of a prompt token and a token before it


@dataclass(slots=True)
class PlanBuilder:
    """Collects what a step computes: decodes (one token of a sequence that is caught up) first, then chunks."""

    budget: int  # tokens left
    sequences: list[Sequence] = field(default_factory=list)  # decodes
    has_known_tokens: bool = False  # some decode begins with a token that the host knows
    has_masks: bool = False  # some sequence has a grammar
    chunks: list[Chunk] = field(default_factory=list)
    num_verified: int = 0  # of the tokens of chunks: those of decodes with a draft
    num_pairs: float = 0.0  # as in the Plan
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

    def add_draft(self, seq: Sequence, num_proposed: int) -> None:
        """A decode that verifies so many proposed tokens."""
        self.num_verified += 1 + num_proposed
        self._add(seq, 1 + num_proposed, 1 + num_proposed)

    def add_chunk(self, seq: Sequence, count: int) -> bool:
        """True if the sequence is caught up with this, and gets a token."""
        is_sampled = seq.num_computed + count == len(seq.tokens)
        self.num_pairs += count * (seq.num_computed + count / 2)
        self._add(seq, count, int(is_sampled))
        return is_sampled

    def _add(self, seq: Sequence, count: int, num_samples: int) -> None:
        self.chunks.append((seq, seq.num_computed, count, num_samples))
        self.has_masks |= seq.mask is not None
        seq.num_computed += count
        seq.num_pending += num_samples
        seq.num_in_flight += 1
        self.budget -= count

    def build(self, step: int, before: Plan | None, handles: Iterator[int] | None) -> Plan | None:
        """The plan, or None if there is nothing to compute.

        before: the last plan, if it had decodes only. handles: for logits at the end of prompts; None: they are not
        kept.
        """
        sequences, num = self.sequences, len(self.sequences)
        if not num and not self.chunks:
            return None
        tokens: Ids = np.full(num, PENDING, dtype=np.int64)
        if self.has_known_tokens:
            tokens[:] = [seq.tokens[-1] if seq.num_pending == 1 else PENDING for seq in sequences]
        if before is not None and before.sequences == sequences and not self.chunks:  # only positions and tokens change
            same = before.input
            step_input = StepInput(
                step, same.rows, same.starts + 1, same.counts, same.counts, same.adapters, tokens, num
            )
            plan = Plan(step_input, sequences, 0)
        else:
            plan = self._build_anew(step, tokens, handles)
        made = plan.input
        made.copies = self.copies
        if self.grown or self.chunks:  # the blocks that the runner does not know yet
            rows: list[int] = []
            places: list[int] = []
            ids: list[int] = []
            for seq in (*self.grown, *(chunk[0] for chunk in self.chunks)):
                num_sent, seq.num_sent = seq.num_sent, len(seq.blocks)
                rows += [seq.row] * (seq.num_sent - num_sent)
                places += range(num_sent, seq.num_sent)
                ids += seq.blocks[num_sent:]
            made.block_rows, made.block_places = np.array(rows, np.int64), np.array(places, np.int64)
            made.block_ids = np.array(ids, np.int64)
        if self.has_masks:
            masks = [(i, seq.mask) for i, seq in enumerate(plan.sequences) if made.samples[i] and seq.mask is not None]
            made.masked = [index for index, _ in masks]
            made.mask_bits = np.concatenate([mask.bits[: made.samples[i]] for i, mask in masks]) if masks else None
        return plan

    def _build_anew(self, step: int, tokens: Ids, handles: Iterator[int] | None) -> Plan:
        chunks = [chunk for chunk in self.chunks if chunk[2] == 1]  # one new token first, then more, then none
        chunks += [chunk for chunk in self.chunks if chunk[2] > 1]
        chunks += [chunk for chunk in self.chunks if not chunk[2]]
        num_decodes = len(self.sequences)
        sequences = [*self.sequences, *(chunk[0] for chunk in chunks)]
        starts = [seq.num_computed - 1 for seq in self.sequences] + [chunk[1] for chunk in chunks]
        counts = [1] * num_decodes + [chunk[2] for chunk in chunks]
        samples = [1] * num_decodes + [chunk[3] for chunk in chunks]
        parts: list[npt.ArrayLike] = []
        for seq, start, count, _ in chunks:
            if count:
                parts.append(np.frombuffer(seq.tokens[start : start + count], np.uint32))
            if start + count > len(seq.tokens) and seq.draft is not None:
                parts.append(seq.draft.tokens)
        made = StepInput(
            step,
            np.array([seq.row for seq in sequences], np.int64),
            np.array(starts, np.int64),
            np.array(counts, np.int64),
            np.array(samples, np.int64),
            np.array([seq.adapter_slot for seq in sequences], np.int64),
            np.concatenate([tokens, *parts], dtype=np.int64),
            counts.count(1),
            entries=[entry_of(seq) for seq in self.started],
        )
        for index, (seq, start, count, is_sampled) in enumerate(chunks, num_decodes):
            is_end = is_sampled and start + count == seq.num_prompt
            if is_sampled and not count:
                made.reused.append((index, seq.logits_handle))
            elif is_end and handles is not None:
                made.kept.append((index, next(handles)))
            if seq.draft is not None and seq.draft.states:
                made.states.append((index, seq.draft.states))
            if is_end and seq.request.wants_logits and seq.index == 0:
                made.returned.append(index)
            if count and seq.request.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
                next_tokens = seq.tokens[start + 1 : min(start + count + 1, seq.num_prompt)]
                made.scored[index] = seq.request.params.prompt_logprobs, next_tokens
        num_prompt_tokens = len(made.tokens) - num_decodes - self.num_verified
        return Plan(made, sequences, num_prompt_tokens, self.num_pairs)


def entry_of(seq: Sequence) -> RowEntry:
    request, params = seq.request, seq.request.params
    return RowEntry(
        seq.row,
        request.request_id,
        params,
        seq.num_prompt,
        request.seed,
        seq.index,
        stop_token_ids=tuple(sorted(request.stop_token_ids)) if params.min_tokens else (),
        tokens=seq.tokens[:] if params.has_penalties or params.logits_processors else array("I"),
        has_grammar=request.grammar is not None,
    )


class PromptPlanner:
    """Gives prompts their part of a step, and admits waiting sequences. fixed_chunk: as in Scheduler.

    A step takes about `max_gap_s` by measured costs, so that other sequences get tokens meanwhile. With a
    `decodes_share`, steps with decodes alone follow, in which answers get tokens quickly. While not all
    prompts fit into a step, every other step begins with those that have the fewest tokens left; the others go in
    order. So a short prompt waits for two steps behind a long one, and a long one gets at least every other step.
    """

    def __init__(
        self, live: LiveSequences, cost: StepCost, fixed_chunk: int, max_model_len: int, max_gap_s: float
    ) -> None:
        self.live = live
        self.cost = cost
        self.fixed_chunk = fixed_chunk
        self.max_gap_s = max_gap_s
        self._left_s = 0.0  # of the step, for prompts
        self.decodes_share = 0.0  # of the time of prompts, for steps with decodes alone
        self._decodes_s = 0.0  # that is left of it
        self._is_shortest_next = True
        self._blocked: tuple[Sequence | None, int] = (None, 0)  # a sequence without room, and how many blocks it takes
        self._needs_one_block = live.blocks.block_size >= max_model_len  # every sequence, for all its tokens

    def prompt_share_s(self, num_decodes: int) -> float:
        """How long the prompt tokens of a step may take; at least as long as the rest of the step."""
        rest_s = self.cost.step_s(num_decodes)
        return max(self.max_gap_s - rest_s, rest_s)

    def plan(self, builder: PlanBuilder, now: float) -> None:
        """Add chunks of the prompts of running sequences, and of waiting ones, which are admitted with their first
        chunk."""
        live, least = self.live, max(1, self.fixed_chunk)
        candidates = list(live.prefilling)
        if live.rows and (not builder.is_pressed or live.is_empty):
            limit = MAX_OVERTAKEN + len(live.rows)
            candidates += self._waiting(limit)
        num_decodes = len(builder.sequences) + builder.num_verified
        if builder.sequences and not live.queue.entries and self._decodes_s > 0:
            self._decodes_s -= self.cost.step_s(num_decodes)
            return
        share_s = self._left_s = self.prompt_share_s(num_decodes)
        candidates = self._order(candidates, builder.budget)
        can_admit = True
        if live.adapters is not None:
            live.adapters.begin_plan()
        for seq in candidates:
            if builder.budget < least or self._left_s < 0:
                break
            is_small = self._left_s < self.cost.prompt_s(MIN_CHUNK / 2, seq.num_computed)
            if is_small and self._left_s < share_s:  # too little is left for a chunk
                continue
            if seq in live.prefilling:
                count = self._next_chunk(seq, builder.budget)
                count = self._make_room(seq, count, builder) if count else 0
                if count:
                    self._add(seq, count, builder)
            elif can_admit and seq in live.queue.entries and not self._must_wait(seq):
                can_admit = (
                    bool(live.rows) and (not builder.is_pressed or live.is_empty) and self._try_admit(seq, builder, now)
                )
        self._decodes_s = min(0.0, self._decodes_s) + self.decodes_share * (share_s - self._left_s)

    def _add(self, seq: Sequence, count: int, builder: PlanBuilder) -> None:
        self._left_s -= self.cost.prompt_s(count, seq.num_computed)
        if builder.add_chunk(seq, count):
            del self.live.prefilling[seq]
            self.live.decoding[seq] = None

    def _waiting(self, limit: int) -> list[Sequence]:
        """The first waiting sequences. Of those whose adapter is not there only the first is among them, beyond the
        limit."""
        live = self.live
        found = list[Sequence]()
        asked = set[int]()
        if live.adapters is None:
            return list(itertools.islice(live.queue.ordered(live.num_available, limit), limit))
        for seq in live.queue.ordered(live.num_available, len(live.queue.entries)):
            adapter = seq.request.adapter
            if adapter in asked:
                continue
            found.append(seq)
            if adapter and not live.adapters.is_here(adapter):
                asked.add(adapter)
            elif len(found) - len(asked) >= limit:
                break
        return found

    def _order(self, sequences: list[Sequence], budget: int) -> list[Sequence]:
        """Sequences in the order in which they get their tokens. None overtakes another while there are enough for
        all. The first step in which there are too few begins with the shortest."""
        live, cost = self.live, self.cost
        if self._blocked[0] in live.queue.entries:
            return sequences  # those that overtake the blocked one could take its memory for ever
        runnable = sequences[: len(live.prefilling) + len(live.rows)]
        takes_s = sum(cost.prompt_s(num_left(seq), seq.num_computed) for seq in runnable)
        if len(runnable) < 2 or (takes_s <= self._left_s and sum(map(num_left, runnable)) <= budget):
            self._is_shortest_next = True
            return sequences
        is_shortest, self._is_shortest_next = self._is_shortest_next, not self._is_shortest_next
        if not is_shortest:
            return sequences
        # Only among those that have a row or would get one in order: a row that becomes free is not given to a later
        # one.
        return sorted(runnable, key=lambda seq: (-seq.request.priority, num_left(seq))) + sequences[len(runnable) :]

    def _next_chunk(self, seq: Sequence, budget: int) -> int:
        start, end = seq.num_computed, len(seq.tokens)
        if not self.fixed_chunk:
            return min(end - start, self._num_fitting(start, budget))
        if start < seq.num_prompt:
            end = min(start - start % self.fixed_chunk + self.fixed_chunk, seq.num_prompt)
        else:  # after a preemption: as it was computed before, one by one
            end = start + 1
        return end - start if end - start <= budget else 0

    def _num_fitting(self, start: int, budget: int) -> int:
        """Prompt tokens from position `start` on that fit into the rest of a step; a multiple of half a MIN_CHUNK."""
        per_token_s = self.cost.prompt_s(1, start)
        if not per_token_s:  # not measured yet
            return budget
        per_token_s = self.cost.prompt_s(1, start + self._left_s / per_token_s / 2)  # in the middle of the chunk
        count = int(self._left_s / per_token_s)
        return min(budget, max(MIN_CHUNK, count - count % (MIN_CHUNK // 2)))

    def _make_room(self, seq: Sequence, count: int, builder: PlanBuilder) -> int:
        """Blocks for the next tokens of a prefill: how many tokens of `count` can be had."""
        live, start = self.live, seq.num_computed
        while True:
            wanted = live.num_missing(seq, start + count)
            if wanted <= 0 or live.grow(seq, wanted):
                return count
            builder.is_pressed = True
            fitting = min(wanted, live.num_available)
            count_fitting = (len(seq.blocks) + fitting) * live.blocks.block_size - start
            if not self.fixed_chunk and count_fitting > 0 and live.grow(seq, fitting):
                return min(count, count_fitting)
            if live.leaving:
                return 0
            victim = live.last_in_rank()
            if victim is not seq or live.num_running == 1:
                live.preempt(victim)
            if victim is seq:
                return 0

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether a waiting sequence needs its mask, its adapter, or what another sequence is computing; one whose
        grammar or adapter failed ends.

        Of many prompts that begin alike and arrive together, one is computed and the others take its KV from the cache:
        a sequence waits if a leader will have at least half of what it must compute.
        """
        live = self.live
        if seq.mask is not None:
            if not seq.mask.done():
                return True
            if seq.mask.error is not None:
                live.end(seq, "error", error=seq.mask.error)
                return True
        if seq.request.adapter and live.adapters is not None:
            error = live.adapters.error_of(seq.request.adapter)
            if error is not None:
                live.end(seq, "error", error=error)
                return True
            if not live.adapters.is_ready(seq.request.adapter):
                return True
        if not live.cache.is_enabled:
            return False
        first = live.requests[seq.request.request_id][0]
        if (first is not seq and first.finish_reason is None and not first.num_emitted) or seq.leader in live.leaders:
            return True
        if seq.num_waits >= MAX_WAITS or (seq.request.params.prompt_logprobs is not None and seq.index == 0):
            return False
        for leader, num_cached in itertools.islice(live.leaders.items(), MAX_LEADERS):
            if gains(seq, leader, num_cached, live.min_shared_tokens):
                seq.leader = leader
                seq.num_waits += 1
                return True
        return False

    def _try_admit(self, seq: Sequence, builder: PlanBuilder, now: float) -> bool:
        live, size = self.live, self.live.blocks.block_size
        before = live.num_available
        if self._blocked[0] is seq and before < self._blocked[1] and not live.is_empty:
            return False
        found = live.look_up(seq)
        wanted = -(-len(seq.tokens) // size) - found.num_tokens // size
        # What running sequences will soon want: the rest of their prompts, and about a block for each decode.
        wanted += sum(live.num_missing(other, len(other.tokens)) for other in live.prefilling)
        wanted += (
            0 if self._needs_one_block else min(len(live.prefilling) + len(live.decoding), live.blocks.num_total // 8)
        )
        available = live.num_available
        if wanted > available:
            if not live.is_empty:
                self._blocked = seq, wanted + before - available
                live.cache.unlock(found.node)
                return False
            root = found.node.tree.root  # a lone sequence fits into the empty pool: what it matched is in its way
            live.cache.lock(root)
            live.cache.unlock(found.node)
            found.num_tokens = 0
            found.blocks = []
            found.node = root
            seq.logits_handle = 0
        builder.copies += live.start(seq, found, now)
        builder.started.append(seq)
        count = 0 if seq.logits_handle else self._next_chunk(seq, builder.budget)
        missing = -(-(found.num_tokens + count) // size) - len(seq.blocks)
        if missing > 0 and not live.grow(seq, missing):
            raise InvariantError(f"{missing} blocks were counted as available and are not.")
        self._add(seq, count, builder)
        live.stats.cached_logits_used += not count
        return True


def num_left(seq: Sequence) -> int:
    """Tokens to compute until the sequence is caught up; of a waiting one, without regard to the cache."""
    return len(seq.tokens) - seq.num_computed


def gains(seq: Sequence, leader: Sequence, num_cached: int, least: int) -> bool:
    """Whether a leader, which took `num_cached` tokens from the cache, computes enough of what a waiting sequence
    needs."""
    ours, theirs = seq.tokens, leader.tokens
    end = num_cached + max(least, (len(ours) - num_cached) // 2)
    if end >= len(ours) or end > leader.num_prompt or seq.request.namespace != leader.request.namespace:
        return False
    return ours[num_cached] == theirs[num_cached] and ours[:end] == theirs[:end]


def check_step_tokens(max_num_batched_tokens: int, max_num_seqs: int, fixed_chunk: int) -> None:
    """Refuse a step that has no room for a token of each sequence and for a chunk of a prompt."""
    chunk = max(1, fixed_chunk)
    if max_num_batched_tokens < max_num_seqs + chunk:
        lower = f", or lower max_num_seqs to {max_num_batched_tokens - chunk}" if max_num_batched_tokens > chunk else ""
        raise InvalidOptionError(
            f"[engine] max_num_batched_tokens is {max_num_batched_tokens}; with a max_num_seqs of {max_num_seqs} it must "
            f"be at least {max_num_seqs + chunk}: a token of each sequence and {chunk} of a prompt.",
            hint=f"Raise it to {max_num_seqs + chunk}{lower}.",
        )
