"""`archerfish bench serve`: scenarios of load on servers, ours and others side by side."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import aiohttp

from archerfish.bench.generate import open_ours
from archerfish.bench.load import Dialect, Load, LoadDriver, Shape
from archerfish.bench.report import OURS, Found, Measurement
from archerfish.bench.worker import EngineGroup, rotated
from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError, ServiceError, refuse_unknown

DEFAULT_WORKLOAD = "chat:64/16"
CHAT, EMBEDDING = Shape("chat", (64, 64), (16, 16)), Shape("embeddings", (32, 32))
TABLE_SIZES = (1, 4, 8, 16)
CAPACITY_SIZES = (16, 32)
CAPACITY_S = 10.0
PROMPT_STREAMS, PROMPTED = (4, 8, 16), Shape("ids", (512, 512), (128, 128))
OVERLOAD = 3.0  # times the capacity
DEADLINES_S = {"chat": 10.0, "embeddings": 1.0}  # in which an overloaded server must have answered
NUM_LEAVERS, LEAVERS_AT_ONCE = 500, 50
START_S = 600.0
STOP_S = 15.0
SETTLE_S = 15.0
POLL_S = 0.2
SAMPLE_S = 1.0
EXTRAS = {"ignore_eos": True, "stream_options": {"include_usage": True}}
NOT_FOR_CHAT = ("embedding", "cross-encoder", "reranker")
SMALL_MODEL = "story-rwkv7"  # of the scenarios that measure the service and not the model
OVERHEAD_ANSWERS = 20
STREAMS = 256
STREAM_TOKENS = 32
FRONT_ENDS = (1, 2)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Server:
    """One server under load. process and log: of the command that was started here; url: "" until it has announced
    it."""

    process: subprocess.Popen[bytes] | None = None
    log: IO[str] | None = None

    def __init__(self, name: str, url: str, options: Namespace) -> None:
        self.name = name
        self.url = url.rstrip("/").removesuffix("/v1")
        self.options = options
        self.dialect = Dialect()

    def session(self) -> aiohttp.ClientSession:
        key = os.environ.get(self.options.api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0), headers=headers)

    async def get(self, path: str) -> Any:
        """A JSON answer; None where there is none."""
        try:
            async with self.session() as session, session.get(path) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None

    async def wait(self) -> list[dict[str, Any]]:
        """Wait until the server answers; returns its models."""
        ends_s = time.monotonic() + (START_S if self.process else STOP_S)
        while True:
            if self.process and self.log:
                self.log.seek(0)
                text = self.log.read()
                if self.process.poll() is not None:
                    raise ServiceError(f"{self.name} ended with {self.process.returncode}: {text[-500:]}", hint="")
                if not self.url and (found := re.search(r"http://127\.0\.0\.1:\d+", text)):
                    self.url = found[0]
            if self.url and (listed := await self.get("/v1/models")):
                models: list[dict[str, Any]] = listed["data"]
                return models
            if time.monotonic() > ends_s:
                raise ServiceError(f"{self.name} does not answer.", hint="Start it, or give --start NAME=COMMAND.")
            await asyncio.sleep(POLL_S)

    async def prepare(self, shapes: tuple[Shape, ...]) -> list[str]:
        """Wait for the server, choose its models, and find out whether it takes the extra members of a request."""
        models = await self.wait()
        chat = next((one for one in models if one.get("kind") not in NOT_FOR_CHAT), models[0])["id"]
        embedding = next((one for one in models if one.get("kind") == "embedding"), models[0])["id"]
        self.dialect = Dialect(self.options.model or chat, self.options.embedding_model or embedding, EXTRAS)
        probe = await self.drive(Load(shapes, concurrency=1, count=2 * len(shapes)))
        if all(record.status not in (400, 422) for record in probe.records):
            return []
        self.dialect = replace(self.dialect, extras={})
        return [f"{self.name} does not take ignore_eos: its answers may be short, and a chunk counts as a token"]

    async def drive(self, load: Load, memory: list[float] | None = None) -> LoadDriver:
        """Put a load on the server. memory: takes the bytes of the server's processes, less its KV, every second."""
        async with self.session() as session:
            driver = LoadDriver(session, self.dialect, replace(load, timeout_s=self.options.timeout))
            sampling = asyncio.create_task(self._sample(memory))
            await driver.run()
            sampling.cancel()
        return driver

    async def _sample(self, memory: list[float] | None) -> None:
        while self.process and memory is not None:
            memory.append(self.use()[0] - sum_of(await self.get("/stats"), "kv_bytes_held"))
            await asyncio.sleep(SAMPLE_S)

    def use(self) -> tuple[float, int, int]:
        """Resident bytes, open files and threads of the process and all its descendants; nothing where it is not
        ours."""
        num_bytes = 0.0
        num_files = 0
        num_threads = 0
        to_visit = [self.process.pid] if self.process else []
        while to_visit:
            folder = Path("/proc") / str(to_visit.pop())
            with suppress(OSError, ValueError, IndexError):
                num_bytes += int((folder / "statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
                num_files += len(list((folder / "fd").iterdir()))
                for task in (folder / "task").iterdir():
                    num_threads += 1
                    to_visit += map(int, (task / "children").read_text(encoding="ascii").split())
        return num_bytes, num_files, num_threads


@contextmanager
def running(name: str, url: str, options: Namespace, command: list[str]) -> Iterator[Server]:
    """Start a server in a process group of its own, and end the group afterwards."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, start_new_session=True, **streams)
        except (OSError, IndexError) as error:
            raise InvalidOptionError(f"The command {command!r} of {name} cannot be run: {error}.") from None
        try:
            server = Server(name, url, options)
            server.process, server.log = process, log
            yield server
        finally:
            for wanted in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, wanted)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)


def own_server(options: Namespace, *arguments: str) -> AbstractContextManager[Server]:
    """`archerfish serve` on a free port."""
    return running(OURS, "", options, [sys.executable, "-m", "archerfish", "serve", "--port", "0", *arguments])


def sum_of(values: Any, *keys: str) -> float:
    """The sum of all numbers under some names, however deep."""
    if isinstance(values, list):
        return sum(sum_of(value, *keys) for value in values)
    if not isinstance(values, dict):
        return 0.0
    return sum(float(value) if key in keys else sum_of(value, *keys) for key, value in values.items())


class ServeBench:
    """Scenarios on servers that are ready; each is a generator of measurements."""

    def __init__(self, servers: list[Server], options: Namespace, runner: asyncio.Runner) -> None:
        self.servers = servers
        self.options = options
        self.runner = runner

    def load(self, *shapes: Shape, **size: Any) -> Load:
        """A load of a scenario; its size is the user's where one is given."""
        if self.options.requests or self.options.duration:
            size |= {"count": self.options.requests, "duration_s": self.options.duration}
        return Load(shapes, **size)

    def drive(
        self, server: Server, load: Load, good_s: float = 0.0, memory: list[float] | None = None
    ) -> dict[str, float]:
        return self.runner.run(server.drive(load, memory)).figures(good_s or self.options.e2e_target / 1000)

    def rounds(self, title: str, load: Load) -> Found:
        """Rounds of one load on all servers, each round beginning with another server."""
        for server in self.servers:
            self.drive(server, Load(load.shapes, concurrency=load.concurrency or 8, count=16, seed="warmup"))
        for number in range(self.options.rounds):
            for server in rotated(self.servers, number):
                found = self.drive(server, replace(load, seed=f"{title}:{number}"))
                yield from measurements(title, server, found)

    def chat8(self) -> Found:
        yield from self.rounds("chat8", self.load(CHAT, concurrency=8, count=200))

    def embed(self) -> Found:
        yield from self.rounds("embed, 8 at once", self.load(EMBEDDING, concurrency=8, duration_s=10.0))
        yield from self.rounds("embed, 100 arrivals/s", self.load(EMBEDDING, rate=100.0, duration_s=10.0))

    def table(self) -> Found:
        for shape in (EMBEDDING, CHAT):
            for size in TABLE_SIZES:
                load = self.load(shape, concurrency=size, duration_s=10.0)
                yield from self.rounds(f"table, {shape.kind}, {size} at once", load)

    def streams(self) -> Found:
        """Prompts of token ids that join streams."""
        for size in PROMPT_STREAMS:
            yield from self.rounds(f"streams, {size} at once", self.load(PROMPTED, concurrency=size, count=12 * size))

    def user_load(self) -> Found:
        shapes, names = user_shapes(self.options), " + ".join(self.options.workload or [DEFAULT_WORKLOAD])
        for size in self.options.concurrency or (() if self.options.rate else (8,)):
            yield from self.rounds(f"{names}, {size} at once", self.load(*shapes, concurrency=int(size), count=200))
        for rate in self.options.rate:
            yield from self.rounds(f"{names}, {rate} arrivals/s", self.load(*shapes, rate=rate, count=200))

    def overload(self, title: str, shape: Shape) -> Found:
        """The capacity before and after, and between them three times as much for two minutes, within the same
        deadline."""
        good_s = self.options.e2e_target / 1000 or DEADLINES_S[shape.kind]
        for server in self.servers:
            before = self.capacity(server, shape, good_s, "before")
            probe = self.runner.run(server.drive(Load((shape,), concurrency=1, count=1, deadline_s=good_s)))
            deadline_s = good_s if probe.records[0].status not in (400, 422) else 0.0  # other servers may not take one
            load = self.load(
                shape, rate=max(1.0, OVERLOAD * before), duration_s=120.0, deadline_s=deadline_s, seed=title
            )
            memory: list[float] = []
            found = self.drive(server, load, good_s, memory)
            after = self.capacity(server, shape, good_s, "after")
            found["capacity before, requests/s"] = before
            found["goodput / capacity"] = found["goodput, requests/s"] / max((before + after) / 2, 1e-9)
            found["capacity after / before"] = after / max(before, 1e-9)
            if quarter := len(memory) // 4:
                early, late = statistics.median(memory[:quarter]), statistics.median(memory[-quarter:])
                found["growth of memory, share"] = (late - early) / early
            yield from measurements(title, server, found)

    def capacity(self, server: Server, shape: Shape, good_s: float, seed: str) -> float:
        """The most good answers a second of some numbers at once. seed: other prompts, which no cache has."""
        duration_s = min(CAPACITY_S, self.options.duration or CAPACITY_S)
        loads = [
            Load((shape,), concurrency=size, duration_s=duration_s, seed=f"{seed}:{size}") for size in CAPACITY_SIZES
        ]
        return max(self.drive(server, load, good_s)["goodput, requests/s"] for load in loads)

    def disconnect(self) -> Found:
        """Clients that hang up at random moments, about half of them before the end. Then nothing may be held for
        them."""
        for server in self.servers:
            staying = Load((CHAT,), concurrency=LEAVERS_AT_ONCE, count=100, seed="staying")
            usual_s = self.drive(server, staying)["end to end p50, ms"] / 1000
            before = server.use()
            count = self.options.requests or NUM_LEAVERS
            left = self.drive(server, replace(staying, count=count, hang_up_within_s=2 * usual_s, seed="leaving"))
            held = self.settled(server, before)
            again = self.drive(server, replace(staying, seed="again"))
            found = {
                "left, requests": left.get("left, requests", 0.0),
                "not answered afterwards": again["not answered"],
            }
            yield from measurements("disconnect", server, found | held)

    def settled(self, server: Server, before: tuple[float, int, int]) -> dict[str, float]:
        """What the server holds once it holds nothing more than before, or after the time that it gets to free it."""
        ends_s = time.monotonic() + SETTLE_S
        while True:
            stats = self.runner.run(server.get("/stats"))
            held: dict[str, float] = {
                "blocks in use afterwards": sum_of(stats, "num_blocks_in_use"),
                "requests in use afterwards": sum_of(stats, "num_running", "num_waiting"),
            }
            if server.process:
                _, files, threads = server.use()
                held |= {"more files afterwards": files - before[1], "more threads afterwards": threads - before[2]}
            if time.monotonic() > ends_s or max(held.values()) <= 0:
                return {name: max(0.0, number) for name, number in held.items()}
            time.sleep(POLL_S)


def measurements(title: str, server: Server, found: dict[str, float]) -> Found:
    return (Measurement(f"{title}: {metric}", value, server.name) for metric, value in found.items())


def service_engine(options: Namespace) -> tuple[EngineConfig, list[str]]:
    """An engine for the scenarios that measure the service, and the flags that serve it.

    It has the user's model, or a small one on a single thread.
    """
    engine = EngineConfig(model=options.model) if options.model else EngineConfig(model=SMALL_MODEL, num_threads=1)
    return engine, ["--kinds", "generation", "--model", engine.model, "--num-threads", str(engine.num_threads)]


def overhead(options: Namespace) -> Found:
    """What HTTP and ZMQ add to a streamed chat, against the same model without a server."""
    engine, flags = service_engine(options)
    with EngineGroup() as group, own_server(options, *flags) as server:
        open_ours(group, Namespace(engine=engine, against=""))
        asyncio.run(server.wait())
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        for number in range(-1, options.rounds):
            inside, served = [], []
            for place in range(options.requests or OVERHEAD_ANSWERS):
                content = f"{number} {place}: a fish"  # short, so that the step takes little time
                inside.append(group.call(OURS, "first_text_s", content=content))
                served.append(first_text_s(connection, engine.model, content))
            if number >= 0:  # the first round warms up
                inside_ms, served_ms = (1000 * statistics.median(times) for times in (inside, served))
                yield Measurement("overhead: first token in process, ms", inside_ms)
                yield Measurement("overhead: first token over HTTP, ms", served_ms)
                yield Measurement("overhead: added to the first token, ms", served_ms - inside_ms)
        connection.close()


def first_text_s(connection: http.client.HTTPConnection, model: str, content: str) -> float:
    """Seconds from a chat request to its first chunk with text, over a kept connection."""
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True})
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    times = [time.perf_counter() - began for line in response if b'"content":' in line and b'"content":""' not in line]
    if not times:
        raise ServiceError(f"The server answered {response.status} without text.", hint="")
    return times[0]


def frontends(options: Namespace) -> Found:
    """256 streams at once of a small model: what 1 and 2 front ends deliver, and the engine by itself."""
    engine, flags = service_engine(options)
    shape = Shape("completions", (16, 16), (STREAM_TOKENS, STREAM_TOKENS))
    for _ in range(options.rounds):
        with EngineGroup() as group:
            open_ours(group, Namespace(engine=engine, against=""))
            work = {"prompts": [[10 + n, *range(20, 50)] for n in range(STREAMS)], "outputs": [STREAM_TOKENS] * STREAMS}
            group.call(OURS, "generate", **work)  # warms up
            rate = STREAMS * STREAM_TOKENS / group.call(OURS, "generate", **work)
            yield Measurement("frontends: in process: tokens/s", rate)
        for number in FRONT_ENDS:
            with own_server(options, *flags, "--num-front-ends", str(number)) as server, asyncio.Runner() as runner:
                runner.run(server.prepare((shape,)))
                bench = ServeBench([server], options, runner)
                for seed in ("warmup", "measured"):
                    found = bench.drive(server, Load((shape,), concurrency=STREAMS, count=STREAMS, seed=seed))
                figures = {
                    metric: found.get(metric, 0.0) for metric in ("tokens/s", "first token p99, ms", "not answered")
                }
                yield from measurements(f"frontends: {number} front end{'s' * (number > 1)}", server, figures)


SCENARIOS: dict[str, Callable[[ServeBench], Found]] = {
    "chat8": ServeBench.chat8,
    "embed": ServeBench.embed,
    "table": ServeBench.table,
    "streams": ServeBench.streams,
    "disconnect": ServeBench.disconnect,
    "overload": lambda bench: bench.overload("overload", CHAT),
    "overload-embed": lambda bench: bench.overload("overload-embed", EMBEDDING),
}
OWN_SCENARIOS = {"overhead": overhead, "frontends": frontends}  # these start what they measure themselves


def measure(options: Namespace) -> Found:
    refuse_unknown(options.scenarios, [*SCENARIOS, *OWN_SCENARIOS], "scenario")
    if options.scenarios and (options.concurrency or options.rate):
        raise InvalidOptionError(
            f"--concurrency and --rate are for a load of your own; {options.scenarios[0]} has its own."
        )
    wanted = [SCENARIOS[name] for name in options.scenarios if name in SCENARIOS]
    if wanted or not options.scenarios:
        yield from run_scenarios(wanted or [ServeBench.user_load], options)
    for name in options.scenarios:
        if name in OWN_SCENARIOS:
            yield from OWN_SCENARIOS[name](options)


def run_scenarios(wanted: list[Callable[[ServeBench], Found]], options: Namespace) -> Found:
    addresses, commands = (named(flag, getattr(options, flag)) for flag in ("server", "start"))
    if commands.keys() - addresses.keys():
        raise InvalidOptionError(
            "--start names a server that no --server names.", hint="Give --server NAME=URL for each."
        )
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        servers = []
        for name, url in addresses.items():
            starting = running(name, url, options, shlex.split(commands[name])) if name in commands else None
            servers.append(stack.enter_context(starting) if starting else Server(name, url, options))
        if not servers:
            servers.append(stack.enter_context(own_server(options)))
        for server in list(servers):
            try:
                yield from runner.run(server.prepare(probed_shapes(options)))
            except ServiceError as error:
                servers.remove(server)
                yield f"{server.name} was not measured: {error}"
        for scenario in wanted if servers else ():
            yield from scenario(ServeBench(servers, options, runner))


def probed_shapes(options: Namespace) -> tuple[Shape, ...]:
    """What a server is asked for before it is measured."""
    if not options.scenarios:
        return user_shapes(options)
    return (PROMPTED,) if set(options.scenarios) == {"streams"} else (CHAT, EMBEDDING)


def user_shapes(options: Namespace) -> tuple[Shape, ...]:
    return tuple(Shape.parse(text) for text in options.workload or [DEFAULT_WORKLOAD])


def named(flag: str, given: list[str]) -> dict[str, str]:
    found = {name: value for name, _, value in (text.partition("=") for text in given)}
    if not all(found) or not all(found.values()):
        raise InvalidOptionError(f"--{flag} is NAME=VALUE.", hint=f"For example --server {OURS}=http://127.0.0.1:8000.")
    return found
