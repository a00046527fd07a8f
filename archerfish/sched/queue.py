"""Sequences that wait, in the order of a policy."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from archerfish.sched.policy import SchedulingPolicy
from archerfish.sequence import Request, Sequence

Entry = tuple[Any, int, Sequence]  # key, order of arrival, sequence


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue. It must not change while `ordered` is being read."""

    def push(self, seq: Sequence, order: int) -> None:
        """`order` is unique and grows with arrival; a sequence that comes back brings its old one."""

    def remove(self, seq: Sequence) -> None: ...

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        """At most the first `limit` sequences (of each group)."""

    def __iter__(self) -> Iterator[Sequence]: ...

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

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

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

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._orders)

    def __len__(self) -> int:
        return len(self._orders)


def queue_for(policy: SchedulingPolicy) -> WaitingQueue:
    has_own_schedule = type(policy).schedule is not SchedulingPolicy.schedule
    return GroupedQueue(policy) if policy.is_static and not has_own_schedule else PolicyQueue(policy)
