"""A client of an app inside the same event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from archerfish.config import ServeConfig
from archerfish.engine.fakes import FakeEngine
from archerfish.observe import MetricRegistry
from archerfish.serve.app import create_app

LIMIT_S = 20


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """With the app's lifespan around it, which httpx leaves to others."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def with_client(
    test: Callable[[httpx.AsyncClient], Awaitable[None]],
    engine: FakeEngine | None = None,
    reranker: FakeEngine | None = None,
    registry: MetricRegistry | None = None,
    aliases: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Run a test against a fresh app."""

    async def main() -> None:
        app = create_app(engine or FakeEngine(), ServeConfig(**options), reranker, registry, aliases=aliases)
        async with asyncio.timeout(LIMIT_S), client_of(app) as client:
            await test(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's shape."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
