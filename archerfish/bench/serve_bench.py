"""What a run of `archerfish bench serve` is made of: scenarios, the servers that they load in turns, and all that was found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from archerfish.bench.serve_load import Load
from archerfish.bench.serve_processes import allow_connections
from archerfish.bench.serve_report import Limits, Point, is_steady
from archerfish.bench.serve_requests import Shape
from archerfish.bench.serve_server import Server
from archerfish.bench.targets import Bar, Judged
from archerfish.errors import ArcherfishError
from archerfish.types import Progress, no_progress

MOST_LAG_MS = 20.0  # a client that is later than this measures itself
NO_LIMITS = Limits()
Tell = Callable[[str, float], None]


def tell_nothing(name: str, value: float) -> None:
    """The Tell of callers that want none."""


@dataclass(frozen=True)
class BenchOptions:
    """What the scenarios leave to the user. 0: as the scenario has it."""

    rounds: int = 3
    count: int = 0
    duration_s: float = 0.0
    num_warmup: int = -1
    timeout_s: float = 120.0
    max_in_flight: int = 0
    limits: Limits = NO_LIMITS
    seed: int = 0
    model: str = ""  # that a scenario loads itself


@dataclass
class Found:
    """All that a run of the bench found."""

    points: list[Point] = field(default_factory=list)
    targets: list[tuple[str, str, Judged]] = field(default_factory=list)  # scenario, server, target
    errors: dict[str, str] = field(default_factory=dict)  # of servers that could not be measured
    notes: list[str] = field(default_factory=list)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "servers": self.servers,
            "points": [point.as_dict() for point in self.points],
            "targets": [{"scenario": name, "server": server, **target.as_dict()} for name, server, target in self.targets],
            "errors": self.errors,
            "notes": self.notes,
        }


class ServeBench:
    """Runs scenarios on servers that are ready."""

    def __init__(
        self, servers: Sequence[Server], options: BenchOptions, tell: Tell = tell_nothing, progress: Progress = no_progress
    ) -> None:
        self.servers, self.options = list(servers), options
        self.tell, self._progress = tell, progress
        self._num_done = 0
        self.found = Found()

    async def run(self, scenarios: Mapping[str, Scenario], loads: Sequence[Load] = ()) -> Found:
        """Prepare the servers, run the scenarios and then loads of the user's own."""
        allow_connections(max([4096, *(load.concurrency for load in loads)]))
        shapes = [shape for scenario in scenarios.values() for shape in scenario.shapes]
        shapes += [shape for load in loads for shape in load.shapes]
        await self._prepare(shapes)
        if self.servers:
            for scenario in scenarios.values():
                if not scenario.is_own:
                    await scenario.run(self)
            if loads:
                await self.in_turns("load", loads)
        for name, scenario in scenarios.items():
            if scenario.is_own:
                await self._run_own(name, scenario)
        self._remark()
        for server in self.servers:
            await server.pool.close()
        return self.found

    async def _run_own(self, name: str, scenario: Scenario) -> None:
        """A scenario that brings what it measures along."""
        self._progress(self._num_done, 0, name)
        try:
            await scenario.run(self)
        except ArcherfishError as error:
            self.found.errors[name] = str(error)

    async def in_turns(self, scenario: str, loads: Sequence[Load], *, rounds: int = 0) -> dict[str, list[Point]]:
        """Rounds of all loads on all servers, each round in another order; the points of each server."""
        found = {
            server.name: [Point(scenario, server.name, load.title, load.concurrency, load.rate) for load in loads]
            for server in self.servers
        }
        for number in range(rounds or self.options.rounds):
            turn = number % len(self.servers)
            for place, load in enumerate(loads):
                for server in self.servers[turn:] + self.servers[:turn]:
                    await self.measure(server, load, found[server.name][place], f"{number}:{place}")
        for points in found.values():
            self.found.points += points
        return found

    async def measure(self, server: Server, load: Load, point: Point, seed: str, limits: Limits | None = None) -> None:
        """One load on one server; its figures become a round of the point. limits: in place of the user's."""
        self._progress(self._num_done, 0, f"{server.name}: {load.title}")
        run = await server.drive(replace(load, seed=f"{self.options.seed}:{point.scenario}:{seed}"))
        figures = point.add(run, limits or self.options.limits)
        self._num_done += 1
        self.tell(f"{point.scenario}, {server.name}, {load.title}: requests/s", figures["requests_s"])

    async def alone(self, scenario: str, part: str, server: Server, load: Load, limits: Limits | None = None) -> Point:
        """One load, once, on one server."""
        point = Point(scenario, server.name, f"{load.title} ({part})", load.concurrency, load.rate, part)
        await self.measure(server, load, point, f"{part}:{load.title}", limits)
        self.found.points.append(point)
        return point

    def load(self, shape: Shape, *, concurrency: int = 0, rate: float = 0.0, count: int = 0, duration_s: float = 0.0) -> Load:
        """A load of a scenario, with what the user wants otherwise."""
        options = self.options
        if options.count or options.duration_s:
            count, duration_s = options.count, options.duration_s
        num_warmup = options.num_warmup if options.num_warmup >= 0 else 2 * (concurrency or 8)
        return Load(
            (shape,), concurrency=concurrency, rate=rate, count=count, duration_s=duration_s, num_warmup=num_warmup,
            timeout_s=options.timeout_s, max_in_flight=options.max_in_flight,
        )  # fmt: skip

    def judge(
        self, scenario: str, server: str, name: str, value: float | None, wanted: float, *, at_least: bool = False
    ) -> None:
        self.found.targets.append((scenario, server, Bar(name, wanted, at_least).judged(value)))

    async def _prepare(self, shapes: Sequence[Shape]) -> None:
        """Servers that cannot be measured are left out, and the others go on without them."""
        for server in list(self.servers):
            self._progress(0, 0, f"waiting for {server.name}")
            try:
                await server.prepare(shapes)
            except ArcherfishError as error:
                self.found.errors[server.name] = str(error)
                self.servers.remove(server)
            self.found.servers[server.name] = server.as_dict()
            self.found.notes += server.notes

    def _remark(self) -> None:
        """What a reader of the figures should know."""
        for point in self.found.points:
            where = f"{point.scenario}, {point.server}, {point.load}"
            lag = point.median("client_lag_p99_ms")
            if lag is not None and lag > MOST_LAG_MS:
                self.found.notes.append(f"{where}: the client itself was up to {lag:.0f} ms late (p99)")
            if not point.part and not all(is_steady(figures) for figures in point.rounds):
                self.found.notes.append(f"{where}: not a steady state (Little's law is off by more than a tenth)")


@dataclass(frozen=True)
class Scenario:
    """A named piece of work, and the kinds of requests that it needs a server to take."""

    run: Callable[[ServeBench], Awaitable[None]]
    shapes: tuple[Shape, ...]
    summary: str
    is_own: bool = False  # whether it starts what it measures itself
