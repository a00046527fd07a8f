"""`python -m archerfish.deploy.front`: a front end on a node of a cluster.

It is a child of a `FrontEnds` actor, from which it hears of replicas: each line of its standard input is a FrontState.
Requests go straight to the replicas, over encrypted sockets.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from archerfish.config import ServeConfig
from archerfish.deploy.found import Follower, FoundReplica, FrontState
from archerfish.observe.metrics import MetricRegistry
from archerfish.route.router import Router
from archerfish.serve import processes
from archerfish.serve.app import create_app
from archerfish.serve.front import make_server
from archerfish.serve.routing import RoutedBackend
from archerfish.serve.tenants import Tenants


class ClusterFrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a front end of a cluster. `serve` has the values of ServeConfig."""

    serve: dict[str, Any]
    listener: int  # file descriptor of the socket from which it accepts connections
    credentials: str
    routing_secret: str
    own_keys: tuple[str, str]  # public and secret CURVE key
    replicas: list[FoundReplica] = []


def follow(lines: Iterable[bytes], update: Callable[[list[FoundReplica]], Any], on_end: Callable[[], Any]) -> None:
    """Pass on the replicas of every line until the input ends."""
    for line in lines:
        update(msgspec.json.decode(line, type=FrontState).replicas)
    on_end()


def main() -> int:
    """Serve until SIGTERM, or until the actor has ended."""
    pipe = processes.open_report_pipe()
    config = processes.read_config(ClusterFrontConfig)
    serve, listener = ServeConfig(**config.serve), socket.socket(fileno=config.listener)
    logging.basicConfig(level=serve.log_level.upper(), format="%(asctime)s front %(levelname)s %(message)s")
    tenants, registry = Tenants.from_file(serve.api_keys_file), MetricRegistry()
    router = Router(config.routing_secret.encode())
    backend = RoutedBackend(router, credentials=config.credentials, tenants=tenants, registry=registry)
    app = create_app(backend, serve, registry, credentials=config.credentials, tenants=tenants)
    follower = Follower(backend, config.own_keys, app.state.catalog.expire)

    def start() -> None:
        """In the event loop, once the server accepts connections."""
        loop = asyncio.get_running_loop()

        def in_loop(function: Callable[..., Any], *arguments: Any) -> None:
            loop.call_soon_threadsafe(function, *arguments)

        def update(found: list[FoundReplica]) -> None:
            in_loop(follower.update, found)

        def stop() -> None:
            server.should_exit = True

        follower.update(config.replicas)
        lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  # a buffer's lock could not be taken at the end
        threading.Thread(target=follow, args=(lines, update, stop), name="archerfish-parent", daemon=True).start()
        processes.send_report(pipe, {"address": str(listener.getsockname())})

    server = make_server(app, serve, start)
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
