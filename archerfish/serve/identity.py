"""Whose request one is: the tenant of its API key, found before anything else is read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import failure_response
from archerfish.serve.limits import Blocked
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants, bearer_key

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/openapi.json"))  # what a stranger may see
OPERATOR_PATHS = ("/metrics", "/stats", "/admin/")  # figures of all tenants, and switches
STATE = "tenant"


class Identify:
    """Refuses requests without a key of this server's, where it has keys; notes the tenant of the others."""

    def __init__(self, app: ASGIApp, tenants: Tenants, blocked: Blocked | None = None) -> None:
        self.app = app
        self.tenants, self.blocked = tenants, blocked or Blocked()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            tenant = self.tenants.find(bearer_key(header_of(scope, b"authorization"), header_of(scope, b"x-api-key")))
            if scope["path"].startswith(OPERATOR_PATHS):
                tenant.require_operator()
            elif scope["method"] == "POST":
                self.blocked.check(tenant)
        except ArcherfishError as error:
            await failure_response(error, path=scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})[STATE] = tenant
        await self.app(scope, receive, send)


def header_of(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            found: str = value.decode("latin-1")
            return found
    return None


def note_blocked(app: FastAPI, blocked: Blocked) -> None:
    """Remember whose limits allow nothing, as the engine process says it in its refusals."""
    answer: Any = app.exception_handlers[ArcherfishError]

    async def noting(request: Request, error: Exception) -> Response:
        seconds = getattr(error, "blocked_s", None)
        if seconds:
            blocked.note(tenant_of(request), seconds)
        found: Response = await answer(request, error)
        return found

    app.add_exception_handler(RemoteError, noting)


def tenant_of(request: Request) -> Tenant:
    """Of a request that has passed `Identify`; of one to an open path, nobody's."""
    return tenant_in(request.scope)


def tenant_in(scope: Scope) -> Tenant:
    found = scope.get("state", {}).get(STATE)
    return found if isinstance(found, Tenant) else ANONYMOUS


def caller_of(request: Request) -> str:
    """The name that the engine process gets; none for nobody, whom it serves without being told who asks."""
    tenant = tenant_of(request)
    return "" if tenant is ANONYMOUS else tenant.name
