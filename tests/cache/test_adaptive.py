"""AdaptiveCache: bounds hold, values are right, and the hit rate decides who is kept and who goes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.cache.adaptive import AdaptiveCache
from archerfish.errors import InvalidOptionError


def make(
    max_bytes: int = 100, ttl_seconds: float = 10.0, **options: Any
) -> tuple[AdaptiveCache[str, str], SimpleNamespace]:
    clock = SimpleNamespace(now=0.0)
    return AdaptiveCache(max_bytes, ttl_seconds, clock=lambda: clock.now, **options), clock


def ask(cache: AdaptiveCache[str, str], key: str, num_bytes: int = 10) -> bool:
    """As a user of the cache: look, and where there is nothing, compute and keep. Whether it was there."""
    value = cache.get(key)
    if value is None:
        cache.insert(key, key.upper(), num_bytes)
        return False
    assert value == key.upper()
    return True


def spoil(cache: AdaptiveCache[str, str], num: int) -> None:
    for i in range(num):
        assert cache.get(f"never-{i}-{random.random()}") is None


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.booleans(), max_size=40))
def test_the_hit_rate_is_the_mean_of_the_last_lookups(size: int, lookups: list[bool]) -> None:
    cache, _ = make(window_size=size, min_hit_rate=1.0)
    assert cache.hit_rate == 0 and cache.insert("known", "KNOWN", 1)
    for i, is_hit in enumerate(lookups):
        cache.get("known" if is_hit else "unknown")
        last = lookups[max(0, i + 1 - size) : i + 1]
        assert cache.hit_rate == sum(last) / len(last)
        assert cache.is_of_little_use == (len(last) == size and not all(last))


def test_gives_back_what_was_kept_until_it_is_too_old() -> None:
    cache, clock = make()
    assert not ask(cache, "a") and ask(cache, "a") and "a" in cache
    clock.now = 4.0
    assert cache.get("a") == "A"
    assert cache.get("a", max_age_s=3.0) is None and "a" in cache, "too old for one caller is not too old for all"
    assert cache.get("a", max_age_s=4.0) == "A"
    clock.now = 10.0
    assert "a" not in cache and cache.get("a") is None and len(cache) == 0
    stats = cache.get_stats()
    assert (stats.hits, stats.misses, stats.expirations, stats.bytes) == (3, 3, 1, 0)


def test_what_is_too_old_goes_before_anything_else() -> None:
    cache, clock = make(max_bytes=25)
    ask(cache, "a")
    ask(cache, "a")  # of use once, so that it would stay longer than the next one
    clock.now = 5.0
    ask(cache, "b")
    clock.now = 10.0
    ask(cache, "c")
    assert [key in cache for key in "abc"] == [False, True, True]
    assert (cache.get_stats().expirations, cache.get_stats().evictions) == (1, 0)
    clock.now = 12.0
    assert cache.evict_expired(max_age_s=7.0) == 1 and cache.evict_expired() == 0 and "c" in cache
    with pytest.raises(InvalidOptionError, match="max_age_s"):
        cache.evict_expired(-1)


def test_the_least_recently_used_go_first() -> None:
    cache, _ = make(max_bytes=30)
    for key in "abc":
        ask(cache, key)
    ask(cache, "a")
    ask(cache, "d")
    assert [key in cache for key in "abcd"] == [True, False, True, True]
    for key in "cda":
        ask(cache, key)
    ask(cache, "e")
    assert [key in cache for key in "cdae"] == [False, True, True, True]
    assert cache.get_stats().evictions == 2


def test_when_of_little_use_the_never_hit_go_first() -> None:
    cache, _ = make(max_bytes=30, window_size=8, min_hit_rate=0.5)
    ask(cache, "a")
    ask(cache, "a")  # proven, and the oldest
    for key in "bc":
        ask(cache, key)
    spoil(cache, 8)
    assert cache.is_of_little_use
    cache.get("d")
    ask(cache, "d")
    assert [key in cache for key in "abcd"] == [True, False, True, True]


def test_at_a_low_hit_rate_only_repeated_keys_are_kept() -> None:
    cache, _ = make(window_size=8, min_hit_rate=0.5)
    spoil(cache, 7)
    assert not cache.is_of_little_use and cache.should_cache("early"), "a window that is not full says nothing"
    spoil(cache, 1)
    assert not cache.should_cache("x")
    assert not ask(cache, "x") and "x" not in cache
    assert not ask(cache, "x") and "x" in cache, "the second time"
    assert ask(cache, "x")
    assert cache.get_stats().refusals == 1


def test_a_low_rate_ends_when_requests_repeat() -> None:
    cache, _ = make(window_size=16, min_hit_rate=0.3)
    spoil(cache, 40)
    hits = [ask(cache, key) for key in ["a", "b"] * 20]
    assert not any(hits[:4]) and all(hits[4:]) and not cache.is_of_little_use
    assert not ask(cache, "new") and "new" in cache


def test_repeats_are_not_driven_out_by_a_scan() -> None:
    """Five hot keys among 95 % that never come again: an LRU of this size would lose them between two uses."""
    rng = random.Random(5)

    def hits_of(min_hit_rate: float) -> int:
        cache, _ = make(max_bytes=150, ttl_seconds=1e9, window_size=64, min_hit_rate=min_hit_rate)
        rng.seed(7)
        return sum(ask(cache, f"hot-{rng.randrange(5)}" if rng.random() < 0.05 else f"cold-{i}") for i in range(20_000))

    adaptive, plain = hits_of(0.2), hits_of(0.0)
    assert adaptive > 900 and plain < 250


def test_sizes_and_ages_change_while_in_use() -> None:
    cache, clock = make(max_bytes=100, ttl_seconds=100.0)
    for i in range(10):
        clock.now = float(i)
        ask(cache, f"k{i}")
    cache.resize(55, 100.0)
    assert len(cache) == 5 and cache.num_bytes == 50 and "k9" in cache and "k4" not in cache
    cache.resize(55, 2.5)
    assert [f"k{i}" in cache for i in range(5, 10)] == [False, False, True, True, True]
    cache.resize(55, 1000.0)
    clock.now = 900.0
    assert "k9" in cache, "a longer life holds for what is there too"
    cache.resize(0, 1.0)
    assert len(cache) == 0 and not cache.insert("x", "X", 1)
    with pytest.raises(InvalidOptionError):
        cache.resize(-1, 1.0)
    for options in ({"window_size": 0}, {"max_bytes": -1}, {"ttl_seconds": 0.0}):
        with pytest.raises(InvalidOptionError):
            make(**options)


def test_replaced_and_discarded_values_give_back_their_bytes() -> None:
    cache, _ = make()
    assert cache.insert("a", "A", 10) and cache.insert("a", "B", 30) and cache.insert("b", "B", 20)
    assert cache.get("a") == "B" and cache.num_bytes == 50
    cache.discard("a")
    cache.discard("nothing")
    assert "a" not in cache and cache.num_bytes == 20


operations = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "wait", "insert", "discard", "resize", "expire"]), st.integers(0, 12)
    ),
    max_size=120,
)


@settings(deadline=None)
@given(operations, st.floats(0, 1))
def test_bounds_and_values_hold_whatever_happens(history: list[tuple[str, int]], min_hit_rate: float) -> None:
    cache, clock = make(max_bytes=40, ttl_seconds=8.0, window_size=4, min_hit_rate=min_hit_rate)
    versions: dict[str, tuple[str, float]] = {}  # what was last kept, and when
    for action, number in history:
        key = f"k{number}"
        if action == "ask":
            value = cache.get(key)
            if value is not None:
                assert versions[key][0] == value and clock.now - versions[key][1] < cache.ttl_seconds
        if action in ("ask", "insert") and key not in cache:
            value = f"{key}@{clock.now}"
            if cache.insert(key, value, 1 + number * 5):
                versions[key] = value, clock.now
        elif action == "wait":
            clock.now += number / 2
        elif action == "discard":
            cache.discard(key)
        elif action == "resize":
            cache.resize(number * 6, 0.5 + number)
        elif action == "expire":
            cache.evict_expired()
        assert cache.num_bytes <= cache.max_bytes
        assert cache.num_bytes == sum(entry.num_bytes for entry in cache._entries.values())
        assert set(cache._entries) == set(cache._fresh) | set(cache._proven) and not set(cache._fresh) & set(
            cache._proven
        )
        assert [entry.stored for entry in cache._entries.values()] == sorted(
            entry.stored for entry in cache._entries.values()
        )
        assert len(cache._missed) <= 16


def test_cost_does_not_grow_with_entries() -> None:
    """Counted, not timed: how often keys are hashed and compared."""
    num_uses = 0

    class Key(str):
        def __hash__(self) -> int:
            nonlocal num_uses
            num_uses += 1
            return super().__hash__()

        def __eq__(self, other: object) -> bool:
            nonlocal num_uses
            num_uses += 1
            return super().__eq__(other)

    def cost(num_entries: int) -> int:
        cache, _ = make(max_bytes=10 * num_entries, ttl_seconds=1e9, min_hit_rate=0.0)
        for i in range(num_entries):
            ask(cache, Key(f"k{i}"))
        before = num_uses
        assert not ask(cache, Key("one more")) and ask(cache, Key("k5"))
        cache.evict_expired()
        assert len(cache) == num_entries
        return num_uses - before

    assert abs(cost(10) - cost(10_000)) <= 4, "hashes may meet by chance, nothing else may differ"
