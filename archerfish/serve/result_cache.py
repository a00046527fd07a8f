"""Answers of equal deterministic requests, kept for the tenant that asked: the ResultCache, off unless it is given room."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from archerfish.cache.adaptive import AdaptiveCache
from archerfish.errors import InvalidOptionError
from archerfish.serve.wire import Chunk, Generated, GenerationRequest, Output

OVERHEAD_BYTES = 512  # of an entry beside its payload: key, entry, places in orders
COMPLETE = ("stop", "length")
# All else of a GenerationRequest may change the answer.
NOT_PART_OF_THE_KEY = (
    "v", "type", "request_id", "model", "stream", "takes_bundles", "priority", "deadline_s", "credentials", "tenant",
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder: msgspec.msgpack.Decoder[Generated] = msgspec.msgpack.Decoder(Generated)


@dataclass(frozen=True)
class CacheControl:
    """What the Cache-Control header of a request asks for."""

    may_read: bool = True
    may_store: bool = True
    max_age_s: float | None = None


def parse_cache_control(header: str | None) -> CacheControl:
    """no-store: neither read nor kept; no-cache: computed anew, and kept; max-age: nothing older. Other directives say nothing.

    Of several max-age the smallest counts; one that is no number of seconds stands for 0, as RFC 9111 advises.
    """
    may_read = may_store = True
    max_age_s: float | None = None
    for part in (header or "").split(","):
        name, _, value = part.strip().partition("=")
        name = name.strip().lower()
        if name in ("no-store", "no-cache"):
            may_read = False
            may_store = may_store and name == "no-cache"
        elif name == "max-age":
            digits = value.strip().strip('"')
            seconds = float(digits[:12]) if digits.isascii() and digits.isdigit() else 0.0
            max_age_s = seconds if max_age_s is None else min(max_age_s, seconds)
    return CacheControl(may_read, may_store, max_age_s)


def is_deterministic(params: dict[str, Any]) -> bool:
    """Whether equal requests get equal answers: the likeliest tokens, or draws from a fixed seed."""
    return params.get("temperature", 1.0) == 0 or params.get("seed") is not None


def key_of(request: GenerationRequest, model: str) -> bytes | None:
    """What an answer depends on, hashed: the model, by its full name, and all that is asked. None: it depends on chance too."""
    if not is_deterministic(request.params):
        return None
    asked = {name: value for name, value in msgspec.structs.asdict(request).items() if name not in NOT_PART_OF_THE_KEY}
    try:
        data = _encoder.encode([model, asked])
    except (TypeError, ValueError, OverflowError, RecursionError):  # what is not plain data will be refused elsewhere
        return None
    return hashlib.blake2b(data, digest_size=32, person=b"af-result").digest()


class ResultCache:
    """One AdaptiveCache for each tenant, with an equal part of the bytes: no tenant can feel what another does.

    Not for several threads at once. Tenants beyond `max_tenants` have no part. Each of several front ends has a cache of its
    own, with an equal part of `max_bytes`: a hit costs the engine process nothing, and one computation more at worst per front
    end is its price.
    """

    def __init__(
        self, max_bytes: int = 0, ttl_seconds: float = 600.0, *, max_tenants: int = 1, num_front_ends: int = 1,
        window_size: int = 256, min_hit_rate: float = 0.05, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options: dict[str, Any] = {"window_size": window_size, "min_hit_rate": min_hit_rate, "clock": clock}
        self._caches: dict[str, AdaptiveCache[bytes, bytes]] = {}
        self._num_front_ends, self._max_tenants = num_front_ends, max_tenants
        self._set_limits(max_bytes, ttl_seconds)
        AdaptiveCache(max_bytes, ttl_seconds, **self._options)  # so that wrong options show now

    def _set_limits(self, max_bytes: int, ttl_seconds: float) -> None:
        if max_bytes < 0 or not ttl_seconds > 0:
            raise InvalidOptionError(
                f"Of a ResultCache max_bytes must be at least 0 and ttl_seconds above 0: {max_bytes}, {ttl_seconds}."
            )
        self.max_bytes, self.ttl_seconds = max_bytes, ttl_seconds

    @property
    def is_enabled(self) -> bool:
        return self.max_bytes > 0

    @property
    def _tenant_bytes(self) -> int:
        return self.max_bytes // self._num_front_ends // self._max_tenants

    def get(self, namespace: str, key: bytes, max_age_s: float | None = None) -> Generated | None:
        """A whole answer. It took no time, and all of its prompt was cached."""
        cache = self._cache(namespace)
        found = None if cache is None else cache.get(key, max_age_s)
        return None if found is None else _decoder.decode(found)

    def put(self, namespace: str, key: bytes, answer: Generated) -> bool:
        """Keep a whole answer, all of whose outputs are complete. Whether it was kept."""
        cache = self._cache(namespace)
        if cache is None or not answer.outputs or any(output.finish_reason not in COMPLETE for output in answer.outputs):
            return False
        kept = msgspec.structs.replace(answer, request_id="", metrics={}, num_cached_tokens=answer.num_prompt_tokens)
        payload = _encoder.encode(kept)
        return cache.insert(key, payload, len(payload) + OVERHEAD_BYTES)

    def _cache(self, namespace: str) -> AdaptiveCache[bytes, bytes] | None:
        if not self.is_enabled:
            return None
        cache = self._caches.get(namespace)
        if cache is None and len(self._caches) < self._max_tenants:
            cache = AdaptiveCache(self._tenant_bytes, self.ttl_seconds, **self._options)
            self._caches[namespace] = cache
        return cache

    def resize(self, max_bytes: int, ttl_seconds: float) -> None:
        """Other limits from now on: what does not fit is evicted, the rest stays."""
        self._set_limits(max_bytes, ttl_seconds)
        if not self.is_enabled:
            self._caches.clear()
        for cache in self._caches.values():
            cache.resize(self._tenant_bytes, self.ttl_seconds)

    def totals(self) -> dict[str, int]:
        """Of all tenants together, for operators."""
        stats = [cache.get_stats() for cache in self._caches.values()]
        names = ("hits", "misses", "entries", "bytes", "evictions", "expirations", "refusals")
        return {name: sum(getattr(each, name) for each in stats) for name in names}


class Recording:
    """Puts a whole answer together out of what a backend sends, streamed or not."""

    def __init__(self) -> None:
        self._outputs: dict[int, Output] = {}

    def take(self, message: Chunk | Generated) -> Generated | None:
        """The whole answer with the last message; None before."""
        if isinstance(message, Generated):
            if message.outputs:
                return message
            return msgspec.structs.replace(message, outputs=[self._outputs[index] for index in sorted(self._outputs)])
        output = self._outputs.setdefault(message.index, Output(index=message.index))
        output.text += message.text
        output.token_ids += message.token_ids
        if message.logprobs is not None:
            output.logprobs = [] if output.logprobs is None else output.logprobs
            output.logprobs += message.logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(item[1] for item in message.logprobs)
        output.finish_reason, output.stop_reason = message.finish_reason, message.stop_reason
        return None


def replay(answer: Generated, request: GenerationRequest) -> Iterator[Chunk | Generated]:
    """A whole answer as a backend would send it for this request."""
    if not request.stream:
        yield msgspec.structs.replace(answer, request_id=request.request_id)
        return
    for output in answer.outputs:
        yield Chunk(
            request_id=request.request_id, index=output.index, text=output.text, token_ids=output.token_ids,
            finish_reason=output.finish_reason, stop_reason=output.stop_reason, logprobs=output.logprobs,
            num_cached_tokens=answer.num_cached_tokens,
        )  # fmt: skip
    yield msgspec.structs.replace(answer, request_id=request.request_id, outputs=[])


async def generate_cached(
    cache: ResultCache, generate: Callable[[GenerationRequest], AsyncIterator[Chunk | Generated]], request: GenerationRequest,
    *, model: str, namespace: str, control: CacheControl,
) -> AsyncIterator[Chunk | Generated]:
    """What `generate` (of a Backend) gives for a request, out of the cache where it can be."""
    is_wanted = cache.is_enabled and (control.may_read or control.may_store)
    key = key_of(request, model) if is_wanted else None
    found = cache.get(namespace, key, control.max_age_s) if key is not None and control.may_read else None
    if found is not None:
        for message in replay(found, request):
            yield message
        return
    recording = Recording() if key is not None and control.may_store else None
    async with aclosing(cast(AsyncGenerator[Chunk | Generated, None], generate(request))) as messages:
        async for message in messages:
            if recording is not None and key is not None:
                answer = recording.take(message)
                if answer is not None:
                    cache.put(namespace, key, answer)
            yield message
