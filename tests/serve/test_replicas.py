"""Several engine hosts behind one backend that routes, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archerfish.cache.digest import PathHash, PrefixDigest, keyed
from archerfish.route.router import Router
from archerfish.sequence import Namespace, pack_tokens
from archerfish.serve import loads
from archerfish.serve.client import AsyncClient, RemoteError
from archerfish.serve.loads import CHANGES_BYTES_PER_S, MAX_CHANGES_BYTES, NO_DIGEST, LoadReports
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.tenants import Tenants, add_key
from archerfish.serve.wire import EmbedRequest, ExplainRequest, Generated, GenerationRequest, Query, Report, Vectors

from .hosting import GREEDY, LIMIT_S, FakeClock, ThreadHost, WordEncoder, hold, make_host, report_of, talking

SECRET, PASS = "a secret", "pass"


async def until_ready(backend: RoutedBackend, count: int) -> None:
    while len(backend.ready()) < count:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(*hosts: ThreadHost, tenants: Tenants | None = None) -> AsyncIterator[RoutedBackend]:
    """A backend over hosts, when all of them have reported."""
    backend = RoutedBackend(Router(SECRET.encode()), credentials=PASS, tenants=tenants)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        for number, host in enumerate(hosts):
            stack.enter_context(host)
            backend.add(f"replica-{number}", AsyncClient(host.config.address))
        stack.push_async_callback(backend.close)
        await until_ready(backend, len(hosts))
        yield backend


def replicas(directory: Path, count: int = 2, **options: Any) -> list[ThreadHost]:
    hosts = []
    for number in range(count):
        place = directory / str(number)
        place.mkdir()
        given = {"llm": {}, "front_end_pass": PASS, "routing_secret": SECRET, **options}
        hosts.append(make_host(place, **given))
    return hosts


async def whole(backend: RoutedBackend, tokens: list[int], tenant: str = "", **fields: Any) -> Generated:
    sent = {"request_id": "r", "model": "tiny", "token_ids": tokens, "params": GREEDY, "wants_ids": True, **fields}
    parts = [part async for part in backend.generate(GenerationRequest(credentials=PASS, tenant=tenant, **sent))]
    assert isinstance(parts[-1], Generated)
    return parts[-1]


def prompt(seed: int, length: int = 200) -> list[int]:
    return Random(seed).choices(range(90), k=length)


async def explain(backend: RoutedBackend, tokens: list[int], tenant: str = "") -> dict[str, Any]:
    message = ExplainRequest(request_id="e", model="tiny", token_ids=tokens, credentials=PASS, tenant=tenant)
    report = await backend.ask(message)
    assert isinstance(report, Report)
    return report.values


def shown(report: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on measured times."""
    return {name: value for name, value in report.items() if name != "routing"}


def test_requests_go_where_their_prefix_is_cached(tmp_path: Path) -> None:
    async def main() -> None:
        async with routed(*replicas(tmp_path)) as backend:
            for seed in (1, 2, 1, 2):
                found = await whole(backend, prompt(seed))
                assert found.num_output_tokens == 8
            assert found.num_cached_tokens >= 128
            names = {(await explain(backend, prompt(seed)))["replica"] for seed in (1, 2)}
            for seed in (1, 2):
                report = await explain(backend, [*prompt(seed), 5])
                assert report["num_matched"] >= 128 and report["replica"] in names
                assert set(report["cached_elsewhere"]) == {"replica-0", "replica-1"} - {report["replica"]}

    asyncio.run(main())


def test_other_tenants_prefixes_change_no_report_and_no_choice(tmp_path: Path) -> None:
    """What tenant b is told, and where it is sent, is the same whatever a has cached; so are the bytes without the
    secret."""

    async def main(directory: Path, cached_by: str) -> tuple[list[dict[str, Any]], bytes]:
        directory.mkdir()
        hosts = replicas(directory)
        async with routed(*hosts) as backend:
            for _ in range(2):
                await whole(backend, prompt(1), tenant=cached_by)
            explained = [shown(await explain(backend, prompt(seed), tenant="b")) for seed in (1, 2)]
            digest = b"".join(host.digest.changes(0, 1 << 20)[1] for host in hosts if host.digest is not None)
        for report in explained:  # which of two equal replicas it is depends on who has reported last
            report["replica"], report["cached_elsewhere"] = "", list(report["cached_elsewhere"].values())
        return explained, digest

    (with_a, of_a), (without, of_none) = asyncio.run(main(tmp_path / "1", "a")), asyncio.run(main(tmp_path / "2", "c"))
    assert [one["num_matched"] for one in with_a] == [0, 0]
    assert with_a == without
    tokens = pack_tokens(prompt(1))
    plain = PathHash().prefixes(0, 0, tokens.tobytes(), 0, len(tokens))
    for secret, tenant in ((b"another secret", "a"), (SECRET.encode(), "b")):
        guessed = keyed(plain, secret, "tiny", Namespace(tenant)).tobytes()
        assert not any(guessed[i : i + 8] in of_a for i in range(0, len(guessed), 8))
    assert of_a and of_none and of_a != of_none


def test_limits_hold_for_all_replicas_together(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "acme", requests_per_minute=2)

    async def main() -> None:
        hosts = replicas(tmp_path, api_keys_file=str(keys))
        async with routed(*hosts, tenants=Tenants.from_file(keys)) as backend:
            for seed in (1, 2):
                await whole(backend, prompt(seed), tenant="acme")
            with pytest.raises(RemoteError, match="over its limit of 2 requests") as caught:
                await whole(backend, prompt(3), tenant="acme")
            assert caught.value.status == 429 and caught.value.retry_after_s is not None
            await whole(backend, prompt(3), tenant="free")

    asyncio.run(main())


def test_load_reports_what_runs_and_waits(tmp_path: Path) -> None:
    encoder = WordEncoder()
    host = make_host(tmp_path, encoder, llm={"max_num_seqs": 2}, front_end_pass=PASS, routing_secret=SECRET)

    async def main() -> None:
        async with talking(host) as client:

            async def loads() -> dict[str, Any]:
                query = Query(request_id="", about="load", credentials=PASS)
                return dict((await report_of(client, query))["loads"])

            idle = (await loads())["tiny"]
            assert (idle["num_running"], idle["num_waiting"], idle["max_running"], idle["waiting_tokens"]) == (
                0,
                0,
                2,
                {},
            )
            holding = await hold(
                encoder, client.ask(EmbedRequest(request_id="1", texts=["a b"], credentials=PASS, tenant="a"))
            )
            texts = EmbedRequest(request_id="2", texts=["c d e", "f"], credentials=PASS, tenant="b")
            waiting = asyncio.create_task(client.ask(texts))
            while not (load := (await loads())["words"])["num_waiting"]:
                pass
            assert (load["num_running"], load["num_waiting"], load["waiting_tokens"], load["is_fair"]) == (
                1,
                2,
                {"b": 4},
                True,
            )
            sent = [
                GenerationRequest(
                    request_id=f"g{i}",
                    model="tiny",
                    token_ids=prompt(i),
                    params=GREEDY,
                    stream=True,
                    credentials=PASS,
                    tenant="a",
                )
                for i in range(4)
            ]
            streams = [client.generate(one) for one in sent]
            first = [asyncio.create_task(anext(stream)) for stream in streams]
            while not (load := (await loads())["tiny"])["num_waiting"]:
                pass
            assert load["num_waiting"] + load["num_running"] <= 4 and load["waiting_tokens"]["a"] <= 4 * 200
            encoder.gate.set()  # the model had no turn
            for stream, task in zip(streams, first, strict=True):
                await task
                _ = [part async for part in stream]
            assert isinstance(await holding, Vectors) and isinstance(await waiting, Vectors)
            load = (await loads())["tiny"]
            assert load["prompt_token_s"] > 0 and load["waiting_tokens"] == {}

    asyncio.run(main())


def test_unloaded_model_takes_its_prefixes_back(tmp_path: Path) -> None:
    host = make_host(tmp_path, llm={}, front_end_pass=PASS, routing_secret=SECRET)

    async def main() -> None:
        async with talking(host) as client:
            message = GenerationRequest(request_id="g", token_ids=prompt(1), params=GREEDY, credentials=PASS)
            _ = [part async for part in client.generate(message)]

    asyncio.run(main())
    assert host.digest is not None and len(host.digest) == 200 // 64
    [entry] = host.models.entries
    assert entry.hosted is not None
    entry.hosted.engine.scheduler.cache.clear()  # type: ignore[union-attr]  # as ModelTable does before it closes an engine
    assert len(host.digest) == 0


def test_digest_bytes_are_limited_for_each_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: routers that share a limit, and so know the digest later the more of them there are; a load alone that
    spends it."""
    digest, num_hashes = PrefixDigest(b"secret"), 10_000
    tokens = pack_tokens(Random(1).choices(range(1000), k=64 * num_hashes))
    digest.add(PathHash().prefixes(0, 0, tokens.tobytes(), 0, len(tokens)), "model", Namespace())
    times = []
    for count in (1, 40):
        clock = FakeClock()
        reports = LoadReports(digest, clock)
        since = [0] * count
        num_bytes = 0
        began = clock.now
        while any(version != digest.changes(0, 1 << 30)[0] for version in since):
            clock.now += 0.05
            for router in range(count):
                assert "changes" not in reports.report(NO_DIGEST, (), str(router), is_stopping=False)
                report = reports.report(since[router], (), str(router), is_stopping=False)
                since[router], size = report["version"], len(report["changes"])
                assert size <= MAX_CHANGES_BYTES
                num_bytes += size
        assert num_bytes == count * 8 * num_hashes
        assert num_bytes <= count * (MAX_CHANGES_BYTES + CHANGES_BYTES_PER_S * (clock.now - began))
        times.append(clock.now - began)
    assert times[0] == times[1]
    assert CHANGES_BYTES_PER_S + MAX_CHANGES_BYTES < 64_000  # in any second
    monkeypatch.setattr(loads, "MAX_ASKERS", 2)
    reports = LoadReports(digest, clock)
    sizes = [len(reports.report(0, (), asker, is_stopping=False)["changes"]) for asker in "abbcbab"]
    assert sizes == [
        MAX_CHANGES_BYTES,
        MAX_CHANGES_BYTES,
        0,
        MAX_CHANGES_BYTES,
        0,
        MAX_CHANGES_BYTES,
        0,
    ]  # a was forgotten
    idle = LoadReports(None, clock).report(0, (), is_stopping=True)
    assert idle["is_stopping"] and "changes" not in idle  # a process without routers
