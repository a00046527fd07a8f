"""A service in virtual time: requests come, routers choose, replicas compute, some are lost, others are added."""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archerfish.observe.summary import percentile
from archerfish.params import SamplingParams
from archerfish.route.router import POLICIES, Route, Router
from archerfish.route.scaling import Autoscaler
from archerfish.sequence import Namespace, Request
from archerfish.sequence import Sequence as TokenSequence
from archerfish.simulate.pace import Pace
from archerfish.simulate.replica import MODEL, PacedReplica
from archerfish.simulate.traces import Arrival
from archerfish.types import Progress, no_progress

SECRET = b"simulation"
DIGEST_BYTES_PER_S = 64_000
DETECTION_S = 1.0  # from the loss of a replica until routers know of it
SAMPLE_S = 0.25  # between samples for the plot
SCALE_S = 1.0  # between decisions on the number of replicas
PARAMS = SamplingParams(ignore_eos=True)


@dataclass(frozen=True)
class Failure:
    """So many replicas are lost; they start again down_s later."""

    at_s: float
    count: int = 1
    down_s: float = 30.0


@dataclass(frozen=True)
class Setup:
    """A service. network_s: from a client through a front end to a replica, and back."""

    pace: Pace
    num_replicas: int
    num_routers: int = 1
    report_s: float = 0.2
    network_s: float = 0.002
    scheduling: str = "fcfs"
    failures: tuple[Failure, ...] = ()
    scale: tuple[int, int] = (0, 0)  # fewest and most replicas; 0: their number stays
    batches_steps: bool = True
    seed: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. Moments are virtual seconds; 0: not yet."""

    arrival: Arrival
    number: int
    route: Route | None = None
    num_tries: int = 0
    num_cached: int = 0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    end_s: float = 0.0
    is_lost: bool = False  # its replica went while the answer was on its way


@dataclass
class Outcome:
    """What became of all requests under one policy."""

    policy: str
    jobs: list[Job]
    end_s: float  # of the last request
    mean_live: float  # requests in the system, averaged over time up to then
    router_us: float  # median real time of a choice
    busy_s: list[float]  # of each replica
    replica_s: float  # machines' time
    live: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, requests in the system, replicas
    real_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """Numbers for people and programs; times in seconds."""
        done = [job for job in self.jobs if not job.is_lost]
        first, whole = self.first_tokens_s(), [job.end_s - job.arrival.at_s for job in self.jobs]
        prompt = sum(job.arrival.num_prompt for job in done)
        return {
            "requests/s": len(done) / self.end_s,
            "tokens/s": sum(job.arrival.output_tokens for job in done) / self.end_s,
            "first token p50": percentile(first, 0.5),
            "first token p90": percentile(first, 0.9),
            "first token p99": percentile(first, 0.99),
            "queue mean": statistics.fmean(job.admitted_s - job.arrival.at_s for job in done),
            "latency mean": statistics.fmean(whole),
            "latency p50": percentile(whole, 0.5),
            "latency p99": percentile(whole, 0.99),
            "hit rate": sum(job.num_cached for job in done) / prompt,
            "imbalance": max(self.busy_s) / (statistics.fmean(self.busy_s) or 1.0),
            "requests at once": self.mean_live,
            "retried": sum(job.num_tries > 1 for job in self.jobs),
            "lost": len(self.jobs) - len(done),
            "replica hours": self.replica_s / 3600,
            "router us": self.router_us,
        }

    def first_tokens_s(self) -> list[float]:
        return [job.first_token_s - job.arrival.at_s for job in self.jobs if job.first_token_s]


class Simulation:
    """One run of a trace under one policy. No request is refused: queues are as long as they get."""

    def __init__(self, trace: Sequence[Arrival], setup: Setup, policy: str) -> None:
        self.setup, self.policy = setup, policy
        self.now = 0.0
        self.jobs = [Job(arrival, number) for number, arrival in enumerate(trace)]
        drawn = np.random.default_rng(setup.seed)
        choose = (lambda found: drawn.random(len(found.num_live))) if policy == "random" else POLICIES[policy]
        self.routers = [Router(SECRET, policy=choose, clock=lambda: self.now) for _ in range(setup.num_routers)]
        self.replicas: list[PacedReplica] = []  # also those that are gone; a replica's name is its place
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._sent: list[dict[int, Job]] = []  # to each replica, and not over
        self._unrouted: list[Job] = []  # no replica was ready
        self._choice_s: list[float] = []
        self._replica_s = 0.0  # of replicas that are gone
        self._num_coming = 0  # replicas that start
        self._num_live = 0
        self._live_since = 0.0
        self._live_area = 0.0
        self._num_ended = 0
        self._samples: list[tuple[float, int, int]] = []

    def run(self, progress: Progress = no_progress) -> Outcome:
        """Until the last request has ended."""
        began = time.perf_counter()
        setup = self.setup
        jobs = self.jobs
        for number in range(setup.num_replicas):
            self._join(first_report_s=setup.report_s * number / setup.num_replicas)
        for failure in setup.failures:
            self.at(failure.at_s, self._fail, failure)
        if setup.scale[1]:
            self.at(SCALE_S, self._scale, Autoscaler(*setup.scale))
        self.at(0.0, self._sample)
        self.at(jobs[0].arrival.at_s, self._arrive, 0)
        for count in itertools.count():
            if self._num_ended == len(jobs):
                break
            self.now, _, function, values = heapq.heappop(self._events)
            function(*values)
            if not count % 4096:
                progress(self._num_ended, len(jobs), self.policy)
        replica_s = self._replica_s + sum(self.now - one.began_s for one in self.replicas if one.is_up)
        return Outcome(
            self.policy,
            jobs,
            self.now,
            self._live_area / self.now,
            1e6 * statistics.median(self._choice_s),
            [one.busy_s for one in self.replicas],
            replica_s,
            self._samples,
            time.perf_counter() - began,
        )

    def at(self, at_s: float, function: Callable[..., None], *values: Any) -> None:
        """Call a function at a virtual time."""
        heapq.heappush(self._events, (at_s, next(self._order), function, values))

    # Requests

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self.jobs):
            self.at(self.jobs[number + 1].arrival.at_s, self._arrive, number + 1)
        self._count_live(1)
        self._send(self.jobs[number])

    def _send(self, job: Job) -> None:
        router = self._router(job)
        tokens = job.arrival.prompt()
        namespace = Namespace(job.arrival.tenant)
        began = time.perf_counter()
        route = job.route = router.choose(MODEL, tokens, namespace)
        if route is None:
            self._unrouted.append(job)
            return
        router.sent(route)
        self._choice_s.append(time.perf_counter() - began)
        job.num_tries += 1
        replica = self.replicas[int(route.replica.name)]
        self._sent[int(route.replica.name)][job.number] = job
        request = Request(str(job.number), tokens, PARAMS, job.arrival.output_tokens, namespace=namespace)
        self.at(self.now + self.setup.network_s / 2, self._reach, replica, job, route, request)

    def _reach(self, replica: PacedReplica, job: Job, route: Route, request: Request) -> None:
        if replica.is_up and job.route is route:
            replica.add(request)

    def _change(self, seq: TokenSequence) -> None:
        """A sequence has its first token, or has ended."""
        job, back_s = self.jobs[int(seq.request.request_id)], self.setup.network_s / 2
        if not job.first_token_s:
            job.num_cached = seq.num_cached
            job.admitted_s = seq.times.admitted
            job.first_token_s = self.now + back_s
        if seq.finish_reason is not None:
            self._end(job, self.now + back_s)

    def _end(self, job: Job, at_s: float) -> None:
        job.end_s = at_s
        self._leave(job)
        self.at(at_s, self._count_live, -1)

    def _leave(self, job: Job) -> None:
        """A request is no longer at the replica that it was sent to."""
        assert job.route is not None
        del self._sent[int(job.route.replica.name)][job.number]
        self._router(job).ended(job.route)
        job.route = None

    def _router(self, job: Job) -> Router:
        return self.routers[job.number % len(self.routers)]

    def _count_live(self, change: int) -> None:
        self._live_area += self._num_live * (self.now - self._live_since)
        self._live_since, self._num_live = self.now, self._num_live + change
        self._num_ended += change < 0

    # Replicas

    def _join(self, first_report_s: float = 0.0) -> None:
        setup, name = self.setup, str(len(self.replicas))
        replica = PacedReplica(
            name,
            setup.pace,
            SECRET,
            clock=lambda: self.now,
            at=self.at,
            on_change=self._change,
            policy=setup.scheduling,
            batches_steps=setup.batches_steps,
        )
        self.replicas.append(replica)
        self._sent.append({})
        replica.handles = [router.add(name) for router in self.routers]
        replica.versions = [0] * len(self.routers)
        self._report(replica, is_first=True)
        self.at(self.now + first_report_s, self._report, replica)

    def _report(self, replica: PacedReplica, *, is_first: bool = False) -> None:
        """A replica says how busy it is, and what it has cached since its last report. An idle one has nothing to
        say."""
        if not replica.is_up:
            return
        if is_first or replica.is_changed or any(handle.unreported for handle in replica.handles):
            load, setup = replica.report(), self.setup
            for number, router in enumerate(self.routers):
                most_bytes = int(DIGEST_BYTES_PER_S * setup.report_s)
                version, changes, begins_anew = replica.digest.changes(replica.versions[number], most_bytes)
                replica.versions[number] = version
                if not replica.is_leaving:
                    asked_at = self.now - setup.network_s / 2
                    loads = {MODEL: load}
                    router.report(replica.handles[number], loads, changes, begins_anew=begins_anew, asked_at=asked_at)
        if replica.is_leaving and not self._sent[int(replica.name)]:
            self._remove(replica)
        elif not is_first:
            self.at(self.now + self.setup.report_s, self._report, replica)
        waiting, self._unrouted = self._unrouted, []
        for job in waiting:
            self._send(job)

    def _fail(self, failure: Failure) -> None:
        """The busiest replicas are lost. Routers learn of it later."""
        up = sorted((one for one in self.replicas if one.is_up), key=lambda one: -len(self._sent[int(one.name)]))
        for replica in up[: failure.count]:
            self._replica_s += self.now - replica.began_s
            replica.stop()
            self.at(self.now + DETECTION_S, self._detect, replica)
            self.at(self.now + max(DETECTION_S, failure.down_s), self._restart, replica)

    def _detect(self, replica: PacedReplica) -> None:
        """Routers learn that a replica is lost: what has not begun to answer is sent to another one, the rest ends."""
        for router, handle in zip(self.routers, replica.handles, strict=True):
            router.lost(handle)
        for job in list(self._sent[int(replica.name)].values()):
            if job.first_token_s:
                job.is_lost = True
                self._end(job, self.now)
            else:
                self._leave(job)
                self._send(job)

    def _restart(self, replica: PacedReplica) -> None:
        replica.begin()
        replica.versions = [0] * len(self.routers)
        self._report(replica)

    def _remove(self, replica: PacedReplica) -> None:
        self._replica_s += self.now - replica.began_s
        replica.stop()
        for router, handle in zip(self.routers, replica.handles, strict=True):
            router.remove(handle)

    def _scale(self, scaler: Autoscaler) -> None:
        """Start replicas, or let the least busy ones finish what they have and go."""
        there = [one for one in self.replicas if one.is_up and not one.is_leaving]
        loads = [one.handles[0].loads[MODEL] for one in there if MODEL in one.handles[0].loads]
        missing = scaler.desired(self.now, loads, self._num_coming) - len(there) - self._num_coming
        for _ in range(missing):
            self._num_coming += 1
            self.at(self.now + self.setup.pace.start_s, self._start)
        for replica in sorted(there, key=lambda one: len(self._sent[int(one.name)]))[: max(0, -missing)]:
            replica.is_leaving = True
            for router, handle in zip(self.routers, replica.handles, strict=True):
                router.pause(handle)
        self.at(self.now + SCALE_S, self._scale, scaler)

    def _start(self) -> None:
        self._num_coming -= 1
        self._join()

    def _sample(self) -> None:
        self._samples.append((self.now, self._num_live, sum(one.is_up for one in self.replicas)))
        self.at(self.now + SAMPLE_S, self._sample)
