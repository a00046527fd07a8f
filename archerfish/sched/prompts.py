"""Which prompts are computed in a step, and how they share its tokens."""

from __future__ import annotations

import itertools

from archerfish.errors import InvariantError
from archerfish.sched.live import LiveSequences
from archerfish.sched.memory import Found, SequenceMemory
from archerfish.sched.plan import PlanBuilder
from archerfish.sequence import Sequence

MAX_OVERTAKEN = 64  # waiting sequences that another one may overtake in one plan
LONE_STEP_S = 1.0  # about how long a step may take while one prompt is all there is to compute
SHARED_STEP_S = 0.25  # the same while other sequences wait for the step
MIN_STEP_TOKENS = 64  # of prompts, however slow the machine is; fewer waste its time


class PromptShares:
    """Orders the prompts that compete for a step, and bounds the step by the speed measured so far.

    While not all prompts fit into a step, every other step begins with those that have the fewest tokens left; the others go in
    order. So a short prompt waits two steps behind a long one, and a long one gets at least every other step.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of prompts; 0: not measured yet
        self._is_shortest_next = True

    def max_tokens(self, *, is_shared: bool) -> int | None:
        """How many prompt tokens a step should have at most; None: not known yet."""
        if not self.tokens_per_s:
            return None
        tokens = int(self.tokens_per_s * (SHARED_STEP_S if is_shared else LONE_STEP_S))
        return max(MIN_STEP_TOKENS, tokens - tokens % MIN_STEP_TOKENS)

    def order(self, sequences: list[Sequence], num_runnable: int, budget: int) -> list[Sequence]:
        """Sequences in the order in which they get their tokens. num_runnable: how many of them there are rows for.

        No sequence overtakes another while the budget is enough for all that can run.
        """
        if len(sequences) < 2 or sum(map(num_left, sequences[:num_runnable])) <= budget:
            return sequences
        is_shortest, self._is_shortest_next = self._is_shortest_next, not self._is_shortest_next
        return sorted(sequences, key=lambda seq: (-seq.request.priority, num_left(seq))) if is_shortest else sequences

    def measure(self, num_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long. A step of few tokens can only show that the machine is faster."""
        if num_tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        found = num_tokens / seconds
        if found > self.tokens_per_s:
            self.tokens_per_s = found
        elif 2 * num_tokens >= self.tokens_per_s * SHARED_STEP_S:
            self.tokens_per_s = (self.tokens_per_s + found) / 2


def num_left(seq: Sequence) -> int:
    """Tokens to compute until the sequence is caught up; of a waiting one, without regard to the cache."""
    return len(seq.tokens) - seq.num_computed


class PromptPlanner:
    """Gives prompts their part of a step, and admits waiting sequences. fixed_chunk: as in Scheduler."""

    def __init__(self, live: LiveSequences, memory: SequenceMemory, fixed_chunk: int, max_model_len: int) -> None:
        self.live, self.memory = live, memory
        self.fixed_chunk, self.max_model_len = fixed_chunk, max_model_len
        self.shares = PromptShares()
        self._blocked: tuple[Sequence | None, int] = (None, 0)  # a sequence without room, and how many blocks it takes

    def plan(self, builder: PlanBuilder, now: float) -> None:
        """Add chunks of the prompts of running sequences, and of waiting ones, which are admitted with their first chunk."""
        live, memory = self.live, self.memory
        candidates = list(live.prefilling)
        if (live.rows and not builder.is_pressed) or live.is_empty:
            limit = MAX_OVERTAKEN + len(live.rows)
            candidates += itertools.islice(live.queue.ordered(memory.num_available, limit), limit)
        is_shared = bool(builder.sequences) or len(candidates) > 1
        most = self.shares.max_tokens(is_shared=is_shared)
        if most is not None:
            builder.budget = min(builder.budget, max(most, self.fixed_chunk))
        is_blocked = self._blocked[0] in live.queue and memory.num_available < self._blocked[1]
        if not is_blocked:  # else sequences that overtake the blocked one could take its memory for ever
            candidates = self.shares.order(candidates, len(live.prefilling) + len(live.rows), builder.budget)
        can_admit = True
        for seq in candidates:
            if builder.budget < max(1, self.fixed_chunk):
                break
            if seq in live.prefilling:
                self._plan_chunk(seq, builder)
            elif can_admit and seq in live.queue and not self._must_wait(seq):
                can_admit = bool(live.rows) and (live.is_empty or not builder.is_pressed) and self._try_admit(seq, builder, now)

    def _plan_chunk(self, seq: Sequence, builder: PlanBuilder) -> None:
        """More tokens of a running sequence's prompt."""
        count = self._next_chunk(seq, builder.budget)
        count = self._make_room(seq, count, builder) if count else 0
        if count:
            self._give(seq, count, builder)

    def _next_chunk(self, seq: Sequence, budget: int) -> int:
        start, end = seq.num_computed, len(seq.tokens)
        if not self.fixed_chunk:
            return min(end - start, budget)
        if start < seq.num_prompt:
            end = min(start - start % self.fixed_chunk + self.fixed_chunk, seq.num_prompt)
        else:  # after a preemption: as it was computed before, one by one
            end = start + 1
        return end - start if end - start <= budget else 0

    def _make_room(self, seq: Sequence, count: int, builder: PlanBuilder) -> int:
        """Blocks for the next tokens of a prefill: how many tokens of `count` can be had."""
        live, memory, start = self.live, self.memory, seq.num_computed
        while True:
            held = len(seq.blocks)
            wanted = memory.num_blocks_for(start + count) - held
            if wanted <= 0 or memory.grow(seq, wanted):
                return count
            builder.is_pressed = True
            fitting = min(wanted, memory.num_available)
            count_fitting = (held + fitting) * self.memory.blocks.block_size - start
            if not self.fixed_chunk and count_fitting > 0 and memory.grow(seq, fitting):
                return min(count, count_fitting)
            if live.leaving:
                return 0
            victim = live.last_in_rank()
            if victim is not seq or live.num_running == 1:
                live.preempt(victim)
            if victim is seq:
                return 0

    def _give(self, seq: Sequence, count: int, builder: PlanBuilder) -> None:
        if builder.add_chunk(seq, count):
            self.live.catch_up(seq)

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether a waiting sequence needs its mask, or what another sequence is computing; one with a failed grammar ends."""
        if seq.mask is not None:
            if not seq.mask.done():
                return True
            if seq.mask.error is not None:
                self.live.end_by_mask(seq)
                return True
        return self.live.waits_for_another(seq)

    def _try_admit(self, seq: Sequence, builder: PlanBuilder, now: float) -> bool:
        memory, live = self.memory, self.live
        before = memory.num_available
        if self._blocked[0] is seq and before < self._blocked[1] and not live.is_empty:
            return False
        found = memory.look_up(seq)
        wanted = memory.num_blocks_wanted(seq, found) + self._num_reserved()
        if wanted > memory.num_available:
            if not live.is_empty:
                self._blocked = seq, wanted + before - memory.num_available
                memory.put_back(found)
                return False
            found = memory.without_match(found)  # a lone sequence fits into the empty pool: what it matched is in its way
        self._start(seq, found, builder, now)
        return True

    def _num_reserved(self) -> int:
        """Blocks that running sequences will soon want: the rest of their prompts, and about one for each decode."""
        memory, live = self.memory, self.live
        rest = sum(memory.num_blocks_for(len(seq.tokens)) - len(seq.blocks) for seq in live.prefilling)
        if self.memory.blocks.block_size >= self.max_model_len:  # a sequence never wants a second one
            return rest
        return rest + min(live.num_running, memory.blocks.num_total // 8)

    def _start(self, seq: Sequence, found: Found, builder: PlanBuilder, now: float) -> None:
        self.live.queue.remove(seq)
        builder.copies += self.live.start(seq, found, now)
        builder.started.append(seq)
        count = 0 if found.logits_handle else self._next_chunk(seq, builder.budget)
        wanted = self.memory.num_blocks_for(found.num_tokens + count) - len(seq.blocks)
        if wanted > 0 and not self.memory.grow(seq, wanted):
            raise InvariantError(f"{wanted} blocks were counted as available and are not.")
        self._give(seq, count, builder)
        self.live.stats.cached_logits_used += not count
