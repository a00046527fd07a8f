"""Which sequences run in the next step, and what a step has brought. Ids and counts only; not for several threads at
once.

Token catch-up: a sequence has tokens that are known and tokens that are computed, and a plan gives it a count. A step
may be planned while the one before it is in flight: planning counts its tokens as computed and its samples as pending,
and commit makes them real.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from archerfish.cache.adaptive import LogitsCache
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import HitRecord, RadixCache, RadixKey
from archerfish.errors import InputTooLargeError, InvalidInputError, InvariantError, TooManyRequestsError
from archerfish.sched.adapters import AdapterSlots
from archerfish.sched.cost import StepCost
from archerfish.sched.drafts import Speculation
from archerfish.sched.forecast import Forecast
from archerfish.sched.live import LiveSequences, SchedulerStats
from archerfish.sched.masks import MaskFinder
from archerfish.sched.plan import Plan, PlanBuilder, PromptPlanner, check_step_tokens
from archerfish.sched.policy import SchedulingPolicy, scheduling_policy
from archerfish.sched.view import cache_view
from archerfish.sequence import Delta, FinishReason, Namespace, Request, Sequence, Status
from archerfish.step import MOST_PENALISED_DRAFTS, StepResult

MAX_OPEN_STEPS = 2  # one in flight, one planned behind it


@dataclass(slots=True)
class OpenStep:
    """A step that is planned and not yet committed."""

    copied_blocks: list[int]  # held until the step is done
    planned_at: float


class Scheduler:
    """Turns requests into plans and results into deltas.

    `max_num_batched_tokens` must leave room for a token of every running sequence and for one chunk. `max_requests`
    bounds the requests that wait or run; 0: only the queue is bounded. `fixed_chunk`: chunks of a prompt end at its
    multiples, whatever else runs, so that results do not depend on other requests. `max_gap_s`: about how long a step
    with prompts may take. Without `plans_ahead` no step is planned while another one is in flight and there are
    prompts: where steps take long, a request that arrives is in the next step.
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
        max_requests: int = 0,
        fixed_chunk: int = 0,
        masks: MaskFinder | None = None,
        logits_row_bytes: int = 0,
        speculation: Speculation | None = None,
        adapters: AdapterSlots | None = None,
        max_gap_s: float = 0.25,
        plans_ahead: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_step_tokens(max_num_batched_tokens, max_num_seqs, fixed_chunk)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_queue_size, self.max_requests = max_queue_size, max_requests
        self.max_model_len = max_model_len
        self.fixed_chunk, self.plans_ahead = fixed_chunk, plans_ahead
        self.clock = clock
        self.policy = scheduling_policy(policy) if isinstance(policy, str) else policy
        self.blocks, self.cache = blocks, cache
        self.masks = masks or MaskFinder(0)
        self.speculation, self.adapters = speculation, adapters
        self.policy.bind(clock, lambda request: cache.peek(RadixKey(request.prompt_token_ids, request.namespace)))
        self._live = LiveSequences(
            blocks,
            cache,
            logits_cache,
            self.policy,
            model_state_hash=model_state_hash,
            max_num_seqs=max_num_seqs,
            fixed_chunk=fixed_chunk,
            logits_row_bytes=logits_row_bytes,
            clock=clock,
            adapters=adapters,
        )
        self.cost = StepCost()
        self.prompts = PromptPlanner(self._live, self.cost, fixed_chunk, max_model_len, max_gap_s)
        self.forecast = Forecast(self._live, self.prompts)
        self._arrivals = itertools.count()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._open: dict[int, OpenStep] = {}
        self._next_step, self._last_commit = 0, 0.0
        self._last_decodes: Plan | None = None  # the last plan, if it had decodes only
        self.tokens_done = 0, 0  # tokens of prompts that were computed, and tokens that came out, since the start

    def resize(self, max_num_batched_tokens: int, max_queue_size: int) -> None:
        """Other limits from now on. Requests that wait already stay, also where the queue is shorter now."""
        check_step_tokens(max_num_batched_tokens, self.max_num_seqs, self.fixed_chunk)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue_size = max_queue_size

    # Requests

    def add(self, request: Request) -> list[Sequence]:
        """Accept a request, or say at once why not. Each of its sequences will end with exactly one finish reason."""
        self.check(request)
        live = self._live
        is_queue_full = len(live.queued) >= self.max_queue_size
        if is_queue_full or 0 < self.max_requests <= len(live.requests):
            live.stats.refused_requests += 1
            if is_queue_full:
                raise TooManyRequestsError(f"The queue is full: {self.max_queue_size:,} requests wait.")
            raise TooManyRequestsError(f"{self.max_requests:,} requests run or wait, which is max_concurrent_requests.")
        request.arrival = now = self.clock()
        sequences = [Sequence(request, index) for index in range(request.params.n)]
        live.requests[request.request_id] = sequences
        live.queued.add(request.request_id)
        live.stats.total_requests += 1
        self.policy.arrived(request)
        for seq in sequences:
            seq.times.arrived = now
            seq.num_new -= seq.num_prompt if seq.index else self.cache.peek(RadixKey(seq.tokens, request.namespace))
            live.order[seq] = next(self._arrivals)
            live.queue.push(seq, live.order[seq])
            seq.draft = self.speculation.start(request) if self.speculation is not None else None
            if request.grammar is not None:
                self.masks.begin(seq)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, live.order[sequences[0]], request))
            if len(self._deadlines) > 2 * len(live.requests) + 1024:
                self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2])]
                heapq.heapify(self._deadlines)
        return sequences

    @property
    def has_room(self) -> bool:
        """Whether one more request can be added."""
        is_full = 0 < self.max_requests <= len(self._live.requests)
        return not is_full and len(self._live.queued) < self.max_queue_size

    def check(self, request: Request) -> None:
        """Raise what `add` would raise, whatever the state of the queue."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.max_tokens
        if not num_prompt:
            raise InvalidInputError("The prompt is empty.", hint="Give at least one token.")
        if max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, not {max_tokens}.")
        if request.request_id in self._live.requests:
            raise InvalidInputError(
                f"There is a live request {request.request_id!r}.", hint="Choose another request_id."
            )
        total, room = num_prompt + max_tokens, self.blocks.num_total * self.blocks.block_size
        wanted = f"{num_prompt:,} prompt tokens and max_tokens={max_tokens:,} make {total:,}"
        if total > self.max_model_len:
            raise InputTooLargeError(
                f"{wanted}; the longest sequence is {self.max_model_len:,}.",
                hint="Shorten the prompt or lower max_tokens.",
            )
        if total > room:
            raise InputTooLargeError(
                f"{wanted}; the whole memory holds {room:,}.",
                hint="Shorten the prompt, lower max_tokens, or give the engine more memory (max_cache_tokens).",
            )

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End all sequences of a request now. False: there is no such request, or it has ended."""
        sequences = self._live.requests.get(request_id)
        if sequences is None:
            return False
        for seq in list(sequences):
            self.finish(seq, reason)
        return True

    def finish(self, seq: Sequence, reason: FinishReason = "stop") -> bool:
        """End one sequence now (its text is complete); tokens still to come are dropped. False: it has ended
        already."""
        if seq.finish_reason is not None:
            return False
        self._live.end(seq, reason)
        return True

    def finish_one(self, request_id: str, index: int) -> bool:
        """The same by the index of a sequence in its request."""
        return any(self.finish(seq) for seq in list(self._live.requests.get(request_id, ())) if seq.index == index)

    def take_deltas(self) -> list[Delta]:
        """What has happened since the last call."""
        deltas, self._live.deltas = self._live.deltas, []
        return deltas

    def _is_live(self, request: Request) -> bool:
        sequences = self._live.requests.get(request.request_id)
        return sequences is not None and sequences[0].request is request

    # Planning

    def plan(self) -> Plan | None:
        """What to compute next; None: nothing can be, before a step is committed, a request arrives or a mask is
        found."""
        if len(self._open) >= MAX_OPEN_STEPS:
            raise InvariantError("plan() was called with two steps open.", hint="Commit the older one first.")
        live, now = self._live, self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self._is_live(request):
                self.abort(request.request_id, "deadline")
        has_prompts = bool(live.prefilling or (live.rows and live.queue.entries))
        if self._open and has_prompts and not self.plans_ahead:
            return None
        builder = PlanBuilder(self.max_num_batched_tokens)
        self._plan_decodes(builder)
        if builder.stalled:
            self._rescue(builder)
        if has_prompts:
            self.prompts.plan(builder, now)
        if self.policy.counts_service:
            self._charge(builder)
        keeps_logits = builder.chunks and live.logits_cache is not None
        plan = builder.build(self._next_step, self._last_decodes, live.handles if keeps_logits else None)
        self._last_decodes = None if builder.chunks else plan
        if plan is None:
            return None
        if live.dropped:
            plan.input.dropped = live.dropped[:]
            live.dropped.clear()
        self._open[self._next_step] = OpenStep([source for source, _ in builder.copies], self.clock())
        self._next_step += 1
        live.stats.num_steps += 1
        live.num_held_tokens += len(plan.input.tokens)
        share = live.num_held_tokens / (live.num_held_blocks * self.blocks.block_size)
        live.stats.kv_utilization += (share - live.stats.kv_utilization) / live.stats.num_steps
        return plan

    def _charge(self, builder: PlanBuilder) -> None:
        """Tell the policy what is computed for answers; prompts are charged when they are admitted."""
        for seq in builder.sequences:
            self.policy.charge(seq.request, 1)
        for seq, _, count, num_samples in builder.chunks:
            if num_samples > 1:  # the last token and its draft
                self.policy.charge(seq.request, count)

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        """The hot loop: one token for every sequence that is caught up."""
        block_size, grow = self.blocks.block_size, self._live.grow
        sequences = builder.sequences
        apart: tuple[list[Sequence], list[Sequence]] = [], []
        for seq in self._live.decoding:
            computed = seq.num_computed
            pending = seq.num_pending
            if pending:
                if computed >= seq.pending_limit:
                    continue
            else:
                builder.has_known_tokens = True
                if (seq.draft is not None or seq.mask is not None) and self._is_apart(seq, builder, *apart):
                    continue
            if computed >= len(seq.blocks) * block_size:
                if not grow(seq, 1):
                    builder.stalled.append(seq)
                    continue
                builder.grown.append(seq)
            seq.num_computed = computed + 1
            seq.num_pending = pending + 1
            seq.num_in_flight += 1
            sequences.append(seq)
        builder.budget -= len(sequences)
        if apart[0]:
            self._plan_drafts(builder, apart[0])
        for seq in apart[1]:
            self._live.end(seq, "error", error=seq.mask.error if seq.mask is not None else None)

    def _is_apart(self, seq: Sequence, builder: PlanBuilder, drafted: list[Sequence], failed: list[Sequence]) -> bool:
        """Whether a sequence is no plain decode: it waits for its mask or proposals, has some, or its grammar
        failed."""
        if self.speculation is not None and self.speculation.is_proposing(seq):
            return True
        if seq.mask is not None:
            self._begin_mask(seq, looks_ahead=seq.draft is not None)
            if not seq.mask.done():
                return True
            if seq.mask.error is not None:
                failed.append(seq)
                return True
            builder.has_masks = True
            if seq.draft is not None:
                seq.draft.tokens, seq.draft.is_forced = seq.mask.proposed, seq.mask.is_forced
        if seq.draft is not None and seq.draft.tokens:
            drafted.append(seq)
            return True
        if seq.num_sent < len(seq.blocks):  # states that a verified step left
            builder.grown.append(seq)
        return False

    def _begin_mask(self, seq: Sequence, *, looks_ahead: bool = False) -> None:
        """Find the tokens that the grammar of a sequence allows next, and behind its proposals if they are there."""
        draft = seq.draft
        if seq.request.grammar is not None and (draft is None or draft.job is None):
            most = self.speculation.room(seq) if looks_ahead and self.speculation is not None else 0
            self.masks.begin(seq, draft.tokens if draft is not None else (), most)

    def _plan_drafts(self, builder: PlanBuilder, drafted: list[Sequence]) -> None:
        """Decodes for which tokens are proposed: with as many of them as pay, where there is memory for them."""
        assert self.speculation is not None
        count = self.speculation.choose(len(builder.sequences), drafted, builder.budget - len(drafted))
        room = MOST_PENALISED_DRAFTS
        for seq in drafted:
            assert seq.draft is not None
            proposed = seq.draft.tokens[:count]
            if seq.request.params.has_penalties:
                proposed = proposed[:room]
                room -= len(proposed)
            seq.draft.tokens = proposed if proposed and self._live.make_room(seq, 1 + len(proposed)) else []
            if not count:
                self.speculation.pause(seq)
            if seq.draft.tokens:
                builder.add_draft(seq, len(proposed))
            elif (missing := self._live.num_missing(seq, seq.num_computed + 1)) <= 0 or self._live.grow(seq, missing):
                builder.add_decode(seq)
            else:
                builder.stalled.append(seq)

    def _rescue(self, builder: PlanBuilder) -> None:
        """Blocks for decodes that found none: those that are coming back, else those of the lowest priority and
        latest."""
        live = self._live
        builder.is_pressed = True
        num_coming = sum(live.leaving.values())
        for seq in sorted(builder.stalled, key=live.rank):
            while seq.status is Status.RUNNING:
                if live.grow(seq, 1):
                    builder.add_decode(seq)
                    break
                if num_coming > 0:
                    num_coming -= 1
                    break
                num_coming += live.preempt(live.last_in_rank())

    # Results

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Take in what a step has brought. Steps are committed in the order in which they were planned."""
        now = self.clock()
        live = self._live
        step = plan.input
        self._close(plan, now, is_done=True)
        # Sequences for which there is more to do than to add one token; decodes get one token each.
        special = {*result.logprobs, *result.prompt_logprobs, *result.errors, *step.masked, *step.returned}
        if plan.num_prompt_tokens or step.num_decodes < len(plan.sequences):
            special.update(np.flatnonzero(step.samples != 1).tolist())
        running, append = Status.RUNNING, live.deltas.append
        num_accepted = 0
        for index, (seq, new) in enumerate(zip(plan.sequences, result.tokens.tolist(), strict=True)):
            seq.num_in_flight -= 1
            if seq.status is running and index not in special:
                tokens = seq.tokens
                request = seq.request
                token = new[0]
                num_output = len(tokens) + 1 - seq.num_prompt
                if 1 < num_output < request.max_tokens and token not in request.stop_token_ids:
                    tokens.append(token)
                    seq.num_pending -= 1
                    seq.num_emitted = num_output
                    num_accepted += 1
                    append(Delta(seq, [token]))
                    continue
            self._settle(plan, result, index, now)
        live.stats.total_tokens_generated += num_accepted
        if self.speculation is not None:
            is_small = len(plan.sequences) <= self.speculation.max_sequences
            proposed = [seq for seq in plan.sequences if seq.draft is not None and seq.status is running]
            if is_small:
                self.speculation.look_ahead(proposed, len(plan.sequences) - len(proposed))
            for seq in proposed:
                if not is_small and not seq.pending_limit:
                    self.speculation.pause(seq)
                self._begin_mask(seq, looks_ahead=is_small)
        self.tokens_done = live.stats.prefill_tokens_computed, live.stats.total_tokens_generated
        if step.kept:
            live.dropped += [handle for _, handle in step.kept if handle not in live.stored]
            live.stored.clear()

    def _settle(self, plan: Plan, result: StepResult, index: int, now: float) -> None:
        """One sequence of a step, in full."""
        live = self._live
        seq = plan.sequences[index]
        step = plan.input
        num_samples, error = int(step.samples[index]), result.errors.get(index)
        seq.num_pending -= num_samples
        if seq.finish_reason is None and error is not None:
            live.end(seq, "error", error=error)
        elif seq.finish_reason is None:
            delta = Delta(seq, [])
            if index in result.prompt_logprobs and seq.index == 0:
                # After a preemption they are computed again, and must not be reported again.
                start, logprobs = int(step.starts[index]), result.prompt_logprobs[index]
                delta.prompt_logprobs = logprobs[max(0, seq.num_reported - start) :] or None
                seq.num_reported = max(seq.num_reported, start + len(logprobs))
            if num_samples and len(seq.tokens) == seq.num_prompt:
                delta.logits = result.logits.get(index)
                live.leaders.pop(seq, None)
                live.stats.prefill_seconds += now - seq.times.admitted
                live.stats.num_prefilled += 1
                seq.times.first_token = now
                seq.logits_handle = 0
                if step.counts[index]:
                    live.store_prompt(seq, dict(step.kept).get(index, 0))
            tokens = result.tokens[index, :num_samples].tolist()
            reason = self._add_tokens(delta, self._verify(seq, tokens) if num_samples > 1 else tokens)
            if index in result.logprobs:
                delta.logprobs = result.logprobs[index][: len(delta.token_ids)]
            if reason is not None:
                live.end(seq, reason, delta=delta)
            elif num_samples or delta.prompt_logprobs is not None:
                live.deltas.append(delta)
                if num_samples and seq.draft is None:
                    self._begin_mask(seq)
        if seq.row >= 0 and seq.status is not Status.RUNNING and not seq.num_in_flight:
            live.release(seq)

    def _verify(self, seq: Sequence, drawn: list[int]) -> list[int]:
        """The drawn tokens that count; what was computed for proposals that were not accepted is forgotten."""
        assert self.speculation is not None
        live, tokens = self._live, self.speculation.verify(seq, drawn)
        num_rejected = len(drawn) - len(tokens)
        seq.num_computed -= num_rejected
        if seq.draft is not None and seq.draft.states:
            live.keep_states(seq, seq.num_computed - len(tokens), len(tokens))
        live.num_held_tokens -= num_rejected
        live.stats.num_drafts += 1
        live.stats.num_draft_tokens += len(drawn) - 1
        live.stats.num_accepted_tokens += len(tokens) - 1
        return tokens

    def _add_tokens(self, delta: Delta, tokens: list[int]) -> FinishReason | None:
        """Add sampled tokens to their sequence, up to the one that ends it."""
        seq, request = delta.sequence, delta.sequence.request
        for token in tokens:
            seq.tokens.append(token)
            delta.token_ids.append(token)
            self._live.stats.total_tokens_generated += 1
            seq.num_emitted = len(seq.tokens) - seq.num_prompt
            if token in request.stop_token_ids and seq.num_emitted > request.params.min_tokens:
                return "stop"
            if seq.num_emitted >= request.max_tokens:
                return "length"
        return None

    def fail(self, plan: Plan, error: BaseException) -> None:
        """A step has raised: its sequences end with "error", nothing of it enters the tree, others go on."""
        self._close(plan, self.clock(), is_done=False)
        live, step = self._live, plan.input
        for seq, start, samples in zip(plan.sequences, step.starts.tolist(), step.samples.tolist(), strict=True):
            seq.num_in_flight -= 1
            seq.num_pending -= samples
            if seq.num_computed > start:  # what the step was to compute cannot be trusted
                live.num_held_tokens -= seq.num_computed - start
                seq.num_computed = start
            live.drop_states(seq)
            if seq.finish_reason is None:
                live.end(seq, "error", error=error)
            if seq.row >= 0 and not seq.num_in_flight:
                live.release(seq)
        live.dropped += [handle for _, handle in step.kept] + step.dropped  # maybe it failed before it dropped them

    def _close(self, plan: Plan, now: float, *, is_done: bool) -> None:
        number = plan.input.step
        if next(iter(self._open), None) != number:
            raise InvariantError(f"Step {number} is committed, but open are {list(self._open)}.")
        step = self._open.pop(number)
        self.blocks.free(step.copied_blocks)
        seconds = now - max(step.planned_at, self._last_commit)
        self._last_commit = now
        if not is_done:
            return
        num_prompt = plan.num_prompt_tokens
        num_output = len(plan.input.tokens) - num_prompt
        self._live.stats.prefill_tokens_computed += num_prompt
        self.cost.observe(num_prompt, num_output, seconds, plan.num_pairs)
        if self.speculation is not None and num_output and not num_prompt:
            self.speculation.times.add(num_output, seconds)

    # Figures

    @property
    def has_work(self) -> bool:
        """Whether requests are alive or steps open."""
        return bool(self._live.requests or self._open)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those among them that were preempted and are still leaving."""
        return len(self._live.order) - self._live.num_running

    @property
    def num_running(self) -> int:
        return self._live.num_running

    def stats(self) -> SchedulerStats:
        """Counters since the start, and gauges now."""
        live = self._live
        return dataclasses.replace(
            live.stats,
            queue_size=len(live.queued),
            queue_capacity=self.max_queue_size,
            num_waiting=self.num_waiting,
            concurrent_requests=len(live.requests) - len(live.queued),
            num_running=self.num_running,
        )

    def queue_status(self) -> dict[str, Any]:
        """What waits and what runs: requests in the queue and its capacity, sequences in all and for each tenant."""
        live = self._live
        return {
            "queued_requests": len(live.queued),
            "capacity": self.max_queue_size,
            "live_requests": len(live.requests),
            "waiting": self.num_waiting,
            "running": self.num_running,
            "max_running": self.max_num_seqs,
            "tenants": live.counts_by_tenant(),
            "prompt_tokens_left": live.prompts_left(),
            "cache_use": 1 - live.blocks.num_free / live.blocks.num_total,
        }

    def view(self, tenant: str, *, sees_all: bool) -> dict[str, Any]:
        return cache_view(self._live, tenant, self.clock(), sees_all=sees_all)

    def explain(self, token_ids: SequenceOf[int], namespace: Namespace) -> HitRecord:
        """What the cache would do for a prompt if it were admitted now, and why; changes nothing."""
        key, logits_cache = RadixKey(token_ids, namespace), self._live.logits_cache
        has_logits = logits_cache is not None and self._live.logits_key(key) in logits_cache
        return self.cache.explain(key, limit=len(token_ids) - (not has_logits))

    def wait(self) -> None:
        """Wait for what keeps sequences from being planned: proposals of a draft model, or masks."""
        for seq in list(self._live.decoding):  # others may abort meanwhile
            if seq.draft is not None and (job := seq.draft.job) is not None:
                job.tokens(seq)
                return
        self.masks.wait()

    def close(self) -> None:
        """Give the memory of a draft model back."""
        if self.speculation is not None and self.speculation.model is not None:
            self.speculation.model.close()
