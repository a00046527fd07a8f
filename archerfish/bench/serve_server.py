"""One server under load: is it there, which models it has, what it takes, and what it says of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from archerfish.bench.serve_http import Address, BrokenAnswerError, Pool, WholeAnswer, ask
from archerfish.bench.serve_load import Driver, Load, Memory, Run
from archerfish.bench.serve_processes import ServerProcess, tree_use
from archerfish.bench.serve_requests import Manner, Record, Shape
from archerfish.errors import ServiceError

START_S = 600.0  # what a server that we start gets to load its models
THERE_S = 10.0  # and one that is said to be there
POLL_S = 0.2
NOT_FOR_CHAT = ("embedding", "cross-encoder", "reranker")
EXTRAS: tuple[dict[str, Any], ...] = (  # the most useful that a server takes
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)
BLOCKS_IN_USE = ("blocks_in_use", "num_blocks_in_use", "used_blocks", "num_used_blocks", "protected_size")
REQUESTS_IN_USE = ("num_running", "num_waiting", "concurrent_requests", "queue_size")


@dataclass(frozen=True)
class ServerOptions:
    """A server as it is named on the command line."""

    name: str
    url: str
    start: str = ""  # a command
    pid: int = 0  # of a server that we did not start
    model: str = ""  # "": the first one that it has
    embedding_model: str = ""
    api_key: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)  # more members of requests that generate


class Server:
    """A server that is being measured. Made inside the event loop."""

    def __init__(self, options: ServerOptions, pool: Pool | None = None, process: ServerProcess | None = None) -> None:
        self.options, self.process = options, process
        self.name = options.name
        self.pool = pool or Pool(Address.parse(options.url), api_key=options.api_key)
        self.manner = Manner(options.model, options.embedding_model, options.body)
        self.notes: list[str] = []
        self._names: dict[int, str] = {}  # of its processes

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else self.options.pid

    async def prepare(self, shapes: Sequence[Shape]) -> None:
        """Wait until it answers, learn its models and find out which extras it takes."""
        await self._wait()
        listed = await self.get("/v1/models")
        chat, embedding = choose_models(listed)
        options = self.options
        self.manner = Manner(options.model or chat, options.embedding_model or embedding, options.body)
        for kind in dict.fromkeys(shape.kind for shape in shapes):
            await self._try_kind(kind)

    async def drive(self, load: Load) -> Run:
        """Put a load on it; the memory of its processes is noted where their id is known."""
        return await Driver(self.pool, self.manner, load, self.memory if self.pid else None).run()

    async def memory(self) -> Memory:
        """Of its processes, in the order in which they were started, and what of it is KV by its own account."""
        uses = tree_use(self.pid)
        for pid in uses:
            self._names.setdefault(pid, f"process {len(self._names) + 1}")
        cached = in_use(await self.get("/stats"), ("kv_bytes_held",))
        return Memory({self._names[pid]: use.num_bytes for pid, use in uses.items()}, cached or 0.0)

    async def get(self, path: str) -> Any:
        """A JSON answer, None where there is none."""
        answer = await self._ask(path)
        if answer is None or answer.status != 200:
            return None
        try:
            return json.loads(answer.body)
        except ValueError:
            return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.options.url, "start": self.options.start, "model": self.manner.model,
            "embedding_model": self.manner.embedding_model, "extras": dict(self.manner.extras), "notes": self.notes,
        }  # fmt: skip

    async def _ask(self, path: str) -> WholeAnswer | None:
        try:
            return await ask(self.pool, "GET", path)
        except (OSError, BrokenAnswerError):
            return None

    async def _wait(self) -> None:
        tries = int((START_S if self.process else THERE_S) / POLL_S)
        for _ in range(tries):
            if self.process is not None:
                self.process.check()
            models = await self._ask("/v1/models")
            health = await self._ask("/health") if models is not None and models.status != 503 else None
            if health is not None and health.status != 503:
                return
            await asyncio.sleep(POLL_S)
        hint = "Start it, or let us do so: --start 'NAME=COMMAND'."
        raise ServiceError(f"{self.name} does not answer at {self.options.url}.", hint=hint)

    async def _try_kind(self, kind: str) -> None:
        """One small request of a kind; for those that generate, with ever fewer extras until the server takes them."""
        is_embedding = kind == "embeddings"
        shape = Shape(kind, (4, 4), (0, 0) if is_embedding else (2, 2))
        for extras in EXTRAS[-1:] if is_embedding else EXTRAS:
            if not is_embedding:
                self.manner = replace(self.manner, extras={**extras, **self.options.body})
            record = await self._one(shape)
            if record.outcome == "ok":
                self.notes += [] if is_embedding else missing_extras(self.name, self.manner)
                return
            if record.status not in (400, 422):
                break
        said = f"{record.status or 'no answer'} {record.code}".strip()
        hint = "Name a model that it has with --model, or --embedding-model; GET /v1/models lists them."
        raise ServiceError(f"{self.name} does not answer a small {kind} request: {said}.", hint=hint)

    async def _one(self, shape: Shape) -> Record:
        run = await Driver(self.pool, self.manner, Load((shape,), concurrency=1, count=1, seed=f"try:{self.name}")).run()
        return run.records[0]


def missing_extras(name: str, manner: Manner) -> list[str]:
    """What a reader should know of a server that does not take all extras."""
    notes = []
    if "ignore_eos" not in manner.extras:
        notes.append(f"{name} does not take ignore_eos: its answers may be shorter than asked")
    if "stream_options" not in manner.extras:
        notes.append(f"{name} does not report usage: a chunk counts as a token")
    return notes


def choose_models(listed: Any) -> tuple[str, str]:
    """The first model of a list that may generate, and the first that embeds; the first of all where kinds are not told."""
    models = [one for one in listed.get("data") or [] if isinstance(one, dict)] if isinstance(listed, dict) else []
    names = [str(one.get("id", "")) for one in models]
    first = names[0] if names else ""
    chat = next((name for name, one in zip(names, models, strict=True) if one.get("kind") not in NOT_FOR_CHAT), first)
    embedding = next((name for name, one in zip(names, models, strict=True) if one.get("kind") == "embedding"), first)
    return chat, embedding


def in_use(values: Any, keys: Sequence[str]) -> float | None:
    """The sum of all numbers under some names, however deep; None if there is none."""
    found: list[float] = []
    to_visit = [values]
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, dict):
            found += [float(inner) for key, inner in value.items() if key in keys and isinstance(inner, int | float)]
            to_visit += value.values()
        elif isinstance(value, list):
            to_visit += value
    return sum(found) if found else None
