"""What every HTTP request passes: limits of time and size, metrics, its tenant, the JSON in it, the watch for its
client; and answers as streams of events.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from archerfish.config import ServeConfig
from archerfish.errors import ArcherfishError, CallerError, InputTooLargeError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.bodies import Body
from archerfish.serve.errors import BadJSONError, Schema, data_event, failure_body, failure_response
from archerfish.serve.generation import ChoiceDelta, Generation, TextService
from archerfish.serve.logs import last_times, log_request, request_members
from archerfish.serve.tenants import ANONYMOUS, Tenants, bearer_key
from archerfish.serve.tracing import Tracer

logger = logging.getLogger("archerfish.serve")
OPEN_PATHS = frozenset(("/", "/health", "/ready", "/openapi.json", "/docs", "/version", "/favicon.ico"))  # need no key
OPERATOR_PATHS = (  # figures of all tenants, options, and what changes the service for all
    "/metrics",
    "/stats",
    "/admin/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
CLIENT_GONE = 499  # the status that nginx logs for a client that closed its connection before the answer
UNSTATED = ("", "application/x-www-form-urlencoded")  # the second is curl's for any data
JSON_TYPE = re.compile(r"application/(.*\+)?json")
REMARK_HEADER, MAX_REMARK = b"x-archerfish-remark", 1000
NOT_IN_HEADERS = re.compile(r"[^\x20-\x7e]")
REQUEST_S = 60.0  # a request must arrive completely within this time
REQUEST_ID_HEADER = b"x-request-id"
GIVEN_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)  # of a client
NETWORK = "archerfish_request_network_time_seconds"
REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """An HTTP connection of uvicorn, which is closed if a request does not arrive within REQUEST_S."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_S, self._refuse)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_S, self._refuse)

    def on_message_complete(self) -> None:
        self._timer.cancel()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(REQUEST_TIMEOUT)
        self.transport.close()


class RequestMiddleware:
    """Refuses requests without a valid key, where the server has keys, before anything else of them is read.

    Bodies of more than `max_body_bytes` are refused, whether they state their length or not. Paths that are not a route
    are counted as "other". What bodies and routes append to `request.state.remarks` is sent in REMARK_HEADER; what they
    put into `request.state.log` (`update` adds numbers), `request.state.engine_times`, and `request.state.error`, are
    part of the request's line in the log, and of its trace. REQUEST_ID_HEADER has the id that the client gave the
    request, or a new one.
    """

    def __init__(
        self,
        app: ASGIApp,
        registry: MetricRegistry,
        tenants: Tenants,
        config: ServeConfig,
        tracer: Tracer | None = None,
    ) -> None:
        self.app = app
        self.tenants = tenants
        self.tracer = tracer
        self.max_body_bytes, self.has_access_log = config.max_body_bytes, config.access_log
        self.requests = registry.counter("archerfish_requests_total", "Requests answered.", ("route", "status"))
        self.seconds = registry.histogram("archerfish_request_seconds", "Time from request to answer.", ("route",))
        self.network = registry.histogram(NETWORK, "Time outside of the engine: front end and transport.", ("route",))
        self.running = registry.gauge("archerfish_requests_running", "Requests being answered.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0
        num_bytes = 0
        began = time.monotonic()
        state = scope["state"] = {
            **scope.get("state", {}),
            "tenant": None,
            "remarks": [],
            "log": Counter(),
            "error": None,
        }
        state["truncated"] = []
        state["engine_times"] = []
        state["request_id"] = request_id_of(scope)

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], [(REQUEST_ID_HEADER, state["request_id"].encode())]
                if state["remarks"]:
                    text = "; ".join(dict.fromkeys(state["remarks"])).encode("ascii", "backslashreplace").decode()
                    headers.append((REMARK_HEADER, NOT_IN_HEADERS.sub("?", text)[:MAX_REMARK].encode()))
                if scope["app"].state.is_stopping:
                    headers.append((b"connection", b"close"))  # the client's next request goes elsewhere
                message["headers"] = [*message.get("headers", ()), *headers]  # streams share their list of headers
            await send(message)

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise self._too_large()
            return message

        self.running.add(1)
        try:
            refusal = self._refusal(scope)
            await (refusal or self.app)(scope, receive_bounded, send_noted)
        except ClientDisconnect:
            status, state["error"] = status or CLIENT_GONE, "client_gone"
        except BaseException as error:
            state["error"] = error
            raise
        finally:
            self.running.add(-1)
            self._record(scope, status or 500, began)

    def _record(self, scope: Scope, status: int, began: float) -> None:
        """Count a request that is over, and write its line and its trace."""
        ended, route = time.monotonic(), getattr(scope.get("route"), "path", "other")
        self.requests.add(route=route, status=str(status))
        self.seconds.observe(ended - began, route=route)
        times = last_times(scope)
        if times is not None and (phases := times.phases_ms()):
            self.network.observe(ended - began - sum(phases.values()) / 1000, route=route)
        if self.has_access_log or self.tracer is not None:
            members = request_members(scope, status, ended - began)
            if self.has_access_log:
                log_request(members)
            if self.tracer is not None:
                self.tracer.record(scope, members, began, ended)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request with a wrong key or too large a body. Notes the tenant of other requests in their
        scope."""
        headers = Headers(scope=scope)
        path = scope["path"]
        tenant = ANONYMOUS
        try:
            is_open = path in OPEN_PATHS or path.startswith("/web/")
            if not is_open or scope["method"] not in ("GET", "HEAD"):
                tenant = self.tenants.find(bearer_key(headers.get("authorization"), headers.get("x-api-key")))
                if path.startswith(OPERATOR_PATHS):
                    tenant.require_operator()
            scope["state"]["tenant"] = tenant
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) > self.max_body_bytes:
                raise self._too_large()
        except ArcherfishError as error:
            refusal, scope["state"]["error"] = failure_response(error, path), error
            if isinstance(error, InputTooLargeError):
                refusal.headers["Connection"] = "close"  # the rest of the body is not read
            return refusal
        return None

    def _too_large(self) -> InputTooLargeError:
        return InputTooLargeError(f"The request body has more than {self.max_body_bytes} bytes.")


def request_id_of(scope: Scope) -> str:
    """The id that the client gave its request, if it is a plain word, or a new one."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID_HEADER), "")
    return given if GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


class BodyRoute(Route):
    """A route that takes a JSON object by POST: `handler(request, body)` gives the response.

    The handler and its response are cancelled when the client closes its connection. answer, events: the types of what
    it answers, whole and as a stream of the media type event_type, for the OpenAPI document.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[[Request, Any], Coroutine[Any, Any, ASGIApp]],
        body_type: type[Body],
        answer: Any,
        events: Sequence[type[Schema]] = (),
        event_type: str = "text/event-stream",
    ) -> None:
        super().__init__(path, handler, methods=["POST"])
        self.event_type = event_type
        self.app = self._answer
        self.handler = handler
        self.body_type = body_type
        self.answer = answer
        self.events = events

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        # Ollama's clients and `curl -d` state no type. A page of another site, which must not get through, states its
        # origin.
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = JSON_TYPE.fullmatch(content_type) or (content_type in UNSTATED and "origin" not in request.headers)
        data = read_json(await request.body() or b"null") if is_json else None
        if not isinstance(data, dict):
            sent = "" if is_json else ", sent with the header Content-Type: application/json"
            raise CallerError(f"The body must be a JSON object{sent}.")
        if isinstance(data.get("model"), str):
            request.state.log["model"] = data["model"]
        body = self.body_type.model_validate(data, context=request.state.remarks)
        try:
            async with asyncio.timeout(None) as limit:
                gone = asyncio.create_task(expire_when_gone(receive, limit))
                try:
                    response = await self.handler(request, body)
                    await response(scope, receive, send)
                finally:
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
        except TimeoutError:
            if limit.expired():
                raise ClientDisconnect from None
            raise


async def expire_when_gone(receive: Receive, limit: asyncio.Timeout) -> None:
    """Let a timeout expire when the client closes its connection. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    limit.reschedule(0)


def read_json(body: bytes) -> Any:
    """JSON by the standard: UTF-8, and no NaN. BadJSONError says what is wrong, in which line and column."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadJSONError(f"The body is not valid JSON: {error}.") from None


# Streams of events

YIELD_BYTES = 64 << 10
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter(Protocol):
    """How a route writes an answer as events."""

    headers: ClassVar[list[tuple[bytes, bytes]]] = EVENT_HEADERS
    keep_alive: ClassVar[bytes] = KEEP_ALIVE  # empty: nothing is sent between events

    def start(self) -> bytes:
        """The events before the first delta, when it has come."""
        return b""

    def delta(self, delta: ChoiceDelta) -> bytes:
        """The events of a delta; may be none."""

    def end(self) -> bytes: ...

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))


@dataclass
class EventStream:
    """A response of server-sent events. An error before the first event is an ordinary error response, later ones are
    events.

    After `keep_alive_s` without an event, at the latest, a comment is sent, also before the first event; 0: never.
    """

    service: TextService
    request: Request
    generations: Sequence[Generation]
    writer: EventWriter
    _is_started: bool = False
    _is_shown: bool = False  # something other than comments was sent
    _num_bytes: int = 0  # sent since other requests had their turn
    _is_quiet: bool = False  # nothing was sent since the last tick of the timer
    _timer: asyncio.TimerHandle | None = None
    _comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self.writer
        has_begun = False
        pause_s = self.service.config.keep_alive_s / 2
        if pause_s and writer.keep_alive:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick, send, pause_s)
        try:
            runs = self.service.run(self.request, *self.generations, is_shown=lambda: self._is_shown)
            async with aclosing(runs):
                async for deltas in runs:
                    written = []
                    if deltas and not has_begun:
                        has_begun = True
                        written.append(writer.start())
                    written += [writer.delta(delta) for delta in deltas]
                    data = b"".join(written)
                    if data:
                        self._is_shown = True
                        await self._write(send, data)
            last = writer.end()
        except Exception as error:
            if not self._is_started:
                raise
            if not isinstance(error, ArcherfishError):
                logger.exception("An answer broke off")
            self.request.state.error = error
            last = writer.error(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._comment is not None:
            await self._comment  # nothing may be sent after the last event
        await self._write(send, last, is_last=True)

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._is_quiet = False
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.writer.headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._num_bytes += len(data)
        if self._num_bytes > YIELD_BYTES and not is_last:  # neither `send` nor a backend with waiting messages suspends
            self._num_bytes = 0
            await asyncio.sleep(0)

    def _tick(self, send: Send, pause_s: float) -> None:
        if self._is_quiet:
            self._comment = asyncio.create_task(self._write(send, self.writer.keep_alive))
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick, send, pause_s)
