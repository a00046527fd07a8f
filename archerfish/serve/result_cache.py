"""Answers of equal deterministic requests, kept for the tenant that asked: the ResultCache, off unless it is given
room."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from archerfish.cache.adaptive import AdaptiveCache
from archerfish.errors import InvalidOptionError
from archerfish.serve.wire import Chunk, Generated, GenerationRequest, WireOutput

OVERHEAD_BYTES = 512  # of an entry beside its payload: key, entry, places in orders
# All else of a GenerationRequest may change the answer.
NOT_PART_OF_THE_KEY = (
    "v",
    "type",
    "request_id",
    "stream",
    "takes_bundles",
    "priority",
    "deadline_s",
    "credentials",
    "tenant",
)
Messages = AsyncGenerator[Chunk | Generated, None]

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder: msgspec.msgpack.Decoder[Generated] = msgspec.msgpack.Decoder(Generated)


class CacheControl(NamedTuple):
    """What the Cache-Control header of a request asks for."""

    may_read: bool = True
    may_store: bool = True
    max_age_s: float | None = None


def parse_cache_control(header: str | None) -> CacheControl:
    """no-store: neither read nor keep an answer; no-cache: keep, but do not read; max-age: read nothing older.

    Other directives are ignored. The smallest of several max-age counts. An invalid max-age counts as 0, as RFC 9111
    advises.
    """
    names: set[str] = set()
    ages: list[float] = []
    for part in (header or "").split(","):
        name, _, value = part.partition("=")
        names.add(name.strip().lower())
        if name.strip().lower() == "max-age":
            digits = value.strip().strip('"')
            ages.append(float(digits[:12]) if digits.isascii() and digits.isdigit() else 0.0)
    return CacheControl(names.isdisjoint(("no-store", "no-cache")), "no-store" not in names, min(ages, default=None))


def key_of(request: GenerationRequest) -> bytes | None:
    """A hash of all that an answer depends on. None if the answer is random: sampled without a seed."""
    if request.params.get("temperature", 1.0) != 0 and request.params.get("seed") is None:
        return None
    asked = {name: value for name, value in msgspec.structs.asdict(request).items() if name not in NOT_PART_OF_THE_KEY}
    try:
        data = _encoder.encode(asked)
    except TypeError:  # it cannot put the integer keys of logit_bias in order
        return None
    return hashlib.blake2b(data, digest_size=32, person=b"af-result").digest()


class ResultCache:
    """One AdaptiveCache for each tenant, with an equal part of the bytes, so that no tenant's hits depend on another
    tenant.

    Not thread-safe. Tenants beyond `max_tenants` have no cache. Each front end has caches of its own, with an equal
    part of
    `max_bytes`: a hit needs no message to the engine process, but each front end computes an answer once before it can
    hit.
    """

    def __init__(
        self,
        max_bytes: int = 0,
        ttl_seconds: float = 600.0,
        *,
        max_tenants: int = 1,
        num_front_ends: int = 1,
        window_size: int = 256,
        min_hit_rate: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options: dict[str, Any] = {"window_size": window_size, "min_hit_rate": min_hit_rate, "clock": clock}
        self._caches: dict[str, AdaptiveCache[bytes, bytes]] = {}
        self._num_parts, self._max_tenants = num_front_ends * max_tenants, max_tenants
        self.resize(max_bytes, ttl_seconds)
        AdaptiveCache(max_bytes, ttl_seconds, **self._options)  # raises an error about wrong options now

    def resize(self, max_bytes: int, ttl_seconds: float) -> None:
        """Change the limits. What does not fit any more is evicted."""
        if max_bytes < 0 or not ttl_seconds > 0:
            wanted = "max_bytes must be at least 0 and ttl_seconds above 0"
            raise InvalidOptionError(f"Of a ResultCache {wanted}: {max_bytes}, {ttl_seconds}.")
        self.max_bytes, self.ttl_seconds = max_bytes, ttl_seconds
        if max_bytes == 0:
            self._caches.clear()
        for cache in self._caches.values():
            cache.resize(max_bytes // self._num_parts, ttl_seconds)

    def _cache(self, tenant: str) -> AdaptiveCache[bytes, bytes] | None:
        if self.max_bytes > 0 and tenant not in self._caches and len(self._caches) < self._max_tenants:
            part = AdaptiveCache[bytes, bytes](self.max_bytes // self._num_parts, self.ttl_seconds, **self._options)
            self._caches[tenant] = part
        return self._caches.get(tenant)

    def get(self, tenant: str, key: bytes, max_age_s: float | None = None) -> Generated | None:
        """A whole answer. It took no time, and all of its prompt was cached."""
        cache = self._cache(tenant)
        found = None if cache is None else cache.get(key, max_age_s)
        return None if found is None else _decoder.decode(found)

    def put(self, tenant: str, key: bytes, answer: Generated) -> bool:
        """Keep a whole answer if all of its outputs are complete. Returns whether it was kept."""
        cache, reasons = self._cache(tenant), {output.finish_reason for output in answer.outputs}
        if cache is None or not reasons or not reasons <= {"stop", "length"}:
            return False
        kept = msgspec.structs.replace(answer, request_id="", metrics={}, num_cached_tokens=answer.num_prompt_tokens)
        payload = _encoder.encode(kept)
        return cache.insert(key, payload, len(payload) + OVERHEAD_BYTES)

    def totals(self) -> dict[str, int]:
        """The sums over all tenants, for operators."""
        stats = [cache.get_stats() for cache in self._caches.values()]
        names = ("hits", "misses", "entries", "bytes", "evictions", "expirations", "refusals")
        return {name: sum(getattr(each, name) for each in stats) for name in names}

    async def generate(
        self,
        generate: Callable[[GenerationRequest], Messages],
        request: GenerationRequest,
        cache_control: str | None = None,
    ) -> Messages:
        """The messages of a request: from the cache if it has them, else from `generate` of a Backend."""
        control, key = parse_cache_control(cache_control), key_of(request)
        found = self.get(request.tenant, key, control.max_age_s) if key is not None and control.may_read else None
        if found is not None:
            for output in found.outputs if request.stream else ():
                yield Chunk(
                    request_id=request.request_id,
                    index=output.index,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    num_cached_tokens=found.num_cached_tokens,
                )
            outputs = [] if request.stream else found.outputs
            yield msgspec.structs.replace(found, request_id=request.request_id, outputs=outputs)
            return
        recorded: dict[int, WireOutput] = {}  # of a stream, as far as it has come
        async with aclosing(generate(request)) as messages:
            async for message in messages:
                if isinstance(message, Chunk):
                    output = recorded.setdefault(message.index, WireOutput(index=message.index))
                    output.token_ids += message.token_ids
                    if message.logprobs is not None:
                        output.logprobs = output.logprobs or []
                        output.logprobs += message.logprobs
                    output.finish_reason, output.stop_reason = message.finish_reason, message.stop_reason
                elif key is not None and control.may_store and message.adapter_digest == request.adapter_digest:
                    whole = message.outputs or [recorded[index] for index in sorted(recorded)]
                    self.put(request.tenant, key, msgspec.structs.replace(message, outputs=whole))
                yield message
