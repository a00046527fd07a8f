"""Clients of an engine process: what HTTP front ends and other programs talk to it with.

    async with AsyncClient("ipc:///run/archerfish/engine") as client:
        request = GenerationRequest(request_id="1", prompt="Once", params={"max_tokens": 16}, stream=True)
        async for part in client.generate(request):
            ...                                         # Chunk, Chunk, ..., Generated
        vectors = await client.ask(EmbedRequest(request_id="2", texts=["a text"]))

    with Client("ipc:///run/archerfish/engine") as client:     # the same without await, from any thread
        ...

An answer that is a Failed is raised as a RemoteError. Leaving the iterator of `generate`, or cancelling what waits, cancels
the request in the engine. When the connection breaks, because the process has died or cannot be reached any more, all that
wait get an error at once (503, with the seconds to wait before trying again), and the client connects again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Any, Protocol, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, StoppedError
from archerfish.serve import wire
from archerfish.serve.wire import (
    Bundle,
    Cancel,
    Charge,
    Chunk,
    Configure,
    EmbedRequest,
    ExplainRequest,
    Failed,
    Generated,
    GenerationRequest,
    Message,
    Ping,
    Pong,
    Query,
    Report,
    ScoreRequest,
    Vectors,
)

Question = EmbedRequest | ScoreRequest | ExplainRequest | Configure | Charge | Query | Ping
Answer = Vectors | Report | Pong
Part = Chunk | Generated
T = TypeVar("T")
M = TypeVar("M", bound=Message)
CONNECT_S = 10.0  # how long a first request waits for the engine process
HEARTBEAT_MS, SILENCE_MS = 2000, 15_000  # a peer that is stopped or cut off counts as gone after such a silence
MAX_PENDING_MESSAGES = 100_000  # to or from one peer
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RemoteError(ArcherfishError):
    """An error that the engine process answered with, or that it could not answer."""

    def __init__(
        self, message: str, *, code: str = "internal_error", status: int = 500, hint: str = "", param: str | None = None,
        retry_after_s: float | None = None, blocked_s: float | None = None, needs_s: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        # Of this error, not of the class: the engine process says which.
        self.code, self.status = code, status  # type: ignore[misc]
        self.param, self.retry_after_s, self.blocked_s, self.needs_s = param, retry_after_s, blocked_s, needs_s

    @classmethod
    def of(cls, failed: Failed) -> RemoteError:
        return cls(
            failed.message, code=failed.code, status=failed.status, hint=failed.hint, param=failed.param,
            retry_after_s=failed.retry_after_s, blocked_s=failed.blocked_s, needs_s=failed.needs_s,
        )


class Backend(Protocol):
    """What answers requests: AsyncClient has it, and so do the fakes of tests."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Part]:
        """Chunks if request.stream, then one Generated; raises RemoteError. Leaving the iterator cancels the request."""

    async def ask(self, message: Question) -> Answer:
        """The one answer to any other message; raises RemoteError."""

    def end_sequence(self, request_id: str, index: int) -> None:
        """End a sequence of a request: it is complete, by a stop string that only the client knows."""


class Waiting:
    """Answers to one request that have come and are not fetched yet."""

    __slots__ = ("_answers", "_waiter")

    def __init__(self) -> None:
        self._answers: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: Message) -> None:
        self._answers.append(answer)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Message:
        while not self._answers:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        answer = self._answers.popleft()
        if type(answer) is Failed:
            raise RemoteError.of(answer)
        return answer


CLOSED = Failed(request_id="", code="cancelled", message="The answers were closed.")


class Answers:
    """Answers to one request as they come, the last of which is no Chunk. Who leaves or loses them cancels the request.

    They have one reader, who hears of their end where another task closes them. What can be sent when they are made is on its
    way then, while their reader is still getting ready.
    """

    __slots__ = ("_client", "_is_awaited", "_is_open", "_message", "_waiting")

    def __init__(self, client: AsyncClient, message: Message) -> None:
        self._client, self._message = client, message
        self._is_open, self._is_awaited = True, False
        self._waiting: Waiting | None = None  # None: not sent yet
        if client.can_send_now():
            with contextlib.suppress(ArcherfishError):  # which is raised when it is tried again
                self._waiting = client.put(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._is_awaited:
            raise InvalidInputError("The next of these answers is being waited for already.", hint="Read them in one place.")
        if not self._is_open:
            raise StopAsyncIteration
        self._is_awaited = True
        try:
            if self._waiting is None:
                await self._client.reach()
                if not self._is_open:
                    raise StopAsyncIteration
                self._waiting = self._client.put(self._message)
            answer = await self._waiting.get()
        except RemoteError:
            if not self._is_open:
                raise StopAsyncIteration from None
            self._end(is_complete=True)
            raise
        except BaseException:
            self._end(is_complete=False)
            raise
        finally:
            self._is_awaited = False
        if type(answer) is not Chunk:
            self._end(is_complete=True)
        return answer

    async def aclose(self) -> None:
        if self._is_awaited and self._waiting is not None:
            self._waiting.put(CLOSED)
        self._end(is_complete=False)

    def _end(self, *, is_complete: bool) -> None:
        if self._is_open and self._waiting is not None:
            self._client.leave(self._message.request_id, is_complete=is_complete)
        self._is_open = False

    def __del__(self) -> None:
        if self._is_open and self._waiting is not None:
            self._client.lose(self._message.request_id)  # in whatever thread this happens


class AsyncClient:
    """A connection to one engine process, for one event loop; it begins with the first request.

    server_key: the public CURVE key of an engine process behind tcp. own_keys: the public and secret key of this client, where
    the process asks for one that it knows; else new ones are made. retry_after_s: what an error says if the process is gone.
    """

    def __init__(
        self, address: str, *, server_key: str = "", own_keys: tuple[str, str] | None = None, connect_s: float = CONNECT_S,
        retry_after_s: float = 1.0,
    ) -> None:
        if own_keys is not None and not server_key:
            raise InvalidOptionError("own_keys are given without server_key.", hint="Give the engine process's public key too.")
        self.address = address
        self.is_connected = False
        self._server_key, self._own_keys = server_key, own_keys
        self._connect_s, self._retry_after_s = connect_s, retry_after_s
        self._waiting: dict[str, Waiting] = {}
        self._arrivals: list[asyncio.Future[None]] = []  # of requests that wait for the first connection
        self._ids = itertools.count()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # which the socket belongs to
        self._was_connected = False
        self._closed: StoppedError | None = None

    # Requests

    def generate(self, request: GenerationRequest) -> Answers:
        """Chunks if request.stream, then one Generated. Leaving the iterator cancels the request."""
        named = self._named(request)
        named.takes_bundles = True
        return Answers(self, named)

    async def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
        """The one answer to any other message."""
        answers = Answers(self, self._named(message))
        try:
            async with asyncio.timeout(timeout_s):
                answer: Answer = await anext(answers)
                return answer
        except TimeoutError:
            raise self._gone(f"The engine process has not answered within {timeout_s:g} s.") from None
        finally:
            await answers.aclose()

    def _named(self, message: M) -> M:
        """A copy with a request_id; the caller's own stays as it is."""
        return msgspec.structs.replace(message, request_id=message.request_id or f"#{next(self._ids)}")

    def put(self, message: Message) -> Waiting:
        """Send a request over the connection that there is; RemoteError where there is none any more."""
        if message.request_id in self._waiting:
            raise InvalidInputError(f"There is a live request {message.request_id!r}.", hint="Choose another request_id.")
        payload = wire.encode(message)
        waiting = self._waiting[message.request_id] = Waiting()
        try:
            self._put(payload)
        except RemoteError:
            del self._waiting[message.request_id]
            raise
        return waiting

    def _put(self, payload: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([b"", payload], zmq.NOBLOCK)
        except zmq.Again:
            raise self._gone("The engine process takes no requests now.") from None
        self._read()  # sending may have used up the signal that answers are there

    def end_sequence(self, request_id: str, index: int) -> None:
        """End a sequence of a request; nothing more of it is wanted."""
        self._cancel(Cancel(request_id=request_id, index=index))

    def leave(self, request_id: str, *, is_complete: bool = False) -> None:
        """Nobody waits for a request any more."""
        self._waiting.pop(request_id, None)
        if not is_complete:
            self._cancel(Cancel(request_id=request_id))

    def lose(self, request_id: str) -> None:
        """The same from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self.leave, request_id)

    def _cancel(self, message: Cancel) -> None:
        if self.is_connected:
            with contextlib.suppress(RemoteError):
                self._put(wire.encode(message))

    def _gone(self, message: str) -> RemoteError:
        return RemoteError.of(self._told_gone(message))

    def _told_gone(self, message: str) -> Failed:
        wait_s = self._retry_after_s
        return Failed(request_id="", code="unavailable", message=message, status=503, hint="Try again.", retry_after_s=wait_s)

    # The connection

    def can_send_now(self) -> bool:
        """Whether there is a connection, which belongs to the loop that runs here."""
        try:
            return self.is_connected and asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def reach(self) -> None:
        """Return when there is a connection. Only a first one is waited for; one that broke is told at once."""
        if self._closed is not None:
            raise StoppedError(self._closed.message, hint=self._closed.hint)
        if self.is_connected:
            return
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append(arrival)  # before there is anything to be told
        try:
            if self._socket is None:
                self._open()
            if arrival.done():  # no turn of the loop then, in which later requests would pass this one
                arrival.result()
                return
            if self._was_connected:
                raise self._gone("The engine process is not there; it is being waited for.")
            await asyncio.wait_for(arrival, self._connect_s)
        except TimeoutError:
            what = f"Nothing answers at {self.address} after {self._connect_s:g} s"
            raise self._gone(f"{what}; an engine process with other keys would not.") from None
        finally:
            self._arrivals.remove(arrival)

    def _open(self) -> None:
        opened = open_socket(zmq.DEALER)
        opened.setsockopt(zmq.RECONNECT_IVL, 20)
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._server_key:
            public, secret = self._own_keys or (key.decode() for key in zmq.curve_keypair())
            set_keys(opened, CURVE_SERVERKEY=self._server_key, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=secret)
        self._socket = opened
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        loop = self._loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.FD, self._read)
        loop.add_reader(self._monitor.FD, self._watch)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._shut()
            raise InvalidOptionError(f"{self.address!r} is no address to connect to: {error}.") from None
        self._watch()  # a descriptor tells of what comes after the first look
        self._read()

    def _read(self) -> None:
        """Hand out all answers that have come."""
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = wire.decode_answer(frames[-1])
            except wire.WireError as error:
                self._fail_all(Failed(request_id="", code=error.code, message=error.message, status=502))
                continue
            for one in answer.answers if isinstance(answer, Bundle) else (answer,):
                waiting = self._waiting.get(one.request_id)
                if waiting is not None:
                    waiting.put(one)

    def _watch(self) -> None:
        """See the connection come and go."""
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = self._was_connected = True
                self._arrive(None)
            elif event == zmq.EVENT_DISCONNECTED:
                if self.is_connected:
                    self._read()
                    self._fail_all(self._told_gone("The engine process has gone; the request is lost."))
                    self._shut()
                    self._open()  # a new socket, from which the next process gets nothing that was meant for this one
            else:
                message = f"The engine process at {self.address} refuses the keys of this client."
                hint = "Give server_key and own_keys."
                self._arrive(Failed(request_id="", code="not_allowed", message=message, status=403, hint=hint))

    def _arrive(self, failed: Failed | None) -> None:
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None) if failed is None else arrival.set_exception(RemoteError.of(failed))

    def _fail_all(self, failed: Failed) -> None:
        for waiting in self._waiting.values():
            waiting.put(failed)

    async def close(self, reason: StoppedError | None = None) -> None:
        """Cancel what waits, for this reason, and leave."""
        self._closed = self._closed or reason or StoppedError("This client has been closed.", hint="Make a new one.")
        stopped = Failed.of("", self._closed, self._retry_after_s)
        self._fail_all(stopped)
        self._arrive(stopped)
        self._shut()

    def _shut(self) -> None:
        self.is_connected = False
        if self._socket is None or self._monitor is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.FD)
        loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._socket = self._monitor = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client:
    """An AsyncClient for programs without an event loop: it has a thread with one. Safe to use from several threads at once."""

    def __init__(self, address: str, **options: Any) -> None:
        """options: those of AsyncClient."""
        self._client = AsyncClient(address, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="archerfish-client", daemon=True)
        self._thread.start()

    def generate(self, request: GenerationRequest) -> Generator[Part, None, None]:
        """Chunks if request.stream, then one Generated. Closing the iterator cancels the request."""
        parts = self._client.generate(request)
        try:
            while (part := self._wait(anext(parts, None))) is not None:
                yield part
        finally:
            self._wait(parts.aclose())

    def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
        """The one answer to any other message."""
        return self._wait(self._client.ask(message, timeout_s))

    def _wait(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket with the manners of both sides: heartbeats, bounded queues, no lingering."""
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for name, value in {
        zmq.LINGER: 0, zmq.SNDHWM: MAX_PENDING_MESSAGES, zmq.RCVHWM: MAX_PENDING_MESSAGES,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: SILENCE_MS, zmq.HEARTBEAT_TTL: SILENCE_MS,
    }.items():  # fmt: skip
        opened.setsockopt(name, value)
    return opened


def set_keys(opened: zmq.Socket[bytes], **keys: str) -> None:
    """CURVE keys, of 40 characters each."""
    for name, key in keys.items():
        try:
            opened.setsockopt(getattr(zmq, name), key.encode("ascii"))
        except (zmq.ZMQError, UnicodeEncodeError):
            opened.close(0)
            raise InvalidOptionError(
                f"{name.lower()} is no CURVE key.", hint="Make a pair with zmq.curve_keypair(): 40 printable characters each."
            ) from None
