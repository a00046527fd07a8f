"""LoRA adapters by name: what requests may name, what lies in the machine's memory, and what goes to the device.

An adapter's content has a number, under which the scheduler gives it a slot, and a digest, which separates its cached
contexts from those of others. A name that is loaded again with other content gets others: requests that run keep
theirs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archerfish.config import EngineConfig
from archerfish.engine.llm_loading import ModelFacts
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.kernels.adapters import plain_name
from archerfish.runtime.runner import ModelRunner
from archerfish.sched.adapters import AdapterSlots
from archerfish.sequence import Namespace
from archerfish.store.adapters import Adapter, AdapterError, MapShape, read_adapter

logger = logging.getLogger("archerfish.engine")
WAIT_S = 0.05  # after which masks of grammars are looked at again
MOST_BYTES = 255  # of the name of a file
NOT_ENABLED = "Start with enable_lora=True (--enable-lora)."


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request by name and path, as vLLM has it. Under another lora_int_id the files are read again."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True)
class LoadedAdapter:
    """What a name stands for."""

    name: str
    path: str
    number: int
    digest: str
    rank: int
    num_bytes: int  # in the machine's memory


class AdapterLibrary:
    """The adapters of one engine. Safe to use from several threads.

    maps: what adapters may add to. kind: as in `read_adapter`. changed: over the lock of the scheduler; notified when
    an adapter has come into its slot, as `wake` is called then.
    """

    def __init__(
        self,
        config: EngineConfig,
        maps: Mapping[str, MapShape],
        kind: str,
        runner: ModelRunner[Any],
        changed: threading.Condition,
        wake: Callable[[], None] | None,
    ) -> None:
        self.config = config
        self._maps = maps
        self._kind = kind
        self._changed = changed
        self._wake = wake
        self.slots = AdapterSlots(config.max_loras, self._begin_load)
        self.attach(runner)
        self._names: dict[str, LoadedAdapter] = {}
        self._files: dict[int, dict[str, LoadedAdapter]] = {}  # by number and path: where its content can be read again
        self._numbers: dict[str, int] = {}  # by digest
        self._ids: dict[str, int] = {}  # of the LoRARequests that adapters came with, by name
        self._content: OrderedDict[int, Adapter] = (
            OrderedDict()
        )  # in the machine's memory, the one used longest ago first
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archerfish-adapters")
        if config.lora_dir and not Path(config.lora_dir).expanduser().is_dir():
            raise InvalidOptionError(f"[engine] lora_dir: there is no directory {config.lora_dir}.")
        for name, path in config.lora_paths.items():
            self.load(name, path)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        facts: ModelFacts,
        runner: ModelRunner[Any],
        changed: threading.Condition,
        wake: Callable[[], None] | None,
    ) -> AdapterLibrary | None:
        """None where adapters are not enabled. Of an engine that cannot begin for a wrong one, the runner is closed."""
        if not config.enable_lora:
            return None
        try:
            shapes = facts.adapter.noted(facts.config).adapted
            maps = {plain_name(name): MapShape(*shape) for name, shape in shapes.items()}
            return cls(config, maps, facts.config.model_type, runner, changed, wake)
        except BaseException:
            runner.close()
            raise

    def wait(self) -> bool:
        """Whether adapters are on their way to their slots; if so, after one has come, something was submitted, or a
        while."""
        with self._changed:
            return self.slots.is_loading and (self._changed.wait(WAIT_S) or True)

    def attach(self, runner: ModelRunner[Any]) -> None:
        """Use the slots of a runner, which are empty."""
        self._runner: ModelRunner[Any] | None = runner
        self.slots.clear()

    def detach(self) -> None:
        """Let the memory of slots go with the weights, until `attach`."""
        self._thread.submit(lambda: None).result()  # what was on its way has come
        self.slots.clear()
        self._runner = None

    def load(self, name: str, path: str | Path, *, in_place: bool = False) -> LoadedAdapter:
        """Read and check an adapter; from now on requests may name it. in_place: in place of the one of this name."""
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MOST_BYTES:
            hint = f"Choose one of up to {MOST_BYTES} printable characters."
            raise InvalidInputError(f"An adapter cannot have the name {name!r:.80}.", hint=hint)
        known, hint = self._known(name), "Unload it first, or load it in place (load_inplace)."
        if known is not None and not in_place and known.path != str(path):
            raise InvalidInputError(f"There is an adapter {name!r} already, of {known.path}.", hint=hint)
        adapter = self._read(Path(path).expanduser())
        if known is not None and not in_place and known.digest != adapter.digest:
            raise InvalidInputError(
                f"There is an adapter {name!r} already, of what {known.path} was before.", hint=hint
            )
        with self._lock:
            number = self._numbers.setdefault(adapter.digest, len(self._numbers) + 1)
            found = LoadedAdapter(name, str(path), number, adapter.digest, adapter.rank, adapter.num_bytes)
            self._names[name] = self._files.setdefault(number, {})[found.path] = found
            self._keep(number, adapter)
        with self._changed:
            self.slots.forget_error(number)
        logger.info("Adapter %s: rank %d, %d linear maps, %s.", name, adapter.rank, len(adapter.matrices), path)
        return found

    def unload(self, name: str) -> LoadedAdapter:
        """Requests may not name it any more; those that run with it go on."""
        with self._lock:
            found = self.find(name, on_demand=False)
            del self._names[name]
            return found

    def find(self, name: str, *, on_demand: bool = True) -> LoadedAdapter:
        """The adapter of a name; on_demand: one that lies in lora_dir is loaded."""
        found = self._known(name)
        if found is not None:
            return found
        path = self._on_demand(name) if on_demand else None
        if path is None:
            hint = "Name it in lora_modules, or give a LoRARequest with its path."
            raise NotFoundError(f"There is no adapter {name!r}.", hint=hint)
        return self.load(name, path)

    def preload(self, name: str) -> bool:
        """Whether an adapter is in a slot; if not, it comes into one as soon as one is free."""
        number = self.find(name).number
        with self._changed:
            self.slots.begin_plan()
            return self.slots.is_ready(number)

    def is_loaded(self, name: str) -> bool:
        return name in self._names

    def list(self) -> list[LoadedAdapter]:
        """All that are loaded, by name."""
        with self._lock:
            return [self._names[name] for name in sorted(self._names)]

    def for_request(self, wanted: Any) -> LoadedAdapter:
        """The adapter of a request: by name, or as a LoRARequest of ours or of vLLM, which is loaded where it is
        new."""
        if isinstance(wanted, str):
            return self.find(wanted)
        name, path = getattr(wanted, "lora_name", None), getattr(wanted, "lora_path", None)
        if not isinstance(name, str):
            raise InvalidInputError(
                f"The adapter of a request must be a name or a LoRARequest, not {type(wanted).__name__}."
            )
        number = getattr(wanted, "lora_int_id", 0)  # as in vLLM, another one has the files read again
        known = self._names.get(name)
        if not path or (known is not None and (known.path, self._ids.get(name, number)) == (str(path), number)):
            return self.find(name)
        found, self._ids[name] = self.load(name, path, in_place=True), number
        return found

    def allowed_path(self, path: str) -> Path:
        """A path that comes from outside: it must lie in lora_dir."""
        allowed = self.config.lora_dir
        if not allowed:
            raise AdapterError("Adapters are loaded from no directory.", hint="Start with lora_dir (--lora-dir).")
        root = Path(allowed).expanduser().resolve()
        try:
            found = (root / path).resolve()
            found.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, characters that no name has
            raise AdapterError(
                f"{path!r} cannot be read as a path: {error}.", hint="Give a path within lora_dir."
            ) from error
        if root not in found.parents:
            message = f"{path!r} lies outside of the directory of adapters, or is it."
            raise AdapterError(message, hint="Give a path within lora_dir.")
        return found

    def _known(self, name: str) -> LoadedAdapter | None:
        found = self._names.get(name)
        if found is not None:
            self.slots.forget_error(found.number)  # whoever names it tries again
        return found

    def _on_demand(self, name: str) -> Path | None:
        is_plain = name == Path(name).name and name not in ("", ".", "..") and name.isprintable() and "\\" not in name
        if not self.config.lora_dir or not is_plain or name.startswith("~") or len(name.encode()) > MOST_BYTES:
            return None
        path = self.allowed_path(name)
        return path if path.is_dir() else None

    def _read(self, path: Path) -> Adapter:
        options: Any = {
            "max_rank": self.config.max_lora_rank,
            "takes_experts": self.config.lora_experts,
            "kind": self._kind,
        }
        return read_adapter(path, self._maps, **options)

    def _read_again(self, files: Sequence[LoadedAdapter]) -> Adapter:
        """From the first of the paths with one content that still has it."""
        for file in files:
            try:
                adapter = self._read(Path(file.path).expanduser())
                if adapter.digest == file.digest:
                    return adapter
                raise AdapterError(
                    f"{file.path} has changed since {file.name} was loaded.", hint="Load it again in place."
                )
            except (ArcherfishError, OSError) as error:
                if file is files[-1]:
                    if self._forget_changed(file) and isinstance(error, AdapterError):
                        error.hint = "Send the request again: it takes what lies there now."
                    raise
        raise AssertionError

    def _forget_changed(self, file: LoadedAdapter) -> bool:
        """Of one that requests find in lora_dir, the next one that names it takes what lies there now."""
        with self._lock:
            is_found = self._names.get(file.name) is file and str(self._on_demand(file.name)) == file.path
            if is_found:
                del self._names[file.name]
            return is_found

    def _keep(self, number: int, adapter: Adapter) -> None:
        with self._lock:
            self._content[number] = adapter
            self._content.move_to_end(number)
            while len(self._content) > max(1, self.config.max_cpu_loras or 4 * self.config.max_loras):
                self._content.popitem(last=False)

    def _begin_load(self, number: int, slot: int) -> None:
        self._thread.submit(self._load_slot, number, slot)

    def _load_slot(self, number: int, slot: int) -> None:
        """Put an adapter into a slot, in a thread of its own: steps go on meanwhile."""
        error: BaseException | None = None
        try:
            with self._lock:
                adapter, files = self._content.get(number), list(self._files[number].values())
            adapter = adapter or self._read_again(files)
            self._keep(number, adapter)
            assert self._runner is not None  # `detach` waits for this thread
            self._runner.fill_slot(slot, adapter.matrices)
        except BaseException as raised:
            error = raised
        with self._changed:
            if error is None:
                self.slots.loaded(number)
            else:
                self.slots.failed(number, error)
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)


def with_adapter(namespace: Namespace, adapter: LoadedAdapter) -> Namespace:
    """The namespace of a request's cached contexts: they are those of an adapter's content, whatever its name."""
    return namespace._replace(adapter=f"{namespace.adapter}+{adapter.digest}" if namespace.adapter else adapter.digest)
