"""Where every live sequence stands (waiting, running, leaving) and how it moves from one to the next."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from archerfish.sched.memory import Found, SequenceMemory
from archerfish.sched.policy import SchedulingPolicy
from archerfish.sched.queue import PrefixSharing, queue_for
from archerfish.sequence import Delta, FinishReason, Request, Sequence, Status


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and gauges at the moment of asking. Seconds are sums over sequences."""

    total_requests: int = 0
    completed_requests: int = 0  # every sequence ended with "stop" or "length"
    failed_requests: int = 0  # one ended with "error" or "deadline"
    aborted_requests: int = 0
    refused_requests: int = 0  # for want of room in the queue; not in the total
    total_tokens_generated: int = 0
    prefill_tokens_computed: int = 0
    cached_logits_used: int = 0  # first tokens that cost no forward pass
    num_preemptions: int = 0
    num_steps: int = 0
    queue_seconds: float = 0.0  # arrival to first admission
    num_admitted: int = 0
    prefill_seconds: float = 0.0  # first admission to first token
    num_prefilled: int = 0
    decode_seconds: float = 0.0  # first token to end
    num_decoded: int = 0
    kv_utilization: float = 0.0  # tokens held / room in the blocks held by running sequences: mean over steps
    queue_size: int = 0  # requests of which nothing has been admitted
    queue_capacity: int = 0
    concurrent_requests: int = 0
    num_waiting: int = 0  # sequences
    num_running: int = 0

    @property
    def avg_queue_ms(self) -> float:
        return 1e3 * self.queue_seconds / max(1, self.num_admitted)

    @property
    def avg_prefill_ms(self) -> float:
        return 1e3 * self.prefill_seconds / max(1, self.num_prefilled)

    @property
    def avg_decode_ms(self) -> float:
        return 1e3 * self.decode_seconds / max(1, self.num_decoded)


class LiveSequences:
    """A sequence waits, runs, and ends. What a step in flight may touch (blocks, the row) is given back only after it.

    While a running sequence is in a step in flight, ending or preempting it makes it a leaving one: it keeps its blocks and
    its row until `release`, which the scheduler calls when the last of its steps is done.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        max_queue_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.memory = memory
        self.policy = policy
        self.queue = queue_for(policy)
        self.prefilling: dict[Sequence, None] = {}  # running, with tokens to catch up on, by admission
        self.decoding: dict[Sequence, None] = {}  # running, caught up
        self.leaving: dict[Sequence, int] = {}  # -> blocks that it holds
        self.requests: dict[str, list[Sequence]] = {}  # all sequences of requests that have not ended
        self.queued: set[str] = set()  # requests of which nothing has been admitted
        self.order: dict[Sequence, int] = {}  # every live sequence with its number in the order of arrival
        self.rows = list(range(max_num_seqs))  # free ones, a heap
        self.sharing = PrefixSharing(2 * memory.blocks.block_size)
        self.deltas: list[Delta] = []
        self.stats = SchedulerStats(queue_capacity=max_queue_size)
        self.max_num_seqs = max_num_seqs
        self._clock = clock
        self._arrivals = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences, those among them that were preempted and are still leaving."""
        return len(self.order) - self.num_running

    @property
    def is_empty(self) -> bool:
        """Whether no sequence holds memory."""
        return not (self.prefilling or self.decoding or self.leaving)

    # Changes

    def add(self, request: Request) -> list[Sequence]:
        request.arrival = now = self._clock()
        sequences = [Sequence(request, index) for index in range(request.params.n)]
        self.requests[request.request_id] = sequences
        self.queued.add(request.request_id)
        self.policy.arrived(request)
        for seq in sequences:
            seq.times.arrived = now
            self.order[seq] = next(self._arrivals)
            self.queue.push(seq, self.order[seq])
        self.stats.total_requests += 1
        return sequences

    def start(self, seq: Sequence, found: Found, now: float) -> list[tuple[int, int]]:
        """A waiting sequence runs. Returns the block to copy, if any. The caller takes it out of the queue."""
        copies = self.memory.adopt(seq, found)
        seq.row = heapq.heappop(self.rows)
        seq.status = Status.RUNNING
        self.prefilling[seq] = None
        if not seq.num_emitted:
            self.sharing.start(seq, found.num_tokens)
        if not seq.num_preemptions:
            seq.num_cached = found.num_tokens
            seq.times.admitted = now
            self.stats.queue_seconds += now - seq.times.arrived
            self.stats.num_admitted += 1
            self.queued.discard(seq.request.request_id)
            self.policy.charge(seq.request, len(seq.tokens) - found.num_tokens)
        return copies

    def catch_up(self, seq: Sequence) -> None:
        """All its tokens are computed, or planned to be."""
        self.prefilling.pop(seq, None)
        self.decoding[seq] = None

    def preempt(self, seq: Sequence) -> int:
        """Send a running sequence back to wait at its old place. Returns how many blocks come only after its step in flight."""
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        return self._depart(seq)

    def end(
        self, seq: Sequence, reason: FinishReason, *, delta: Delta | None = None, error: BaseException | None = None
    ) -> None:
        """The one place where a sequence gets its finish reason."""
        delta = Delta(seq, []) if delta is None else delta
        delta.finish_reason = seq.finish_reason = reason
        delta.error = seq.error = error
        self.deltas.append(delta)
        seq.times.finished = self._clock()
        if seq.num_emitted:
            self.stats.decode_seconds += seq.times.finished - seq.times.first_token
            self.stats.num_decoded += 1
        was, seq.status = seq.status, Status.FINISHED
        if was is Status.RUNNING:
            self._depart(seq)
        elif seq.row < 0:
            self.queue.remove(seq)
        del self.order[seq]
        self.sharing.forget(seq)
        self._end_request(seq.request)

    def end_by_mask(self, seq: Sequence) -> None:
        """End a sequence whose grammar allows no token, or has failed."""
        assert seq.mask is not None
        self.end(seq, "error", error=seq.mask.error)

    def _depart(self, seq: Sequence) -> int:
        self.prefilling.pop(seq, None)
        self.decoding.pop(seq, None)
        self.sharing.stop(seq)
        if seq.num_in_flight:
            self.leaving[seq] = len(seq.blocks)
            return len(seq.blocks)
        self.release(seq)
        return 0

    def release(self, seq: Sequence) -> None:
        """Take back blocks and row of a sequence that runs no longer and is in no step."""
        self.leaving.pop(seq, None)
        self.memory.release(seq, keeps=seq.finish_reason != "error")
        heapq.heappush(self.rows, seq.row)
        seq.row = -1
        if seq.status is Status.WAITING:
            self.queue.push(seq, self.order[seq])

    def _end_request(self, request: Request) -> None:
        reasons = {seq.finish_reason for seq in self.requests[request.request_id]}
        if None in reasons:
            return
        del self.requests[request.request_id]
        self.queued.discard(request.request_id)
        self.policy.left(request)
        if reasons & {"error", "deadline"}:
            self.stats.failed_requests += 1
        elif "abort" in reasons:
            self.stats.aborted_requests += 1
        else:
            self.stats.completed_requests += 1

    # Reading

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """The order in which sequences keep their memory: higher priority, then earlier arrival."""
        return -seq.request.priority, self.order[seq]

    def last_in_rank(self) -> Sequence:
        """The running sequence that is preempted first."""
        return max(itertools.chain(self.prefilling, self.decoding), key=self.rank)

    def waits_for_another(self, seq: Sequence) -> bool:
        """Whether another sequence is just computing what this one could take from the cache."""
        if not self.memory.cache.is_enabled:
            return False
        first = self.requests[seq.request.request_id][0]
        if first is not seq and first.finish_reason is None and not first.num_emitted:
            return True
        return self.sharing.must_wait(seq)

    def snapshot(self) -> SchedulerStats:
        return dataclasses.replace(
            self.stats,
            queue_size=len(self.queued),
            concurrent_requests=len(self.requests) - len(self.queued),
            num_waiting=self.num_waiting,
            num_running=self.num_running,
        )

    def queue_status(self) -> dict[str, Any]:
        tenants: dict[str, dict[str, int]] = {}
        for seq in self.order:
            counts = tenants.setdefault(seq.request.namespace.tenant, {"waiting": 0, "running": 0})
            counts["running" if seq.status is Status.RUNNING else "waiting"] += 1
        return {
            "queued_requests": len(self.queued),
            "capacity": self.stats.queue_capacity,
            "live_requests": len(self.requests),
            "waiting": self.num_waiting,
            "running": self.num_running,
            "max_running": self.max_num_seqs,
            "tenants": tenants,
        }
