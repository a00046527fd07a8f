"""Answers as long as the client is there: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.serve.errors import ClientGoneError, encode_json

T = TypeVar("T")
logger = logging.getLogger("archerfish.serve")
MAX_WAITING_BYTES = 64 << 10  # events that wait for the client to read; beyond, their producer waits
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
MARK = "\0text\0"
encode_text = msgspec.json.Encoder().encode


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection first."""
    gone = asyncio.create_task(disconnected(request))
    limit = asyncio.timeout(None)

    def cancel_work(_: object) -> None:
        limit.reschedule(0)

    try:
        async with limit:
            gone.add_done_callback(cancel_work)
            try:
                return await work
            finally:
                gone.remove_done_callback(cancel_work)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
    except TimeoutError:
        if limit.expired():
            raise ClientGoneError from None
        raise


async def disconnected(request: Request) -> None:
    """Returns when the client is gone. The body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def data_event(data: Any) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def named_event(data: Any) -> bytes:
    """An event that is named by the type of its data."""
    name: bytes = data.type.encode()
    return b"event: " + name + b"\ndata: " + encode_json(data) + b"\n\n"


class TextEvent:
    """An event that is sent often and differs in one text only: encoded once with MARK in place of the text."""

    def __init__(self, event: bytes) -> None:
        self._before, self._after = event.split(encode_json(MARK))

    def write(self, text: str) -> bytes:
        return self._before + encode_text(text) + self._after


class Outbox:
    """Bytes on their way to one client."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_closed = False
        self.was_used = False
        self.num_quiet = 0  # ticks of the keep-alive timer since the last bytes
        self._arrival, self._room = asyncio.Event(), asyncio.Event()

    def put(self, data: bytes) -> None:
        self.was_used = True
        self.num_quiet = 0
        self._parts.append(data)
        self._num_bytes += len(data)
        self._arrival.set()

    def close(self) -> None:
        """No more bytes will come, or the client has gone."""
        self._is_closed = True
        self._arrival.set()
        self._room.set()

    @property
    def is_full(self) -> bool:
        return self._num_bytes > self._max_bytes

    async def has_bytes(self) -> bool:
        """Waits until there are bytes, or the box is closed."""
        while not self._parts and not self._is_closed:
            self._arrival.clear()
            await self._arrival.wait()
        return bool(self._parts)

    def take(self) -> bytes:
        """All bytes that are there."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        self._room.set()
        return data

    async def wait_for_room(self) -> None:
        """Waits while the box is full. The connection gives up a client that does not read at all."""
        while self.is_full and not self._is_closed:
            self._room.clear()
            await self._room.wait()


class EventStream(StreamingResponse):
    """An answer in events that `produce` puts into an Outbox.

    `start` waits for the first event, so that an error before it is an ordinary error answer; `write_error` makes an event of
    a later error. When the client goes, `produce` is cancelled. After `keep_alive_s` without an event a comment is sent,
    also before the first event; 0: never.
    """

    def __init__(
        self, produce: Callable[[Outbox], Coroutine[Any, Any, None]], write_error: Callable[[Exception], bytes], *,
        keep_alive_s: float = 0.0, max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        super().__init__(self._take_all(), headers=HEADERS, media_type="text/event-stream")
        self._outbox = Outbox(max_waiting_bytes)
        self._produce, self._write_error, self._keep_alive_s = produce, write_error, keep_alive_s
        self._producer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, request: Request) -> EventStream:
        self._producer = asyncio.create_task(self._run())
        self._set_timer()
        try:
            if not await unless_gone(request, self._outbox.has_bytes()):
                await self._producer  # raises the error that ended it
        except BaseException:
            await self._end()
            raise
        return self

    def _set_timer(self) -> None:
        if self._keep_alive_s:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s / 2, self._tick)

    def _tick(self) -> None:
        """One timer for the whole stream, so that events need not set one."""
        self._outbox.num_quiet += 1
        if self._outbox.num_quiet >= 2:
            self._outbox.put(KEEP_ALIVE)
        self._set_timer()

    async def _run(self) -> None:
        try:
            await self._produce(self._outbox)
        except Exception as error:
            if not self._outbox.was_used:
                raise
            if not isinstance(error, ArcherfishError):
                logger.exception("An answer broke off")
            self._outbox.put(self._write_error(error))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._outbox.close()

    async def _take_all(self) -> AsyncIterator[bytes]:
        while await self._outbox.has_bytes():
            yield self._outbox.take()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()

    async def _end(self) -> None:
        assert self._producer is not None, "start() comes first"
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)
