"""What HTTP and ZMQ add to the time of a streamed answer, against the same engine in the caller's process.

One request at a time, in process and over a kept connection in turns, with the same prompt: template, tokens and text are
made on both ways. An engine whose steps only wait shows what is added without the noise of a model; a real one, that it is so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from archerfish.bench.paced_engine import NAME, NO_WAIT, Pace, make_engine, save_model
from archerfish.bench.paced_process import Task
from archerfish.bench.serve_bench import ServeBench
from archerfish.bench.serve_report import Figures, Point
from archerfish.bench.served_stack import FrontEnds, chat_request, paced_stack
from archerfish.bench.stream_reader import CONTENT
from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ServiceError
from archerfish.params import SamplingParams
from archerfish.serve.host_config import HostConfig, ModelSpec
from archerfish.serve.processes import engine_process

PACES = {"steps of 5 ms": Pace(0.005), "steps of no time": NO_WAIT}
NUM_PACED, NUM_PACED_TOKENS = 40, 64  # answers of a round on each way, and their tokens
NUM_REAL, NUM_REAL_TOKENS = 10, 16
MOST_TTFT_MS, MOST_TOKEN_MS = 2.0, 0.2
IN_PROCESS, SERVED, ADDED = "in process", "over HTTP", "added"
END_OF_BODY = b"0\r\n\r\n"
PAGE = "The archerfish spits a jet of water at an insect above the surface, corrects for the bending of light, and waits. "
TIMEOUT_S = 60.0
IDLE_S = 1.0  # after which a server may close a connection
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """Of one answer, in milliseconds: to the first token, and from each to the next in the mean."""

    ttft_ms: float
    token_ms: float

    @classmethod
    def of(cls, began_s: float, times: list[float], num_tokens: int) -> Timing:
        if not times:
            raise ServiceError("An answer had no text.", hint="The server's log may say why.")
        return cls((times[0] - began_s) * 1000, (times[-1] - times[0]) * 1000 / max(1, num_tokens - 1))


def time_in_process(engine: LLMEngine, content: str, num_tokens: int, clock: Clock = time.perf_counter) -> Timing:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    began = clock()
    parts = engine.stream_chat([{"role": "user", "content": content}], params)
    times = [clock() for part in parts if part.text]
    return Timing.of(began, times, num_tokens)


class Line:
    """One connection, over which one chat at a time is asked for."""

    def __init__(self, host: str, port: int, clock: Clock = time.perf_counter) -> None:
        self._address, self._clock = (host, port), clock
        self._socket: socket.socket | None = None
        self._used_s = 0.0

    def _ready(self) -> socket.socket:
        """The connection; a new one, over which something was asked before, where a server may have closed the old one."""
        if self._socket is None or self._clock() - self._used_s > IDLE_S:
            self.close()
            self._socket = socket.create_connection(self._address, TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith((b"}", END_OF_BODY)):  # a JSON object, whole or in chunks
                answer += (data := self._socket.recv(1 << 16))
                if not data:
                    raise ServiceError(f"The server answered {answer!r}.", hint="")
        return self._socket

    def chat(self, model: str, content: str, num_tokens: int) -> Timing:
        request, connection = chat_request(model, content, num_tokens), self._ready()
        times: list[float] = []
        received, end = b"", b""
        began = self._clock()
        connection.sendall(request)
        while not end.endswith(END_OF_BODY):
            data = connection.recv(1 << 16)
            times += [self._clock()] * data.count(CONTENT)
            end = (end + data)[-len(END_OF_BODY) :]
            received = (received + data)[:100]
            if not data or not received.startswith(b"HTTP/1.1 200"):
                raise ServiceError(f"The server answered {received!r}.", hint="")
        self._used_s = self._clock()
        return Timing.of(began, times, num_tokens)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True)
class Pair:
    """The same engine on both ways."""

    engine: LLMEngine
    line: Line
    model: str
    num_tokens: int

    def round(self, number: int, count: int) -> dict[str, Figures]:
        """So many answers on each way, in turns; medians of each, and how far they are apart."""
        timings: dict[str, list[Timing]] = {IN_PROCESS: [], SERVED: []}
        ways = {
            IN_PROCESS: lambda content: time_in_process(self.engine, content, self.num_tokens),
            SERVED: lambda content: self.line.chat(self.model, content, self.num_tokens),
        }
        for place in range(count):
            content = f"{number}.{place}: {PAGE * 2}"  # which no cache has, after the first words
            for way in ((IN_PROCESS, SERVED), (SERVED, IN_PROCESS))[place % 2]:
                timings[way].append(ways[way](content))
        found = {way: medians(own) for way, own in timings.items()}
        return {**found, ADDED: {key: found[SERVED][key] - value for key, value in found[IN_PROCESS].items()}}


def medians(timings: list[Timing]) -> Figures:
    return {
        "ttft_p50_ms": statistics.median(timing.ttft_ms for timing in timings),
        "per_token_ms": statistics.median(timing.token_ms for timing in timings),
    }


def measure(pair: Pair, load: str, rounds: int, count: int) -> list[Point]:
    """Points of one engine: on each way, and what is added."""
    points = {way: Point("overhead", way, load, concurrency=1, part=load) for way in (IN_PROCESS, SERVED, ADDED)}
    pair.round(-1, 2)  # what a first request costs more is left out
    for number in range(rounds):
        for way, figures in pair.round(number, count).items():
            points[way].rounds.append(figures)
    return list(points.values())


@contextmanager
def paced_pairs(num_tokens: int) -> Iterator[Callable[[Pace], Pair]]:
    """Paced engines on both ways, for paces one after another."""
    with tempfile.TemporaryDirectory(prefix="archerfish-overhead-") as directory, ExitStack() as stack:
        engine, runner = make_engine(save_model(Path(directory)))
        stack.enter_context(engine)
        process, (front_end,) = stack.enter_context(paced_stack(1))
        line = Line(front_end.host, front_end.port)
        stack.callback(line.close)

        def at(pace: Pace) -> Pair:
            runner.pace = pace
            process.do(Task(kind="begin", pace=pace))
            return Pair(engine, line, NAME, num_tokens)

        yield at


@contextmanager
def real_pair(config: EngineConfig, num_tokens: int) -> Iterator[Pair]:
    """A model on both ways: one engine here, one behind a socket and a front end."""
    credentials = secrets.token_urlsafe(32)
    spec = ModelSpec(kind="generation", options=dataclasses.asdict(config))
    with ExitStack() as stack:
        engine = stack.enter_context(LLMEngine(config))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="archerfish-overhead-"))
        host = HostConfig(address=f"ipc://{directory}/engine", models=(spec,), front_end_pass=credentials)
        stack.enter_context(engine_process(host))
        front_end = stack.enter_context(FrontEnds(host.address, credentials, 1))
        front_end.wait()
        line = Line(front_end.host, front_end.port)
        stack.callback(line.close)
        yield Pair(engine, line, spec.model, num_tokens)


def measure_all(config: EngineConfig, rounds: int, count: int) -> list[Point]:
    points: list[Point] = []
    with paced_pairs(NUM_PACED_TOKENS) as at:
        for load, pace in PACES.items():
            points += measure(at(pace), load, rounds, count or NUM_PACED)
    with real_pair(config, NUM_REAL_TOKENS) as pair:
        points += measure(pair, config.model, rounds, count or NUM_REAL)
    return points


async def overhead(bench: ServeBench) -> None:
    """The scenario: paced engines, then a model."""
    config = EngineConfig(model=bench.options.model or EngineConfig.model)
    points = await asyncio.to_thread(measure_all, config, bench.options.rounds, bench.options.count)
    bench.found.points += points
    for point in points:
        if point.server == ADDED:
            bench.judge("overhead", point.load, "added to the first token, ms", point.median("ttft_p50_ms"), MOST_TTFT_MS)
            bench.judge("overhead", point.load, "added to a token, ms", point.median("per_token_ms"), MOST_TOKEN_MS)
