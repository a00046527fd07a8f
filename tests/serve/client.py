"""Clients of the service's app: inside the event loop of a test, or on a real socket, over an engine host in a thread."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from archerfish.config import ServeConfig
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve import front, run
from archerfish.serve.app import create_app
from archerfish.serve.client import AsyncClient
from archerfish.serve.host import EngineHost
from archerfish.serve.hosted_encoder import HostedEncoder
from archerfish.serve.tenants import Tenants

from .fake_backend import error_of, until
from .hosting import WordEncoder, add_encoder, make_host

__all__ = ["error_of", "until"]
LIMIT_S = 20
PASS = "the-pass-of-the-front-ends"
WORDS = "fake/words"
Test = Callable[[httpx.AsyncClient], Awaitable[None]]


def host_with(directory: Path, *encoders: WordEncoder, aliases: tuple[str, ...] = (), **options: Any) -> EngineHost:
    """An engine host that is not started yet; front ends use the password PASS."""
    host = make_host(directory, **{"front_end_pass": PASS, **options})
    for encoder in encoders:
        add_encoder(host, encoder)
        host.models.entries[-1].aliases = aliases
    return host


@contextmanager
def words_host() -> Iterator[EngineHost]:
    """A host of one embedding model."""
    with tempfile.TemporaryDirectory() as directory:
        yield host_with(Path(directory), WordEncoder(WORDS))


def app_of(
    host: EngineHost, *, tenants: Tenants | None = None, registry: MetricRegistry | None = None, retry_after_s: float = 1.0,
    **options: Any,
) -> Starlette:
    backend = AsyncClient(host.address, retry_after_s=retry_after_s)
    return create_app(backend, ServeConfig(**options), registry, credentials=host.config.front_end_pass, tenants=tenants)


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app, inside of the app's lifespan, which httpx does not run."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def with_app(test: Test, app: Starlette) -> None:
    """Run a test against an app; no task may be left over."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), client_of(app) as client:
            await test(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def with_client(test: Test, host: EngineHost | None = None, **options: Any) -> None:
    """Run a test against a fresh app over a host, which serves meanwhile. options: those of `app_of`."""
    if host is None:
        with words_host() as made:
            with_client(test, made, **options)
        return
    with host:
        with_app(test, app_of(host, **options))


@contextmanager
def running(app: Starlette, **options: Any) -> Iterator[tuple[str, int]]:
    """Host and port of a server of an app in a thread."""
    config = ServeConfig(**{"port": 0, "log_level": "error", **options})
    ready = threading.Event()
    with run.bind(config) as listener:
        server = front.make_server(app, config, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(LIMIT_S)
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def hosted(host: EngineHost, name: str = WORDS) -> HostedEncoder:
    found = next(one for one in host.models.loaded if one.name == name)
    assert isinstance(found, HostedEncoder)
    return found


def num_waiting(host: EngineHost, name: str = WORDS) -> int:
    """Texts that have been tokenized and wait for a job."""
    return sum(len(encoding.texts) for encoding in list(hosted(host, name)._queue))


async def entered(encoder: WordEncoder) -> None:
    """Waits until an encoder has begun a pass."""
    assert await asyncio.to_thread(encoder.entered.acquire, timeout=LIMIT_S)
