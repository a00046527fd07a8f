"""ResultCache, and several front ends, which share its bytes, its options and their metrics."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InvalidOptionError
from archerfish.observe.metrics import MetricRegistry
from archerfish.params import SamplingParams
from archerfish.serve import result_cache
from archerfish.serve.client import RemoteError
from archerfish.serve.metrics import ALIVE_S, MAX_SOURCES, FrontEndMetrics, merged, metric_values
from archerfish.serve.result_cache import OVERHEAD_BYTES, CacheControl, ResultCache, key_of, parse_cache_control
from archerfish.serve.wire import Chunk, FrontEndState, Generated, GenerationRequest, WireOutput, decode_request, encode

from .client import WORDS, app_of, client_of, host_with
from .fake_backend import FakeBackend
from .hosting import FakeClock, ThreadHost, WordEncoder

pytestmark = pytest.mark.anyio


def request(**fields: Any) -> GenerationRequest:
    params = {"temperature": 0.0, "max_tokens": 8} | fields.pop("params", {})
    return GenerationRequest(request_id="r", **{"token_ids": [1], "wants_ids": True, "params": params} | fields)


def answer(text: str = "hi", reason: str | None = "stop", **fields: Any) -> Generated:
    outputs = [WireOutput(text=text, token_ids=[1, 2, 3], finish_reason=reason)]
    return Generated(request_id="r", outputs=outputs, num_prompt_tokens=5, num_output_tokens=3, **fields)


def must_have(key: bytes | None) -> bytes:
    assert key is not None
    return key


KEY = must_have(key_of(request()))


# Cache-Control


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, CacheControl()),
        ("", CacheControl()),
        ("no-transform, private", CacheControl()),
        ("no-cache", CacheControl(may_read=False)),
        ("No-Store", CacheControl(may_read=False, may_store=False)),
        ("no-cache, no-store", CacheControl(may_read=False, may_store=False)),
        ("no-store,no-cache", CacheControl(may_read=False, may_store=False)),
        ("max-age=30", CacheControl(max_age_s=30.0)),
        ('MAX-AGE = "5" , no-cache', CacheControl(may_read=False, max_age_s=5.0)),
        ("max-age=0", CacheControl(max_age_s=0.0)),
        ("max-age=soon", CacheControl(max_age_s=0.0)),
        ("max-age", CacheControl(max_age_s=0.0)),
        ("max-age=-4", CacheControl(max_age_s=0.0)),
        ("max-age=60, max-age=20", CacheControl(max_age_s=20.0)),
        ("max-age=²", CacheControl(max_age_s=0.0)),
        ("max-stale=100, only-if-cached", CacheControl()),
    ],
    ids=str,
)
def test_cache_control_is_read(header: str | None, expected: CacheControl) -> None:
    assert parse_cache_control(header) == expected


@given(st.text(max_size=60))
def test_any_header_can_be_read(header: str) -> None:
    control = parse_cache_control(header)
    assert control.may_store or not control.may_read
    assert control.max_age_s is None or control.max_age_s >= 0


# Keys


def test_only_deterministic_requests_have_a_key() -> None:
    assert key_of(request()) is not None
    assert key_of(request(params={"temperature": 0})) is not None
    assert key_of(request(params={"temperature": 0.7, "seed": 0})) is not None
    assert key_of(request(params={"temperature": 0.7})) is None
    assert key_of(GenerationRequest(request_id="r", prompt="x")) is None, "the default temperature is 1"


def test_key_covers_every_field() -> None:
    """A new field of GenerationRequest or of SamplingParams must not let answers be mixed up."""
    values: dict[str, Any] = {"prompt": "p", "token_ids": [2], "wants_ids": False, "messages": [{}]}
    values |= {"template_options": {"a": 1}, "params": {}}
    for field in msgspec.structs.fields(GenerationRequest):
        if field.encode_name in result_cache.NOT_PART_OF_THE_KEY:
            continue
        value = values.get(field.name, "x" if field.name == "model" else True)
        changed = request(**{field.name: value}) if field.name != "params" else request(params={"seed": 3})
        assert key_of(changed) != KEY, field.name
    seeded = key_of(request(params={"seed": 1}))
    for spec in dataclasses.fields(SamplingParams):
        assert key_of(request(params={"seed": 1, spec.name: 7})) != seeded, spec.name


def test_key_ignores_who_asks_and_how() -> None:
    other = request(stream=True, priority=3, deadline_s=2.0, credentials="c", tenant="t", takes_bundles=True)
    other.request_id = "another"
    assert key_of(other) == KEY
    assert key_of(request(params={"top_k": 1, "seed": 2})) == key_of(request(params={"seed": 2, "top_k": 1}))
    sent = decode_request(encode(request()))
    assert isinstance(sent, GenerationRequest) and key_of(sent) == KEY


# Keeping


def test_cache_is_off_by_default() -> None:
    cache, backend = ResultCache(), FakeBackend()
    for num_asked in (1, 2):
        ask(cache, backend, request())
        assert len(backend.requests) == num_asked
    assert not cache.put("a", KEY, answer()) and cache.get("a", KEY) is None
    assert cache.totals()["misses"] == 0


def test_an_answer_comes_back_whole() -> None:
    clock = FakeClock()
    cache = ResultCache(100_000, 60.0, clock=clock)
    assert cache.get("a", KEY) is None
    assert cache.put("a", KEY, answer(metrics={"ttft_ms": 3.0}, num_cached_tokens=2))
    clock.now += 30.0
    found = cache.get("a", KEY)
    assert found is not None
    assert found.outputs == answer().outputs and (found.num_prompt_tokens, found.num_output_tokens) == (5, 3)
    assert found.metrics == {} and found.num_cached_tokens == 5, "it took no time, and nothing was computed"
    found.outputs[0].token_ids.append(9)
    again = cache.get("a", KEY)
    assert again is not None and again.outputs[0].token_ids == [1, 2, 3], "what one caller does to it others do not see"
    assert cache.get("a", KEY, max_age_s=29.0) is None
    clock.now += 30.0
    assert cache.get("a", KEY) is None
    assert (cache.totals()["hits"], cache.totals()["misses"]) == (2, 3)


@pytest.mark.parametrize("reason", ["abort", "deadline", "error", None])
def test_incomplete_answers_are_not_kept(reason: str | None) -> None:
    cache = ResultCache(100_000)
    assert not cache.put("a", KEY, answer(reason=reason))
    mixed = answer()
    mixed.outputs.append(WireOutput(index=1, finish_reason=reason))
    assert not cache.put("a", KEY, mixed) and not cache.put("a", KEY, Generated(request_id="r"))


def test_tenants_never_see_each_others_answers() -> None:
    cache = ResultCache(100_000, max_tenants=2)
    cache.put("a", KEY, answer("of a"))
    assert cache.get("b", KEY) is None
    cache.put("b", KEY, answer("of b"))
    found = cache.get("a", KEY)
    assert found is not None and found.outputs[0].text == "of a"
    assert not cache.put("c", KEY, answer()) and cache.get("c", KEY) is None, "one more than there are parts"


events = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 300), st.floats(0, 9)), max_size=60
)


@settings(deadline=None, max_examples=60)
@given(events)
def test_tenants_do_not_affect_each_other(history: list[tuple[str, int, int, float]]) -> None:
    def seen(names: str) -> list[object]:
        clock = FakeClock()
        cache = ResultCache(
            4 * (OVERHEAD_BYTES + 400), 20.0, max_tenants=2, window_size=4, min_hit_rate=0.3, clock=clock
        )
        found: list[object] = []
        for name, number, size, pause in history:
            clock.now += pause
            if name in names:
                key = bytes([number])
                hit = cache.get(name, key)
                kept = None if hit is not None else cache.put(name, key, answer("x" * size))
                if name == "a":
                    found.append((hit, kept, cache._caches["a"].get_stats()))
            assert cache.totals()["bytes"] <= cache.max_bytes
        return found

    assert seen("ab") == seen("a")


def test_sizes_change_while_in_use() -> None:
    cache = ResultCache(100_000, max_tenants=2)
    for number in range(20):
        cache.put("a", bytes([number]), answer("x" * 1000))
        cache.put("b", bytes([number]), answer("x" * 1000))
    cache.resize(20_000, 600.0)
    assert 0 < cache.totals()["bytes"] <= 20_000 and cache.get("a", bytes([19])) is not None
    cache.resize(0, 600.0)
    assert cache.totals()["bytes"] == 0 and cache.get("a", bytes([19])) is None
    cache.resize(50_000, 5.0)
    assert cache.put("a", KEY, answer()) and cache.totals()["entries"] == 1
    for limits in ((-1, 600.0), (1, 0.0)):
        with pytest.raises(InvalidOptionError):
            cache.resize(*limits)
    with pytest.raises(InvalidOptionError):
        ResultCache(1, window_size=0)


# Streams


def ask(
    cache: ResultCache, backend: FakeBackend, given: GenerationRequest, control: str = ""
) -> list[Chunk | Generated]:
    async def main() -> list[Chunk | Generated]:
        return [message async for message in cache.generate(backend.generate, given, control)]

    return asyncio.run(main())


def test_equal_requests_are_computed_once() -> None:
    cache, backend = ResultCache(100_000), FakeBackend()
    first, again = ask(cache, backend, request()), ask(cache, backend, request())
    assert len(backend.requests) == 1
    assert isinstance(first[0], Generated) and isinstance(again[0], Generated) and again[0].outputs == first[0].outputs
    ask(cache, backend, request(stream=True))
    assert len(backend.requests) == 1, "a stream may be played from an answer that was none"
    ask(cache, backend, request(token_ids=[2], stream=True))
    ask(cache, backend, request(token_ids=[2]))
    assert len(backend.requests) == 2, "and the other way round"
    ask(cache, backend, request(params={"temperature": 1.0}))
    ask(cache, backend, request(params={"temperature": 1.0}))
    assert len(backend.requests) == 4
    ask(cache, backend, request(tenant="b"))
    assert len(backend.requests) == 5


def test_stream_is_recorded_and_played_again() -> None:
    cache, backend = ResultCache(100_000), FakeBackend("ab")
    given = request(stream=True, params={"n": 2, "logprobs": 0})
    parts = [part for part in ask(cache, backend, given) if isinstance(part, Chunk)]
    assert [part.token_ids for part in parts] == [[97], [98], [256], [97], [98], [32], [49], [256]]
    [whole] = ask(cache, backend, request(params={"n": 2, "logprobs": 0}))
    assert isinstance(whole, Generated)
    expected = [
        (
            index,
            [part.token_ids[0] for part in parts if part.index == index],
            "stop",
            [logprob for part in parts if part.index == index for logprob in part.logprobs or ()],
        )
        for index in (0, 1)
    ]
    assert [(o.index, o.token_ids, o.finish_reason, o.logprobs) for o in whole.outputs] == expected
    *chunks, last = ask(cache, backend, given)
    assert [(c.index, c.token_ids, c.finish_reason, c.logprobs) for c in chunks if isinstance(c, Chunk)] == expected
    assert isinstance(last, Generated) and not last.outputs
    assert {message.request_id for message in (whole, *chunks, last)} == {"r"}
    assert len(backend.requests) == 1


def test_headers_are_obeyed() -> None:
    clock, backend = FakeClock(), FakeBackend()
    cache = ResultCache(100_000, clock=clock)
    no_store, no_cache = "no-store", "no-cache"
    ask(cache, backend, request(), no_store)
    assert cache.totals()["entries"] == 0
    ask(cache, backend, request(), no_cache)
    assert cache.totals()["entries"] == 1 and len(backend.requests) == 2
    ask(cache, backend, request())
    assert len(backend.requests) == 2
    ask(cache, backend, request(), no_cache)
    ask(cache, backend, request(), no_store)
    assert len(backend.requests) == 4
    clock.now += 2
    ask(cache, backend, request(), "max-age=1")
    assert len(backend.requests) == 5


def test_failed_or_cancelled_answer_is_not_kept() -> None:
    cache, backend = ResultCache(100_000), FakeBackend()

    async def leave() -> None:
        made = cache.generate(backend.generate, request(stream=True))
        async for _ in made:
            break
        await made.aclose()

    asyncio.run(leave())
    assert len(backend.left) == 1 and cache.totals()["entries"] == 0
    backend.fails[0] = RemoteError("no")
    with pytest.raises(RemoteError, match="no"):
        ask(cache, backend, request(stream=True))
    assert cache.totals()["entries"] == 0


# Several front ends


EMBEDDINGS, ADMIN = "/v1/embeddings", "/admin/optimization"


def registry_of(counts: dict[str, int], times: list[float], num_running: int = 0) -> MetricRegistry:
    registry = MetricRegistry()
    counter, histogram = (
        registry.counter("requests", "Requests.", ("route",)),
        registry.histogram("seconds", "Seconds."),
    )
    for route, count in counts.items():
        counter.add(count, route=route)
    histogram.observe(*times)
    registry.gauge("running", "Now.").add(num_running)
    return registry


def state_of(registry: MetricRegistry) -> FrontEndState:
    return FrontEndState(metrics={metric.name: metric_values(metric) for metric in registry})


COUNTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000))
TIMES = st.lists(st.floats(0, 100), max_size=5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(COUNTS, TIMES), min_size=1, max_size=6))
def test_merged_metrics_equal_those_of_one_front_end(parts: list[tuple[dict[str, int], list[float]]]) -> None:
    whole: dict[str, int] = {}
    for counts, _ in parts:
        for route, count in counts.items():
            whole[route] = whole.get(route, 0) + count
    expected = registry_of(whole, [time for _, times in parts for time in times])
    found = {metric.name: metric for metric in merged(registry_of(*part) for part in parts)}
    for metric in expected:
        ours = {one.labels: one for one in found[metric.name].samples()}
        for one in metric.samples():
            assert ours[one.labels].value == pytest.approx(one.value)
            assert (ours[one.labels].count, ours[one.labels].buckets) == (one.count, one.buckets)
        assert len(ours) == len(metric.samples())


def value(figures: FrontEndMetrics, name: str) -> float:
    [metric] = [metric for metric in figures.metrics() if metric.name == name]
    return sum(one.value for one in metric.samples())


def test_ended_front_ends_count_except_in_gauges() -> None:
    clock = FakeClock()
    figures = FrontEndMetrics(clock)
    for number in range(3):
        figures.take(f"old-{number}", state_of(registry_of({"a": 5}, [], num_running=1)))
        figures.take(f"old-{number}", state_of(registry_of({"a": 7}, [], num_running=2)))  # not 12: these are totals
    assert (value(figures, "requests"), value(figures, "running")) == (21, 6)
    clock.now += ALIVE_S + 1
    figures.take("new", state_of(registry_of({"a": 1}, [], num_running=1)))
    assert (value(figures, "requests"), value(figures, "running")) == (22, 1)
    for number in range(2 * MAX_SOURCES):
        figures.take(f"new-{number}", state_of(registry_of({"a": 1}, [])))
    assert value(figures, "requests") == 22 + 2 * MAX_SOURCES
    assert len(figures._last) == MAX_SOURCES


@asynccontextmanager
async def two_front_ends(host: ThreadHost, **options: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        apps = [app_of(host, num_front_ends=2, **options) for _ in range(2)]
        yield [await stack.enter_async_context(client_of(app)) for app in apps]


def lines_of(answer: httpx.Response, *names: str) -> dict[str, str]:
    assert answer.status_code == 200
    lines = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith(names))
    return {line[0]: line[1] for line in lines}


async def test_metrics_are_the_same_from_every_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.app.SHARE_S", 0.005)
    names = (
        'archerfish_requests_total{route="/v1/emb',
        "archerfish_texts_total",
        'archerfish_request_seconds_count{route="/v1/emb',
    )
    with host_with(tmp_path, WordEncoder(WORDS)) as host:
        async with two_front_ends(host) as (one, other):
            for client in (one, one, other, other, other):
                assert (await client.post(EMBEDDINGS, json={"input": ["a", "b"]})).status_code == 200
            for client in (one, other):
                found: dict[str, str] = {}
                while sum(map(float, found.values())) != 20:  # until the other has sent its metrics
                    found = lines_of(await client.get("/metrics"), *names)
                assert sorted(map(float, found.values())) == [5, 5, 10]
                assert lines_of(await client.get("/metrics"), "archerfish_engine_up ") == {
                    "archerfish_engine_up": "1.0"
                }


async def test_change_of_the_result_cache_reaches_all_front_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archerfish.serve.app.SHARE_S", 0.005)
    host = host_with(tmp_path, llm={"has_text": True})
    with host:
        async with two_front_ends(host, result_cache_mib=2) as (one, other):
            assert (await other.get(ADMIN)).json()["result_cache_mib"] == 2
            for client, mib in ((one, 8), (other, 0), (one, 4)):
                changed = await client.patch(ADMIN, json={"result_cache_mib": mib, "result_cache_ttl_s": 60.0 + mib})
                assert changed.status_code == 200
                for each in (one, other):
                    while (found := (await each.get(ADMIN)).json())["result_cache_mib"] != mib:
                        pass
                    assert found["result_cache_ttl_s"] == 60.0 + mib


async def test_simultaneous_changes_leave_front_ends_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.app.SHARE_S", 3600.0)  # no front end sends its state by itself
    host = host_with(tmp_path, llm={"has_text": True})
    with host:
        async with two_front_ends(host, result_cache_mib=2) as (one, other):
            assert (await one.patch(ADMIN, json={"result_cache_mib": 8})).status_code == 200
            assert (await other.get(ADMIN)).json()["result_cache_mib"] == 8
            assert (await one.patch(ADMIN, json={"result_cache_mib": 0})).status_code == 200
            assert (await other.patch(ADMIN, json={"max_queue_size": 100})).json()["result_cache_mib"] == 0
            await asyncio.gather(
                *(client.patch(ADMIN, json={"result_cache_mib": mib}) for client, mib in ((one, 16), (other, 32)))
            )
            found = [(await client.get(ADMIN)).json()["result_cache_mib"] for client in (one, other)]
            assert found in ([16, 16], [32, 32])


def test_front_ends_share_the_bytes_of_the_result_cache() -> None:
    answer = Generated(request_id="", outputs=[WireOutput(text="x" * 3000, finish_reason="stop")])
    caches = [ResultCache(40_000, max_tenants=2, num_front_ends=4) for _ in range(4)]
    for number in range(100):
        for cache in caches:
            for tenant in "ab":
                cache.put(tenant, b"%d" % number, answer)
    assert 0 < sum(cache.totals()["bytes"] for cache in caches) <= 40_000
    for cache in caches:
        cache.resize(80_000, 600.0)
        for number in range(100):
            cache.put("a", b"%d" % number, answer)
    assert 20_000 < sum(cache.totals()["bytes"] for cache in caches) <= 80_000
