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

from archerfish.config import ServeConfig, split_names
from archerfish.errors import ArcherfishError, CallerError, InputTooLargeError
from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.bodies import Body
from archerfish.serve.catalog import Catalog
from archerfish.serve.errors import BadJSONError, Schema, data_event, failure_body, failure_response, short_value
from archerfish.serve.generation import ChoiceDelta, Generation, TextService
from archerfish.serve.logs import last_times, log_request, request_members
from archerfish.serve.processes import is_loopback
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
MIB = 1 << 20
MAX_HEAD = 64 << 10  # bytes of a request's line, headers and trailers
TOKEN_BYTES = 16  # bytes of JSON that a route takes for each token of the longest context
COUNTED_BYTES = 256 << 10  # the items of a larger body are counted before the body is built
PIECE = 64 << 10  # bytes to count before other requests run: less than a millisecond
MAX_ITEMS = 1 << 18  # items of lists beside the tokens of a prompt: the size of the largest vocabularies
MAX_TEXT_IDS = 1 << 20  # items of lists for encoders: the token ids of 2,048 texts of 512 tokens
MAX_PARTS = 1 << 16  # lists, objects and members of objects in a body
LINGER_S = 1.0  # seconds in which a refused client may still send
HEADER_MARKS = len(": \r\n")
REFUSAL = "HTTP/1.1 {}\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{}"


class Connection(HttpToolsProtocol):
    """An HTTP connection of uvicorn. It is closed if a request does not arrive within REQUEST_S, or if the headers of
    a request have more than MAX_HEAD bytes."""

    _is_refused = False  # data that still arrives is ignored
    _num_parsed = 0  # bytes of the request's line, headers and trailers that the parser has reported
    _num_unparsed = 0  # bytes that the parser has read since its last report

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_S, self._refuse, "408 Request Timeout")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_parsed + self._num_unparsed > MAX_HEAD and not self._is_refused:
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse the request at which the parser has stopped: with 431 if its headers are too long."""
        status = "400 Bad Request"
        if self._num_parsed + self._num_unparsed > MAX_HEAD:
            status, msg = "431 Request Header Fields Too Large", f"A request has at most {MAX_HEAD:,} bytes of headers."
        self._refuse(status, msg, LINGER_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_parsed = 0
        self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_S, self._refuse, "408 Request Timeout")

    def on_url(self, url: bytes) -> None:
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_to_head(len(name) + len(value) + HEADER_MARKS)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self._timer.cancel()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _add_to_head(self, num_bytes: int) -> None:
        self._num_unparsed = 0
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEAD:
            raise ValueError  # the parser stops

    def _refuse(self, status: str, text: str = "", linger_s: float = 0.0) -> None:
        """Answer and close the connection after `linger_s`. A client that sends to a closed connection loses the
        answer."""
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(REFUSAL.format(status, len(text), text).encode())
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._timer.cancel()
        self._timer = self.loop.call_later(linger_s, self.transport.close)


class ForbiddenHostError(CallerError):
    """The request may be from a page of another site, whose host name leads to this machine (DNS rebinding)."""

    status, code = 403, "forbidden_host"


def local_hosts(config: ServeConfig, tenants: Tenants) -> frozenset[str] | None:
    """The host names that a server without keys accepts beside localhost and loopback addresses; None: all names.

    A server with keys needs no check, because a page of another site has no key.
    """
    names = frozenset(map(str.lower, split_names(config.allowed_hosts)))
    is_open = ANONYMOUS not in tenants.all() or "*" in names or not (names or is_loopback(config.host))
    return None if is_open else names


def check_hosts(given: Sequence[str], names: frozenset[str]) -> None:
    """Raise an error if a Host header names neither this machine nor one of `names`."""
    for host in map(str.lower, given):
        name = (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].removesuffix(".")
        if name and name not in names and not is_loopback(name) and not name.endswith(".localhost"):
            message = f"This server has no API keys and does not answer requests for the host {short_value(name)}."
            raise ForbiddenHostError(message, hint="Start it with --allowed-hosts and the name, or with API keys.")


class RequestMiddleware:
    """Refuses requests without a valid key, where the server has keys, before anything else of them is read.

    Without keys, a server that listens on a loopback address refuses requests for other hosts.
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
        self.hosts = local_hosts(config, tenants)
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
        """The answer to a request with a wrong host, a wrong key or too large a body. Notes the tenant of other
        requests in their scope."""
        headers = Headers(scope=scope)
        path = scope["path"]
        tenant = ANONYMOUS
        try:
            if self.hosts is not None:
                check_hosts(headers.getlist("host"), self.hosts)
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
        data = await read_body(request, self.body_type.takes_texts) if is_json else None
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


@dataclass(frozen=True)
class BodyLimit:
    """The largest body that a route takes."""

    num_bytes: int
    reason: str
    num_items: int  # in all lists together


async def limit_of(catalog: Catalog, max_texts: int) -> BodyLimit:
    """The limit for a prompt of the longest context served. max_texts > 0: the limit for `max_texts` texts of
    encoders."""
    cards = await catalog.cards()
    longest = max((card.max_length for card in cards if not max_texts or card.kind != "generation"), default=0)
    num_bytes = max(1, max_texts) * longest * TOKEN_BYTES + MIB
    if max_texts:
        reason = f"{TOKEN_BYTES} a token for {max_texts:,} texts of {longest:,} tokens, and 1 MiB; at least 8 MiB"
        return BodyLimit(max(8 * MIB, num_bytes), reason, MAX_TEXT_IDS)
    reason = f"{TOKEN_BYTES} a token of the longest context served here, {longest:,} tokens, and 1 MiB"
    return BodyLimit(num_bytes, reason, MAX_ITEMS + longest)


async def read_body(request: Request, takes_texts: bool = False) -> Any:
    """The JSON of a request; None for an empty body.

    A body with too many bytes is refused while it arrives. A body with too many items is refused before it is built.
    """
    state, limit, body = request.app.state, None, bytearray()
    async for piece in request.stream():
        body += piece
        if limit is None and len(body) > COUNTED_BYTES:
            limit = await limit_of(state.catalog, state.max_texts if takes_texts else 0)
        if limit is not None and len(body) > limit.num_bytes:
            raise InputTooLargeError(f"The body has more than {limit.num_bytes:,} bytes ({limit.reason}).")
    if limit is not None:
        await check_size(body, limit.num_items)
    return read_json(body or b"null")


async def check_size(body: bytearray, max_items: int) -> None:
    """Refuse JSON with too many items in lists or too many members of objects. Other requests run meanwhile."""
    num_items, num_parts, start, is_inside = 0, 0, 0, 0
    while start < len(body):
        piece = body[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last backslash escapes the next character
            piece = piece[:-1] or piece
        start += len(piece)
        quoted = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(quoted[is_inside::2])
        is_inside ^= (len(quoted) - 1) & 1
        num_items += outside.count(b",")
        num_parts += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        if num_items > max_items or num_parts > MAX_PARTS:
            most = f"{max_items:,} items and {MAX_PARTS:,} lists, objects and members of objects"
            raise InputTooLargeError(f"The body has too many parts; this route takes {most}.")
        await asyncio.sleep(0)


def read_json(body: bytes | bytearray) -> Any:
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
