"""Several engine hosts behind one backend that routes, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from archerfish.route.router import Router
from archerfish.serve.client import AsyncClient
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.tenants import Tenants
from archerfish.serve.wire import ExplainRequest, Generated, GenerationRequest, Report

from .hosting import GREEDY, LIMIT_S, ThreadHost, make_host

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


def test_requests_go_where_their_prefix_is_cached(tmp_path: Path) -> None:
    hosts = replicas(tmp_path)

    async def main() -> None:
        async with routed(*hosts) as backend:
            first = [(7 * i) % 90 for i in range(200)]
            second = [(11 * i + 5) % 90 for i in range(200)]
            for tokens in (first, second, first, second):
                found = await whole(backend, tokens)
                assert found.num_output_tokens == 8
            assert found.num_cached_tokens >= 128
            explained = await backend.ask(ExplainRequest(request_id="e", model="tiny", token_ids=first, credentials=PASS))
            assert isinstance(explained, Report)
            assert set(explained.values["cached_elsewhere"]) == {"replica-0", "replica-1"} - {explained.values["replica"]}

    asyncio.run(main())
