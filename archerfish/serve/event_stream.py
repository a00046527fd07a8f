"""An answer as server-sent events, in the form that a route gives them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from archerfish.errors import ArcherfishError
from archerfish.serve.errors import data_event, failure_body
from archerfish.serve.generation import ChoiceDelta, Generation, TextService

logger = logging.getLogger("archerfish.serve")
YIELD_BYTES = 64 << 10
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")
]  # fmt: skip


class EventWriter(Protocol):
    """How a route writes an answer as events."""

    headers: ClassVar[list[tuple[bytes, bytes]]] = EVENT_HEADERS
    keep_alive: ClassVar[bytes] = KEEP_ALIVE  # empty: nothing is sent between events

    def start(self) -> bytes:
        """The events before the first delta, when it has come."""

    def delta(self, delta: ChoiceDelta) -> bytes:
        """The events of a delta; may be none."""

    def end(self) -> bytes: ...

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))


@dataclass
class EventStream:
    """A response of server-sent events. An error before the first event is an ordinary error response, later ones are events.

    After `service.keep_alive_s` without an event, at the latest, a comment is sent, also before the first event; 0: never.
    """

    service: TextService
    request: Request
    generations: Sequence[Generation]
    writer: EventWriter
    _is_started: bool = False
    _num_bytes: int = 0  # sent since other requests had their turn
    _is_quiet: bool = False  # nothing was sent since the last tick of the timer
    _timer: asyncio.TimerHandle | None = None
    _comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, has_begun, pause_s = self.writer, False, self.service.keep_alive_s / 2
        if pause_s and writer.keep_alive:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick, send, pause_s)
        try:
            async with aclosing(self.service.run(self.request, *self.generations)) as runs:
                async for deltas in runs:
                    written = []
                    if deltas and not has_begun:
                        has_begun = True
                        written.append(writer.start())
                    written += [writer.delta(delta) for delta in deltas]
                    data = b"".join(written)
                    if data:
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
