"""`archerfish bench serve`: loads servers over HTTP, in turns, and says what they gave and which targets they met."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from archerfish.bench.serve_bench import BenchOptions, Found, Scenario, ServeBench, Tell, tell_nothing
from archerfish.bench.serve_http import Address
from archerfish.bench.serve_load import Load
from archerfish.bench.serve_processes import ServerProcess, check_free, tree_use
from archerfish.bench.serve_report import Limits, Point
from archerfish.bench.serve_requests import Shape
from archerfish.bench.serve_server import BLOCKS_IN_USE, POLL_S, REQUESTS_IN_USE, Server, ServerOptions, in_use
from archerfish.types import Progress, no_progress

CHAT = Shape("chat", (64, 64), (16, 16))
EMBEDDING = Shape("embeddings", (32, 32))
TABLE_SIZES = (1, 4, 8, 16)
CAPACITY_SIZES = (16, 32)
CAPACITY_S = 10.0
OVER_CAPACITY, LEAST_OVER = 3.0, 2.7
# In which an overloaded server must have answered for a request to count as goodput, unless the user names another time
# (--e2e-target): what people wait for a chat, and programs for a vector. Sent as deadline_s to servers that take it.
DEADLINES_S = {"chat": 10.0, "embeddings": 1.0}
NUM_LEAVERS, LEAVERS_AT_ONCE = 500, 50
SETTLE_S = 15.0  # what a server gets to free what leavers held
MOST_GROWTH = 0.05  # of memory, from the first quarter of an overload to the last


async def chat8(bench: ServeBench) -> None:
    points = await bench.in_turns("chat8", [bench.load(CHAT, concurrency=8, count=200)])
    for server, (point,) in points.items():
        bench.judge("chat8", server, "end to end p50, ms", point.median("e2e_p50_ms"), 500)
        bench.judge("chat8", server, "end to end p99, ms", point.median("e2e_p99_ms"), 2000)
        bench.judge("chat8", server, "not answered well", num_not_well(point), 0)


async def embed(bench: ServeBench) -> None:
    loads = [bench.load(EMBEDDING, concurrency=8, duration_s=10.0), bench.load(EMBEDDING, rate=100.0, duration_s=10.0)]
    points = await bench.in_turns("embed", loads)
    for server, (closed, opened) in points.items():
        bench.judge("embed", server, "requests/s, 8 at once", closed.median("requests_s"), 100, at_least=True)
        bench.judge("embed", server, "end to end p99, 8 at once, ms", closed.median("e2e_p99_ms"), 200)
        bench.judge("embed", server, "end to end p99, 100 arrivals/s, ms", opened.median("e2e_p99_ms"), 200)
        bench.judge("embed", server, "not answered well", num_not_well(closed) + num_not_well(opened), 0)


async def table(bench: ServeBench) -> None:
    shapes = (EMBEDDING, CHAT)
    loads = [bench.load(shape, concurrency=size, duration_s=10.0) for shape in shapes for size in TABLE_SIZES]
    await bench.in_turns("table", loads)


async def overload(bench: ServeBench) -> None:
    await overloaded(bench, "overload", CHAT)


async def overload_embed(bench: ServeBench) -> None:
    await overloaded(bench, "overload-embed", EMBEDDING)


async def overloaded(bench: ServeBench, scenario: str, shape: Shape) -> None:
    """Capacity before and after, and between them three times as much for two minutes; all within the same deadline."""
    limits = bench.options.limits
    if not limits.latency_s:
        limits = replace(limits, latency_s=DEADLINES_S[shape.kind])
    for server in bench.servers:
        deadline_s = limits.latency_s if await takes_deadline(bench, server, shape, limits.latency_s) else 0.0
        before = await capacity(bench, scenario, "before", server, shape, limits)
        if not before:
            bench.judge(scenario, server.name, "capacity, requests/s", before, 0.001, at_least=True)
            continue
        load = replace(bench.load(shape, rate=OVER_CAPACITY * before, duration_s=120.0), deadline_s=deadline_s)
        point = await bench.alone(scenario, f"{OVER_CAPACITY:g} x capacity", server, load, limits)
        after = await capacity(bench, scenario, "after", server, shape, limits)
        judge_overload(bench, scenario, server, point, before, after)


async def takes_deadline(bench: ServeBench, server: Server, shape: Shape, deadline_s: float) -> bool:
    """Whether a server takes deadline_s; where it does not, a note says so."""
    run = await server.drive(Load((shape,), concurrency=1, count=1, deadline_s=deadline_s, seed=f"deadline:{server.name}"))
    if run.records[0].status not in (400, 422):
        return True
    bench.found.notes.append(f"{server.name} does not take deadline_s: it cannot refuse what would come too late")
    return False


def judge_overload(bench: ServeBench, scenario: str, server: Server, point: Point, before: float, after: float) -> None:
    figures, name = point.rounds[0], server.name
    answered = figures["num_ok"] + figures["num_refused_with_retry_after"]
    bench.judge(scenario, name, "not answered, nor refused with Retry-After", figures["num_requests"] - answered, 0)
    mean = (before + after) / 2  # the machine may have changed meanwhile, and if much, this was no such overload
    bench.judge(scenario, name, "load / capacity", point.rate / mean, LEAST_OVER, at_least=True)
    bench.judge(scenario, name, "goodput / capacity", figures["goodput_s"] / mean, 0.9, at_least=True)
    bench.judge(scenario, name, "growth of memory beside KV", figures.get("memory_growth"), MOST_GROWTH)
    bench.judge(scenario, name, "capacity afterwards / before", after / before, 0.9, at_least=True)


async def capacity(bench: ServeBench, scenario: str, when: str, server: Server, shape: Shape, limits: Limits) -> float:
    """Most requests a second, and within the limits, of some numbers at once."""
    best = 0.0
    for size in CAPACITY_SIZES:
        duration_s = min(CAPACITY_S, bench.options.duration_s or CAPACITY_S)
        load = replace(bench.load(shape, concurrency=size, duration_s=duration_s), count=0, duration_s=duration_s)
        point = await bench.alone(scenario, f"capacity {when}", server, load, limits)
        best = max(best, point.rounds[0]["goodput_s"])
    return best


async def disconnect(bench: ServeBench) -> None:
    """Clients that hang up at random moments, about half of them before the end; then nothing may be held for them."""
    for server in bench.servers:
        staying = replace(bench.load(CHAT, concurrency=LEAVERS_AT_ONCE, count=100), count=100, duration_s=0.0)
        usual = await bench.alone("disconnect", "before", server, staying)
        latency_ms = usual.median("e2e_p50_ms")
        if latency_ms is None:
            bench.judge("disconnect", server.name, "blocks in use afterwards", None, 0)
            continue
        before = await use_of(server)
        leaving = replace(
            staying, count=bench.options.count or NUM_LEAVERS, num_warmup=0, hang_up_within_s=2 * latency_ms / 1000
        )
        await bench.alone("disconnect", "leaving", server, leaving)
        blocks, requests = await settle(server)
        bench.judge("disconnect", server.name, "blocks in use afterwards", blocks, 0)
        bench.judge("disconnect", server.name, "requests running or waiting afterwards", requests, 0)
        again = await bench.alone("disconnect", "after", server, replace(staying, num_warmup=0))
        bench.judge("disconnect", server.name, "not answered well afterwards", num_not_well(again), 0)
        after = await use_of(server, before)
        for what, was, now in zip(("files and sockets", "threads"), before, after, strict=True):
            bench.judge("disconnect", server.name, f"more {what} than before", now - was if was else None, 0)


async def use_of(server: Server, wanted: tuple[int, int] | None = None) -> tuple[int, int]:
    """Open files and threads of a server's processes without our connections, once they are as few as wanted or time is up."""
    found = 0, 0
    for _ in range(int(SETTLE_S / POLL_S) if wanted else 1):
        await server.pool.close()
        await asyncio.sleep(POLL_S)
        uses = tree_use(server.pid).values() if server.pid else ()
        found = sum(use.num_files for use in uses), sum(use.num_threads for use in uses)
        if wanted and found[0] <= wanted[0] and found[1] <= wanted[1]:
            break
    return found


async def settle(server: Server) -> tuple[float | None, float | None]:
    """Blocks and requests in use by the server's own /stats, once they are zero or time is up."""
    blocks, requests = None, None
    for _ in range(int(SETTLE_S / POLL_S)):
        stats = await server.get("/stats")
        blocks, requests = in_use(stats, BLOCKS_IN_USE), in_use(stats, REQUESTS_IN_USE)
        if not blocks and not requests:
            break
        await asyncio.sleep(POLL_S)
    return blocks, requests


async def overhead(bench: ServeBench) -> None:
    """Imported when it runs, as the next one: they need engine and service, which loading other servers does not."""
    from archerfish.bench.serve_overhead import overhead as run

    await run(bench)


async def frontends(bench: ServeBench) -> None:
    from archerfish.bench.serve_frontends import frontends as run

    await run(bench)


def num_not_well(point: Point) -> float:
    return sum(figures["num_requests"] - figures["num_ok"] for figures in point.rounds)


SCENARIOS = {
    "chat8": Scenario(chat8, (CHAT,), "8 chats at once, 64 tokens in and 16 out: p50 < 500 ms, p99 < 2 s"),
    "embed": Scenario(embed, (EMBEDDING,), "embeddings, 8 at once and 100 arrivals/s: >= 100 requests/s, p99 < 200 ms"),
    "table": Scenario(table, (EMBEDDING, CHAT), "embeddings and chats, 1, 4, 8 and 16 at once"),
    "overload": Scenario(overload, (CHAT,), "chats, three times the capacity for two minutes: answers, goodput, memory"),
    "overload-embed": Scenario(overload_embed, (EMBEDDING,), "the same with embeddings"),
    "disconnect": Scenario(disconnect, (CHAT,), "500 clients that hang up at random moments: nothing stays in use"),
    "overhead": Scenario(overhead, (), "what HTTP and ZMQ add to an engine: < 2 ms to a first token, < 0.2 ms a token", True),
    "frontends": Scenario(frontends, (), "256 streams at 20,000 tokens/s: front ends keep up, the loop loses < 5 %", True),
}


def measure_servers(
    servers: Sequence[ServerOptions], options: BenchOptions, scenarios: Sequence[str], loads: Sequence[Load],
    tell: Tell = tell_nothing, progress: Progress = no_progress,
) -> Found:  # fmt: skip
    """Start the servers that are to be started, run the bench, stop them."""
    from archerfish.serve.client import new_event_loop

    async def main(processes: dict[str, ServerProcess]) -> Found:
        made = [Server(one, process=processes.get(one.name)) for one in servers]
        return await ServeBench(made, options, tell, progress).run({name: SCENARIOS[name] for name in scenarios}, loads)

    if scenarios and not loads and all(SCENARIOS[name].is_own for name in scenarios):
        servers = ()
    for one in servers:
        if one.start:
            check_free(one.name, Address.parse(one.url))
    with ExitStack() as stack:
        processes = {one.name: stack.enter_context(ServerProcess(one.name, one.start)) for one in servers if one.start}
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(main(processes))
