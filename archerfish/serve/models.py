"""The models of an engine process: which there are, which of them are loaded, and which model a request means."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from archerfish.background import in_background
from archerfish.cache.digest import ModelDigest
from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.inference_core import locate, output_sizes
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.llm_loading import read_facts
from archerfish.engine.progress import progress_bar
from archerfish.errors import InvalidInputError, OutOfMemoryError, ServiceError, StoppedError
from archerfish.kernels.machine import free_memory
from archerfish.models.adapter import encoder_class
from archerfish.models.config import Config
from archerfish.serve.adapter_changes import load_adapters
from archerfish.serve.compute import Lane, ModelHost, PendingRequest, attempt
from archerfish.serve.hosted_encoder import HostedEncoder
from archerfish.serve.hosted_llm import HostedLLM, card_of
from archerfish.serve.overload import BusyError
from archerfish.serve.processes import ModelSpec
from archerfish.serve.wire import ChangeAdapter, UnservedModelError, names_of, unserved_model
from archerfish.store.metadata import ARROW_NAME, read_metadata
from archerfish.text.tokenizer import read_settings, stated_max_length
from archerfish.types import no_progress

logger = logging.getLogger("archerfish.serve")
Hosted = HostedLLM | HostedEncoder
GENERATION: tuple[str, ...] = ("generation",)
VECTORS: tuple[str, ...] = ("embedding",)
ENCODERS: tuple[str, ...] = ("cross-encoder", "embedding")
MAX_WAITING = 1024  # requests for a model that is being loaded


@dataclass(eq=False)
class ModelEntry:
    """A model of the table, loaded or not."""

    name: str
    kind: str
    load: Callable[[Lane], Hosted]
    loads: str = "start"
    aliases: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()  # aliases that are listed beside its name
    hosted: Hosted | None = None
    is_loading: bool = False
    error: BaseException | None = None  # of the last attempt to load it
    waiting: list[PendingRequest] = field(default_factory=list)  # requests until it is loaded
    last_used: float = 0.0
    num_requests: int = 0
    num_bytes: int = 0  # that it takes, or would take
    known: dict[str, Any] = field(default_factory=dict)  # of its card: as its files say, then as it said when loaded

    def card(self, *, with_adapters: bool) -> dict[str, Any]:
        shown = {"id": self.name, "kind": self.kind, "max_length": 0, "aliases": list(self.aliases)}
        shown |= {"served_names": list(self.served_names)}
        if with_adapters and isinstance(self.hosted, HostedLLM):
            shown |= self.hosted.adapters()
        return {**shown, **self.known, "is_loaded": self.hosted is not None}


class ModelTable:
    """All models of a process.

    If the configuration limits the memory of loaded models, idle models are unloaded above the limit, the least
    recently used first, and loaded again when a request names them.
    """

    def __init__(self, host: ModelHost) -> None:
        self.entries: list[ModelEntry] = []
        self.loaded: list[Hosted] = []
        self.num_unloaded = 0
        self._host = host
        self._memory_bytes = int(host.config.memory_gib * (1 << 30))  # 0: no limit

    def add(self, entry: ModelEntry) -> None:
        self.entries.append(entry)
        if entry.loads == "start":
            self._set_loaded(entry, entry.load(self._host.compute.lane(entry.name)))

    def find(self, name: str, kinds: tuple[str, ...]) -> ModelEntry:
        """The model with this name; without a name, the first model of the first kind that is served."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        if not name:
            found = [(kinds.index(entry.kind), entry) for entry in self.entries if entry.kind in kinds]
            if not found:
                raise UnservedModelError(f"No {' or '.join(kinds)} model is served here.", hint="")
        else:
            names = [(names_of(entry.name, entry.aliases), entry) for entry in self.entries]
            found = [(own.index(name), entry) for own, entry in names if name in own]
            if not found:
                raise unserved_model(name, [entry.name for entry in self.entries])
        return min(found, key=itemgetter(0))[1]  # a full alias wins over the short name of another model

    def change_adapter(self, request: PendingRequest, message: ChangeAdapter) -> None:
        """Load or unload an adapter of a model, in another thread."""
        entry = self.find(message.model, GENERATION)
        if not isinstance(entry.hosted, HostedLLM):
            raise StoppedError(f"The model {entry.name} is not loaded.", hint="Send it a request first.")
        entry.hosted.change_adapter(request, message)

    def submit(self, entry: ModelEntry, request: PendingRequest) -> None:
        """Pass a request to a model, which is loaded first if necessary."""
        entry.last_used = self._host.clock()
        entry.num_requests += 1
        request.model_entry = entry
        if entry.hosted is not None:
            entry.hosted.submit(request)
            return
        if len(entry.waiting) >= MAX_WAITING:
            entry.waiting = [one for one in entry.waiting if not one.is_over]
        if len(entry.waiting) >= MAX_WAITING:
            message = f"The model {entry.name} is being loaded, and {MAX_WAITING:,} requests wait for it."
            raise BusyError(message, retry_after_s=5.0)
        entry.waiting.append(request)
        self._load(entry)

    # Loading

    def _load(self, entry: ModelEntry) -> None:
        """Load a model in a thread of its own; requests that wait for it go on afterwards."""
        if entry.is_loading:
            return
        entry.is_loading = True
        self._make_room(keeps=entry, num_bytes=entry.num_bytes)
        lane = self._host.compute.lane(entry.name)

        def end(loading: Future[Hosted]) -> None:
            self._host.post(partial(self._end_loading, entry, lane, loading))

        in_background(partial(entry.load, lane), f"load-{entry.name}", daemon=True).add_done_callback(end)

    @property
    def is_loading(self) -> bool:
        return any(entry.is_loading for entry in self.entries)

    def _set_loaded(self, entry: ModelEntry, hosted: Hosted) -> None:
        self.loaded.append(hosted)
        entry.hosted, entry.error = hosted, None
        if self._host.digest is not None and isinstance(hosted, HostedLLM):
            hosted.engine.scheduler.cache.digest = ModelDigest(self._host.digest, entry.name)
        entry.kind = hosted.kind
        entry.num_bytes = num_bytes_of(hosted)
        entry.known = hosted.card()
        entry.last_used = self._host.clock()
        if hosted.name != entry.name and hosted.name not in entry.aliases:
            entry.aliases = (*entry.aliases, hosted.name)

    def _end_loading(self, entry: ModelEntry, lane: Lane, loading: Future[Hosted]) -> None:
        entry.is_loading, error = False, loading.exception()
        if error is None:
            self._set_loaded(entry, loading.result())
            self._make_room(keeps=entry)
        else:
            self._host.compute.remove(lane)
            if isinstance(error, OutOfMemoryError | MemoryError) and self._unload_one(keeps=entry):
                self._load(entry)
                return
            logger.error("The model %s could not be loaded: %s", entry.name, error)
            entry.error = error
        waiting, entry.waiting = entry.waiting, []
        for request in waiting:
            if entry.hosted is not None:
                attempt(self._host, request, partial(entry.hosted.submit, request))
            else:
                failed = ServiceError(f"The model {entry.name} could not be loaded.", hint="The log says why.")
                self._host.fail(request, error if isinstance(error, OutOfMemoryError) else failed)

    # Memory

    def use_idle_time(self) -> bool:
        """Do some work in advance: unload, load, and what models have to do; return whether there is more of it."""
        if self._memory_bytes and not self._has_room():  # models were busy when memory was needed
            self._make_room(keeps=max(self.entries, key=lambda entry: entry.last_used))
        left = [
            entry
            for entry in self.entries
            if entry.loads == "idle"
            and entry.hosted is None
            and entry.error is None
            and self._has_room(entry.num_bytes)
        ]
        if left and not self.is_loading:
            self._load(max(left, key=lambda entry: entry.num_requests))
        return any(isinstance(hosted, HostedLLM) and hosted.engine.use_idle_time() for hosted in self.loaded)

    def _has_room(self, num_bytes: int = 0) -> bool:
        num_loaded = sum(entry.num_bytes for entry in self.entries if entry.hosted is not None)
        return not self._memory_bytes or num_loaded + num_bytes <= self._memory_bytes

    def _make_room(self, keeps: ModelEntry, num_bytes: int = 0) -> None:
        while not self._has_room(num_bytes) and self._unload_one(keeps):
            pass

    def _unload_one(self, keeps: ModelEntry) -> bool:
        """Unload the idle model that was used least recently; False if all are busy."""
        kept = {keeps, *(request.model_entry for request in self._host.live_requests())}
        idle = [(entry, entry.hosted) for entry in self.entries if entry.hosted is not None and entry not in kept]
        idle = [(entry, hosted) for entry, hosted in idle if not hosted.has_work]
        if not idle:
            return False
        entry, hosted = min(idle, key=lambda one: one[0].last_used)
        logger.info("The model %s is unloaded because memory is short.", entry.name)
        if isinstance(hosted, HostedLLM):
            hosted.engine.scheduler.cache.clear()  # and what was published of it
        hosted.engine.close()
        self._host.compute.remove(hosted.lane)
        self.loaded.remove(hosted)
        entry.hosted = None
        self.num_unloaded += 1
        free_memory()
        return True


def make_entry(spec: ModelSpec, hub: HubConfig, host: ModelHost) -> ModelEntry:
    """The entry of a model that the configuration names."""

    def load(lane: Lane) -> Hosted:
        if spec.kind == "generation":
            is_shown = spec.loads == "start" and sys.stderr.isatty()
            with progress_bar(f"Loading {spec.model}", show=is_shown, transient=True) as bar:
                options = EngineConfig(**spec.options)
                bare = options.replace(lora_modules="")
                engine = LLMEngine(bare, hub=hub, executor=lane, text_thread=host.writer, progress=bar)
            try:
                if engine.tokenizer is not None:
                    _ = engine.tokenizer.vocab_size  # it is parsed: one that does not fit the model ends the start
                if engine.adapters is not None:
                    is_only = sum(bool(one.options.get("lora_modules")) for one in host.config.models) == 1
                    file = host.config.adapters_file
                    load_adapters(engine.adapters, engine.model_name, options.lora_paths, file, is_only=is_only)
            except BaseException:
                engine.close()
                raise
            in_background(engine.grammars.warm_up, "grammar-warm-up", daemon=True)
            return HostedLLM(engine, lane, host)
        config = EmbedConfig(**spec.options)
        encoder = ArrowEngine(config, hub=hub)
        hosted = HostedEncoder(encoder, lane, host)
        if hosted.kind != spec.kind:
            raise InvalidInputError(f"{hosted.name} is no {spec.kind} model.", hint=f"Its kind is {hosted.kind!r}.")
        lane.submit(encoder.core.ops.start_thread, config.num_threads).result()
        warm = ("warm", "up") if encoder.is_cross_encoder else "warm up"
        tokenized, is_dense = encoder.tokenize([warm]), encoder.core.output == "dense"
        compute: Any = encoder.compute if is_dense else partial(encoder.compute_tokens, output=encoder.core.output)
        lane.submit(compute, tokenized).result()
        return hosted

    name = Path(spec.model).name if Path(spec.model).exists() else spec.model
    aliases = (*spec.aliases, *([spec.model] if name != spec.model else []))
    first, *others = spec.served_names or (name,)
    aliases = (*others, *([name] if first != name else []), *aliases)
    entry = ModelEntry(first, spec.kind, load, spec.loads, aliases, tuple(others))
    if spec.loads != "start":
        entry.known, entry.num_bytes = describe(spec, hub)
    return entry


def describe(spec: ModelSpec, hub: HubConfig) -> tuple[dict[str, Any], int]:
    """The card of a model that is not loaded, and about how much memory it would take.

    Its files are fetched and converted first if necessary.
    """
    if spec.kind == "generation":
        engine = EngineConfig(**spec.options)
        facts = read_facts(engine, hub, no_progress)
        return card_of(facts, engine), facts.num_bytes
    config = EmbedConfig(**spec.options)
    directory = locate(config, hub, no_progress)
    metadata = read_metadata(directory)
    values = Config(metadata.config)
    embedding = metadata.embedding or {}
    architecture = encoder_class(values, embeds=bool(embedding))
    most = architecture.max_positions(values)
    settings = read_settings(directory / "tokenizer" / "tokenizer_config.json")
    stated = embedding.get("max_seq_length") or stated_max_length(settings)
    card = {"max_length": config.max_length or min(most, stated or most), "directory": str(directory)}
    if spec.kind == "embedding":
        outputs = output_sizes(architecture, values, embedding, {info.name: info.shape for info in metadata.tensors})
        card |= {"dimension": next(iter(outputs.values())), "outputs": tuple(outputs)}
    return card, arrow_bytes(directory)


def num_bytes_of(hosted: Hosted) -> int:
    """Memory of a loaded model: weights and KV."""
    if isinstance(hosted, HostedLLM):
        return hosted.engine.facts.num_bytes
    return arrow_bytes(Path(getattr(hosted.engine, "directory", "")))


def arrow_bytes(directory: Path) -> int:
    arrow = directory / ARROW_NAME
    return arrow.stat().st_size if arrow.is_file() else 0
