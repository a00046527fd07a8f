"""Who runs in the next step, and what a step has brought. Ids and counts only; not for several threads at once.

Token catch-up: a sequence has tokens that are known and tokens that are computed, and a plan gives it a count. A step may be
planned while the one before it is in flight: planning counts its tokens as computed and its samples as pending, and commit
makes them real.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.logits_cache import LogitsCache
from archerfish.cache.radix import HitRecord, RadixCache
from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError, InvariantError, OverloadedError
from archerfish.sched.board import Board
from archerfish.sched.draft import Draft
from archerfish.sched.memory import Found, SequenceMemory
from archerfish.sched.policy import SchedulingPolicy, scheduling_policy
from archerfish.sched.stats import SchedulerStats
from archerfish.sequence import (
    Delta,
    FinishReason,
    Namespace,
    Plan,
    Request,
    Sequence,
    Status,
    StepResult,
    TokenLogprobs,
)

MAX_OPEN_STEPS = 2  # one in flight, one planned behind it
MAX_SKIPPED = 64  # waiting sequences that are passed over in one plan


class Scheduler:
    """Turns requests into plans and results into deltas.

    `max_num_batched_tokens` must leave room for one chunk beside a token for every running sequence. `fixed_chunk`: chunks of a
    prompt end at its multiples, whatever else runs, so that results do not depend on the company.
    """

    def __init__(
        self,
        *,
        blocks: BlockManager,
        cache: RadixCache,
        logits_cache: LogitsCache | None = None,
        model_state_hash: str = "",
        policy: SchedulingPolicy | str = "fcfs",
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_queue_size: int,
        max_model_len: int,
        fixed_chunk: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_step_tokens(max_num_batched_tokens, max_num_seqs, fixed_chunk)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue_size = max_queue_size
        self.max_model_len = max_model_len
        self.fixed_chunk = fixed_chunk
        self.policy = scheduling_policy(policy) if isinstance(policy, str) else policy
        self.blocks, self.cache = blocks, cache
        self._memory = SequenceMemory(blocks, cache, logits_cache, model_state_hash, fixed_chunk)
        self.policy.bind(clock, self._memory.num_cached)
        self._board = Board(self._memory, self.policy, max_num_seqs, max_queue_size, clock)
        self.clock = clock
        self._block_size = blocks.block_size
        self._deadlines: list[tuple[float, int, Request]] = []
        self._open: dict[int, list[int]] = {}  # planned steps, and the blocks that they copy from
        self._open_prefill_tokens: dict[int, int] = {}  # prefill tokens of planned steps, counted when the step is committed
        self._blocked: tuple[Sequence | None, int] = (None, 0)  # who could not be admitted, and how many blocks it takes
        self._num_told: dict[Sequence, int] = {}  # prompt logprobs handed out
        self._next_step = 0

    def resize(self, max_num_batched_tokens: int, max_queue_size: int) -> None:
        """Other limits from now on. Requests that wait already stay, also where the queue is shorter now."""
        check_step_tokens(max_num_batched_tokens, self.max_num_seqs, self.fixed_chunk)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue_size = self._board.stats.queue_capacity = max_queue_size

    # Requests

    def add(self, request: Request) -> list[Sequence]:
        """Accept a request, or say at once why not. Each of its sequences will end with exactly one finish reason."""
        self.check(request)
        if len(self._board.queued) >= self.max_queue_size:
            self._board.stats.refused_requests += 1
            raise OverloadedError(f"The queue is full: {self.max_queue_size:,} requests wait.")
        sequences = self._board.add(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._board.order[sequences[0]], request))
            if len(self._deadlines) > 2 * len(self._board.live) + 1024:
                self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2])]
                heapq.heapify(self._deadlines)
        return sequences

    def check(self, request: Request) -> None:
        """Raise what `add` would raise, whatever the state of the queue."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.max_tokens
        if not num_prompt:
            raise InvalidInputError("The prompt is empty.", hint="Give at least one token.")
        if max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, not {max_tokens}.")
        if request.request_id in self._board.live:
            raise InvalidInputError(f"There is a live request {request.request_id!r}.", hint="Choose another request_id.")
        total, pool = num_prompt + max_tokens, self._memory.blocks.num_total
        wish = f"{num_prompt:,} prompt tokens and max_tokens={max_tokens:,} make {total:,}"
        if total > self.max_model_len:
            raise InputTooLargeError(
                f"{wish}; the longest sequence is {self.max_model_len:,}.", hint="Shorten the prompt or lower max_tokens."
            )
        if self._memory.num_blocks_for(total) > pool:
            raise InputTooLargeError(
                f"{wish}; the whole memory holds {pool * self._block_size:,}.",
                hint="Shorten the prompt, lower max_tokens, or give the engine more memory (max_cache_tokens).",
            )

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End all sequences of a request now. False: there is no such request, or it has ended."""
        sequences = self._board.live.get(request_id)
        if sequences is None:
            return False
        for seq in list(sequences):
            self.finish(seq, reason)
        return True

    def finish(self, seq: Sequence, reason: FinishReason = "stop") -> bool:
        """End one sequence now (its text is complete); tokens still to come are dropped. False: it has ended already."""
        if seq.finish_reason is not None:
            return False
        self._end(seq, reason)
        return True

    def finish_one(self, request_id: str, index: int) -> bool:
        """The same by the index of a sequence in its request."""
        return any(self.finish(seq) for seq in list(self._board.live.get(request_id, ())) if seq.index == index)

    def take_deltas(self) -> list[Delta]:
        """What has happened since the last call."""
        deltas, self._board.deltas = self._board.deltas, []
        return deltas

    def _is_live(self, request: Request) -> bool:
        sequences = self._board.live.get(request.request_id)
        return sequences is not None and sequences[0].request is request

    # Planning

    def plan(self) -> Plan | None:
        """What to compute next; None: nothing can be, before a step is committed, a request arrives or a mask is found."""
        if len(self._open) >= MAX_OPEN_STEPS:
            raise InvariantError("plan() was called with two steps open.", hint="Commit the older one first.")
        board = self._board
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self._is_live(request):
                self.abort(request.request_id, "deadline")
        draft = Draft(self.max_num_batched_tokens)
        self._plan_decodes(draft)
        if draft.stalled:
            self._rescue(draft)
        if board.prefilling:
            self._plan_prefills(draft)
        if board.rows and len(board.queue) and (board.is_empty or not draft.is_pressed):
            self._admit(draft, now)
        return self._seal(draft)

    def _plan_decodes(self, draft: Draft) -> None:
        """The hot loop: one token for every sequence that is caught up."""
        block_size, grow = self._block_size, self._memory.grow
        sequences, starts = draft.sequences, draft.starts
        for seq in self._board.decoding:
            computed = seq.num_computed
            pending = seq.num_pending
            if pending:
                request = seq.request
                if request.needs_host_token or computed + 1 - seq.num_prompt >= request.max_tokens:
                    continue
            elif seq.mask is not None and not seq.mask.done():
                continue
            if computed >= len(seq.blocks) * block_size and not grow(seq, 1):
                draft.stalled.append(seq)
                continue
            seq.num_computed = computed + 1
            seq.num_pending = pending + 1
            seq.num_in_flight += 1
            sequences.append(seq)
            starts.append(computed)
        draft.budget -= len(sequences)

    def _rescue(self, draft: Draft) -> None:
        """Blocks for decodes that found none: those that are coming back, else those of the lowest priority and latest."""
        board = self._board
        draft.is_pressed = True
        num_coming = sum(board.leaving.values())
        for seq in sorted(draft.stalled, key=board.rank):
            while seq.status is Status.RUNNING:
                if self._memory.grow(seq, 1):
                    draft.add_decode(seq)
                    break
                if num_coming > 0:
                    num_coming -= 1
                    break
                num_coming += board.preempt(board.last_in_rank())

    def _plan_prefills(self, draft: Draft) -> None:
        for seq in list(self._board.prefilling):
            if seq.status is not Status.RUNNING:
                continue
            count = self._next_chunk(seq, draft.budget)
            if not count:
                break
            count = self._make_room(seq, count, draft)
            if count:
                self._give(seq, count, draft)

    def _next_chunk(self, seq: Sequence, budget: int) -> int:
        start, end = seq.num_computed, len(seq.tokens)
        if not self.fixed_chunk:
            return min(end - start, budget)
        if start < seq.num_prompt:
            end = min(start - start % self.fixed_chunk + self.fixed_chunk, seq.num_prompt)
        else:  # after a preemption: as it was computed before, one by one
            end = start + 1
        return end - start if end - start <= budget else 0

    def _make_room(self, seq: Sequence, count: int, draft: Draft) -> int:
        """Blocks for the next tokens of a prefill: how many tokens of `count` can be had."""
        board, memory, start = self._board, self._memory, seq.num_computed
        while True:
            held = len(seq.blocks)
            wanted = memory.num_blocks_for(start + count) - held
            if wanted <= 0 or memory.grow(seq, wanted):
                return count
            draft.is_pressed = True
            fitting = min(wanted, memory.num_available)
            count_fitting = (held + fitting) * self._block_size - start
            if not self.fixed_chunk and count_fitting > 0 and memory.grow(seq, fitting):
                return min(count, count_fitting)
            if board.leaving:
                return 0
            victim = board.last_in_rank()
            if victim is not seq or board.num_running == 1:
                board.preempt(victim)
            if victim is seq:
                return 0

    def _give(self, seq: Sequence, count: int, draft: Draft) -> None:
        if draft.add_chunk(seq, count):
            self._board.catch_up(seq)

    def _seal(self, draft: Draft) -> Plan | None:
        memory, stats = self._memory, self._board.stats
        if self.policy.counts_service:
            for seq in draft.sequences:
                self.policy.charge(seq.request, 1)
        num_decodes = len(draft.sequences)
        plan = draft.seal(self._next_step, keeps_logits=memory.logits_cache is not None)
        if plan is None:
            return None
        self._open[plan.step] = [source for source, _ in plan.copies]
        self._next_step += 1
        stats.num_steps += 1
        self._open_prefill_tokens[plan.step] = plan.num_tokens - num_decodes
        memory.num_held_tokens += plan.num_tokens
        share = memory.num_held_tokens / (memory.num_held_blocks * self._block_size)
        stats.kv_utilization += (share - stats.kv_utilization) / stats.num_steps
        return plan

    # Admission

    def _admit(self, draft: Draft, now: float) -> None:
        board = self._board
        admitted: list[Sequence] = []
        num_skipped = 0
        for seq in board.queue.ordered(self._memory.num_available, MAX_SKIPPED + len(board.rows)):
            if not board.rows or draft.budget < max(1, self.fixed_chunk):
                break
            if board.waits_for_another(seq):
                num_skipped += 1
                if num_skipped >= MAX_SKIPPED:
                    break
            elif self._try_admit(seq, draft, now):
                admitted.append(seq)
            else:
                break
        for seq in admitted:
            board.queue.remove(seq)

    def _try_admit(self, seq: Sequence, draft: Draft, now: float) -> bool:
        memory, board = self._memory, self._board
        before = memory.num_available
        if self._blocked[0] is seq and before < self._blocked[1] and not board.is_empty:
            return False
        found = memory.look_up(seq, self._num_told.get(seq, 0))
        wanted = memory.num_blocks_wanted(seq, found) + self._num_reserved()
        if wanted > memory.num_available:
            if not board.is_empty:
                self._blocked = seq, wanted + before - memory.num_available
                memory.put_back(found)
                return False
            found = memory.without_match(found)  # a lone sequence fits into the empty pool: what it matched is in its way
        self._start(seq, found, draft, now)
        return True

    def _num_reserved(self) -> int:
        """Blocks that running sequences will soon want: the rest of their prompts, and about one for each decode."""
        memory, board = self._memory, self._board
        rest = sum(memory.num_blocks_for(len(seq.tokens)) - len(seq.blocks) for seq in board.prefilling)
        if self._block_size >= self.max_model_len:  # a sequence never wants a second one
            return rest
        return rest + min(board.num_running, memory.blocks.num_total // 8)

    def _start(self, seq: Sequence, found: Found, draft: Draft, now: float) -> None:
        draft.copies += self._board.start(seq, found, now)
        count = self._next_chunk(seq, draft.budget) if found.logits is None else 0
        wanted = self._memory.num_blocks_for(found.num_tokens + count) - len(seq.blocks)
        if wanted > 0 and not self._memory.grow(seq, wanted):
            raise InvariantError(f"{wanted} blocks were counted as available and are not.")
        self._give(seq, count, draft)
        self._board.stats.cached_logits_used += not count

    # Results

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take in what a step has brought. Steps are committed in the order in which they were planned."""
        self._board.stats.prefill_tokens_computed += self._close(plan)
        now = self.clock()
        running, append = Status.RUNNING, self._board.deltas.append
        special = _special(result)
        num_accepted = 0
        for index, (seq, token, samples) in enumerate(zip(plan.sequences, result.tokens, plan.samples, strict=True)):
            seq.num_in_flight -= 1
            if samples and seq.status is running and index not in special:
                tokens, request = seq.tokens, seq.request
                num_output = len(tokens) + 1 - seq.num_prompt
                if 1 < num_output < request.max_tokens and token not in request.stop_token_ids:
                    tokens.append(token)
                    seq.num_pending -= 1
                    seq.num_emitted = num_output
                    num_accepted += 1
                    append(Delta(seq, [token]))
                    continue
            self._settle(plan, result, index, now)
        self._board.stats.total_tokens_generated += num_accepted

    def _settle(self, plan: Plan, result: StepResult, index: int, now: float) -> None:
        """One sequence of a step, in full."""
        seq = plan.sequences[index]
        seq.num_pending -= plan.samples[index]
        if seq.finish_reason is None:
            error = result.errors.get(index)
            if error is not None:
                self._end(seq, "error", error=error)
            else:
                self._accept(plan, result, index, now)
        if seq.row >= 0 and seq.status is not Status.RUNNING and not seq.num_in_flight:
            self._board.release(seq)

    def _accept(self, plan: Plan, result: StepResult, index: int, now: float) -> None:
        seq = plan.sequences[index]
        delta = Delta(seq, [])
        if index in result.prompt_logprobs:
            self._tell_prompt(delta, plan.starts[index], result.prompt_logprobs[index])
        if not plan.samples[index]:
            if delta.prompt_logprobs is not None:
                self._board.deltas.append(delta)
            return
        token, request = result.tokens[index], seq.request
        seq.tokens.append(token)
        delta.token_ids.append(token)
        if index in result.logprobs:
            delta.logprobs = [result.logprobs[index]]
        self._board.stats.total_tokens_generated += 1
        num_output = seq.num_emitted = len(seq.tokens) - seq.num_prompt
        if num_output == 1:
            if request.wants_logits and seq.index == 0:
                delta.logits = result.logits.get(index, seq.cached_logits)
            self._first_token(seq, now, is_computed=plan.counts[index] > 0, logits=result.logits.get(index))
        if token in request.stop_token_ids and num_output > request.params.min_tokens:
            self._end(seq, "stop", delta=delta)
        elif num_output >= request.max_tokens:
            self._end(seq, "length", delta=delta)
        else:
            self._board.deltas.append(delta)

    def _first_token(self, seq: Sequence, now: float, *, is_computed: bool, logits: Any) -> None:
        board = self._board
        board.sharing.stop(seq)
        board.stats.prefill_seconds += now - seq.times.admitted
        board.stats.num_prefilled += 1
        seq.times.first_token = now
        seq.cached_logits = None
        if is_computed:
            self._memory.store_prompt(seq, logits)

    def _tell_prompt(self, delta: Delta, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Prompt logprobs, of the first sequence only, and none twice where a preemption made them be computed again."""
        seq = delta.sequence
        fresh = logprobs[max(0, self._num_told.get(seq, 0) - start) :]
        if fresh and seq.index == 0 and seq.request.params.prompt_logprobs is not None:
            self._num_told[seq] = start + len(logprobs)
            delta.prompt_logprobs = fresh

    def fail(self, plan: Plan, error: BaseException) -> None:
        """A step has raised: its sequences end with "error", nothing of it enters the tree, others go on."""
        self._close(plan)
        for seq, start, samples in zip(plan.sequences, plan.starts, plan.samples, strict=True):
            seq.num_in_flight -= 1
            seq.num_pending -= samples
            self._memory.forget_computed(seq, start)
            if seq.finish_reason is None:
                self._end(seq, "error", error=error)
            if seq.row >= 0 and not seq.num_in_flight:
                self._board.release(seq)

    def _close(self, plan: Plan) -> int:
        """Remove a step from the open ones; returns its number of prefill tokens."""
        if next(iter(self._open), None) != plan.step:
            raise InvariantError(f"Step {plan.step} is committed, but open are {list(self._open)}.")
        self._memory.blocks.free(self._open.pop(plan.step))
        return self._open_prefill_tokens.pop(plan.step)

    def _end(
        self, seq: Sequence, reason: FinishReason, *, delta: Delta | None = None, error: BaseException | None = None
    ) -> None:
        self._num_told.pop(seq, None)
        self._board.end(seq, reason, delta=delta, error=error)

    # Figures

    @property
    def has_work(self) -> bool:
        """Whether requests are alive or steps open."""
        return bool(self._board.live or self._open)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, the preempted among them."""
        return self._board.num_waiting

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has been admitted."""
        return len(self._board.queued)

    @property
    def num_running(self) -> int:
        return self._board.num_running

    @property
    def tokens_done(self) -> tuple[int, int]:
        """Tokens of prompts that were computed, and tokens that came out, since the start."""
        stats = self._board.stats
        return stats.prefill_tokens_computed, stats.total_tokens_generated

    def stats(self) -> SchedulerStats:
        """Counters since the start, and gauges now."""
        return self._board.snapshot()

    def queue_status(self) -> dict[str, Any]:
        """Who waits and who runs: requests in the queue and its capacity, sequences in all and for each tenant."""
        return self._board.queue_status()

    def explain(self, token_ids: SequenceOf[int], namespace: Namespace) -> HitRecord:
        """What the cache would do for a prompt if it were admitted now, and why; changes nothing."""
        return self._memory.explain(token_ids, namespace)

    def owned_blocks(self) -> list[list[int]]:
        """The blocks of every sequence that holds some, and those that open steps copy from: for RadixCache.check."""
        board = self._board
        holders = itertools.chain(board.prefilling, board.decoding, board.leaving)
        return [list(seq.blocks) for seq in holders] + [list(sources) for sources in self._open.values()]


def check_step_tokens(max_num_batched_tokens: int, max_num_seqs: int, fixed_chunk: int) -> None:
    least = max_num_seqs + max(1, fixed_chunk)
    if max_num_batched_tokens < least:
        raise InvalidOptionError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least {least} with {max_num_seqs} sequences: "
            f"one token for each, and {max(1, fixed_chunk)} for a prompt.",
            hint="Raise max_num_batched_tokens or lower max_num_seqs.",
        )


def _special(result: StepResult) -> frozenset[int] | set[int]:
    """Sequences of which a result says more than a token."""
    if not (result.logprobs or result.prompt_logprobs or result.errors):
        return frozenset()
    return {*result.logprobs, *result.prompt_logprobs, *result.errors}
