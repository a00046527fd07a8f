"""Running the service: engines, a socket, uvicorn, and a clean stop."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from archerfish.config import EmbedConfig, HubConfig, ServeConfig
from archerfish.errors import MachineError
from archerfish.serve.app import create_app
from archerfish.serve.inference import Engine
from archerfish.serve.page import EXAMPLES, curl
from archerfish.types import Progress, no_progress

GRACE_S = 30  # what running requests get after SIGTERM


def serve(
    embed: EmbedConfig | None = None,
    serve: ServeConfig | None = None,
    hub: HubConfig | None = None,
    progress: Progress = no_progress,
    *,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `announce` gets the lines that say where; by default they are printed."""
    embed, config, hub = embed or EmbedConfig(), serve or ServeConfig(), hub or HubConfig()
    with bind(config) as listener:  # before the models are loaded: a taken port should show at once
        engine, reranker = build_engines(embed, config, hub, progress)
        app = create_app(engine, config, reranker, aliases=(embed.model,))
        run_app(app, listener, config, lambda url: (announce or say)(ready_text(url, engine, reranker)))


def build_engines(embed: EmbedConfig, config: ServeConfig, hub: HubConfig, progress: Progress) -> tuple[Engine, Engine | None]:
    """The engine, and the cross-encoder if one is configured; each has computed something."""
    from archerfish.engine.arrow_engine import ArrowEngine

    engine: Engine = ArrowEngine(embed, hub=hub, progress=progress)
    reranker: Engine | None = None
    if config.rerank_model:
        reranker = ArrowEngine(embed.replace(model=config.rerank_model), hub=hub, progress=progress)
    for each in (engine, reranker):
        if each is not None:
            warm_up(each)
    return engine, reranker


def warm_up(engine: Engine) -> None:
    if engine.is_cross_encoder:
        engine.score_pairs([("warm", "up")])
    else:
        engine.encode_batch(["warm up"], True)


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
        hint = "Choose another port; 0 takes any free one."
        raise MachineError(f"Cannot listen on {config.host}:{config.port}: {error.strerror}.", hint=hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which calls back once it accepts requests."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready()


def make_server(app: ASGIApp, listener: socket.socket, config: ServeConfig, on_ready: Callable[[str], None]) -> Server:
    """A server for an app, with uvloop and httptools where they are installed."""
    settings: dict[str, Any] = {
        "log_level": config.log_level,
        "access_log": config.log_level == "debug",
        "lifespan": "on",
        "ws": "none",
        "server_header": False,
        "timeout_graceful_shutdown": GRACE_S,
    }
    return Server(uvicorn.Config(app, **settings), lambda: on_ready(url_of(listener)))


def run_app(app: ASGIApp, listener: socket.socket, config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Serve an app until a signal; running requests are answered first."""
    server = make_server(app, listener, config, on_ready)
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


def ready_text(url: str, engine: Engine, reranker: Engine | None) -> str:
    """What a person sees when the service is ready."""
    also = f" and {reranker.model_name}" if reranker else ""
    method, path, body = EXAMPLES[1 if engine.is_cross_encoder else 0]
    return f"archerfish serves {engine.model_name}{also} at {url} (Ctrl+C stops it)\n\n{curl(url, method, path, body)}\n"


def say(text: str) -> None:
    print(text, flush=True)
