"""Several front ends: each answers with the same metrics and has the same options."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.host import EngineHost
from archerfish.serve.metrics import ALIVE_S, MAX_SOURCES, FrontEndMetrics, merged, metric_values
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.wire import FrontEndState, Generated, Output

from .client import WORDS, app_of, client_of, host_with
from .hosting import FakeClock, WordEncoder

pytestmark = pytest.mark.anyio
EMBEDDINGS, ADMIN = "/v1/embeddings", "/admin/optimization"


def registry_of(counts: dict[str, int], times: list[float], num_running: int = 0) -> MetricRegistry:
    registry = MetricRegistry()
    counter, histogram = registry.counter("requests", "Requests.", ("route",)), registry.histogram("seconds", "Seconds.")
    for route, count in counts.items():
        counter.add(count, route=route)
    histogram.observe(*times)
    registry.gauge("running", "Now.").set(num_running)
    return registry


def state_of(registry: MetricRegistry) -> FrontEndState:
    return FrontEndState(metrics={metric.name: metric_values(metric) for metric in registry})


COUNTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000))
TIMES = st.lists(st.floats(0, 100), max_size=5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(COUNTS, TIMES), min_size=1, max_size=6))
def test_merged_metrics_are_those_of_one_front_end_that_did_all(parts: list[tuple[dict[str, int], list[float]]]) -> None:
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
async def two_front_ends(host: EngineHost, **options: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        apps = [app_of(host, num_front_ends=2, **options) for _ in range(2)]
        yield [await stack.enter_async_context(client_of(app)) for app in apps]


def lines_of(answer: httpx.Response, *names: str) -> dict[str, str]:
    assert answer.status_code == 200
    lines = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith(names))
    return {line[0]: line[1] for line in lines}


async def test_metrics_are_the_same_from_every_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.sharing.SHARE_S", 0.005)
    names = (
        'archerfish_requests_total{route="/v1/emb', "archerfish_texts_total",
        'archerfish_request_seconds_count{route="/v1/emb',
    )  # fmt: skip
    with host_with(tmp_path, WordEncoder(WORDS)) as host:
        async with two_front_ends(host) as (one, other):
            for client in (one, one, other, other, other):
                assert (await client.post(EMBEDDINGS, json={"input": ["a", "b"]})).status_code == 200
            for client in (one, other):
                found: dict[str, str] = {}
                while sum(map(float, found.values())) != 20:  # until the other has sent its metrics
                    found = lines_of(await client.get("/metrics"), *names)
                assert sorted(map(float, found.values())) == [5, 5, 10]
                assert lines_of(await client.get("/metrics"), "archerfish_engine_up ") == {"archerfish_engine_up": "1.0"}


async def test_change_of_the_result_cache_reaches_all_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.serve.sharing.SHARE_S", 0.005)
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
    monkeypatch.setattr("archerfish.serve.sharing.SHARE_S", 3600.0)  # no front end sends its state by itself
    host = host_with(tmp_path, llm={"has_text": True})
    with host:
        async with two_front_ends(host, result_cache_mib=2) as (one, other):
            assert (await one.patch(ADMIN, json={"result_cache_mib": 8})).status_code == 200
            assert (await other.get(ADMIN)).json()["result_cache_mib"] == 8
            assert (await one.patch(ADMIN, json={"result_cache_mib": 0})).status_code == 200
            assert (await other.patch(ADMIN, json={"max_queue_size": 100})).json()["result_cache_mib"] == 0
            await asyncio.gather(*(
                client.patch(ADMIN, json={"result_cache_mib": mib}) for client, mib in ((one, 16), (other, 32))
            ))  # fmt: skip
            found = [(await client.get(ADMIN)).json()["result_cache_mib"] for client in (one, other)]
            assert found in ([16, 16], [32, 32])


def test_front_ends_share_the_bytes_of_the_result_cache() -> None:
    answer = Generated(request_id="", outputs=[Output(text="x" * 3000, finish_reason="stop")])
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
