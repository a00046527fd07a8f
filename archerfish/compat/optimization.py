"""OptimizationConfig: options that can be changed while an engine serves; no request is lost.

Some options have a second name: cache_size_mb (logits_cache_mib) and enable_prefetch (pipeline_depth). Vectorised
sampling and reused buffers cannot be turned off: enable_simd_sampling=False and enable_object_pool=False are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from archerfish.cache.eviction import eviction_policy
from archerfish.config import EngineConfig, Options, option, parse_text
from archerfish.errors import InvalidOptionError, refuse_unknown

ALWAYS_ON = {
    "enable_simd_sampling": "Sampling is always vectorised.",
    "enable_object_pool": "Buffers are always reused.",
}
FIXED = {"pool_max_objects": "An engine makes its buffers once, for max_num_seqs sequences, when it starts."}
SECOND_NAMES = ("cache_size_mb", "enable_prefetch", *ALWAYS_ON)
# Options that an engine has under the same name.
ENGINE_OPTIONS = ("logits_cache_ttl_s", "enable_prefix_caching", "eviction_policy", "max_queue_size", "pipeline_depth")


class RunningEngine(Protocol):
    """The part of LLMEngine that is used here."""

    config: EngineConfig

    def configure(self, **changes: Any) -> dict[str, Any]: ...


class ResizableCache(Protocol):
    """The part of serve's ResultCache that is used here."""

    max_bytes: int
    ttl_seconds: float

    def resize(self, max_bytes: int, ttl_seconds: float) -> None: ...


@dataclass(frozen=True, kw_only=True, init=False)
class OptimizationConfig(Options):
    """Caches, queue and pipeline of a running engine; made, changed and read by either name of an option."""

    section: ClassVar[str] = "optimization"
    enable_simd_sampling: ClassVar[bool] = True
    enable_object_pool: ClassVar[bool] = True

    enable_logits_cache: bool = option(True, "Keep logits of whole prompts, which spare an exact repeat its pass.")
    logits_cache_mib: int = option(64, "Memory for such logits; also cache_size_mb.", minimum=0, maximum=1 << 20)
    logits_cache_ttl_s: float = option(600.0, "Age at which they expire.", minimum=0.001)
    enable_prefix_caching: bool = option(
        True, "Keep the KV of finished requests and reuse it for prompts that begin alike."
    )
    eviction_policy: str = option("lru", "Which cached blocks go first; a registered name.")
    max_queue_size: int = option(4096, "Requests that may wait; above this they are refused.", minimum=1)
    pipeline_depth: int = option(
        1, "Steps planned before the step before them is done; enable_prefetch is 1.", minimum=0, maximum=1
    )
    result_cache_mib: int = option(
        0, "Memory for answers to equal deterministic requests; 0: off.", minimum=0, maximum=1 << 20
    )
    result_cache_ttl_s: float = option(600.0, "Age at which they expire.", minimum=0.001)

    def __new__(cls, **_: Any) -> Self:
        return object.__new__(cls)  # Options would refuse second names

    def __init__(self, **values: Any) -> None:
        given = self._read(values)
        for spec in dataclasses.fields(self):
            object.__setattr__(self, spec.name, given.get(spec.name, spec.default))
        self.__post_init__()
        eviction_policy(self.eviction_policy)

    @property
    def cache_size_mb(self) -> int:
        return self.logits_cache_mib

    @property
    def enable_prefetch(self) -> bool:
        return self.pipeline_depth > 0

    def replace(self, **changes: Any) -> Self:
        return self.updated(changes)

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Like `replace`, with a table of options."""
        return super().replace(**self._read(values))

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Options by their first names."""
        if not isinstance(values, Mapping):
            raise InvalidOptionError(f"Options must be a table of names and values, not {type(values).__name__}.")
        refuse_unknown(map(str, values), [*cls.names(), *SECOND_NAMES], "option", FIXED)
        found: dict[str, Any] = {}
        for given_name, given_value in values.items():
            name, value = _first_name(given_name, given_value)
            if name in found and found[name] != value:
                raise InvalidOptionError(
                    f"There are two values for {name}: {found[name]!r} and {value!r}.", hint="Give one."
                )
            if name:
                found[name] = value
        return found

    @classmethod
    def of(cls, engine: RunningEngine, result_cache: ResizableCache | None = None) -> Self:
        """The options that are in force."""
        config = engine.config
        values = {name: getattr(config, name) for name in ENGINE_OPTIONS}
        if config.logits_cache_mib:
            values["logits_cache_mib"] = config.logits_cache_mib
        if result_cache is not None:
            values["result_cache_mib"] = result_cache.max_bytes >> 20
            values["result_cache_ttl_s"] = result_cache.ttl_seconds
        return cls(enable_logits_cache=config.logits_cache_mib > 0, **values)

    def changes(self, other: OptimizationConfig) -> dict[str, tuple[Any, Any]]:
        """The options that differ: name -> (value here, value in the other)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.names()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def apply(self, engine: RunningEngine, result_cache: ResizableCache | None = None) -> dict[str, tuple[Any, Any]]:
        """Put these options in force and return the ones that changed: name -> (before, now).

        Requests that run or wait go on. Caches that get smaller evict; a shorter queue refuses later requests only.
        """
        changed = self.of(engine, result_cache).changes(self)
        if result_cache is None and self.result_cache_mib:
            raise InvalidOptionError("There is no result cache here.", hint="Leave out result_cache_mib.")
        engine_changes = {name: getattr(self, name) for name in ENGINE_OPTIONS if name in changed}
        logits_mib = self.logits_cache_mib if self.enable_logits_cache else 0
        if logits_mib != engine.config.logits_cache_mib:
            engine_changes["logits_cache_mib"] = logits_mib
        if engine_changes:
            engine.configure(**engine_changes)
        if result_cache is not None and (changed.keys() & {"result_cache_mib", "result_cache_ttl_s"}):
            result_cache.resize(self.result_cache_mib << 20, self.result_cache_ttl_s)
        return changed

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _first_name(name: str, value: Any) -> tuple[str, Any]:
    """An option by its first name; "" for one that states what is always so."""
    if name == "cache_size_mb":
        return "logits_cache_mib", value
    if name in ALWAYS_ON or name == "enable_prefetch":
        is_on = parse_text(name, bool, value) if isinstance(value, str) else value
        if not isinstance(is_on, bool):
            raise InvalidOptionError(f"{name} must be true or false, not {value!r}.")
        if name == "enable_prefetch":
            return "pipeline_depth", int(is_on)
        if not is_on:
            raise InvalidOptionError(f"{name} cannot be false.", hint=ALWAYS_ON[name])
        return "", None
    return name, value
