"""The models of an engine process: which there are, which of them are loaded, and which one a request means."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archerfish.background import in_background
from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError, ModelNotFoundError, OutOfMemoryError, ServiceError
from archerfish.observe.collector import MetricsCollector
from archerfish.serve.admission import BusyError
from archerfish.serve.compute import ComputeThread, Lane
from archerfish.serve.gate import Gate, ReadingGate
from archerfish.serve.host_config import Kind, ModelSpec, hint_for, names_of
from archerfish.serve.hosted_encoder import HostedEncoder
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.model_cards import describe, num_bytes_of_encoder, num_bytes_of_writer
from archerfish.serve.pending_request import ModelHost, PendingRequest

logger = logging.getLogger("archerfish.serve")
Hosted = HostedLLM | HostedEncoder
Load = Callable[[Lane], Hosted]
GENERATION: tuple[Kind, ...] = ("generation",)
VECTORS: tuple[Kind, ...] = ("embedding",)
SCORES: tuple[Kind, ...] = ("cross-encoder", "embedding")
MAX_WAITING, LOADING_S = 1024, 5.0  # requests for a model that is being loaded, and what others are told to wait


class UnknownModelError(ModelNotFoundError):
    """A request names a model that this process does not have."""

    param = "model"


@dataclass(eq=False)
class Slot:
    """The place of a model, loaded or not."""

    name: str
    kind: str
    load: Load
    loads: str = "start"
    aliases: tuple[str, ...] = ()
    is_beside: bool = False  # requests that name no model mean another
    hosted: Hosted | None = None
    lane: Lane | None = None
    is_loading: bool = False
    error: BaseException | None = None  # of the last attempt to load it
    waiting: list[PendingRequest] = field(default_factory=list)  # until it is loaded
    last_used: float = 0.0
    num_requests: int = 0
    num_bytes: int = 0  # that it takes, or would take
    known: dict[str, Any] = field(default_factory=dict)  # of its card, while it is not loaded

    @property
    def names(self) -> list[str]:
        return names_of(self.name, self.aliases)

    @property
    def is_idle(self) -> bool:
        return self.hosted is not None and not self.hosted.has_work and not self.waiting

    def card(self) -> dict[str, Any]:
        shown = {"id": self.name, "kind": self.kind, "max_length": 0, "aliases": list(self.aliases), **self.known}
        return {**shown, **({} if self.hosted is None else self.hosted.card()), "is_loaded": self.hosted is not None}


class Shelf:
    """All models of a process.

    memory_bytes: what loaded models may take together, 0 for no limit; above it those that were used least recently and have
    nothing to do are unloaded, and loaded again when they are asked for.
    """

    def __init__(
        self, compute: ComputeThread, desk: ModelHost, *, memory_bytes: int = 0, clock: Callable[[], float] = time.monotonic,
        live: Callable[[], Iterable[PendingRequest]] = tuple,
    ) -> None:
        """live: all requests that are not over, which may be with those who read their texts."""
        self.slots: list[Slot] = []
        self._live = live
        self._compute, self._desk, self._clock = compute, desk, clock
        self._memory_bytes = memory_bytes
        self.num_unloaded = 0

    def __iter__(self) -> Iterator[Hosted]:
        return iter([slot.hosted for slot in self.slots if slot.hosted is not None])

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        if slot.loads == "start":
            lane = self._compute.lane(slot.name)
            self._put(slot, lane, slot.load(lane))

    def find(self, name: str, kinds: tuple[Kind, ...]) -> Slot:
        """The model that a request names; without a name the one there is of the first of these kinds."""
        if name:
            found = [slot for slot in self.slots if name in slot.names]
            if not found:
                hint = hint_for(name, [slot.name for slot in self.slots])
                raise UnknownModelError(f"The model {name!r} is not served here.", hint=hint)
            return min(found, key=lambda slot: slot.names.index(name))  # a model's own name comes before others' short ones
        for kind in kinds:
            of_kind = [slot for slot in self.slots if slot.kind == kind]
            found = [slot for slot in of_kind if not slot.is_beside] or of_kind
            if len(found) > 1:
                names = ", ".join(slot.name for slot in found)
                raise InvalidInputError(f"There are several {kind} models.", hint=f"Name one: {names}.")
            if found:
                return found[0]
        raise UnknownModelError(f"No {' or '.join(kinds)} model is served here.", hint="")

    def submit(self, slot: Slot, ticket: PendingRequest, act: Callable[[Hosted, PendingRequest], None]) -> None:
        """Hand a request to a model, which is loaded first if it is not there."""
        slot.last_used = self._clock()
        slot.num_requests += 1
        ticket.slot = slot
        if slot.hosted is not None:
            self._hand(slot.hosted, ticket, act)
            return
        if len(slot.waiting) >= MAX_WAITING:
            slot.waiting = [one for one in slot.waiting if not one.is_over]
        if len(slot.waiting) >= MAX_WAITING:
            raise BusyError(f"The model {slot.name} is being loaded, and {MAX_WAITING:,} requests wait for it.", LOADING_S)
        ticket.model_work = act
        slot.waiting.append(ticket)
        self.load(slot)

    def _hand(self, hosted: Hosted, ticket: PendingRequest, act: Callable[[Hosted, PendingRequest], None]) -> None:
        ticket.retry_after_s = hosted.gate.retry_after_s
        act(hosted, ticket)

    def load(self, slot: Slot) -> None:
        """Load in a thread of its own; requests that wait for it go on when it is there."""
        if slot.is_loading or slot.hosted is not None:
            return
        slot.is_loading = True
        self._make_room(keeps=slot, num_bytes=slot.num_bytes)
        lane = self._compute.lane(slot.name)

        def run() -> None:
            try:
                hosted = slot.load(lane)
            except BaseException as error:
                raised = error
                self._desk.post(lambda: self._fail(slot, lane, raised))
            else:
                self._desk.post(lambda: self._arrive(slot, lane, hosted))

        in_background(run, f"load-{slot.name}", daemon=True)

    def load_next(self) -> None:
        """Begin to load the model for idle times that was asked for most, if none is being loaded now and it has room."""
        if self.is_loading:
            return
        left = [slot for slot in self.slots if slot.loads == "idle" and slot.hosted is None and slot.error is None]
        left = [slot for slot in left if self._has_room(slot.num_bytes)]
        if left:
            self.load(max(left, key=lambda slot: slot.num_requests))

    def keep_within_memory(self) -> None:
        """In idle times: unload what could not be when memory was wanted, because it had something to do."""
        if not self._has_room():
            self._make_room(keeps=max(self.slots, key=lambda slot: slot.last_used))

    def _has_room(self, num_bytes: int = 0) -> bool:
        return not self._memory_bytes or self.num_bytes + num_bytes <= self._memory_bytes

    @property
    def is_loading(self) -> bool:
        return any(slot.is_loading for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self.slots if slot.hosted is not None)

    def _put(self, slot: Slot, lane: Lane, hosted: Hosted) -> None:
        slot.hosted, slot.lane, slot.error = hosted, lane, None
        slot.is_loading = False
        slot.kind = hosted.kind
        slot.num_bytes = num_bytes_of(hosted)
        slot.known = hosted.card()
        slot.last_used = self._clock()
        if hosted.name != slot.name and hosted.name not in slot.aliases:
            slot.aliases = (*slot.aliases, hosted.name)

    def _arrive(self, slot: Slot, lane: Lane, hosted: Hosted) -> None:
        self._put(slot, lane, hosted)
        self._make_room(keeps=slot)
        waiting, slot.waiting = slot.waiting, []
        for ticket in waiting:
            if not ticket.is_over and ticket.model_work is not None:
                try:
                    self._hand(hosted, ticket, ticket.model_work)
                except Exception as error:
                    self._desk.fail(ticket, error)

    def _fail(self, slot: Slot, lane: Lane, error: BaseException) -> None:
        self._compute.remove(lane)
        slot.is_loading = False
        if isinstance(error, OutOfMemoryError | MemoryError) and self._unload_one(keeps=slot):
            self.load(slot)
            return
        logger.error("The model %s could not be loaded: %s", slot.name, error)
        slot.error = error
        waiting, slot.waiting = slot.waiting, []
        for ticket in waiting:
            self._desk.fail(ticket, ServiceError(f"The model {slot.name} could not be loaded.", hint="The log says why."))

    def _make_room(self, keeps: Slot, num_bytes: int = 0) -> None:
        while not self._has_room(num_bytes) and self._unload_one(keeps):
            pass

    def _unload_one(self, keeps: Slot) -> bool:
        """Let the model go that was used least recently; False: all have something to do."""
        busy = {ticket.slot for ticket in self._live()}
        idle = [slot for slot in self.slots if slot is not keeps and slot.is_idle and slot not in busy]
        if not idle:
            return False
        slot = min(idle, key=lambda slot: slot.last_used)
        assert slot.hosted is not None and slot.lane is not None
        logger.info("The model %s is unloaded for want of memory.", slot.name)
        slot.hosted.close()
        self._compute.remove(slot.lane)
        slot.hosted = slot.lane = None
        self.num_unloaded += 1
        free_memory()
        return True

    def close(self) -> None:
        for hosted in self:
            hosted.close()


def free_memory() -> None:
    """Give back to the system what an engine has left behind."""
    gc.unfreeze()  # an engine that is loaded freezes what there is, the one that has gone too
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # of glibc alone, which keeps most of it otherwise
        ctypes.CDLL(None).malloc_trim(0)


def make_slot(
    spec: ModelSpec, hub: HubConfig, desk: ModelHost, figures: MetricsCollector, writer: Executor, *, latency_s: float,
    max_queue_texts: int, gate_of: Callable[[LLMEngine], Gate], reading_gate: Callable[[], ReadingGate],
) -> Slot:
    """The place of a model that a configuration names."""

    def load(lane: Lane) -> Hosted:
        if spec.kind == "generation":
            engine = LLMEngine(EngineConfig(**spec.options), hub=hub, executor=lane, text_thread=writer)
            return HostedLLM(engine, lane, desk, figures, gate_of(engine))
        config = EmbedConfig(**spec.options)
        encoder = ArrowEngine(config, hub=hub)
        hosted = HostedEncoder(
            encoder, lane, desk, figures, reading_gate(), latency_s=latency_s, max_queue_texts=max_queue_texts
        )
        if hosted.kind != spec.kind:
            raise InvalidInputError(f"{hosted.name} is no {spec.kind} model.", hint=f"Its kind is {hosted.kind!r}.")
        lane.submit(encoder.core.ops.start_thread, config.num_threads).result()
        warm = ("warm", "up") if encoder.is_cross_encoder else "warm up"
        lane.submit(encoder.compute, encoder.tokenize([warm])).result()
        return hosted

    name = Path(spec.model).name if Path(spec.model).exists() else spec.model
    aliases = (*spec.aliases, *([spec.model] if name != spec.model else []))
    slot = Slot(name, spec.kind, load, spec.loads, aliases, is_beside=spec.is_beside)
    if spec.loads != "start":
        found = describe(spec, hub)
        slot.known, slot.num_bytes = found.card, found.num_bytes
    return slot


def num_bytes_of(hosted: Hosted) -> int:
    """Memory of a model: weights and KV."""
    if isinstance(hosted, HostedLLM):
        return num_bytes_of_writer(hosted.engine.facts)
    directory = getattr(hosted.engine, "directory", None)
    return 0 if directory is None else num_bytes_of_encoder(Path(directory))
