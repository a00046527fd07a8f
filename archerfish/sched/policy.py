"""The order in which requests run, and the queues that keep it. A policy is a key function; users can register their
own."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

from archerfish.errors import InvalidOptionError, refuse_unknown
from archerfish.sequence import Request, Sequence

Entry = tuple[Any, int, Sequence]  # key, order of arrival, sequence


class SchedulingPolicy:
    """Base of all policies: first come, first served. Override `key`, or `schedule` for full control.

    Requests that are equal by key run in order of arrival. With `is_static` the key must depend on the request alone:
    it is asked for once, on arrival, so that a step costs the same however many wait. Otherwise `schedule` is called
    whenever there is room for one more.
    """

    is_static: ClassVar[bool] = False
    counts_service: ClassVar[bool] = False  # whether `charge` is called for every token

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.num_cached: Callable[[Request], int] = lambda request: 0

    def bind(self, clock: Callable[[], float], num_cached: Callable[[Request], int]) -> None:
        """Called by the scheduler with its clock, and with a way to ask how many tokens of a prompt are cached."""
        self.clock = clock
        self.num_cached = num_cached

    def key(self, request: Request, now: float) -> Any:
        """Lower runs first."""
        return request.arrival

    def group(self, request: Request) -> Hashable:
        """Requests of one group are ordered by `key`; groups among each other by `group_key`, which may change at any
        time."""
        return None

    def group_key(self, group: Hashable) -> float:
        return 0.0

    def schedule(self, requests: SequenceOf[Request], available_blocks: int) -> list[Request]:
        """The waiting requests in the order in which to admit them; those left out are not admitted now."""
        now = self.clock()
        return sorted(requests, key=lambda r: (self.group_key(self.group(r)), self.key(r, now)))

    def price(self, group: Hashable, num_tokens: float) -> float:
        """By how much tokens raise the `group_key` of a group."""
        return 0.0

    def arrived(self, request: Request) -> None:
        """A request was accepted."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens are being computed for a request."""

    def left(self, request: Request) -> None:
        """A request has ended."""


class FirstComeFirstServed(SchedulingPolicy):
    is_static = True


class PriorityFirst(SchedulingPolicy):
    """Higher `Request.priority` first, then arrival."""

    is_static = True

    def key(self, request: Request, now: float) -> tuple[int, float]:
        return -request.priority, request.arrival


class EarliestDeadlineFirst(SchedulingPolicy):
    """Earliest deadline first; requests without one last, by arrival."""

    is_static = True

    def key(self, request: Request, now: float) -> tuple[float, float]:
        return math.inf if request.deadline is None else request.deadline, request.arrival


class LongestPrefixFirst(SchedulingPolicy):
    """What the cache knows most of first, so that it is used before it is evicted.

    Of the `window` oldest requests at most `max_lookups` are looked up per call, those looked up longest ago first. A
    request that has waited `patience_s` goes before all others, so that none starves.
    """

    def __init__(self, *, window: int = 256, max_lookups: int = 16, patience_s: float = 10.0) -> None:
        super().__init__()
        self.window = window
        self.max_lookups = max_lookups
        self.patience_s = patience_s
        self._cached: dict[str, int] = {}  # by request id, least recently looked up first

    def key(self, request: Request, now: float) -> tuple[int, int, float]:
        if now - request.arrival >= self.patience_s:
            return 0, 0, request.arrival
        return 1, -self._cached.get(request.request_id, 0), request.arrival

    def schedule(self, requests: SequenceOf[Request], available_blocks: int) -> list[Request]:
        cached, window = self._cached, {request.request_id: request for request in requests[: self.window]}
        fresh = [request_id for request_id in window if request_id not in cached][: self.max_lookups]
        stale = [request_id for request_id in cached if request_id in window][: self.max_lookups - len(fresh)]
        for request_id in fresh + stale:
            cached.pop(request_id, None)
            cached[request_id] = self.num_cached(window[request_id])
        return super().schedule(requests[: self.window], available_blocks) + list(requests[self.window :])

    def left(self, request: Request) -> None:
        self._cached.pop(request.request_id, None)


class FairShare(SchedulingPolicy):
    """The tenant that was served least first; within a tenant higher `Request.priority` first, then arrival.

    Service is counted in tokens computed, divided by the tenant's weight (1 unless given). A tenant that comes back
    starts no lower than the least served of those present: being idle earns nothing.
    """

    is_static = True
    counts_service = True
    MAX_IDLE_TENANTS = 1024

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.weights: dict[str, float] = {}
        self.set_weights(weights or {})
        self._served: dict[str, float] = {}
        self._num_present: dict[str, int] = {}  # live requests of tenants that have any
        self._floor = 0.0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights, by the tenant of a request's namespace, for what is served from now on."""
        for tenant, weight in weights.items():
            if not weight > 0 or not math.isfinite(weight):
                raise InvalidOptionError(f"The weight of tenant {tenant!r} must be above 0, not {weight!r}.")
        self.weights = dict(weights)

    def key(self, request: Request, now: float) -> tuple[int, float]:
        return -request.priority, request.arrival

    def group(self, request: Request) -> str:
        return request.namespace.tenant

    def group_key(self, group: Hashable) -> float:
        served = self._served.get(str(group), 0.0)
        if group in self._num_present:
            return served
        self._raise_floor()
        return max(served, self._floor)

    def price(self, group: Hashable, num_tokens: float) -> float:
        return num_tokens / self.weights.get(str(group), 1.0)

    def arrived(self, request: Request) -> None:
        tenant = request.namespace.tenant
        self._served[tenant] = self.group_key(tenant)
        self._num_present[tenant] = self._num_present.get(tenant, 0) + 1

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = request.namespace.tenant
        self._served[tenant] += self.price(tenant, num_tokens)

    def left(self, request: Request) -> None:
        tenant = request.namespace.tenant
        self._raise_floor()
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant]
            if len(self._served) > 2 * len(self._num_present) + self.MAX_IDLE_TENANTS:
                # Of those that are gone, keep the counters for which it matters most: of the ones served most.
                idle = sorted(
                    (one for one in self._served if one not in self._num_present), key=self._served.__getitem__
                )
                for one in idle[: -self.MAX_IDLE_TENANTS // 2]:
                    del self._served[one]

    def _raise_floor(self) -> None:
        if self._num_present:
            self._floor = max(self._floor, min(self._served[tenant] for tenant in self._num_present))


_POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "longest-prefix-first": LongestPrefixFirst,
    "deadline": EarliestDeadlineFirst,
    "fair-share": FairShare,
}


def register_scheduling_policy(name: str, cls: type[SchedulingPolicy]) -> None:
    """Make a policy of one's own known by a name. It is made without arguments, once per scheduler."""
    if not isinstance(cls, type) or not issubclass(cls, SchedulingPolicy):
        raise InvalidOptionError(f"A scheduling policy must be a subclass of SchedulingPolicy, not {cls!r}.")
    if _POLICIES.get(name, cls) is not cls:
        raise InvalidOptionError(f"There is already a scheduling policy {name!r}.", hint="Choose another name.")
    _POLICIES[name] = cls


def scheduling_policy(name: str) -> SchedulingPolicy:
    """A new policy of that name."""
    refuse_unknown([name], _POLICIES, "scheduling policy")
    return _POLICIES[name]()


class GroupedQueue:
    """The sequences that wait, for static keys: a sorted list per group, each change O(log n) and a short memmove.

    Groups are compared when read. The queue must not change while `ordered` is being read.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, list[Entry]] = {}
        self.entries: dict[Sequence, tuple[Hashable, Entry]] = {}

    def push(self, seq: Sequence, order: int) -> None:
        """`order` is unique and grows with arrival; a sequence that comes back brings its old one."""
        request = seq.request
        group = self._policy.group(request)
        entry = (self._policy.key(request, request.arrival), order, seq)
        bisect.insort(self._groups.setdefault(group, []), entry)
        self.entries[seq] = group, entry

    def remove(self, seq: Sequence) -> None:
        group, entry = self.entries.pop(seq)
        entries = self._groups[group]
        del entries[bisect.bisect_left(entries, entry)]
        if not entries:
            del self._groups[group]

    def ahead(self, request: Request) -> list[Sequence]:
        """The sequences that would be admitted before a new request."""
        policy, group = self._policy, self._policy.group(request)
        key = policy.key(request, request.arrival)
        found = [entry[2] for entry in itertools.takewhile(lambda entry: entry[0] <= key, self._groups.get(group, ()))]
        limit = policy.group_key(group) + policy.price(group, sum(seq.num_new for seq in found))
        for other, entries in list(self._groups.items()):
            at = policy.group_key(other)
            for entry in entries if other != group else ():
                if at > limit:
                    break
                found.append(entry[2])
                at += policy.price(other, entry[2].num_new)
        return found

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        """At most the first `limit` sequences (of each group)."""
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


class PolicyQueue:
    """The same for keys that change: the policy orders the waiting requests anew each time."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.entries: dict[Sequence, int] = {}  # -> order of arrival, rising

    def push(self, seq: Sequence, order: int) -> None:
        last = next(reversed(self.entries.values()), -1)
        self.entries[seq] = order
        if order < last:
            self.entries = dict(sorted(self.entries.items(), key=lambda entry: entry[1]))

    def remove(self, seq: Sequence) -> None:
        del self.entries[seq]

    def ahead(self, request: Request) -> list[Sequence]:
        """All, because a new request may change the order."""
        return list(self.entries)

    def ordered(self, available_blocks: int, limit: int) -> Iterator[Sequence]:
        waiting: dict[Request, list[Sequence]] = {}
        for seq in self.entries:
            waiting.setdefault(seq.request, []).append(seq)
        for request in self._policy.schedule(list(waiting), available_blocks):
            yield from waiting.get(request, ())


def queue_for(policy: SchedulingPolicy) -> GroupedQueue | PolicyQueue:
    has_own_schedule = type(policy).schedule is not SchedulingPolicy.schedule
    return GroupedQueue(policy) if policy.is_static and not has_own_schedule else PolicyQueue(policy)
