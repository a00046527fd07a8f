"""Server-sent events: bytes that are there go out in one write, a reader that stops reading is given up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.serve.errors import ClientGoneError
from archerfish.serve.presence import disconnected

logger = logging.getLogger("archerfish.serve")
MAX_WAITING_BYTES = 64 << 10  # events that wait for a reader; beyond, their producer waits
STALL_S = 60.0  # how long it does
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
quoted = msgspec.json.Encoder().encode  # a text, or anything of texts and numbers, as JSON


def dumped(data: Any) -> bytes:
    """JSON of what may hold anything a client sent, half of a surrogate pair included."""
    return json.dumps(data, separators=(",", ":")).encode()


class StalledReaderError(Exception):
    """A client that is still there, but has not read for long."""


class Outbox:
    """Bytes on their way to one client."""

    def __init__(self, max_bytes: int = MAX_WAITING_BYTES, stall_s: float = STALL_S) -> None:
        self._max_bytes, self._stall_s = max_bytes, stall_s
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_closed = False
        self.was_used = False
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    def put(self, data: bytes) -> None:
        self.was_used = True
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._arrival is not None:
            wake(self._arrival)

    def close(self) -> None:
        """No more will come, or nobody reads it."""
        self._is_closed = True
        for waiter in (self._arrival, self._room):
            if waiter is not None:
                wake(waiter)

    @property
    def is_full(self) -> bool:
        return self._num_bytes > self._max_bytes

    async def has_bytes(self) -> bool:
        """Waits until there are some, or never will be."""
        if not self._parts and not self._is_closed:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
            self._arrival = None
        return bool(self._parts)

    def take(self) -> bytes:
        """All that is there."""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        if self._room is not None:
            wake(self._room)
        return data

    async def room(self) -> None:
        """Waits while it is full; for one producer, or several that wait in turn."""
        try:
            async with asyncio.timeout(self._stall_s):
                while self.is_full and not self._is_closed:
                    self._room = self._room or asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._room)
                    self._room = None
        except TimeoutError:
            raise StalledReaderError from None


def wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class EventStream(Response):
    """An answer in events that `produce` puts into an Outbox as they come.

    `start` waits for the first of them, so that what goes wrong before it is an ordinary error; `tell` makes an event of a
    later one. When the client goes or stops reading, `produce` is cancelled.
    """

    def __init__(
        self, produce: Callable[[Outbox], Awaitable[None]], tell: Callable[[Exception], bytes], outbox: Outbox | None = None
    ) -> None:
        super().__init__(None, headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._outbox = outbox or Outbox()
        self._produce, self._tell = produce, tell
        self._producer: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None
        self._has_begun = False

    async def start(self, request: Request) -> EventStream:
        self._producer = asyncio.create_task(self._run())
        first = asyncio.create_task(self._outbox.has_bytes())
        gone = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise ClientGoneError
            if not first.result():
                await self._producer  # which raises what went wrong
            self._has_begun = True
        finally:
            first.cancel()
            gone.cancel()
            if not self._has_begun:
                self._producer.cancel()
            await asyncio.gather(first, gone, *([] if self._has_begun else [self._producer]), return_exceptions=True)
        return self

    async def _run(self) -> None:
        try:
            await self._produce(self._outbox)
        except StalledReaderError:
            logger.warning("A client has not read its answer for %g s; it is given up.", STALL_S)
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())
        except Exception as error:
            if not self._outbox.was_used:
                raise
            if not isinstance(error, ArcherfishError):
                logger.exception("An answer broke off")
            self._outbox.put(self._tell(error))
        finally:
            self._outbox.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._producer is not None, "start() comes first"
        gone = asyncio.create_task(disconnected(Request(scope, receive)))
        gone.add_done_callback(lambda _: self._leave())
        try:
            async with asyncio.timeout(None) as self._limit:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while await self._outbox.has_bytes():
                    await send({"type": "http.response.body", "body": self._outbox.take(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            pass  # without its end, the answer makes the server close the connection
        finally:
            self._leave()
            gone.cancel()
            await asyncio.gather(gone, self._producer, return_exceptions=True)

    def _leave(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
        self._outbox.close()
