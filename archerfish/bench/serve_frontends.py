"""Whether front ends keep up with a fast engine, and what they cost its loop.

An engine whose steps only wait brings a token to each of many streams at every step. Beside it in turns: the same engine in a
process of its own, whose tokens nobody carries anywhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from archerfish.bench import stream_reader
from archerfish.bench.paced_engine import FIRST_WORD, NAME, NUM_WORDS, Pace
from archerfish.bench.paced_process import Report, Task
from archerfish.bench.serve_bench import ServeBench
from archerfish.bench.serve_report import Figures, Point, percentiles
from archerfish.bench.served_stack import FrontEnds, PacedProcess, Process, chat_request, paced_stack
from archerfish.bench.stream_reader import Reading, WasRead
from archerfish.errors import ServiceError
from archerfish.serve import wire
from archerfish.serve.client import open_socket
from archerfish.serve.wire import Bundle, Chunk, GenerationRequest

NUM_STREAMS, TOKENS_S = 256, 20_000.0
ALONE, SOCKETS = "in process", "sockets alone"
FRONT_ENDS = (1, 2)
RAMP_S = 4.0  # what streams may need to begin
PACES = {"one wait a step": 1, "100 waits a step": 100}
MOST_SLOWED = 0.05
LEAST_DELIVERED = 0.99  # of what the engine brought meanwhile
TIMEOUT_S = 120.0
PROMPT = "Tell me something about archerfish."


@dataclass(frozen=True)
class Size:
    """How much of it."""

    num_streams: int = NUM_STREAMS
    tokens_s: float = TOKENS_S
    duration_s: float = 5.0

    def pace(self, num_waits: int) -> Pace:
        return Pace(self.num_streams / self.tokens_s, num_waits)

    @property
    def num_tokens(self) -> int:
        return int((self.duration_s + RAMP_S) * self.tokens_s / self.num_streams)


def run_alone(engine: PacedProcess, pace: Pace, size: Size) -> Figures:
    """The loop with a sink in its own process."""
    task = Task(kind="run", pace=pace, num_streams=size.num_streams, num_tokens=size.num_tokens)
    return engine.do(task).figures


def run_sockets(engine: PacedProcess, pace: Pace, size: Size) -> Figures:
    """The loop with a socket and a client that throws away what it gets: what front ends cost without their use of cores."""
    engine.do(Task(kind="begin", pace=pace))
    params = {"max_tokens": size.num_tokens, "ignore_eos": True, "temperature": 0.0}
    with open_socket(zmq.DEALER) as opened:
        opened.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        opened.connect(engine.address)
        for number in range(size.num_streams):
            prompt = [FIRST_WORD + number, *range(FIRST_WORD, FIRST_WORD + 31)]
            asked = GenerationRequest(
                request_id=str(number), token_ids=prompt, params=params, stream=True, wants_ids=True, takes_bundles=True
            )
            opened.send_multipart([b"", wire.encode(asked)])
        num_open = size.num_streams
        while num_open:
            answer = wire.decode_answer(opened.recv_multipart()[-1])
            told = answer.answers if isinstance(answer, Bundle) else [answer]
            num_open -= sum(not isinstance(one, Chunk) for one in told)
    return engine.do(Task(kind="report", num_streams=size.num_streams)).figures


def run_served(engine: PacedProcess, front_ends: FrontEnds, pace: Pace, size: Size) -> Figures:
    """The loop with sockets, front ends and a reader."""
    engine.do(Task(kind="begin", pace=pace))
    pids = {f"front end {number}": pid for number, pid in enumerate(front_ends.pids)}
    reading = Reading(
        host=front_ends.host, port=front_ends.port, request=chat_request(NAME, PROMPT, size.num_tokens),
        num_streams=size.num_streams, processes={"engine": engine.pid, **pids},
    )  # fmt: skip
    with Process(stream_reader.COMMAND) as reader:
        reader.send(reading)
        read = msgspec.json.decode(reader.receive(), type=WasRead)
    return served_figures(engine.do(Task(kind="report", num_streams=size.num_streams)), read, size)


def served_figures(report: Report, read: WasRead, size: Size) -> Figures:
    if not read.num_tokens or not report.figures:
        raise ServiceError(f"Only {read.num_done} of {size.num_streams} streams ended; they never ran all at once.", hint="")
    late_ms = [value * 1000 for value in lateness(report, read)]
    front_s = sum(value for name, value in read.cpu_s.items() if name.startswith("front end"))
    num_front_ends = sum(name.startswith("front end") for name in read.cpu_s)
    return {
        **report.figures,
        "read_tokens_s": read.num_tokens / read.window_s,
        "delivered": read.num_tokens / read.window_s / report.figures["tokens_s"],
        "num_ok": float(read.num_done),
        **{f"late_p{percent}_ms": percentiles(late_ms, (percent,))[0] for percent in (50, 90, 99)},
        "engine_us_token": read.cpu_s["engine"] / read.num_tokens * 1e6,
        "front_us_token": front_s / read.num_tokens * 1e6,
        "reader_us_token": read.cpu_s["reader"] / read.num_tokens * 1e6,
        "front_cores": front_s / read.window_s / num_front_ends,
        "all_cores": sum(read.cpu_s.values()) / read.window_s,
        "tokens_read": read.num_tokens / read.num_reads,
    }


def lateness(report: Report, read: WasRead) -> list[float]:
    """Seconds from the end of a step to the arrival of its tokens at the reader."""
    ends = {number % NUM_WORDS: ended_s for number, ended_s in report.ends.items()}
    return [arrived_s - ends[word] for word, arrived_s in read.words if word in ends]


def measure(size: Size, rounds: int, tell: Callable[[str, float], None] = lambda name, value: None) -> list[Point]:
    """Rounds of all kinds in turns: the loop alone, with sockets, and served by ever more front ends."""
    titles = [ALONE, SOCKETS, *(f"{number} front end{'s' * (number > 1)}" for number in FRONT_ENDS)]
    points = {
        (load, title): Point("frontends", title, f"{size.num_streams} streams, {load}", concurrency=size.num_streams, part=load)
        for load in PACES
        for title in titles
    }
    with PacedProcess() as alone, paced_stack(*FRONT_ENDS) as (engine, groups):
        runs: dict[str, Callable[[Pace], Figures]] = {
            ALONE: lambda pace: run_alone(alone, pace, size),
            SOCKETS: lambda pace: run_sockets(engine, pace, size),
        }
        for title, group in zip(titles[2:], groups, strict=True):
            runs[title] = lambda pace, group=group: run_served(engine, group, pace, size)  # type: ignore[misc]
        for number in range(rounds):
            for load, num_waits in PACES.items():
                turn = number % len(titles)
                for title in titles[turn:] + titles[:turn]:
                    figures = runs[title](size.pace(num_waits))
                    points[load, title].rounds.append(figures)
                    tell(f"frontends, {title}, {load}: tokens/s", figures.get("tokens_s", math.nan))
    return list(points.values())


async def frontends(bench: ServeBench) -> None:
    """The scenario. 100 waits a step are slowed by a machine with few cores too, which the waiting for a core shows."""
    size = Size(duration_s=bench.options.duration_s or Size.duration_s)
    points = await asyncio.to_thread(measure, size, bench.options.rounds, bench.tell)
    bench.found.points += points
    for load in PACES:
        alone, *served = [point for point in points if point.part == load]
        for point in served:
            slowed = slowdown(alone, point)
            bench.judge("frontends", point.server, f"engine loop slowed by, {load}", slowed, MOST_SLOWED)
            if point.server != SOCKETS:
                delivered = point.median("delivered")
                bench.judge("frontends", point.server, f"delivered, {load}", delivered, LEAST_DELIVERED, at_least=True)
    for point in points:
        if "one wait" in point.part and point.server not in (ALONE, SOCKETS):
            least, found = LEAST_DELIVERED * size.tokens_s, point.median("read_tokens_s")
            bench.judge("frontends", point.server, "tokens/s at the reader", found, least, at_least=True)


def slowdown(alone: Point, served: Point) -> float | None:
    """The share of its steps that a loop loses."""
    usual, found = alone.median("steps_s"), served.median("steps_s")
    return None if not usual or found is None else 1 - found / usual
