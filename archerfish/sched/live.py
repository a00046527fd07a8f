"""Every live sequence: where it stands (waiting, running, leaving), which blocks it holds, and what the cache keeps of
them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from archerfish.cache.adaptive import CacheKey, LogitsCache, state_hash_of
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import Match, RadixCache, RadixKey
from archerfish.errors import InvariantError
from archerfish.sched.adapters import AdapterSlots
from archerfish.sched.policy import SchedulingPolicy, queue_for
from archerfish.sequence import Delta, FinishReason, Sequence, Status

NUM_REMEMBERED = 64  # answers over which the used share of max_tokens is averaged


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
    num_drafts: int = 0  # speculation: steps of sequences that verified proposed tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these
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
    def avg_queue_time_ms(self) -> float:
        return 1e3 * self.queue_seconds / max(1, self.num_admitted)

    @property
    def avg_prefill_time_ms(self) -> float:
        return 1e3 * self.prefill_seconds / max(1, self.num_prefilled)

    @property
    def avg_decode_time_ms(self) -> float:
        return 1e3 * self.decode_seconds / max(1, self.num_decoded)


class LiveSequences:
    """A sequence waits, runs, and ends. What a step in flight may touch (blocks, the row) is given back only after it.

    While a running sequence is in a step in flight, ending or preempting it makes it a leaving one: it keeps its blocks
    and its row until `release`, which the scheduler calls when the last of its steps is done.

    A sequence owns a reference to each of its blocks. It locks the node up to which its tokens are in the tree, or the
    root: a lock on the root protects nothing, but shows whether the cache was cleared meanwhile. Where a block is a
    state, the last block of a sequence, which still changes, never goes into the tree and is never copied.
    """

    def __init__(
        self,
        blocks: BlockManager,
        cache: RadixCache,
        logits_cache: LogitsCache | None,
        policy: SchedulingPolicy,
        *,
        model_state_hash: str,
        max_num_seqs: int,
        fixed_chunk: int,
        logits_row_bytes: int,
        clock: Callable[[], float],
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.blocks = blocks
        self.cache = cache
        self.policy = policy
        self.adapters = adapters
        self.queue = queue_for(policy)
        self.prefilling: dict[Sequence, None] = {}  # running, with tokens to catch up on, by admission
        self.decoding: dict[Sequence, None] = {}  # running, caught up
        self.leaving: dict[Sequence, int] = {}  # -> blocks that it holds
        self.leaders: dict[Sequence, int] = {}  # running, the prompt not yet in the tree -> tokens taken from the cache
        self.requests: dict[str, list[Sequence]] = {}  # all sequences of requests that have not ended
        self.queued: set[str] = set()  # requests of which nothing has been admitted
        self.order: dict[Sequence, int] = {}  # every live sequence with its number in the order of arrival
        self.num_rows = max_num_seqs
        self.rows = list(range(max_num_seqs))  # free ones, a heap
        self.used_share = 1.0  # of max_tokens, the mean of the last answers
        self._num_answers = 0
        self.deltas: list[Delta] = []
        self.stats = SchedulerStats()
        self.num_held_tokens = 0  # of sequences that hold blocks
        self.num_held_blocks = 0
        self.min_shared_tokens = 2 * blocks.block_size  # of a prompt that others wait for
        self._logits_cache = logits_cache  # of handles: the runner keeps the logits themselves
        self._row_bytes, self._model_state_hash = logits_row_bytes, model_state_hash
        self.handles = itertools.count(1)
        self.stored: set[int] = set()  # handles that the step being committed has stored
        self.dropped: list[int] = []  # handles that nothing will ask for any more
        if logits_cache is not None:
            logits_cache.on_drop = self.dropped.append
        self._clock = clock
        self._block_size, self._fixed_chunk = blocks.block_size, fixed_chunk
        self._kept_step = blocks.block_size if cache.whole_blocks else 1  # the tree takes multiples of so many tokens
        # Where a match may end: where chunks do, and the cache's own rule must hold as well.
        self._match_step = math.lcm(fixed_chunk, self._kept_step) if fixed_chunk else 1

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence holds memory."""
        return not (self.prefilling or self.decoding or self.leaving)

    @property
    def logits_cache(self) -> LogitsCache | None:
        """None where it could not keep anything: it lives with the tree, and both may be turned off while sequences
        run."""
        cache = self._logits_cache
        return cache if cache is not None and cache.max_bytes and self.cache.is_enabled else None

    @property
    def num_available(self) -> int:
        return self.blocks.num_free + self.cache.num_evictable

    @property
    def num_needed(self) -> int:
        """Blocks that neither are free nor can be evicted."""
        return self.blocks.num_total - self.num_available

    def holders(self) -> Iterator[Sequence]:
        """The sequences that hold blocks."""
        return itertools.chain(self.prefilling, self.decoding, self.leaving)

    def num_shared_blocks(self, seq: Sequence) -> int:
        """How many of a sequence's blocks, the first ones, are those of the tree that it keeps from being evicted."""
        node = seq.node
        if node.is_stale or not node.blocks:
            return 0
        last = -(-node.end // self._block_size) - 1
        return last + 1 if seq.blocks[last : last + 1] == node.blocks[-1:] else int(node.end // self._block_size)

    def counts_by_tenant(self) -> dict[str, dict[str, int]]:
        """Sequences that wait, and that run."""
        tenants: dict[str, dict[str, int]] = {}
        for seq in self.order:
            counts = tenants.setdefault(seq.request.namespace.tenant, {"waiting": 0, "running": 0})
            counts["running" if seq.status is Status.RUNNING else "waiting"] += 1
        return tenants

    def prompts_left(self) -> dict[str, int]:
        """Prompt tokens that are still to be computed, by tenant."""
        found: dict[str, int] = {}
        for seq in itertools.chain(self.prefilling, self.queue.entries):
            left = seq.num_prompt - seq.num_computed if seq.status is Status.RUNNING else seq.num_new
            if left > 0:
                tenant = seq.request.namespace.tenant
                found[tenant] = found.get(tenant, 0) + left
        return found

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence needs for so many tokens, less those that it holds."""
        return -(-num_tokens // self._block_size) - len(seq.blocks)

    def grow(self, seq: Sequence, num_blocks: int) -> bool:
        """Give a sequence blocks; false: too few can be had."""
        blocks = self.allocate(num_blocks)
        seq.blocks += blocks or ()
        self.num_held_blocks += len(blocks or ())
        return blocks is not None

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks of the free list and of what the cache can spare; None: too few."""
        short = num_blocks - self.blocks.num_free
        if short > 0 and (short > self.cache.num_evictable or self.cache.evict(short) < short):
            return None
        return self.blocks.allocate(num_blocks)

    def make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for tokens that a step verifies; false: too few can be had."""
        assert seq.draft is not None
        if self.cache.whole_blocks:
            seq.draft.states = self.allocate(num_tokens) or []
            return bool(seq.draft.states)
        missing = self.num_missing(seq, seq.num_computed + num_tokens)
        return missing <= 0 or self.grow(seq, missing)

    def keep_states(self, seq: Sequence, start: int, num_tokens: int) -> None:
        """A step has left a state behind each of its tokens from `start` on, of which so many count: the last state,
        and those at the ends of blocks, take their places in the sequence."""
        assert seq.draft is not None
        states = seq.draft.states
        size = self._block_size
        end = start + num_tokens
        first = start // size
        kept = [states[min((place + 1) * size, end) - start - 1] for place in range(first, -(-end // size))]
        before = seq.blocks[first:]
        seq.blocks[first:] = kept
        seq.draft.states = []
        self.blocks.free([*before, *(block for block in states if block not in kept)])
        self.num_held_blocks += len(kept) - len(before)
        seq.num_sent = min(seq.num_sent, first)

    def drop_states(self, seq: Sequence) -> None:
        """A step that was to leave states behind proposed tokens has failed."""
        if seq.draft is not None:
            self.blocks.free(seq.draft.states)
            seq.draft.states = []

    # Changes

    def look_up(self, seq: Sequence) -> Match:
        """The longest prefix that may be taken from the cache, whose node ends with it and is locked. Where logits were
        kept too, it is all of the sequence, which has their handle then."""
        request, num_known = seq.request, len(seq.tokens)
        key = RadixKey(seq.tokens, request.namespace)
        limit = num_known - 1
        if request.params.prompt_logprobs is not None and seq.index == 0:
            limit = min(limit, seq.num_reported)
        handle, logits_cache = 0, self.logits_cache
        if logits_cache is not None and num_known == seq.num_prompt and limit == num_known - 1:
            handle = logits_cache.get(self.logits_key(key)) or 0
            limit += handle > 0
        if self._fixed_chunk:
            limit = min(limit, seq.num_prompt)
        match = self.cache.match_prefix(key, limit=limit, counts=seq.hit is None)
        if not seq.num_preemptions:
            seq.hit = match.record
        if match.num_tokens < num_known:
            handle = 0
            match.num_tokens -= match.num_tokens % self._match_step
        if match.num_tokens < match.node.end:  # cut the node there, so that no more is locked than is used
            key = RadixKey(seq.tokens[: match.num_tokens], request.namespace)
            match.node = self.cache.insert(key, match.blocks, handle=match.node)
        self.cache.lock(match.node)
        seq.logits_handle = handle
        return match

    def logits_key(self, key: RadixKey) -> CacheKey:
        """The key of the logits behind all tokens of another key."""
        return CacheKey(key, len(key.tokens), state_hash_of(self._model_state_hash, key.namespace))

    def start(self, seq: Sequence, found: Match, now: float) -> list[tuple[int, int]]:
        """A waiting sequence runs, with what was found. Returns the block to copy, (from, to), where that ends inside
        one.

        The source of the copy gets one more owner: free it when the step is done. One block must be available.
        """
        self.queue.remove(seq)
        seq.row = heapq.heappop(self.rows)
        if seq.request.adapter and self.adapters is not None:
            seq.adapter_slot = self.adapters.enter(seq.request.adapter)
        seq.status = Status.RUNNING
        self.prefilling[seq] = None
        num_full, rest = divmod(found.num_tokens, self._block_size)
        seq.node = found.node
        seq.num_computed = found.num_tokens
        seq.blocks = found.blocks[:num_full]
        self.blocks.share(seq.blocks)
        self.num_held_blocks += num_full
        self.num_held_tokens += found.num_tokens
        num_new = len(seq.tokens) - found.num_tokens
        seq.leader, seq.num_waits = None, 0
        if not seq.num_emitted and num_new >= self.min_shared_tokens:
            self.leaders[seq] = found.num_tokens
        if not seq.num_preemptions:
            seq.num_cached = found.num_tokens
            seq.times.admitted = now
            self.stats.queue_seconds += now - seq.times.arrived
            self.stats.num_admitted += 1
            self.queued.discard(seq.request.request_id)
            if self.policy.counts_service:
                self.policy.charge(seq.request, num_new)
        if not rest:
            return []
        source = found.blocks[num_full]
        self.blocks.share((source,))
        if not self.grow(seq, 1):
            raise InvariantError("A sequence was admitted without a block for the one to copy.")
        return [(source, seq.blocks[-1])]

    def store_prompt(self, seq: Sequence, handle: int) -> None:
        """The prompt is computed: others may have it now, and its logits if they were kept under a handle."""
        cache, num_tokens = self.cache, seq.num_prompt - seq.num_prompt % self._kept_step
        if not cache.is_enabled or seq.node.is_stale or not num_tokens:
            return
        key = RadixKey(seq.tokens[:num_tokens], seq.request.namespace)
        num_blocks = -(-num_tokens // self._block_size)
        node = cache.insert(key, seq.blocks[:num_blocks], handle=seq.node)
        # Where the tree had the prompt from elsewhere, locking it would keep blocks that this sequence does not use.
        if node.blocks[-1] == seq.blocks[num_blocks - 1]:
            cache.lock(node)
            cache.unlock(seq.node)
            seq.node = node
        logits_cache = self.logits_cache if handle and num_tokens == seq.num_prompt else None
        if logits_cache is not None and logits_cache.insert(self.logits_key(key), handle, self._row_bytes, node):
            self.stored.add(handle)

    def preempt(self, seq: Sequence) -> int:
        """Send a running sequence back to wait at its old place. Returns how many blocks come only after its step in
        flight."""
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.release(seq)
        return self.leaving.get(seq, 0)

    def end(
        self, seq: Sequence, reason: FinishReason, *, delta: Delta | None = None, error: BaseException | None = None
    ) -> None:
        """The one place where a sequence gets its finish reason."""
        delta = Delta(seq, []) if delta is None else delta
        delta.finish_reason = seq.finish_reason = reason
        delta.error = seq.error = error
        self.deltas.append(delta)
        stats, request = self.stats, seq.request
        seq.times.finished = self._clock()
        if seq.num_emitted:
            stats.decode_seconds += seq.times.finished - seq.times.first_token
            stats.num_decoded += 1
        if reason in ("stop", "length"):
            self._num_answers = min(NUM_REMEMBERED, self._num_answers + 1)
            share = min(1.0, seq.num_emitted / request.most_output)
            self.used_share += (share - self.used_share) / self._num_answers
        was, seq.status = seq.status, Status.FINISHED
        if was is Status.RUNNING:
            self.release(seq)
        elif seq.row < 0:
            self.queue.remove(seq)
        del self.order[seq]
        reasons = {other.finish_reason for other in self.requests[request.request_id]}
        if None in reasons:
            return
        del self.requests[request.request_id]
        self.queued.discard(request.request_id)
        self.policy.left(request)
        if reasons & {"error", "deadline"}:
            stats.failed_requests += 1
        elif "abort" in reasons:
            stats.aborted_requests += 1
        else:
            stats.completed_requests += 1

    def release(self, seq: Sequence) -> None:
        """Take back blocks and row of a sequence that runs no longer; the tree keeps what is computed.

        If a step in flight uses them, the sequence leaves: this must be called again when that is done.
        """
        self.prefilling.pop(seq, None)
        self.decoding.pop(seq, None)
        self.leaders.pop(seq, None)
        if seq.num_in_flight:
            self.leaving[seq] = len(seq.blocks)
            return
        if seq.draft is not None and seq.draft.states:  # it was ended while a step verified proposals
            start = len(seq.tokens) - 1
            self.num_held_tokens -= seq.num_computed - start - 1
            seq.num_computed = start + 1
            self.keep_states(seq, start, 1)
        num_tokens = min(seq.num_computed, len(seq.tokens))
        if self._fixed_chunk:  # what came one by one would be computed in chunks by another, with other roundings
            num_tokens = min(num_tokens, seq.num_prompt)
        num_tokens -= num_tokens % self._kept_step
        if num_tokens and self.cache.is_enabled and not seq.node.is_stale and seq.finish_reason != "error":
            key = RadixKey(seq.tokens[:num_tokens], seq.request.namespace)
            self.cache.insert(key, seq.blocks[: -(-num_tokens // self._block_size)], handle=seq.node)
        self.cache.unlock(seq.node)
        self.blocks.free(seq.blocks)
        self.num_held_tokens -= seq.num_computed
        self.num_held_blocks -= len(seq.blocks)
        seq.blocks, seq.node = [], None
        seq.logits_handle = seq.num_sent = seq.num_computed = 0
        self.leaving.pop(seq, None)
        heapq.heappush(self.rows, seq.row)
        seq.row = -1
        if seq.adapter_slot and self.adapters is not None:
            self.adapters.leave(seq.request.adapter)
            seq.adapter_slot = 0
        if seq.status is Status.WAITING:
            self.queue.push(seq, self.order[seq])

    # Reading

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """The order in which sequences keep their memory: higher priority, then earlier arrival."""
        return -seq.request.priority, self.order[seq]

    def last_in_rank(self) -> Sequence:
        """The running sequence that is preempted first."""
        return max(itertools.chain(self.prefilling, self.decoding), key=self.rank)
