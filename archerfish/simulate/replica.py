"""A replica without a model: a real scheduler, prefix cache and digest, and steps that only take their time."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.digest import ModelDigest, PrefixDigest
from archerfish.cache.radix import RadixCache
from archerfish.route.router import Replica, ReplicaLoad
from archerfish.sched.plan import Plan
from archerfish.sched.scheduler import Scheduler
from archerfish.sequence import Request, Sequence
from archerfish.simulate.pace import BLOCK_TOKENS, Decodes, Pace
from archerfish.step import StepResult

ANSWER = 7  # every token of every answer
MODEL = "model"
QUEUE_SIZE = 1 << 30  # the simulation shows how long a queue gets


class PacedScheduler(Scheduler):
    """The scheduler, which can also take many steps at once in which sequences only get tokens."""

    @property
    def num_plain_steps(self) -> int:
        """Steps that would only bring a token to each running sequence, the last of none, if no request arrives."""
        live = self._live
        if not live.decoding or live.prefilling or live.leaving or (live.rows and live.queue.entries):
            return 0
        steps = min(seq.request.max_tokens - seq.num_emitted for seq in live.decoding) - 1
        wanted = sum(max(0, live.num_missing(seq, seq.num_computed + steps)) for seq in live.decoding)
        return steps if wanted <= live.num_available else 0

    def take_plain_steps(self, count: int) -> None:
        live = self._live
        answers = array("I", [ANSWER]) * count
        for seq in live.decoding:
            seq.tokens += answers
            seq.num_computed += count
            seq.num_emitted += count
            live.grow(seq, max(0, live.num_missing(seq, seq.num_computed)))
            if self.policy.counts_service:
                self.policy.charge(seq.request, count)
        num_tokens = count * len(live.decoding)
        live.num_held_tokens += num_tokens
        live.stats.total_tokens_generated += num_tokens
        live.stats.num_steps += count
        self._last_decodes = None

    @property
    def decodes(self) -> tuple[int, int]:
        """Running sequences that are caught up, and their context."""
        return len(self._live.decoding), sum(seq.num_computed for seq in self._live.decoding)


class PacedReplica:
    """One replica in virtual time. on_change is called with sequences that got their first token or ended.

    at: calls a function at a time. batches_steps=False takes every step by itself, which gives the same results.
    """

    def __init__(
        self,
        name: str,
        pace: Pace,
        secret: bytes,
        *,
        clock: Callable[[], float],
        at: Callable[..., None],
        on_change: Callable[[Sequence], None],
        policy: str = "fcfs",
        batches_steps: bool = True,
    ) -> None:
        self.name = name
        self.pace = pace
        self.secret = secret
        self.policy = policy
        self._clock = clock
        self._at = at
        self._on_change = on_change
        self._batches = batches_steps
        self.handles: list[Replica] = []  # of each router
        self.versions: list[int] = []  # of the digest, by router
        self.is_up = self.is_leaving = False
        self.busy_s = self.began_s = 0.0
        self._generation = 0  # of the step: an event of another one is void
        self._ended, self._ended_tokens = 0, 0
        self.begin()

    def begin(self) -> None:
        """Start with an empty cache."""
        clock, pace = self._clock, self.pace
        self.digest = PrefixDigest(self.secret)
        blocks = BlockManager(-(-pace.kv_tokens // BLOCK_TOKENS), BLOCK_TOKENS)
        self.cache = RadixCache(blocks, clock=clock, num_ghosts=0)
        self.cache.digest = ModelDigest(self.digest, MODEL)
        self.scheduler = PacedScheduler(
            blocks=blocks,
            cache=self.cache,
            policy=self.policy,
            max_num_seqs=pace.max_num_seqs,
            max_queue_size=QUEUE_SIZE,
            max_num_batched_tokens=pace.max_num_batched_tokens,
            max_model_len=pace.max_model_len,
            clock=clock,
        )
        self.is_up, self.began_s = True, clock()
        self.is_changed = True  # since the last report
        self._plan: Plan | None = None
        self._decodes: Decodes | None = None
        self._num_taken = 0  # of their steps
        self._generation += 1

    def stop(self) -> None:
        """The machine has gone. What ran there gets no tokens any more."""
        self.is_up = False
        self._generation += 1

    def add(self, request: Request) -> Sequence:
        """A request arrives. A step that runs ends as it was planned; steps behind it are planned anew."""
        if self._decodes is not None:
            count = self._decodes.num_begun(self._clock())
            self._take_steps(self._decodes.num_done(self._clock()))
            self._generation += 1
            self._at(self._decodes.end_s(count), self._end_decodes, self._generation, count)
        (seq,) = self.scheduler.add(request)
        self.is_changed = True
        if self._plan is None and self._decodes is None:
            self._step()
        return seq

    def report(self) -> ReplicaLoad:
        """What routers are told of the model."""
        if self._decodes is not None:
            self._take_steps(self._decodes.num_done(self._clock()))
        status, (num_decodes, context) = self.scheduler.queue_status(), self.scheduler.decodes
        step_s = self.pace.decode_s(num_decodes, context) if status["running"] else 0.0
        mean_tokens = self._ended_tokens / max(1, self._ended)
        self.is_changed = self.scheduler.has_work
        return ReplicaLoad(
            self.pace.prompt_token_s,
            step_s,
            status["running"],
            status["waiting"],
            self.pace.max_num_seqs,
            mean_tokens * step_s / self.pace.max_num_seqs,
            status["prompt_tokens_left"],
            self.policy == "fair-share",
            status["cache_use"],
        )

    def _step(self) -> None:
        """Begin what comes next."""
        now, scheduler = self._clock(), self.scheduler
        count = scheduler.num_plain_steps if self._batches else 0
        if count > 1:
            self._decodes, self._num_taken = Decodes(self.pace, now, *scheduler.decodes, count), 0
            self._at(self._decodes.end_s(count), self._end_decodes, self._generation, count)
            return
        self._plan = scheduler.plan()
        if self._plan is not None:
            step, num_prompt = self._plan.input, self._plan.num_prompt_tokens
            num_decodes = len(step.tokens) - num_prompt
            context = int(step.starts[:num_decodes].sum())
            seconds = num_prompt * self.pace.prompt_token_s + self.pace.decode_s(num_decodes, context)
            self.busy_s += seconds
            self._at(now + seconds, self._end_step, self._generation)

    def _end_step(self, generation: int) -> None:
        if generation != self._generation or self._plan is None:
            return
        plan, self._plan = self._plan, None
        self.scheduler.commit(plan, StepResult(np.full((len(plan.sequences), 1), ANSWER)))
        for delta in self.scheduler.take_deltas():
            seq = delta.sequence
            if delta.finish_reason is not None:
                self._ended += 1
                self._ended_tokens += seq.num_emitted
            if seq.num_emitted == 1 or delta.finish_reason is not None:
                self._on_change(seq)
        self._step()

    def _end_decodes(self, generation: int, count: int) -> None:
        if generation != self._generation or self._decodes is None:
            return
        self._take_steps(count)
        self.busy_s += self._clock() - self._decodes.began_s
        self._decodes = None
        self._step()

    def _take_steps(self, count: int) -> None:
        if count > self._num_taken:
            self.scheduler.take_plain_steps(count - self._num_taken)
            self._num_taken = count
