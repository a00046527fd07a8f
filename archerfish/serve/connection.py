"""A connection that does not wait for ever: neither for the bytes of a request nor for whoever should read the answer.

uvicorn waits as long as a client likes. Here all connections of a server are looked at now and then, so that requests cost no
timers: one whose client has had its time is answered with 408 where nothing was answered yet, and closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from archerfish.serve.errors import error_response

logger = logging.getLogger("archerfish.serve")
LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 1.0  # from one look to the next
LAST_LOOK_S = 0.001  # any time: timers that are set now come after what can be read now


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What a client gets."""

    head_s: float = 20.0  # for the head of a request, from the first byte or from the connection
    body_s: float = 30.0  # for its body,
    bytes_per_s: float = 1000.0  # and a second more for so many bytes of it
    write_s: float = 60.0  # for reading nothing of an answer that waits for it
    max_head_bytes: int = 64 << 10

    @property
    def pause_s(self) -> float:
        return max(LEAST_PAUSE_S, min(MOST_PAUSE_S, self.head_s / 8, self.body_s / 8, self.write_s / 8))


PATIENCE = Patience()


class Watch:
    """Looks at the connections of one server for as long as there are any."""

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at, self._now = clock(), 0.0

    def begin(self, connection: Connection) -> None:
        if self._timer is None:
            self._looked_at = self._clock()
            self._timer = connection.loop.call_later(self.patience.pause_s, self._look, connection.loop, connection.connections)

    def _look(self, loop: asyncio.AbstractEventLoop, connections: set[Any]) -> None:
        now = self._clock()
        # Time in which this process was busy, and did not read what clients had sent, does not count.
        self._now += min(now - self._looked_at, 2 * self.patience.pause_s)
        self._looked_at = now
        # The next look first: if one connection cannot be looked at, the others still are.
        self._timer = loop.call_later(self.patience.pause_s, self._look, loop, connections) if connections else None
        for connection in list(connections):
            connection.look(self._now)


class Connection(HttpToolsProtocol):
    """uvicorn's, with patience that ends."""

    watch: Watch  # of the class that `connections_with` makes

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_received = self._head_from = 0  # bytes
        self._is_in_head = False
        self._awaited: tuple[RequestResponseCycle | None, str] | None = None  # what the client owed us when we looked last
        self._since, self._received_then = 0.0, 0
        self._num_unsent, self._unsent_since = 0, 0.0
        self._earlier: list[RequestResponseCycle] = []  # before `cycle`, where a client does not wait for answers

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watch.begin(self)

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_received - self._head_from > self.watch.patience.max_head_bytes:
            most = self.watch.patience.max_head_bytes
            self._refuse(431, f"The head of the request has more than {most:,} bytes.", "head_too_large")

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for cycle in self._earlier:  # uvicorn tells only the last one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_from = True, self._num_received

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        before = self.cycle
        super().on_headers_complete()
        self._earlier = [cycle for cycle in self._earlier if not cycle.response_complete]
        if before is not None and not before.response_complete:
            self._earlier.append(before)

    def timeout_keep_alive_handler(self) -> None:
        """Look once more: after a late timer the next request may be there, not read yet."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, super().timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "bad_request")

    # What the watch calls

    def look(self, now: float) -> None:
        """End the connection if its client has had its time."""
        self._look_at_reader(now)
        self._look_at_sender(now)

    def _look_at_reader(self, now: float) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent != self._num_unsent or not num_unsent:
            self._num_unsent, self._unsent_since = num_unsent, now
        elif now - self._unsent_since > self.watch.patience.write_s:
            logger.info("A client has not read its answer for %g s; it is given up.", self.watch.patience.write_s)
            self.transport.abort()

    def _look_at_sender(self, now: float) -> None:
        awaited, patience = self._owed(), self.watch.patience
        if awaited is None or awaited != self._awaited:
            self._awaited, self._since, self._received_then = awaited, now, self._num_received
            return
        is_body = awaited[1] == "body"
        num_seconds = patience.head_s
        if is_body:
            num_seconds = patience.body_s + (self._num_received - self._received_then) / patience.bytes_per_s
        if now - self._since > num_seconds:
            logger.info("A client has not sent the %s of its request within %.0f s.", awaited[1], num_seconds)
            if is_body or self._is_in_head:
                message = f"The {awaited[1]} of the request was not there after {num_seconds:.0f} s."
                self._refuse(408, message, "request_timeout")
            else:
                self.transport.close()

    def _owed(self) -> tuple[RequestResponseCycle | None, str] | None:
        """Which part of which request we wait for; None where the client may take its time."""
        cycle = self.cycle
        if self.transport.is_closing() or self.flow.read_paused:
            return None
        if cycle is None or cycle.response_complete:
            return None if self.timeout_keep_alive_task is not None else (cycle, "head")
        return (cycle, "body") if cycle.more_body and not cycle.response_started else None

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        if any(cycle.response_started and not cycle.response_complete for cycle in [*self._earlier, self.cycle] if cycle):
            self.transport.abort()  # in the middle of an answer there is no place for another
            return
        answer = error_response(status, message, code, headers={"Connection": "close"})
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()


def connections_with(patience: Patience, clock: Callable[[], float] = time.monotonic) -> type[Connection]:
    """The connections of one server."""
    return type("WatchedConnection", (Connection,), {"watch": Watch(patience, clock)})
