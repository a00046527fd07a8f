"""The backend of a front end with several replicas: it sends each request to the one that the router chooses.

A request of which nothing has come goes to another replica if its own has died, hangs or is being stopped. The limits
of tenants are counted by one replica, the one that has run for longest, so that they hold for all replicas together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from archerfish.errors import ArcherfishError, StoppedError
from archerfish.observe.metrics import GivenMetric, Metric, MetricRegistry
from archerfish.route.router import NO_TOKENS, Replica, Route, Router, load_from
from archerfish.sequence import OPEN_OUTPUT_TOKENS, Namespace, pack_tokens
from archerfish.serve import wire
from archerfish.serve.client import Answer, AsyncClient, Part, Question, RemoteError
from archerfish.serve.metrics import merged, metric_values, process_metrics, read_metrics
from archerfish.serve.overload import estimate_tokens
from archerfish.serve.tenants import Tenants

logger = logging.getLogger("archerfish.serve")
POLL_S, IDLE_POLL_S = 0.05, 0.25  # between two reports of a replica: while requests run, and while none does
MAX_REPORTS_PER_S = 200  # of all replicas together, of which each costs about 0.3 ms
SILENCE_S = 2.0  # a replica that owes a report for so long gets no requests
WAIT_S = 5.0  # that a request waits while no replica is ready
ANSWER_S = 5.0  # limit for the answers of single replicas about themselves
LOAD_S = 120.0  # the same while they read an adapter
MAX_TRIES = 3  # replicas that may be lost under one request, which may be the reason
FULL = ("overloaded", "queue_share_used", "deadline_unreachable", "too_many_requests")  # another one may have room
READY = "ready"
STOPPING = "stopping"
LATE = "late"
AWAY = "away"


@dataclass(eq=False, slots=True)
class Connection:
    """A replica and the connection to it."""

    replica: Replica
    client: AsyncClient
    state: str = AWAY
    problem: str = "It has not reported yet."
    version: int = 0  # of its digest, as far as it is known here
    started_at: float = math.inf
    num_sent: int = 0  # requests, since this front end began
    following: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.replica.name


class RoutedBackend:
    """A Backend over replicas. credentials: the pass of this front end. tenants: those with limits.

    Only one event loop may use it. `start` is called in it, unless `add` is.
    """

    def __init__(
        self,
        router: Router,
        *,
        credentials: str = "",
        tenants: Tenants | None = None,
        retry_after_s: float = 1.0,
        registry: MetricRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: that of the router."""
        self.router = router
        self.connections: dict[str, Connection] = {}
        self._credentials, self._tenants = credentials, tenants or Tenants()
        self._source = secrets.token_hex(8)
        self._retry_after_s, self._clock = retry_after_s, clock
        self._changed = asyncio.Event()
        self._serving: dict[str, AsyncClient] = {}  # by request_id
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed: StoppedError | None = None
        registry = registry or MetricRegistry()
        self._num_sent = registry.counter("archerfish_routed_requests", "Requests sent to a replica.", ("replica",))
        self._num_retried = registry.counter(
            "archerfish_rerouted_requests", "Requests sent to another replica.", ("reason",)
        )

    # Replicas

    def add(self, name: str, client: AsyncClient) -> None:
        """A new replica. It gets requests after its first report."""
        self.connections[name] = Connection(self.router.add(name), client)
        with contextlib.suppress(RuntimeError):  # there is no event loop yet
            self.start()

    def start(self) -> None:
        """Ask the replicas for reports from now on."""
        loop = asyncio.get_running_loop()
        for one in self.connections.values():
            one.following = one.following or loop.create_task(self._follow(one))

    async def remove(self, name: str) -> None:
        """Send nothing new to a replica, wait for its running requests, and disconnect."""
        one = self.connections.pop(name)
        self.router.pause(one.replica)
        await stop_task(one.following)
        while one.replica.num_live and one.client.is_connected:
            await asyncio.sleep(POLL_S)
        await one.client.close()
        self.router.remove(one.replica)

    async def close(self, reason: StoppedError | None = None) -> None:
        """Fail all waiting requests with this reason and disconnect."""
        self._closed = reason or StoppedError("This backend has been closed.")
        for one in self.connections.values():
            await stop_task(one.following)
            await one.client.close(reason)
        self._wake()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, one: Connection) -> None:
        """Keep up with the reports of a replica."""
        while True:
            asked_at = self._clock()
            query = wire.Query(
                request_id="", about="load", since=one.version, source=self._source, credentials=self._credentials
            )
            try:
                answer = await one.client.ask(query, SILENCE_S)
                assert isinstance(answer, wire.Report)
                self._take(one, answer.values, asked_at)
            except ArcherfishError as error:
                self._set_state(one, LATE if one.client.is_connected else AWAY, error.message)
            except Exception:
                logger.exception("The report of %s cannot be read", one.name)
                self._set_state(one, LATE, "Its report cannot be read.")
            is_busy = any(other.replica.num_live for other in self.connections.values())
            await asyncio.sleep(max(POLL_S, len(self.connections) / MAX_REPORTS_PER_S) if is_busy else IDLE_POLL_S)

    def _take(self, one: Connection, values: dict[str, Any], asked_at: float) -> None:
        one.started_at, one.version = values["started_at"], values.get("version", 0)
        if values["is_stopping"]:
            self._set_state(one, STOPPING, "It is being stopped.")
            return
        loads = {model: load_from(load) for model, load in values["loads"].items()}
        changes, begins_anew = values.get("changes", b""), values.get("begins_anew", False)
        self.router.report(one.replica, loads, changes, begins_anew=begins_anew, asked_at=asked_at)
        self._set_state(one, READY)
        self._wake()

    def _set_state(self, one: Connection, state: str, problem: str = "") -> None:
        if state != one.state:
            logger.info("%s is %s%s", one.name, state, f": {problem}" if problem and state == LATE else "")
        if state == AWAY and one.state != AWAY:
            one.version = 0
            self.router.lost(one.replica)
        elif state != READY:
            self.router.pause(one.replica)
        one.state, one.problem = state, problem

    def _wake(self) -> None:
        """Wake all requests that wait for a replica."""
        self._changed.set()
        self._changed.clear()

    def ready(self) -> list[Connection]:
        """The replicas that take requests; the one that has run for longest is first."""
        found = [one for one in self.connections.values() if one.state == READY]
        return sorted(found, key=lambda one: (one.started_at, one.name))

    # Requests

    async def generate(self, request: wire.GenerationRequest) -> AsyncGenerator[Part, None]:
        """As AsyncClient's. A request of which nothing has come is sent to another replica if its own is lost."""
        tokens = NO_TOKENS
        with contextlib.suppress(OverflowError, TypeError):
            tokens = pack_tokens(request.token_ids or ())
        texts = (request.prompt or "", *(str(message.get("content", "")) for message in request.messages or ()))
        num_tokens = len(tokens) or estimate_tokens(sum(map(len, texts)))
        most = request.params.get("max_tokens")
        num_output = request.params.get("n", 1) * (OPEN_OUTPUT_TOKENS if most is None else most)
        async with contextlib.aclosing(self._send(request, tokens, num_tokens, num_output)) as parts:
            async for part in parts:
                yield part

    async def ask(self, message: Question) -> Answer:
        if isinstance(message, wire.ForVectors):
            sizes = (len(one) if isinstance(one, list) else estimate_tokens(len("".join(one))) for one in message.texts)
            async with contextlib.aclosing(self._send(message, NO_TOKENS, sum(sizes), 0)) as answers:
                answer: Answer = await anext(answers)
                return answer
        if isinstance(message, wire.ExplainRequest):
            return await self._explain(message)
        if isinstance(message, wire.Ping):
            return await self._ping(message)
        if isinstance(message, wire.Configure | wire.ChangeAdapter):
            needs_all = bool(message.options) if isinstance(message, wire.Configure) else message.action != "find"
            found: list[Answer] = [answer for _, answer in await self._ask_all(message, needs_all=needs_all)]
            return found[0]
        if isinstance(message, wire.Query) and message.about in ("stats", "metrics", "view"):
            ask = {"stats": self._stats, "metrics": self._metrics, "view": self._view}[message.about]
            return await ask(message)
        return await self._ask_ledger(message)

    def end_sequence(self, request_id: str, index: int) -> None:
        if request_id in self._serving:
            self._serving[request_id].end_sequence(request_id, index)

    async def _send(
        self, message: wire.GenerationRequest | wire.ForVectors, tokens: array[int], num_tokens: int, num_output: int
    ) -> AsyncGenerator[Any, None]:
        began = self._clock()
        tried = list[Replica]()
        num_lost = 0
        num_used = 0
        is_refused = True
        charged = await self._charge(message, num_tokens + num_output)
        try:
            while True:
                route = await self._choose(message, tokens, num_tokens, tried)
                one = self._sent(route)
                has_begun = False
                is_refused = False
                self._serving[message.request_id] = one.client
                try:
                    async with contextlib.aclosing(
                        one.client.generate(within(message, self._clock() - began))
                    ) as parts:
                        async for part in parts:
                            has_begun, num_used = True, num_used + num_output_tokens(part)
                            yield part
                    return
                except RemoteError as error:
                    is_refused = not has_begun and (error.is_lost or error.code in FULL)
                    tried.append(route.replica)
                    if not self._may_go_on(error, one, is_refused=is_refused, tried=tried, num_lost=num_lost):
                        raise
                    num_lost += error.is_lost
                finally:
                    self.router.ended(route)
                    self._serving.pop(message.request_id, None)
        finally:
            if charged:
                spent = 0 if is_refused else num_tokens + num_used
                given_back = {"num_tokens": spent - charged, "num_requests": -1 if is_refused else 0}
                self._in_background(self._ask_ledger(self._new_charge(message.tenant, is_spent=True, **given_back)))

    def _sent(self, route: Route) -> Connection:
        one = self.connections[route.replica.name]
        self.router.sent(route)
        one.num_sent += 1
        self._num_sent.add(replica=one.name)
        return one

    def _may_go_on(
        self, error: RemoteError, one: Connection, *, is_refused: bool, tried: list[Replica], num_lost: int
    ) -> bool:
        """Whether another replica is tried: after the loss of up to MAX_TRIES, and once where a queue is full."""
        if error.is_lost:
            self.router.pause(one.replica)  # until its next report
        if self._closed is not None or not is_refused:
            return False
        if not error.is_lost and (len(tried) > num_lost + 1 or all(other.replica in tried for other in self.ready())):
            return False
        self._num_retried.add(reason=error.code)
        return num_lost + 1 < MAX_TRIES

    async def _choose(
        self,
        message: wire.ModelRequest,
        tokens: array[int],
        num_tokens: int,
        tried: Iterable[Replica] = (),
        **options: Any,
    ) -> Route:
        """The replica for a request. While none is ready, it is waited for."""
        choose = partial(
            self.router.choose, message.model, tokens, namespace_of(message), num_tokens=num_tokens, **options
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self._closed is None:
                    route = choose(without=[*tried]) or choose()
                    if route is not None:
                        return route
                    await self._changed.wait()
        raise self._unavailable()

    def _unavailable(self) -> ArcherfishError:
        if self._closed is not None:
            return StoppedError(self._closed.message, hint=self._closed.hint)
        problems = "; ".join(f"{one.name}: {one.problem}" for one in self.connections.values())
        return RemoteError(
            f"No replica takes requests now ({problems or 'there is none'}).",
            code="unavailable",
            status=503,
            hint="Try again.",
            retry_after_s=self._retry_after_s,
        )

    # The limits of tenants

    def _new_charge(self, tenant: str, **values: Any) -> wire.Charge:
        return wire.Charge(request_id="", credentials=self._credentials, tenant=tenant, **values)

    async def _charge(self, message: wire.ModelRequest, num_tokens: int) -> int:
        """Take a request and its tokens from the limits of its tenant; the tokens that were taken, 0 without limits."""
        tenant = self._tenants.named(message.tenant)
        if not message.tenant or not (tenant.requests_per_minute or tenant.tokens_per_minute):
            return 0
        await self._ask_ledger(self._new_charge(message.tenant, num_tokens=num_tokens))
        return num_tokens

    async def _ask_ledger(self, message: Question) -> Answer:
        """The answer of the replica that has run for longest, on which all front ends agree. What it counted dies with
        it."""
        for _ in range(MAX_TRIES):
            if not self.ready():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), WAIT_S)
            for one in self.ready():
                try:
                    return await one.client.ask(message, SILENCE_S)
                except RemoteError as error:
                    if not error.is_lost:
                        raise
                    self._set_state(one, LATE, error.message)
        raise self._unavailable()

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a lost correction is no error

    # All replicas

    async def _ask_all(self, message: Question, *, needs_all: bool = False) -> list[tuple[Connection, Any]]:
        """The answers of all replicas that report and answer in time; an error if none does, or with needs_all one does
        not."""

        async def ask(one: Connection) -> Answer | ArcherfishError:
            try:
                return await one.client.ask(message, LOAD_S if isinstance(message, wire.ChangeAdapter) else ANSWER_S)
            except ArcherfishError as error:
                return error

        asked = [one for one in self.connections.values() if one.state in (READY, STOPPING)]
        answers = list(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))
        failed = {one.name: answer for one, answer in answers if isinstance(answer, ArcherfishError)}
        for error in failed.values():
            if len(failed) == len(answers) or getattr(error, "status", 503) < 500:
                raise error
        if not answers:
            raise self._unavailable()
        problems = {one.name: one.problem for one in self.connections.values() if one not in asked} | failed
        if needs_all and problems:
            raise RemoteError(
                f"Not all replicas took the change ({'; '.join(f'{name}: {why}' for name, why in problems.items())}).",
                code="unavailable",
                status=503,
                retry_after_s=self._retry_after_s,
                hint="Send it again when GET /stats shows all replicas as ready.",
            )
        return [(one, answer) for one, answer in answers if not isinstance(answer, ArcherfishError)]

    async def _explain(self, message: wire.ExplainRequest) -> Answer:
        tokens = pack_tokens(message.token_ids or ())
        route = await self._choose(message, tokens, estimate_tokens(len(message.prompt or "")), explains=True)
        answer = await self.connections[route.replica.name].client.ask(message)
        assert isinstance(answer, wire.Report)
        cached = {name: num_cached for name, num_cached, _ in route.others}
        routing = {"replica": route.replica.name, "routing": route.explain(), "cached_elsewhere": cached}
        return wire.Report(request_id=answer.request_id, values={**answer.values, **routing})

    async def _ping(self, message: wire.Ping) -> Answer:
        """With a probe every replica makes a step; one that succeeds is enough."""
        if message.probe is None:
            return await self._ask_ledger(message)
        began, answers = self._clock(), dict(await self._ask_all(message))
        failing = {
            one.name: one.problem or "no step in time" for one in self.connections.values() if one not in answers
        }
        return wire.Pong(request_id=message.request_id, seconds=self._clock() - began, failing=failing)

    async def _stats(self, message: wire.Query) -> Answer:
        answers, now = dict(await self._ask_all(message)), time.time()
        found = {
            one.name: {
                "state": one.state,
                "problem": one.problem,
                "age_s": now - one.started_at if one in answers else 0.0,
                "sent_requests": one.num_sent,
                **(answers[one].values if one in answers else {}),
            }
            for one in self.connections.values()
        }
        return wire.Report(request_id=message.request_id, values={"replicas": found})

    async def _view(self, message: wire.Query) -> Answer:
        views = {one.name: answer.values for one, answer in await self._ask_all(message)}
        return wire.Report(request_id=message.request_id, values={"replicas": views})

    async def _metrics(self, message: wire.Query) -> Answer:
        """The metrics of each replica, and those of all front ends together."""
        shared = await self._ask_ledger(message)
        assert isinstance(shared, wire.Report)
        own = await self._ask_all(wire.Query(request_id="", about="metrics", credentials=self._credentials))
        up = [
            labelled(one.name, process_metrics({"replica_up": one.state == READY})) for one in self.connections.values()
        ]
        parts = [labelled(one.name, read_metrics(answer.values)) for one, answer in own]
        values = {metric.name: metric_values(metric) for metric in merged([*parts, *up])}
        return wire.Report(request_id=message.request_id, values={**shared.values, **values})


def namespace_of(message: wire.ModelRequest) -> Namespace:
    return Namespace(message.tenant, getattr(message, "adapter_digest", ""))


def within(message: Any, passed_s: float) -> Any:
    """The message with what is left of its deadline."""
    if not message.deadline_s or message.deadline_s < 0:
        return message
    return msgspec.structs.replace(message, deadline_s=max(1e-3, message.deadline_s - passed_s))


def num_output_tokens(part: Any) -> int:
    if isinstance(part, wire.Chunk):
        return len(part.token_ids)
    return sum(len(output.token_ids) for output in part.outputs) if isinstance(part, wire.Generated) else 0


def labelled(name: str, metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics of a replica, with its name as a label."""
    return [
        GivenMetric(
            metric.kind,
            metric.name,
            metric.description,
            (*metric.label_names, "replica"),
            [replace(sample, labels=(*sample.labels, name)) for sample in metric.samples()],
        )
        for metric in metrics
    ]


async def stop_task(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
