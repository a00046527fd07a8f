"""The choice of a replica for each request: where the first tokens are expected soonest."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.cache.digest import DIGEST_TOKENS, PromptHashes
from archerfish.errors import InvalidOptionError, did_you_mean
from archerfish.route.prefixes import PrefixMap
from archerfish.sequence import NO_NAMESPACE, Namespace

Seconds = npt.NDArray[np.float64]
USUAL_TOKEN_S = 1e-4  # of a prompt, before any replica has measured it
EARLY_TOKENS = 10  # of an answer, for which a long step counts; so replicas with many long answers get fewer new ones
EQUAL_S = 1e-3  # expected times that differ by less count as equal
MOST_LIVE = 1e6  # requests at a replica
NO_TOKENS = array("I")


@dataclass(slots=True)
class ReplicaLoad:
    """What a replica reports of one of its models."""

    prompt_token_s: float = 0.0  # time for a prompt token; 0: not measured yet
    step_s: float = 0.0  # time of a step of the sequences that run now
    num_running: int = 0  # sequences
    num_waiting: int = 0
    max_running: int = 0  # 0: no limit
    slot_s: float = 0.0  # between two ends of sequences, while as many run as may
    waiting_tokens: dict[str, int] = field(default_factory=dict)  # prompt tokens that are not computed yet, by tenant
    is_fair: bool = False  # tenants take turns; otherwise the first to come is served first
    cache_use: float = 0.0  # share of the KV memory that is not free: cached contexts and those of running sequences

    @property
    def num_live(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(eq=False, slots=True)
class Replica:
    """A replica as a router knows it."""

    name: str
    index: int
    loads: dict[str, ReplicaLoad] = field(default_factory=dict)  # by model
    unreported: dict[int, Route] = field(default_factory=dict)  # requests that came after the last report, by number
    num_live: int = 0  # requests of this router that are not over
    unpublished: list[tuple[float, Sequence[int]]] = field(
        default_factory=list
    )  # hashes of requests that ended, and when


@dataclass(slots=True)
class Route:
    """The choice for one request, and the reasons for it."""

    replica: Replica
    model: str
    tenant: str
    num_tokens: int
    num_cached: int  # tokens of the prompt that the replica is thought to have
    expected_s: float  # until the first token
    number: int = 0
    sent_at: float = 0.0
    hashes: Sequence[int] = ()  # of the prompt's prefixes
    others: list[tuple[str, int, float]] = field(
        default_factory=list
    )  # name, cached tokens, expected seconds; best first

    def explain(self) -> str:
        """One sentence for people."""
        text = f"{self.replica.name} has about {self.num_cached:,} of {self.num_tokens:,} tokens cached"
        text += f" and its first token is expected after {1000 * self.expected_s:,.1f} ms"
        if self.others:
            name, num_cached, seconds = self.others[0]
            text += f"; the next best, {name}, has {num_cached:,} and is expected after {1000 * seconds:,.1f} ms"
        return f"{text}."


@dataclass(slots=True)
class Candidates:
    """What a policy chooses from: an entry for every replica."""

    expected_s: Seconds  # until the first token
    displaced_s: Seconds  # of computing again what the new part of the prompt displaces from the cache
    step_s: Seconds  # of the sequences that run
    num_live: Seconds  # requests that run or wait
    number: int  # of this choice


def by_first_tokens(found: Candidates) -> Seconds:
    """The soonest first tokens; of equal ones the replica with the fewest requests.

    Where the cache is full, what is computed of the prompt takes the place of another prefix, which is computed again.
    Without that, requests that go elsewhere for a few milliseconds fill every cache with the same prefixes.
    """
    early_s = found.expected_s + found.displaced_s + EARLY_TOKENS * found.step_s
    score: Seconds = early_s // EQUAL_S + found.num_live / MOST_LIVE
    return score


def by_load(found: Candidates) -> Seconds:
    """The fewest requests."""
    return found.num_live


def in_turn(found: Candidates) -> Seconds:
    """Each replica after the other."""
    return np.roll(np.arange(len(found.num_live), dtype=np.float64), found.number)


def at_random(found: Candidates) -> Seconds:
    return np.array([random.random() for _ in found.num_live])


POLICIES: dict[str, Callable[[Candidates], Seconds]] = {
    "cache-aware": by_first_tokens,
    "least-loaded": by_load,
    "round-robin": in_turn,
    "random": at_random,
}


class ModelLoads:
    """The loads of one model on all replicas, with an element for each replica."""

    def __init__(self, num_replicas: int) -> None:
        self.measured_s, self.token_s, self.cache_use, self.fixed_s, self.step_s = np.zeros((5, num_replicas))
        self.waiting, self.num_live, self.num_tenants = np.zeros((3, num_replicas))
        self.absent = np.zeros(num_replicas)  # infinity where the model is not served, else 0
        self.is_fair, self._num_fair = np.zeros(num_replicas, bool), 0
        self.by_tenant: dict[str, Seconds] = {}  # waiting tokens
        self._holders: dict[str, int] = {}  # replicas on which a tenant waits
        self._tenants: list[dict[str, int]] = [
            {} for _ in range(num_replicas)
        ]  # waiting tokens by replica, none of them 0

    def update(self, replica: Replica, model: str) -> None:
        """Count anew what waits on a replica: what it reported, and what was sent since."""
        i, load = replica.index, replica.loads.get(model) or ReplicaLoad()
        self.num_live[i] = load.num_live
        for tenant in list(self._tenants[i]):
            self._set_tokens(i, tenant, load.waiting_tokens.get(tenant, 0))
        for tenant in load.waiting_tokens.keys() - self._tenants[i].keys():
            self._set_tokens(i, tenant, load.waiting_tokens[tenant])
        self._num_fair += int(load.is_fair) - int(self.is_fair[i])
        self.is_fair[i], self.cache_use[i] = load.is_fair, load.cache_use
        self.absent[i] = 0 if model in replica.loads else np.inf
        if load.prompt_token_s != self.measured_s[i] or not self.token_s[i]:
            self.measured_s[i] = load.prompt_token_s
            measured = self.measured_s[self.measured_s > 0]
            self.token_s = np.where(
                self.measured_s, self.measured_s, measured.min() if len(measured) else USUAL_TOKEN_S
            )
        self._set_fixed(replica, model)
        for route in replica.unreported.values():
            if route.model == model:
                self.count(route, 1)

    def count(self, route: Route, change: int) -> None:
        """A request was sent to a replica (1), or one that was sent after its last report is over (-1)."""
        i, tenant = route.replica.index, route.tenant
        self.num_live[i] += change
        self._set_fixed(route.replica, route.model)
        self._set_tokens(i, tenant, self._tenants[i].get(tenant, 0) + change * (route.num_tokens - route.num_cached))

    def _set_fixed(self, replica: Replica, model: str) -> None:
        """The step that runs, a step of each other model, with which steps take turns, and the wait for a place."""
        i, load = replica.index, replica.loads.get(model) or ReplicaLoad()
        others_s = sum(each.step_s for name, each in replica.loads.items() if name != model and each.num_live)
        num_over = max(0.0, self.num_live[i] + 1 - load.max_running) if load.max_running else 0
        self.step_s[i] = load.step_s + others_s
        self.fixed_s[i] = self.step_s[i] + num_over * load.slot_s

    def _set_tokens(self, i: int, tenant: str, count: int) -> None:
        tenants = self._tenants[i]
        before = tenants.pop(tenant, 0)
        if count:
            tenants[tenant] = count
        elif not before:
            return
        if tenant not in self.by_tenant:
            self.by_tenant[tenant], self._holders[tenant] = np.zeros(len(self.waiting)), 0
        self.by_tenant[tenant][i] = count
        self.waiting[i] += count - before
        self.num_tenants[i] = len(tenants)
        self._holders[tenant] += (count > 0) - (before > 0)
        if not self._holders[tenant]:
            del self.by_tenant[tenant], self._holders[tenant]

    def expected_s(self, tenant: str, new_tokens: Seconds) -> Seconds:
        """Until the first token: the step that runs, the wait for a place, the prompts in front, the prompt itself.

        Where tenants take turns, each other tenant delays a request by no more than its own tenant's tokens up to its
        end.
        """
        if not self._num_fair:
            return self.fixed_s + self.token_s * (new_tokens + self.waiting)
        own = self.by_tenant.get(tenant, 0)
        ahead, others = new_tokens + own, self.waiting - own
        fair = np.minimum(others, ahead * (self.num_tenants - np.sign(own)))
        return self.fixed_s + self.token_s * (ahead + np.where(self.is_fair, fair, others))


class Router:
    """Chooses replicas. It knows what they report, and the requests that it has sent since. Not for several threads at
    once.

    policy: a name of POLICIES, or a function of the candidates whose smallest value wins.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        policy: str | Callable[[Candidates], Seconds] = "cache-aware",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(policy, str) and policy not in POLICIES:
            raise InvalidOptionError(f"There is no routing policy {policy!r}.", hint=did_you_mean(policy, POLICIES))
        self.replicas: list[Replica] = []  # a removed one stays here without a name until its place is taken
        self._policy = POLICIES[policy] if isinstance(policy, str) else policy
        self._prefixes = PrefixMap()
        self._hashes = PromptHashes(secret)
        self._clock = clock
        self._numbers = itertools.count()
        self._models: dict[str, ModelLoads] = {}
        self._barred: Seconds = np.zeros(0)  # infinity for replicas that take no requests, else 0

    def add(self, name: str) -> Replica:
        """A new replica. It gets requests after its first report."""
        free = next((old.index for old in self.replicas if not old.name), len(self.replicas))
        replica = Replica(name, free)
        self.replicas[free : free + 1] = [replica]
        if free == len(self._barred):
            self._barred = np.append(self._barred, np.inf)
            self._models.clear()  # made anew with room for it, when a request comes
        return replica

    def remove(self, replica: Replica) -> None:
        self.lost(replica)
        replica.name = ""

    def lost(self, replica: Replica) -> None:
        """The replica has gone, and its cache with it. It gets requests again after its next report."""
        self._barred[replica.index] = np.inf
        replica.unreported.clear()
        replica.unpublished.clear()
        self._take(replica, {})
        self._prefixes.forget(replica.index)

    def pause(self, replica: Replica) -> None:
        """The replica gets no requests before its next report."""
        self._barred[replica.index] = np.inf

    def report(
        self,
        replica: Replica,
        loads: dict[str, ReplicaLoad],
        changes: bytes = b"",
        *,
        begins_anew: bool = False,
        asked_at: float | None = None,
    ) -> None:
        """Take over a report. asked_at: when it was asked for; the replica had received what was sent before that."""
        known_until = self._clock() if asked_at is None else asked_at
        replica.unreported = {n: route for n, route in replica.unreported.items() if route.sent_at >= known_until}
        self._barred[replica.index] = 0
        self._take(replica, loads)
        self._prefixes.apply(replica.index, changes, begins_anew=begins_anew)
        unpublished, replica.unpublished = replica.unpublished, []
        for ended in unpublished:  # what has not been published now was not cached, or is not any more
            if ended[0] < known_until:
                self._prefixes.expect_no_more(replica.index, ended[1])
            else:
                replica.unpublished.append(ended)

    def choose(
        self,
        model: str,
        tokens: array[int] = NO_TOKENS,
        namespace: Namespace = NO_NAMESPACE,
        *,
        num_tokens: int = 0,
        without: Collection[Replica] = (),
        explains: bool = False,
    ) -> Route | None:
        """The replica for a request, or None if none is ready. Nothing changes until `sent`.

        num_tokens: of a prompt whose tokens are not known here. without: replicas that are not to be chosen.
        """
        if not self.replicas:
            return None
        now, count = self._clock(), len(tokens) or num_tokens
        hashes = self._hashes(tokens, model, namespace)
        cached = self._prefixes.lengths(hashes, len(self.replicas), now) * DIGEST_TOKENS
        loads, number = self._loads(model), next(self._numbers)
        new_tokens = count - cached
        expected = loads.expected_s(namespace.tenant, new_tokens)
        displaced = loads.token_s * loads.cache_use * new_tokens
        scores = self._policy(Candidates(expected, displaced, loads.step_s, loads.num_live, number)) + self._barred
        serving = scores + loads.absent
        if serving.min() < np.inf:  # otherwise any of them says that there is no such model
            scores = serving
        for replica in without:
            scores[replica.index] = np.inf
        best = int(scores.argmin())
        if scores[best] == np.inf:
            return None
        chosen = (self.replicas[best], model, namespace.tenant, count, int(cached[best]), float(expected[best]))
        route = Route(*chosen, number, now, hashes)
        if explains:
            order = [i for i in scores.argsort(kind="stable").tolist() if i != best and scores[i] < np.inf]
            route.others = [(self.replicas[i].name, int(cached[i]), float(expected[i])) for i in order]
        return route

    def sent(self, route: Route) -> None:
        """The request goes to the replica that was chosen."""
        replica, route.sent_at = route.replica, self._clock()
        replica.unreported[route.number] = route
        replica.num_live += 1
        self._loads(route.model).count(route, 1)
        self._prefixes.expect(replica.index, route.hashes, route.sent_at)

    def ended(self, route: Route) -> None:
        """The request is over, whatever its result."""
        replica = route.replica
        replica.num_live -= 1
        replica.unpublished.append((self._clock(), route.hashes))
        if replica.unreported.pop(route.number, None) is not None:
            self._loads(route.model).count(route, -1)

    def _loads(self, model: str) -> ModelLoads:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelLoads(len(self.replicas))
            for replica in self.replicas:
                found.update(replica, model)
        return found

    def _take(self, replica: Replica, loads: dict[str, ReplicaLoad]) -> None:
        replica.loads = loads
        for model, known in self._models.items():
            known.update(replica, model)


def load_from(values: dict[str, Any]) -> ReplicaLoad:
    """A load that was sent as plain data. Unknown members are left out, so that replicas may be newer."""
    return ReplicaLoad(**{name: values[name] for name in ReplicaLoad.__slots__ if name in values})
