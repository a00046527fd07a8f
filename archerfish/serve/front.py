"""`python -m archerfish.serve.front`: a front end, a process that speaks HTTP and asks the engine process.

It is a child of the main process (`processes`). All front ends accept connections from one listening socket.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import LOGGING_CONFIG

from archerfish.background import signals_to
from archerfish.config import ServeConfig
from archerfish.observe.metrics import MetricRegistry
from archerfish.route.router import Router
from archerfish.serve import processes
from archerfish.serve.app import create_app
from archerfish.serve.client import AsyncClient
from archerfish.serve.http import Connection
from archerfish.serve.logs import set_up_log
from archerfish.serve.replicas import replica_name
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.tenants import Tenants


class FrontServer(uvicorn.Server):
    """uvicorn's server with another end: running requests are finished, or their clients get an error.

    SIGTERM begins the end: `on_stop` is called, and requests are taken for `drain_s` more. Those that run then have
    `grace_s`. SIGINT cuts it short. `on_ready` is called once the server accepts connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        *,
        drain_s: float = 0.0,
        grace_s: float = processes.GRACE_S,
    ) -> None:
        super().__init__(config)
        self.on_ready = on_ready
        self.on_stop = on_stop
        self.drain_s = drain_s
        self.grace_s = grace_s
        self.closes_at = math.inf  # by time.monotonic

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Handle signals as a normal end; uvicorn would raise them again afterwards."""
        return signals_to(self.handle_exit, signal.SIGINT, signal.SIGTERM)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or sig == signal.SIGINT
        self.should_exit = self.should_exit or self.force_exit or not self.drain_s
        self.closes_at = min(self.closes_at, time.monotonic() + self.drain_s)
        self.on_stop()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or time.monotonic() >= self.closes_at

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for one in (*self.servers, *(sockets or ())):
            one.close()
        await self._drain(self.grace_s, lambda: self.force_exit)
        await self.lifespan.shutdown()  # requests that still wait for the engine fail now
        await self._drain(processes.LAST_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        for task in list(self.server_state.tasks):
            task.cancel()

    async def _drain(self, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until all connections and requests have ended, or `seconds` are over."""
        state, loop = self.server_state, asyncio.get_running_loop()
        end = loop.time() + seconds
        while (state.connections or state.tasks) and loop.time() < end and not is_enough():
            for connection in list(state.connections):
                connection.shutdown()  # now, or after its answer
            await asyncio.sleep(0.05)


def make_server(app: Starlette, config: ServeConfig, on_ready: Callable[[], None] = lambda: None) -> FrontServer:
    """A server for an app of `create_app`, with uvloop if it is installed."""
    settings = uvicorn.Config(
        app,
        log_level=config.log_level,
        access_log=False,
        lifespan="on",
        http=Connection,
        ws="none",
        server_header=False,
        log_config=None if config.log_format == "json" else LOGGING_CONFIG,
    )
    logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
    on_stop = partial(setattr, app.state, "is_stopping", True)
    return FrontServer(settings, on_ready, on_stop, drain_s=config.drain_s, grace_s=config.grace_s)


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Keeps the tracebacks of requests that are cancelled at the end of the server out of the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def make_backend(
    config: processes.FrontConfig, tenants: Tenants, registry: MetricRegistry
) -> AsyncClient | RoutedBackend:
    """A client of the engine process; of several replicas, a backend that chooses one for each request."""
    clients = [AsyncClient(address, retry_after_s=config.retry_after_s) for address in config.addresses]
    if len(clients) == 1:
        return clients[0]
    backend = RoutedBackend(
        Router(config.routing_secret.encode()),
        credentials=config.credentials,
        tenants=tenants,
        registry=registry,
        retry_after_s=config.retry_after_s,
    )
    for number, client in enumerate(clients):
        backend.add(replica_name(number), client)
    return backend


def main(follow: Callable[[Starlette, processes.FrontConfig], Callable[[bytes], None]] | None = None) -> int:
    """Serve until SIGTERM, or until the main process has ended. follow: returns what takes the lines that this one
    sends."""
    pipe = processes.open_report_pipe()
    config = processes.read_config(processes.FrontConfig)
    serve, listener = ServeConfig(**config.serve), socket.socket(fileno=config.listener)
    set_up_log("front", serve.log_format, serve.log_level)
    tenants, registry = Tenants.from_file(serve.api_keys_file), MetricRegistry()
    app = create_app(
        make_backend(config, tenants, registry), serve, registry, credentials=config.credentials, tenants=tenants
    )

    def start() -> None:
        """In the event loop, once the server accepts connections."""
        in_loop: Callable[..., Any] = asyncio.get_running_loop().call_soon_threadsafe
        on_line = partial(in_loop, follow(app, config)) if follow else None
        processes.watch_parent(partial(setattr, server, "should_exit", True), on_line)
        processes.send_report(pipe, {"address": str(listener.getsockname())})

    server = make_server(app, serve, start)
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
