"""Server-sent events: bytes that are there go out in one write, and who writes them waits for who reads them."""

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
COMMENT = b": keep-alive\n\n"  # which every reader of events skips
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
quoted = msgspec.json.Encoder().encode  # a text, or anything of texts and numbers, as JSON


def dumped(data: Any) -> bytes:
    """JSON of what may hold anything a client sent, half of a surrogate pair included."""
    return json.dumps(data, separators=(",", ":")).encode()


class Outbox:
    """Bytes on their way to one client."""

    def __init__(self, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_closed = False
        self.was_used = False
        self.num_quiet = 0  # looks of the timer since there was something
        self._arrival, self._room = asyncio.Event(), asyncio.Event()

    def put(self, data: bytes) -> None:
        self.was_used = True
        self.num_quiet = 0
        self._parts.append(data)
        self._num_bytes += len(data)
        self._arrival.set()

    def close(self) -> None:
        """No more will come, or nobody reads it."""
        self._is_closed = True
        self._arrival.set()
        self._room.set()

    @property
    def is_full(self) -> bool:
        return self._num_bytes > self._max_bytes

    async def has_bytes(self) -> bool:
        """Waits until there are some, or never will be."""
        while not self._parts and not self._is_closed:
            self._arrival.clear()
            await self._arrival.wait()
        return bool(self._parts)

    def take(self) -> bytes:
        """All that is there."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        self._room.set()
        return data

    async def room(self) -> None:
        """Waits while it is full. Who does not read at all is given up by the connection."""
        while self.is_full and not self._is_closed:
            self._room.clear()
            await self._room.wait()


class EventStream(Response):
    """An answer in events that `produce` puts into an Outbox as they come.

    `start` waits for the first of them, so that what goes wrong before it is an ordinary error; `tell` makes an event of a
    later one. When the client goes, `produce` is cancelled. Where nothing comes for `keep_alive_s`, a comment is sent, the
    first event or not; 0 for none.
    """

    def __init__(
        self, produce: Callable[[Outbox], Awaitable[None]], tell: Callable[[Exception], bytes], outbox: Outbox | None = None, *,
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__(None, headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._outbox = outbox or Outbox()
        self._produce, self._tell = produce, tell
        self._producer: asyncio.Task[None] | None = None
        self._gone: asyncio.Task[None] | None = None  # ends when the client has gone
        self._keep_alive_s = keep_alive_s
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, request: Request) -> EventStream:
        self._producer = asyncio.create_task(self._run())
        self._wait_for_quiet()
        self._gone = asyncio.create_task(disconnected(request))
        self._gone.add_done_callback(lambda _: self._leave())
        try:
            if not await self._outbox.has_bytes():
                if self._gone.done():
                    raise ClientGoneError
                await self._producer  # which raises what went wrong
        except BaseException:
            await self._end()
            raise
        return self

    def _wait_for_quiet(self) -> None:
        if self._keep_alive_s:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s / 2, self._look)

    def _look(self) -> None:
        """One timer for all that is put: it costs a token nothing."""
        self._outbox.num_quiet += 1
        if self._outbox.num_quiet >= 2:
            self._outbox.put(COMMENT)
        self._wait_for_quiet()

    async def _run(self) -> None:
        try:
            await self._produce(self._outbox)
        except Exception as error:
            if not self._outbox.was_used:
                raise
            if not isinstance(error, ArcherfishError):
                logger.exception("An answer broke off")
            self._outbox.put(self._tell(error))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._outbox.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._producer is not None, "start() comes first"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while await self._outbox.has_bytes():
                await send({"type": "http.response.body", "body": self._outbox.take(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._end()

    async def _end(self) -> None:
        assert self._producer is not None and self._gone is not None
        self._leave()
        self._gone.cancel()
        await asyncio.gather(self._gone, self._producer, return_exceptions=True)

    def _leave(self) -> None:
        assert self._producer is not None
        self._producer.cancel()
        self._outbox.close()
