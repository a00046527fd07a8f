"""An HTTP/1.1 client that costs little a chunk: bytes go from the socket through the parser to whoever notes them.

No task wakes up for a chunk, only for the end of an answer. A request is sent once, and what becomes of it is what is counted;
but one whose kept connection ends without a byte of an answer goes over a new one, as with other clients, and is counted as
such: llama.cpp's server closes behind every stream what its headers promise to keep.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from archerfish.errors import InvalidOptionError

Clock = Callable[[], float]  # seconds; not the event loop's own, which may be as coarse as a millisecond
IDLE_S = 1.0  # servers close idle connections after 2 s or more: one that was idle for less is still there


class BrokenAnswerError(Exception):
    """Bytes that are no HTTP, or a connection that ended in the middle of an answer."""


class Receiver(Protocol):
    """Takes an answer as it comes."""

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None: ...

    def on_body(self, piece: bytes, now: float) -> None: ...


@dataclass(frozen=True)
class Address:
    """Where a server is: a host and a port, or a socket in the file system, and what its paths begin with."""

    url: str
    host: str = ""
    port: int = 0
    prefix: str = ""
    is_secure: bool = False
    socket_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of http://host:port, https://host or unix:/path; a /v1 at its end may be there or not."""
        if url.startswith("unix:") and len(url) > len("unix:"):
            return cls(url, host="localhost", socket_path=url.removeprefix("unix:"))
        hint = "Give it as http://127.0.0.1:8000, https://example.org or unix:/path/of/socket."
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidOptionError(f"{url!r} is not the address of a server: {error}.", hint=hint) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidOptionError(f"{url!r} is not the address of a server.", hint=hint)
        is_secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, parts.hostname, port or (443 if is_secure else 80), prefix, is_secure)

    @property
    def host_header(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if not self.port or self.port == (443 if self.is_secure else 80) else f"{shown}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._has_head = False
        self._now = 0.0
        self.is_reusable = True
        self.is_answered = False  # some of an answer to the last request came

    async def exchange(self, payload: bytes, receiver: Receiver) -> None:
        """Send a request; returns when the receiver has all of the answer."""
        if self._transport is None or self._transport.is_closing():
            raise BrokenAnswerError("the connection was closed before the request was sent")
        self._receiver, self._done, self._has_head, self._headers = receiver, asyncio.Future(), False, {}
        self.is_answered = False
        self._transport.write(payload)
        try:
            await self._done
        finally:
            self._receiver = self._done = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self.is_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._has_head and "content-length" not in self._headers and "transfer-encoding" not in self._headers:
            self._finish()  # such an answer goes on until the connection ends
        self._fail(f"the connection ended before the answer did{f': {error}' if error else ''}")

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._receiver is not None:
            self._receiver.on_head(self._parser.get_status_code(), self._headers, self._now)

    def on_body(self, piece: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_body(piece, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_reusable = False
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenAnswerError(reason))


class Pool:
    """Connections to one server, kept for the next request as other clients keep them."""

    def __init__(self, address: Address, *, api_key: str = "", clock: Clock = time.perf_counter) -> None:
        self.address = address
        self.clock = clock
        self.num_resent = 0  # requests that found their kept connection closed
        self._idle: deque[tuple[Connection, float]] = deque()
        self._credentials = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    def request_bytes(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {self.address.prefix}{path} HTTP/1.1\r\nHost: {self.address.host_header}\r\n{self._credentials}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    async def exchange(self, payload: bytes, receiver: Receiver) -> None:
        """Send a request over a connection that is free or new. One that is left early is closed."""
        kept = self._take()
        if kept is not None:
            try:
                await self._exchange_over(kept, payload, receiver)
                return
            except BrokenAnswerError:
                if kept.is_answered:
                    raise
            self.num_resent += 1
        await self._exchange_over(await self._connect(), payload, receiver)

    async def _exchange_over(self, connection: Connection, payload: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(payload, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append((connection, self.clock()))
        else:
            connection.close()

    async def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()
        await asyncio.sleep(0)  # transports end in the next turn of the loop

    def _make(self) -> Connection:
        return Connection(self.clock)

    def _take(self) -> Connection | None:
        """The connection that was used last, so that the others may grow old and be closed."""
        oldest = self.clock() - IDLE_S
        while self._idle and (self._idle[0][1] < oldest or not self._idle[0][0].is_reusable):
            self._idle.popleft()[0].close()
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self.address.socket_path:
            _, connection = await loop.create_unix_connection(self._make, self.address.socket_path)
            return connection
        context = ssl.create_default_context() if self.address.is_secure else None
        _, connection = await loop.create_connection(self._make, self.address.host, self.address.port, ssl=context)
        return connection


class EventParser:
    """The data of server-sent events, whatever the pieces are in which they come."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._is_after_return = False  # a line feed that comes next belongs to it
        self._data: list[bytes] = []

    @property
    def _is_between(self) -> bool:
        return not (self._rest or self._data or self._is_after_return)

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        is_one_event = piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2 and piece.endswith(b"\n\n")
        if is_one_event and self._is_between and b"\r" not in piece:  # as most pieces are
            return [piece[6:-2]]
        if not piece:
            return []
        if self._is_after_return and piece.startswith(b"\n"):
            piece = piece[1:]
            if not piece:
                self._is_after_return = False
                return []
        lines = (self._rest + piece).splitlines()
        self._is_after_return = piece.endswith(b"\r")
        self._rest = b"" if piece.endswith((b"\n", b"\r")) else lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        return events


class WholeAnswer:
    """The receiver of a small answer: its status and all of its body."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.status = status

    def on_body(self, piece: bytes, now: float) -> None:
        self.body += piece


async def ask(pool: Pool, method: str, path: str, body: bytes = b"", *, timeout_s: float = 60.0) -> WholeAnswer:
    """One answer, whole; OSError, TimeoutError or BrokenAnswerError where none came."""
    answer = WholeAnswer()
    async with asyncio.timeout(timeout_s):
        await pool.exchange(pool.request_bytes(method, path, body), answer)
    return answer
