"""Drives load over HTTP: closed loops (so many at once) and open loops (Poisson arrivals, whatever the server does).

Latencies of an open loop count from the moment at which a request was meant to be sent, so that neither a server nor a limit
on requests in flight can hide queueing.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

from archerfish.bench.serve_http import BrokenAnswerError, Pool
from archerfish.bench.serve_requests import Account, Manner, Prepared, Record, RequestMaker, Shape
from archerfish.errors import InvalidOptionError

TIMER_S = 0.001  # by which timers may be late: requests set out as much earlier, and count from then
PAUSE_S, MOST_PAUSE_S = 0.1, 1.0  # of a closed loop after a request that failed: without one it would be a flood
BEAT_S = 0.02  # how often the client looks whether it is late itself
SAMPLE_S = 1.0  # how often memory is looked at


@dataclass(frozen=True)
class Load:
    """How a server is loaded. Either `concurrency` or `rate` is given; it ends after `count` requests or `duration_s`."""

    shapes: tuple[Shape, ...]
    concurrency: int = 0
    rate: float = 0.0  # requests a second
    count: int = 0
    duration_s: float = 0.0
    num_warmup: int = 0
    max_in_flight: int = 0  # 0: as many as come
    timeout_s: float = 120.0
    seed: str = "0"
    deadline_s: float = 0.0  # sent with every request; 0: none
    hang_up_within_s: float = 0.0  # leave every request at a random moment up to this long after it was sent

    def __post_init__(self) -> None:
        if (self.concurrency > 0) == (self.rate > 0):
            raise InvalidOptionError("A load has either a concurrency or a rate, above 0.")
        if self.count <= 0 and self.duration_s <= 0:
            raise InvalidOptionError("A load needs a number of requests or a duration, above 0.")

    @property
    def title(self) -> str:
        shown = " + ".join(str(shape) for shape in self.shapes)
        return f"{shown}, {f'{self.concurrency} at once' if self.concurrency else f'{self.rate:.4g}/s'}"


@dataclass
class Run:
    """What one load gave. Times are those of the clock; `start_s` is when the run began."""

    load: Load
    start_s: float = 0.0
    end_s: float = 0.0  # when the last request ended
    records: list[Record] = field(default_factory=list)
    num_resent: int = 0  # of them, over a new connection: the server had closed the kept one
    in_flight: list[tuple[float, int]] = field(default_factory=list)  # the counter, at every change
    lags_s: list[float] = field(default_factory=list)  # how late the client's own loop was
    samples: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the start, bytes of the server)
    cached: list[float] = field(default_factory=list)  # bytes of these that hold KV, where the server tells
    processes: dict[str, list[float]] = field(default_factory=dict)  # bytes of each of its processes, 0 before and after it

    @property
    def window_s(self) -> float:
        """What rates are taken over: the duration that was asked for, else until the last answer."""
        return self.load.duration_s if self.load.duration_s > 0 else self.end_s - self.start_s


def arrivals(rate: float, seed: str, *, count: int = 0, duration_s: float = 0.0) -> Iterator[float]:
    """Seconds from the start at which requests of a Poisson process come."""
    chance = random.Random(f"arrivals:{seed}")
    at, number = 0.0, 0
    while True:
        at += chance.expovariate(rate)
        number += 1
        if (count and number > count) or (duration_s and at >= duration_s):
            return
        yield at


@dataclass(frozen=True)
class Memory:
    """What a server holds at one moment, in bytes."""

    processes: dict[str, float]
    cached: float = 0.0  # KV, which fills its pool and stays


Sample = Callable[[], Awaitable[Memory]]


class Driver:
    """Puts one load on one server and accounts for every request."""

    def __init__(self, pool: Pool, manner: Manner, load: Load, sample: Sample | None = None) -> None:
        self._pool, self._manner, self._load, self._sample = pool, manner, load, sample
        self._clock = pool.clock
        self._maker = RequestMaker(load.shapes, manner, load.seed, load.deadline_s)
        self._hang_ups = random.Random(f"hang-up:{load.seed}")
        self._num_in_flight = 0
        self._coming: deque[tuple[float, Prepared]] = deque()  # of an open loop: when, and what
        self._run = Run(load)

    async def run(self) -> Run:
        """Warm up, then measure; returns when every request has ended."""
        load, run = self._load, self._run
        if not load.concurrency:  # made before, since the cores may be the server's too
            due = arrivals(load.rate, load.seed, count=load.count, duration_s=load.duration_s)
            self._coming.extend((at, self._maker.make(index)) for index, at in enumerate(due))
        if load.num_warmup:
            await self._warm_up()
        run.start_s, num_resent = self._clock(), self._pool.num_resent
        async with self._watching():
            await (self._closed() if load.concurrency else self._open())
        run.num_resent = self._pool.num_resent - num_resent
        run.end_s = max((record.ended_s for record in run.records), default=run.start_s)
        return run

    async def _warm_up(self) -> None:
        """Requests of the same kind, whose account is thrown away."""
        load = self._load
        concurrency = min(load.num_warmup, load.concurrency or 8)
        plain = replace(
            load, concurrency=concurrency, rate=0.0, count=load.num_warmup, duration_s=0.0, num_warmup=0,
            seed=f"{load.seed}:warm-up", hang_up_within_s=0.0,
        )  # fmt: skip
        await Driver(self._pool, self._manner, plain).run()

    async def _closed(self) -> None:
        load = self._load
        end_s = self._run.start_s + load.duration_s if load.duration_s else float("inf")
        next_index = 0

        async def worker() -> None:
            nonlocal next_index
            while (not load.count or next_index < load.count) and self._clock() < end_s:
                index, next_index = next_index, next_index + 1
                prepared = self._maker.make(index)
                record = await self._perform(index, prepared, self._clock())
                if record.outcome not in ("ok", "left"):
                    await asyncio.sleep(min(record.retry_after_s or PAUSE_S, MOST_PAUSE_S))

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(worker())

    async def _open(self) -> None:
        load, start_s = self._load, self._run.start_s
        slots = asyncio.Semaphore(load.max_in_flight) if load.max_in_flight else None

        async def one(index: int, prepared: Prepared, intended_s: float) -> None:
            async with slots or nullcontext():
                await self._perform(index, prepared, intended_s)

        async with asyncio.TaskGroup() as group:
            for index in range(len(self._coming)):
                at, prepared = self._coming.popleft()
                wait_s = start_s + at - TIMER_S - self._clock()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(one(index, prepared, start_s + at))

    async def _perform(self, index: int, prepared: Prepared, intended_s: float) -> Record:
        """One request, which ends in a Record whatever happens."""
        record = Record(index, prepared.kind, intended_s)
        account = Account(record, prepared)
        payload = self._pool.request_bytes("POST", prepared.path, prepared.body)
        limit_s, at_limit = self._load.timeout_s, "timeout"
        if self._load.hang_up_within_s:
            limit_s, at_limit = min((limit_s, at_limit), (self._hang_ups.uniform(0, self._load.hang_up_within_s), "left"))
        record.sent_s = self._clock()
        record.intended_s = min(intended_s, record.sent_s)  # see TIMER_S
        self._count(1)
        try:
            async with asyncio.timeout(limit_s):
                await self._pool.exchange(payload, account)
            account.close()
        except TimeoutError:
            record.outcome, record.code = at_limit, at_limit
        except (OSError, BrokenAnswerError) as error:
            record.outcome, record.code = "disconnected", "unreachable" if isinstance(error, OSError) else "cut_off"
        record.ended_s = self._clock()
        self._count(-1)
        self._run.records.append(record)
        return record

    def _count(self, change: int) -> None:
        self._num_in_flight += change
        self._run.in_flight.append((self._clock(), self._num_in_flight))

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Looks at the client's own lag, and at the server's memory, for as long as the load lasts."""
        tasks = [asyncio.create_task(self._beat())]
        if self._sample is not None:
            tasks.append(asyncio.create_task(self._look()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            due = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self._run.lags_s.append(self._clock() - due)

    async def _look(self) -> None:
        assert self._sample is not None
        while True:
            memory, run = await self._sample(), self._run
            for name in memory.processes:
                run.processes.setdefault(name, [0.0] * len(run.samples))
            for name, values in run.processes.items():
                values.append(memory.processes.get(name, 0.0))
            run.samples.append((self._clock() - run.start_s, sum(memory.processes.values())))
            run.cached.append(max([memory.cached, *run.cached[-1:]]))
            await asyncio.sleep(SAMPLE_S)
