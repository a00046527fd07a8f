"""Clients of the service's app: inside the event loop of a test, or on a real socket, over an engine host in a
thread."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from archerfish.config import ServeConfig
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve import front, run
from archerfish.serve.app import create_app
from archerfish.serve.client import AsyncClient
from archerfish.serve.hosted_encoder import HostedEncoder
from archerfish.serve.tenants import Tenants

from .fake_backend import LIMIT_S, client_of, error_of, until
from .hosting import ThreadHost, WordEncoder, make_host

__all__ = ["LIMIT_S", "client_of", "error_of", "until"]
PASS = "the-pass-of-the-front-ends"
WORDS = "fake/words"


def host_with(directory: Path, *encoders: WordEncoder, **options: Any) -> ThreadHost:
    """An engine host that is not started yet; front ends use the password PASS."""
    return make_host(directory, *encoders, **{"front_end_pass": PASS, **options})


@contextmanager
def words_host() -> Iterator[ThreadHost]:
    """A host of one embedding model."""
    with tempfile.TemporaryDirectory() as directory:
        yield host_with(Path(directory), WordEncoder(WORDS))


def app_of(
    host: ThreadHost,
    *,
    tenants: Tenants | None = None,
    registry: MetricRegistry | None = None,
    retry_after_s: float = 1.0,
    **options: Any,
) -> Starlette:
    backend = AsyncClient(host.address, retry_after_s=retry_after_s)
    return create_app(
        backend, ServeConfig(**options), registry, credentials=host.config.front_end_pass, tenants=tenants
    )


@asynccontextmanager
async def serving(host: ThreadHost | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a fresh app over a host, which serves meanwhile. options: those of `app_of`."""
    with words_host() if host is None else nullcontext(host) as served, served:
        async with client_of(app_of(served, **options)) as client:
            yield client


@dataclass
class Running:
    """A server in a thread."""

    server: front.FrontServer
    address: tuple[str, int]
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def join(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@contextmanager
def running(app: Starlette, *socket_options: tuple[int, int, int], log_level: str = "error") -> Iterator[Running]:
    """A server of an app. socket_options: those of its socket, which its connections have too."""
    config, ready = ServeConfig(port=0, log_level=log_level), threading.Event()
    with run.bind(config) as listener:
        for option in socket_options:
            listener.setsockopt(*option)
        server = front.make_server(app, config, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        made = Running(server, listener.getsockname(), thread)
        try:
            assert ready.wait(LIMIT_S)
            yield made
        finally:
            server.should_exit = server.force_exit = True
            made.join()


def hosted(host: ThreadHost, name: str = WORDS) -> HostedEncoder:
    found = next(one for one in host.models.loaded if one.name == name)
    assert isinstance(found, HostedEncoder)
    return found


def num_waiting(host: ThreadHost, name: str = WORDS) -> int:
    """Texts that have been tokenized and wait for a job."""
    return sum(len(encoding.texts) for encoding in list(hosted(host, name)._queue))
