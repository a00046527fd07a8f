"""Why a request did or did not hit, and the counters of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HitReason = Literal["full", "never_seen", "evicted", "cache_off", "adapter_differs", "limit", "between_states"]


@dataclass(slots=True)
class HitRecord:
    """How far a prompt matched and why no further. It depends on nothing that another tenant has cached.

    full: every token. limit: as many as the caller allowed (the engine computes at least one itself, unless it has the logits).
    between_states: more of it may be known, but the model's states are kept at some places only, and this is the last of them.
    evicted: the next token was cached and had to go. adapter_differs: another adapter of the same tenant has more of it.
    never_seen also stands where what is known of an eviction has been forgotten or dropped by a clear.
    """

    num_prompt: int
    num_matched: int
    reason: HitReason
    evicted_seconds_ago: float | None = None
    generation: int = 0  # how often this namespace has been cleared
    cleared_seconds_ago: float | None = None  # since the last of these

    def explain(self) -> str:
        """One sentence for people."""
        found = f"{self.num_matched:,} of {self.num_prompt:,} tokens came from the cache"
        if self.reason == "full":
            return f"All {self.num_prompt:,} tokens came from the cache."
        if self.reason == "limit":
            return f"{found}: all that may, since the last one must be computed to go on from."
        if self.reason == "cache_off":
            return f"None of {self.num_prompt:,} tokens came from the cache, which is turned off."
        if self.reason == "evicted":
            return f"{found}; the next ones were evicted {_ago(self.evicted_seconds_ago)} to make room."
        if self.reason == "between_states":
            return f"{found}; the state behind them is the nearest that is kept, and the rest is computed from there."
        if self.reason == "adapter_differs":
            return f"{found}; the next ones are cached under another adapter only, whose results differ."
        if self.cleared_seconds_ago is not None:
            return f"{found}; the next ones have not been seen since the cache was cleared {_ago(self.cleared_seconds_ago)}."
        return f"{found}; the next ones have not been seen before."


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "earlier"
    if seconds < 120:
        return f"{seconds:.1f} seconds ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes ago"
    return f"{seconds / 3600:.0f} hours ago"


@dataclass(slots=True, frozen=True)
class CacheStats:
    """Counters of a RadixCache, or of one namespace of it. Sizes, hits and misses are in tokens."""

    hit_rate: float  # hits / (hits + misses); 0 before the first request
    hits: int  # prompt tokens that were found
    misses: int  # prompt tokens that were not
    request_hits: int  # requests with at least one token found
    request_misses: int
    evictable_size: int  # cached, and no running sequence needs it
    protected_size: int  # cached and locked
    total_cached: int
    total_capacity: int  # of all blocks; the same for every namespace
    evictions: int  # nodes evicted
    evicted_tokens: int
    node_count: int
    utilization: float  # total_cached / total_capacity
