"""A front end: one process that speaks HTTP and asks the engine process. `python -m archerfish.serve.front` is a further one.

All of them accept from one listening socket, which the first has opened. A further one reads its configuration from standard
input, as one line of JSON, and ends when that does.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from archerfish.config import ServeConfig
from archerfish.errors import MachineError
from archerfish.serve.app import create_app
from archerfish.serve.client import AsyncClient
from archerfish.serve.connection import PATIENCE, Patience, connections_with
from archerfish.serve.signals import LAST_S, ignore_interrupts
from archerfish.serve.tenants import Tenants

GRACE_S = 30  # what running requests get after SIGTERM or SIGINT
PAUSE_S = 0.05  # from one look at them to the next


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to know."""

    address: str  # of the engine process
    credentials: str
    serve: dict[str, Any] = {}
    retry_after_s: float = 1.0
    listener: int = -1  # file descriptor


def build_app(config: FrontConfig) -> Starlette:
    serve = ServeConfig(**config.serve)
    backend = AsyncClient(config.address, retry_after_s=config.retry_after_s)
    return create_app(backend, serve, credentials=config.credentials, tenants=read_tenants(serve))


def read_tenants(config: ServeConfig) -> Tenants:
    return Tenants.from_file(config.api_keys_file) if config.api_keys_file else Tenants()


def bind(config: ServeConfig) -> socket.socket:
    """A socket that listens as configured."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise MachineError(f"[serve] host {config.host!r} is no address of this machine: {error}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        hint = "Give an address of this machine." if is_elsewhere else "Choose another port; 0 takes any free one."
        raise MachineError(f"Cannot listen on {config.host}:{config.port}: {error.strerror}.", hint=hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, with an end at which what runs is finished, or its clients are told that it will not be.

    on_ready is called once it accepts requests, on_stop when it begins to stop, and on_force at the end of a stop that a second
    SIGINT has cut short, or at once by a third.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None] = lambda: None,
        on_force: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self.on_ready, self.on_stop, self.on_force = on_ready, on_stop, on_force

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.force_exit and sig == signal.SIGINT:
            self.on_force()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        for one in (*self.servers, *(sockets or ())):
            one.close()
        await self._drain(self.config.timeout_graceful_shutdown or 0, lambda: self.force_exit)
        await self.lifespan.shutdown()  # whoever still waits for the engine gets an error now
        await self._drain(LAST_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        for task in list(self.server_state.tasks):
            task.cancel()
        if self.force_exit:
            self.on_force()

    async def _drain(self, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait so long for the connections and requests that there are."""
        state, loop = self.server_state, asyncio.get_running_loop()
        end = loop.time() + seconds
        while (state.connections or state.tasks) and loop.time() < end and not is_enough():
            for connection in list(state.connections):
                connection.shutdown()  # now, or once it has its answer
            await asyncio.sleep(PAUSE_S)


def quiet(app: ASGIApp) -> ASGIApp:
    """An app whose requests may be cancelled, as they are at the end, without a traceback in the log."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise

    return answer


def make_server(
    app: ASGIApp, listener: socket.socket, config: ServeConfig, on_ready: Callable[[str], None],
    on_stop: Callable[[], None] = lambda: None, on_force: Callable[[], None] = lambda: None, *, patience: Patience = PATIENCE,
) -> Server:
    """A server for an app, with uvloop where it is installed."""
    settings: dict[str, Any] = {
        "log_level": config.log_level,
        "access_log": config.log_level == "debug",
        "lifespan": "on",
        "http": connections_with(patience),
        "ws": "none",
        "server_header": False,
        "timeout_graceful_shutdown": GRACE_S,
    }
    return Server(uvicorn.Config(quiet(app), **settings), lambda: on_ready(url_of(listener)), on_stop, on_force)


def run_app(
    app: ASGIApp, listener: socket.socket, config: ServeConfig, on_ready: Callable[[str], None],
    on_stop: Callable[[], None] = lambda: None, on_force: Callable[[], None] = lambda: None,
) -> None:
    """Serve an app until a signal; running requests are answered first, but `on_stop` is called before.

    on_force: what ends the process, after a second Ctrl+C, which does not want to wait for them.
    """
    run_server(make_server(app, listener, config, on_ready, on_stop, on_force), listener)


def run_server(server: uvicorn.Server, listener: socket.socket) -> None:
    with quiet_signals(server):
        server.run(sockets=[listener])


@contextmanager
def quiet_signals(server: uvicorn.Server) -> Iterator[None]:
    """Make SIGINT and SIGTERM a normal end: uvicorn raises them again once it has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """A further front end, until it is told to stop or nobody is left who started it."""
    ignore_interrupts()  # until it serves: ctrl-c reaches the whole group, and all of it stops
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontConfig)
    listener = socket.socket(fileno=config.listener)
    server = make_server(build_app(config), listener, ServeConfig(**config.serve), lambda url: None)

    def watch_parent() -> None:
        while os.read(0, 4096):
            pass
        server.should_exit = True

    threading.Thread(target=watch_parent, name="archerfish-parent", daemon=True).start()
    run_server(server, listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
