"""Layers around the app: one bounds the size of bodies, one refuses what this process cannot take, one counts and times."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.admission import BusyError
from archerfish.serve.errors import BodyTooLargeError, error_response, failure_response

BEAT_S, KEPT = 0.05, 0.8  # of a loop's beats, and what of its lag counts after one more
MOST_LAG_S = 1.0  # of late beats together: a loop that is 0.2 s behind all the time has as much
MOST_BEAT_S = 0.4 * MOST_LAG_S  # of one beat: a pause, however long, is no load, nor are three in a row


def stated_length(scope: Scope) -> int:
    """Bytes of the body by the head of a request; 0 where it does not say."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


class BodyLimit:
    """Refuses bodies of more than `max_bytes`, whether they state their length or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if stated_length(scope) > self.max_bytes:
            error = BodyTooLargeError(self.max_bytes)
            refused = error_response(
                413, error.detail, "input_too_large", headers={"Connection": "close"}, path=scope["path"]
            )
            await refused(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise BodyTooLargeError(self.max_bytes)
            return message

        await self.app(scope, counted, send)


class LoopLag:
    """How far an event loop is behind, while somebody wants to know: its late beats together, the last counting most."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = self.seconds = 0.0
        self.num_watching = 0

    def begin(self) -> None:
        """Somebody watches, until `end`."""
        self.num_watching += 1
        if self._loop is None:
            self._loop, self.seconds = asyncio.get_running_loop(), 0.0
            self._plan()

    def end(self) -> None:
        self.num_watching -= 1

    def _plan(self) -> None:
        assert self._loop is not None
        self._due = self._loop.time() + BEAT_S
        self._loop.call_at(self._due, self._beat)

    def _beat(self) -> None:
        assert self._loop is not None
        self.seconds = KEPT * self.seconds + min(MOST_BEAT_S, max(0.0, self._loop.time() - self._due))
        if self.num_watching:
            self._plan()
        else:
            self._loop = None


class Shed:
    """Refuses work while this process itself is behind: to answer what has come already comes before reading more.

    What it reads of a request is its head, so that a refusal costs a small part of an answer.
    """

    def __init__(self, app: ASGIApp, lag: LoopLag | None = None) -> None:
        self.app, self.lag = app, lag or LoopLag()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        lag = self.lag
        if lag.seconds > MOST_LAG_S and lag.num_watching:
            error = BusyError("This server is behind with its work.", lag.seconds)
            await failure_response(error, path=scope["path"])(scope, receive, send)
            return
        lag.begin()
        try:
            await self.app(scope, receive, send)
        finally:
            lag.end()


class RequestMetrics:
    """Counts requests by route and status and times them; paths that are no route count as "other"."""

    def __init__(self, app: ASGIApp, registry: MetricRegistry) -> None:
        self.app = app
        self.requests = registry.counter("archerfish_requests_total", "Requests answered.", ("route", "status"))
        self.seconds = registry.histogram("archerfish_request_seconds", "Time from request to answer.", ("route",))
        self.running = registry.gauge("archerfish_requests_running", "Requests being answered.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        began = time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.running.add(1)
        try:
            await self.app(scope, receive, noted)
        finally:
            self.running.add(-1)
            route = getattr(scope.get("route"), "path", "other")
            self.requests.add(route=route, status=str(status))
            self.seconds.observe(time.perf_counter() - began, route=route)
