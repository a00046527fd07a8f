"""Whose request one is: the tenant of its API key, found before anything else is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.serve.errors import error_response, json_response
from archerfish.serve.messages_routes import error_body
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants, bearer_key

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/openapi.json"))  # what a stranger may see
OPERATOR_PATHS = ("/metrics", "/stats", "/admin/")  # figures of all tenants, and switches
ANTHROPIC_PATH = "/v1/messages"
STATE = "tenant"


class Identify:
    """Refuses requests without a key of this server's, where it has keys; notes the tenant of the others."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self.app = app
        self.tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            tenant = self.tenants.find(bearer_key(headers.get("authorization"), headers.get("x-api-key")))
            if scope["path"].startswith(OPERATOR_PATHS):
                tenant.require_operator()
        except ArcherfishError as error:
            await refusal(scope["path"], error)(scope, receive, send)
            return
        scope.setdefault("state", {})[STATE] = tenant
        await self.app(scope, receive, send)


def refusal(path: str, error: ArcherfishError) -> Response:
    """In the shape of whose route it is."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    if path.startswith(ANTHROPIC_PATH):
        return json_response(error_body(error.status, str(error)), error.status, headers)
    return error_response(error.status, str(error), error.code, headers=headers)


def tenant_of(request: Request) -> Tenant:
    """Of a request that has passed `Identify`; of one to an open path, nobody's."""
    found = request.scope.get("state", {}).get(STATE)
    return found if isinstance(found, Tenant) else ANONYMOUS


def caller_of(request: Request) -> str:
    """The name that the engine process gets; none for nobody, whom it serves without being told who asks."""
    tenant = tenant_of(request)
    return "" if tenant is ANONYMOUS else tenant.name
