"""Sequences that wait: in the order of a policy, or for another sequence that computes the same prefix."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from archerfish.sched.policy import SchedulingPolicy
from archerfish.sequence import Request, Sequence

Entry = tuple[Any, int, Sequence]  # key, order of arrival, sequence
MAX_LEADERS = 16  # running sequences that a waiting one is compared with
MAX_WAITS = 4  # times that one sequence waits for another


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue. It must not change while `ordered` is being read."""

    def push(self, seq: Sequence, order: int) -> None:
        """`order` is unique and grows with arrival; a sequence that comes back brings its old one."""

    def remove(self, seq: Sequence) -> None: ...

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        """At most the first `limit` sequences (of each group)."""

    def __contains__(self, seq: object) -> bool: ...

    def __len__(self) -> int: ...


class GroupedQueue:
    """For static keys: a sorted list per group, each change O(log n) and a short memmove; groups are compared when read."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, list[Entry]] = {}
        self._entries: dict[Sequence, tuple[Hashable, Entry]] = {}

    def push(self, seq: Sequence, order: int) -> None:
        request = seq.request
        group = self._policy.group(request)
        entry = (self._policy.key(request, request.arrival), order, seq)
        bisect.insort(self._groups.setdefault(group, []), entry)
        self._entries[seq] = group, entry

    def remove(self, seq: Sequence) -> None:
        group, entry = self._entries.pop(seq)
        entries = self._groups[group]
        del entries[bisect.bisect_left(entries, entry)]
        if not entries:
            del self._groups[group]

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        if len(self._groups) == 1:
            (entries,) = self._groups.values()
            for entry in entries[:limit]:
                yield entry[2]
            return
        group_key = self._policy.group_key
        heads = [(group_key(group), *entries[0][:2], group, 0) for group, entries in self._groups.items()]
        heapq.heapify(heads)
        while heads:
            _, _, _, group, index = heapq.heappop(heads)
            entries = self._groups[group]
            yield entries[index][2]
            index += 1
            if index < min(limit, len(entries)):
                heapq.heappush(heads, (group_key(group), *entries[index][:2], group, index))

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class PolicyQueue:
    """For keys that change: the policy orders the waiting requests anew each time."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._requests: list[tuple[int, Request]] = []  # by arrival
        self._sequences: dict[Request, list[tuple[int, Sequence]]] = {}
        self._first: dict[Request, int] = {}  # under which order a request stands
        self._orders: dict[Sequence, int] = {}

    def push(self, seq: Sequence, order: int) -> None:
        request = seq.request
        if request not in self._sequences:
            self._sequences[request] = []
            self._first[request] = order
            bisect.insort(self._requests, (order, request), key=lambda entry: entry[0])
        bisect.insort(self._sequences[request], (order, seq))
        self._orders[seq] = order

    def remove(self, seq: Sequence) -> None:
        request = seq.request
        sequences = self._sequences[request]
        sequences.remove((self._orders.pop(seq), seq))
        if not sequences:
            del self._sequences[request]
            order = self._first.pop(request)
            del self._requests[bisect.bisect_left(self._requests, order, key=lambda entry: entry[0])]

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        for request in self._policy.schedule([request for _, request in self._requests], available_blocks):
            for _, seq in self._sequences.get(request, ()):
                yield seq

    def __contains__(self, seq: object) -> bool:
        return seq in self._orders

    def __len__(self) -> int:
        return len(self._orders)


def queue_for(policy: SchedulingPolicy) -> WaitingQueue:
    has_own_schedule = type(policy).schedule is not SchedulingPolicy.schedule
    return GroupedQueue(policy) if policy.is_static and not has_own_schedule else PolicyQueue(policy)


class PrefixSharing:
    """Of many prompts that begin alike and arrive together, one is computed and the others take its KV from the cache.

    A sequence waits if a leader (running, its prompt not yet in the tree) will have at least half of what it must compute.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._leaders: dict[Sequence, int] = {}  # -> tokens that it took from the cache
        self._behind: dict[Sequence, tuple[Sequence, int]] = {}  # the leader that a sequence waits for, and its number of waits

    def start(self, seq: Sequence, num_cached: int) -> None:
        """An admitted sequence begins to compute its prompt."""
        self._behind.pop(seq, None)
        if len(seq.tokens) - num_cached >= self._min_tokens:
            self._leaders[seq] = num_cached

    def stop(self, seq: Sequence) -> None:
        """Its prompt is in the tree, or it runs no longer."""
        self._leaders.pop(seq, None)

    def forget(self, seq: Sequence) -> None:
        self._behind.pop(seq, None)

    def must_wait(self, seq: Sequence) -> bool:
        if not self._leaders:
            return False
        leader, num_waits = self._behind.get(seq, (None, 0))
        if leader in self._leaders:
            return True
        if num_waits >= MAX_WAITS or (seq.request.params.prompt_logprobs is not None and seq.index == 0):
            return False
        for index, (candidate, num_cached) in enumerate(self._leaders.items()):
            if index == MAX_LEADERS:
                break
            if self._gains(seq, candidate, num_cached):
                self._behind[seq] = candidate, num_waits + 1
                return True
        return False

    def _gains(self, seq: Sequence, leader: Sequence, num_cached: int) -> bool:
        ours, theirs = seq.tokens, leader.tokens
        end = num_cached + max(self._min_tokens, (len(ours) - num_cached) // 2)
        if end >= len(ours) or end > leader.num_prompt or seq.request.namespace != leader.request.namespace:
            return False
        return ours[num_cached] == theirs[num_cached] and ours[:end] == theirs[:end]
