"""Middleware of the app: one class bounds the size of bodies, one counts and times requests."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.errors import BodyTooLargeError, error_response


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
