"""Load over HTTP: closed loops (so many requests at once) and open loops (Poisson arrivals, whatever the server does).

Latencies of an open loop count from the moment at which a request was due, so that a slow server cannot hide its queue.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from archerfish.bench.words import random_text
from archerfish.errors import InvalidOptionError
from archerfish.observe.summary import percentile

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "ids": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
REFUSALS = (429, 503, 504)  # 504: admitted, but its deadline passed while it waited
PAUSE_S, MAX_PAUSE_S = (
    0.1,
    1.0,
)  # of a closed loop after a request that failed; without a pause it would flood the server
MIN_ID, MAX_ID = 100, 8000  # ids that every vocabulary has, past the special ones


@dataclass(frozen=True)
class Shape:
    """Requests of one kind: the range of their tokens in and out."""

    kind: str
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int] = (0, 0)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read KIND:IN[/OUT], where IN and OUT are numbers or ranges: chat:64/16, ids:32-512/16-128."""
        found = re.fullmatch(r"(\w+):(\d+)(?:-(\d+))?(?:/(\d+)(?:-(\d+))?)?", text.strip())
        if found and found[1] in PATHS and (found[1] == "embeddings") != bool(found[4]):
            low, low_out = int(found[2]), int(found[4] or 0)
            high, high_out = int(found[3] or low), int(found[5] or low_out)
            if 1 <= low <= high and low_out <= high_out and bool(found[4]) == bool(low_out):
                return cls(found[1], (low, high), (low_out, high_out))
        hint = "Write chat:64/16, completions:32-512/16-128, ids:64/16 or embeddings:32."
        raise InvalidOptionError(f"{text!r} is not a workload.", hint=hint)


@dataclass(frozen=True)
class Load:
    """What a server is asked for. Either `concurrency` or `rate` is given; it ends after `count` requests or
    `duration_s`."""

    shapes: tuple[Shape, ...]
    concurrency: int = 0
    rate: float = 0.0  # requests a second
    count: int = 0
    duration_s: float = 0.0
    deadline_s: float = 0.0  # sent with every request; 0: none
    hang_up_within_s: float = 0.0  # the client leaves every request at a random moment up to this long after sending it
    timeout_s: float = 120.0
    seed: str = "0"


@dataclass
class Record:
    """The account of one request. Times are those of one clock, nan where nothing happened."""

    due_s: float
    ended_s: float = math.nan
    outcome: str = ""  # ok, refused, error, timeout, disconnected, left
    status: int = 0
    retry_after_s: float | None = None
    num_tokens: int = 0
    is_cut: bool = False  # by its deadline, with a part of its tokens
    times: list[float] = field(default_factory=list)  # of the chunks that brought text


@dataclass(frozen=True)
class Dialect:
    """How a server is addressed: the names of its models and the extra members that it takes."""

    model: str = ""
    embedding_model: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)


def make_body(shape: Shape, dialect: Dialect, draw: random.Random) -> dict[str, Any]:
    length, wanted = draw.randint(*shape.input_tokens), draw.randint(*shape.output_tokens)
    text = random_text(draw, length)
    if shape.kind == "embeddings":
        return {"model": dialect.embedding_model, "input": text}
    common = {"model": dialect.model, "max_tokens": wanted, "temperature": 0, "stream": True, **dialect.extras}
    if shape.kind == "chat":
        return {"messages": [{"role": "user", "content": text}], **common}
    ids = [draw.randint(MIN_ID, MAX_ID) for _ in range(length)]
    return {"prompt": ids if shape.kind == "ids" else text, **common}


class LoadDriver:
    """Puts a load on one server and keeps a record of every request."""

    def __init__(self, session: aiohttp.ClientSession, dialect: Dialect, load: Load) -> None:
        self._session = session
        self._dialect = dialect
        self._load = load
        self.records: list[Record] = []
        self._window_s, self._ends_s = 0.0, math.inf  # rates are taken over the window, which ends then

    async def run(self) -> None:
        """Returns when every request has ended."""
        began = time.perf_counter()
        await (self._closed(began) if self._load.concurrency else self._open(began))
        self._window_s = self._load.duration_s or time.perf_counter() - began
        self._ends_s = began + self._window_s

    def figures(self, good_within_s: float = 0.0) -> dict[str, float]:
        """Latencies are of all requests that ended well, rates of those that ended inside the window.

        good_within_s: an answer is good if it was whole within this time; 0: every whole answer is good.
        """
        ok = [record for record in self.records if record.outcome == "ok"]
        inside = [record for record in ok if record.ended_s <= self._ends_s]
        good = [r for r in inside if not r.is_cut and (not good_within_s or r.ended_s - r.due_s <= good_within_s)]
        streamed = [record for record in ok if record.times]
        found = {"requests/s": len(inside) / self._window_s, "goodput, requests/s": len(good) / self._window_s}
        if streamed:
            found["tokens/s"] = sum(record.num_tokens for record in inside) / self._window_s
        samples = {
            "end to end": [record.ended_s - record.due_s for record in ok],
            "first token": [record.times[0] - record.due_s for record in streamed],
            "gap": [later - earlier for record in streamed for earlier, later in pairwise(record.times)],
        }
        for name, seconds in samples.items():
            for share in (50, 99) if seconds else ():
                found[f"{name} p{share}, ms"] = percentile(seconds, share / 100) * 1000
        outcomes = Counter(record.outcome for record in self.records)
        found |= {f"{outcome}, requests": float(count) for outcome, count in outcomes.items() if outcome != "ok"}
        refused = sum(record.outcome == "refused" and record.retry_after_s is not None for record in self.records)
        found["not answered"] = float(len(self.records) - len(ok))
        found["unanswered"] = found["not answered"] - refused  # neither an answer nor a refusal with Retry-After
        return found

    async def _closed(self, began: float) -> None:
        load, numbers = self._load, iter(range(self._load.count or 1 << 60))
        ends_s = began + load.duration_s if load.duration_s else math.inf

        async def client() -> None:
            for number in numbers:
                now = time.perf_counter()
                if now >= ends_s:
                    return
                record = await self._send(number, now)
                if record.outcome not in ("ok", "left"):
                    await asyncio.sleep(min(record.retry_after_s or PAUSE_S, MAX_PAUSE_S))

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(client())

    async def _open(self, began: float) -> None:
        async with asyncio.TaskGroup() as group:
            for number, at_s in enumerate(arrivals(self._load)):
                await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
                group.create_task(self._send(number, began + at_s))

    async def _send(self, number: int, due_s: float) -> Record:
        """One request, which ends in a record whatever happens."""
        load, record = self._load, Record(due_s)
        draw = random.Random(f"{load.seed}:{number}")
        shape = draw.choice(load.shapes)
        body = make_body(shape, self._dialect, draw) | ({"deadline_s": load.deadline_s} if load.deadline_s else {})
        leave_s = draw.uniform(0, load.hang_up_within_s) if load.hang_up_within_s else math.inf
        try:
            async with asyncio.timeout(min(load.timeout_s, leave_s)):
                await self._ask(PATHS[shape.kind], body, record)
        except TimeoutError:
            record.outcome = "left" if leave_s < load.timeout_s else "timeout"
        except (aiohttp.ClientError, OSError):
            record.outcome = "disconnected"
        record.ended_s = time.perf_counter()
        self.records.append(record)
        return record

    async def _ask(self, path: str, body: dict[str, Any], record: Record) -> None:
        """Sends again where a connection that was kept turns out to be closed, as other clients do."""
        for num_kept in range(self._load.concurrency, -1, -1):
            try:
                return await self._exchange(path, body, record)
            except aiohttp.ClientConnectionError:
                if record.status or not num_kept:
                    raise
        return None

    async def _exchange(self, path: str, body: dict[str, Any], record: Record) -> None:
        async with self._session.post(path, json=body) as response:
            record.status = response.status
            retry_after = response.headers.get("retry-after", "")
            record.retry_after_s = float(retry_after) if retry_after.isdecimal() else None
            if response.status != 200:
                await response.read()
                record.outcome = "refused" if response.status in REFUSALS else "error"
            elif "input" in body:
                found = await response.json()
                record.outcome = "ok" if len(found["data"]) == 1 else "error"
            else:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        take_event(json.loads(line[6:]), record)
                record.outcome = record.outcome or "error"  # a stream without an end


def take_event(event: dict[str, Any], record: Record) -> None:
    """Note what an event of a stream brings: text, the end, or the usage."""
    if event.get("error"):
        record.outcome = "error"
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if delta.get("content") or delta.get("text") or delta.get("reasoning_content") or delta.get("tool_calls"):
            record.times.append(time.perf_counter())
            record.num_tokens += 1
        if choice.get("finish_reason"):
            record.outcome = record.outcome or "ok"
            record.is_cut = choice.get("stop_reason") == "deadline"
    if event.get("usage"):
        record.num_tokens = event["usage"].get("completion_tokens") or record.num_tokens


def arrivals(load: Load) -> Iterator[float]:
    """Seconds from the start at which the requests of a Poisson process come."""
    draw = random.Random(f"arrivals:{load.seed}")
    at_s = 0.0
    number = 0
    while True:
        at_s += draw.expovariate(load.rate)
        number += 1
        if (load.count and number > load.count) or (load.duration_s and at_s >= load.duration_s):
            return
        yield at_s
