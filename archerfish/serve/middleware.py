"""The layer around the app: it counts and times requests, finds their tenants, and bounds their bodies."""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.errors import BodyTooLargeError, failure_response
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants, bearer_key

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/openapi.json"))  # need no key
OPERATOR_PATHS = ("/metrics", "/stats", "/admin/")  # figures of all tenants, and options


class RequestMiddleware:
    """Refuses requests without a valid key, where the server has keys, before anything else of them is read.

    Bodies of more than `max_body_bytes` are refused, whether they state their length or not. Paths that are not a route are
    counted as "other".
    """

    def __init__(self, app: ASGIApp, registry: MetricRegistry, tenants: Tenants, max_body_bytes: int) -> None:
        self.app, self.tenants, self.max_body_bytes = app, tenants, max_body_bytes
        self.requests = registry.counter("archerfish_requests_total", "Requests answered.", ("route", "status"))
        self.seconds = registry.histogram("archerfish_request_seconds", "Time from request to answer.", ("route",))
        self.running = registry.gauge("archerfish_requests_running", "Requests being answered.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.running.add(1)
        try:
            await self._answer(scope, receive, send_noted)
        finally:
            self.running.add(-1)
            route = getattr(scope.get("route"), "path", "other")
            self.requests.add(route=route, status=str(status))
            self.seconds.observe(time.perf_counter() - began, route=route)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        try:
            if path not in OPEN_PATHS:
                scope.setdefault("state", {})["tenant"] = self._find_tenant(headers, path)
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) > self.max_body_bytes:
                raise BodyTooLargeError(self.max_body_bytes)
        except ArcherfishError as error:
            refusal = failure_response(error, path=path)
            if isinstance(error, BodyTooLargeError):
                refusal.headers["Connection"] = "close"  # the rest of the body is not read
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise BodyTooLargeError(self.max_body_bytes)
            return message

        await self.app(scope, receive_bounded, send)

    def _find_tenant(self, headers: Headers, path: str) -> Tenant:
        tenant = self.tenants.find(bearer_key(headers.get("authorization"), headers.get("x-api-key")))
        if path.startswith(OPERATOR_PATHS):
            tenant.require_operator()
        return tenant


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request; ANONYMOUS on open paths and without keys."""
    found = request.scope.get("state", {}).get("tenant")
    return found if isinstance(found, Tenant) else ANONYMOUS


def caller_of(request: Request) -> str:
    """The name of the tenant for the engine process, or "" when the server runs without API keys."""
    tenant = tenant_of(request)
    return "" if tenant is ANONYMOUS else tenant.name
