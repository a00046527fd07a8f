"""Clients of an engine process, for HTTP front ends and other programs.

    async with AsyncClient("ipc:///run/archerfish/engine") as client:
        request = GenerationRequest(request_id="1", prompt="Once", params={"max_tokens": 16}, stream=True)
        async for part in client.generate(request):
            ...                                         # Chunk, Chunk, ..., Generated
        vectors = await client.ask(EmbedRequest(request_id="2", texts=["a text"]))

    with Client("ipc:///run/archerfish/engine") as client:     # the same without await, from any thread
        ...

A Failed answer is raised as a RemoteError. Closing the iterator of `generate`, or cancelling the task that waits,
cancels the request in the engine. When the connection breaks, all waiting requests fail at once, with status 503 and
the seconds to wait before the next try, and the client connects again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any, Protocol, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, StoppedError
from archerfish.serve import wire
from archerfish.serve.wire import Chunk, Failed, Generated, GenerationRequest

Question = (
    wire.ForVectors | wire.ExplainRequest | wire.Configure | wire.ChangeAdapter | wire.Charge | wire.Query | wire.Ping
)
Answer = wire.Vectors | wire.Report | wire.Pong
Part = Chunk | Generated
T = TypeVar("T")
CONNECT_S = 10.0  # time that a first request waits for the connection
HEARTBEAT_MS, SILENCE_MS = 2000, 15_000  # a peer that is silent for so long counts as disconnected
MAX_PENDING_MESSAGES = 100_000  # to or from one peer
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RemoteError(ArcherfishError):
    """An error that the engine process answered with, or a broken connection to it."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "internal_error",
        status: int = 500,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code, self.status = code, status  # type: ignore[misc]  # these belong to the error, not to its class
        self.param, self.retry_after_s = param, retry_after_s

    @classmethod
    def of(cls, failed: Failed) -> RemoteError:
        fields = ("message", "code", "status", "hint", "param", "retry_after_s")
        return cls(**{name: getattr(failed, name) for name in fields})

    @property
    def is_lost(self) -> bool:
        """Whether the engine process did not take the request, or ended under it: another process may answer it."""
        return self.code in ("unavailable", StoppedError.code)


class Backend(Protocol):
    """An engine as a front end sees it: an AsyncClient, or a fake in tests."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Part, None]:
        """Yield Chunks if request.stream, then one Generated; raise RemoteError. Closing the iterator cancels the
        request."""

    async def ask(self, message: Question) -> Answer:
        """Return the one answer to any other request; raise RemoteError."""

    def end_sequence(self, request_id: str, index: int) -> None:
        """End a sequence of a request, because the client found a stop string."""


class AsyncClient:
    """A connection to one engine process, for one event loop. The first request opens it.

    server_key: the public CURVE key of an engine process behind TCP. own_keys: the public and secret key of this
    client, if the engine process knows its clients; otherwise new keys are made. retry_after_s: the wait that an error
    suggests while the engine process is away.
    """

    def __init__(
        self,
        address: str,
        *,
        server_key: str = "",
        own_keys: tuple[str, str] | None = None,
        connect_s: float = CONNECT_S,
        retry_after_s: float = 1.0,
    ) -> None:
        if own_keys is not None and not server_key:
            raise InvalidOptionError(
                "own_keys are given without server_key.", hint="Give the engine process's public key too."
            )
        self.address = address
        self.is_connected = False
        self._server_key, self._own_keys = server_key, own_keys
        self._connect_s, self._retry_after_s = connect_s, retry_after_s
        self._answers: dict[str, asyncio.Queue[wire.Message]] = {}  # of requests that wait, by request_id
        self._ids = itertools.count()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connection_changed = asyncio.Event()
        self._was_connected = False
        self._refusal: Failed | None = None  # of the keys of this client
        self._closed: StoppedError | None = None

    # Requests

    async def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
        """Return the one answer to any other request."""
        try:
            async with asyncio.timeout(timeout_s), contextlib.aclosing(self.generate(message)) as answers:
                answer: Answer = await anext(answers)
                return answer
        except TimeoutError:
            raise RemoteError.of(
                self._unavailable(f"The engine process has not answered within {timeout_s:g} s.")
            ) from None

    async def generate(self, request: GenerationRequest | Question) -> AsyncGenerator[Any, None]:
        """Yield Chunks if request.stream, then one Generated; for another request, its one answer.

        A copy of the request is sent, with a request_id if it has none. Closing the iterator cancels the request.
        """
        request_id = request.request_id or f"#{next(self._ids)}"
        fields = {"takes_bundles": True} if type(request) is GenerationRequest else {}
        if not self.is_connected:
            await self._connect()
        if request_id in self._answers:
            raise InvalidInputError(f"There is a live request {request_id!r}.", hint="Choose another request_id.")
        answers = self._answers[request_id] = asyncio.Queue()
        is_complete = False
        try:
            self._send(msgspec.structs.replace(request, request_id=request_id, **fields))
            while not is_complete:
                answer = await answers.get()
                is_complete = type(answer) is not Chunk
                if type(answer) is Failed:
                    raise RemoteError.of(answer)
                yield answer
        finally:
            del self._answers[request_id]
            if not is_complete:
                self.end_sequence(request_id)

    def end_sequence(self, request_id: str, index: int | None = None) -> None:
        """End a sequence of a request, because the client found a stop string, or cancel the whole request."""
        if self.is_connected:
            with contextlib.suppress(RemoteError):
                self._send(wire.Cancel(request_id=request_id, index=index))

    def _send(self, message: wire.Message) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([b"", wire.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise RemoteError.of(self._unavailable("The engine process takes no requests now.")) from None
        self._read()  # sending may have consumed the socket's signal that answers have come

    def _unavailable(self, message: str) -> Failed:
        wait_s = self._retry_after_s
        return Failed(
            request_id="", code="unavailable", message=message, status=503, hint="Try again.", retry_after_s=wait_s
        )

    # The connection

    async def _connect(self) -> None:
        """Return when the connection is there. Only the first one is waited for; while it is broken, requests fail at
        once."""
        if self._closed is not None:
            raise StoppedError(self._closed.message, hint=self._closed.hint)
        if self._socket is None:
            self._open()
        if self.is_connected:
            return
        if self._was_connected:
            raise RemoteError.of(self._unavailable("The engine process is not there; it is being waited for."))
        try:
            async with asyncio.timeout(self._connect_s):
                await self._connection_changed.wait()
        except TimeoutError:
            message = (
                f"Nothing answers at {self.address} after {self._connect_s:g} s; wrong CURVE keys may be the reason."
            )
            raise RemoteError.of(self._unavailable(message)) from None
        if not self.is_connected:
            raise RemoteError.of(self._refusal or self._unavailable("The connection was closed."))

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            opened = open_socket(zmq.DEALER)
            opened.setsockopt(zmq.RECONNECT_IVL, 20)
            opened.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            if self._server_key:
                public, secret = self._own_keys or (key.decode() for key in zmq.curve_keypair())
                set_keys(opened, CURVE_SERVERKEY=self._server_key, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=secret)
            self._socket = opened
            self._monitor = opened.get_monitor_socket(EVENTS)
            loop.add_reader(self._socket.FD, self._read)
            loop.add_reader(self._monitor.FD, self._read_events)
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._shut()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise RemoteError.of(self._unavailable(f"A new connection cannot be made now: {error}.")) from None
            raise InvalidOptionError(f"{self.address!r} is no address to connect to: {error}.") from None
        self._read_events()  # the file descriptors signal only what comes after the first look
        self._read()

    def _read(self) -> None:
        """Hand all received answers to their requests."""
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
            for one in answer.answers if isinstance(answer, wire.Bundle) else (answer,):
                if one.request_id in self._answers:
                    self._answers[one.request_id].put_nowait(one)

    def _read_events(self) -> None:
        """Follow the state of the connection."""
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            self._read()  # answers that came before the event
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = self._was_connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                if self.is_connected:
                    self._fail_all(self._unavailable("The engine process has gone; the request is lost."))
                    self._shut()
                    with contextlib.suppress(RemoteError):  # the next request tries again
                        self._open()  # a new socket: the next process must not get the requests to this one
                continue
            else:
                message = f"The engine process at {self.address} refuses the keys of this client."
                hint = "Give server_key and own_keys."
                self._refusal = Failed(request_id="", code="not_allowed", message=message, status=403, hint=hint)
            self._wake()

    def _wake(self) -> None:
        """Wake all requests that wait for the connection."""
        self._connection_changed.set()
        self._connection_changed.clear()

    def _fail_all(self, failed: Failed) -> None:
        for answers in self._answers.values():
            answers.put_nowait(failed)

    async def close(self, reason: StoppedError | None = None) -> None:
        """Fail all waiting requests with this reason and disconnect."""
        self._closed = self._closed or reason or StoppedError("This client has been closed.", hint="Make a new one.")
        self._refusal = Failed.of("", self._closed, self._retry_after_s)
        self._fail_all(self._refusal)
        self._shut()
        self._wake()

    def _shut(self) -> None:
        self.is_connected = False
        if self._socket is not None:
            self._socket.disable_monitor()
        for opened in (self._monitor, self._socket):
            if opened is not None:
                asyncio.get_running_loop().remove_reader(opened.FD)
                opened.close(0)
        self._socket = self._monitor = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client:
    """An AsyncClient for programs without an event loop; a thread of its own runs one. Several threads may use it at
    once."""

    def __init__(self, address: str, **options: Any) -> None:
        """options: those of AsyncClient."""
        self._client = AsyncClient(address, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="archerfish-client", daemon=True)
        self._thread.start()

    def generate(self, request: GenerationRequest) -> Generator[Part, None, None]:
        """Yield Chunks if request.stream, then one Generated. Closing the iterator cancels the request."""
        parts = self._client.generate(request)
        try:
            while (part := self._wait(anext(parts, None))) is not None:
                yield part
        finally:
            self._wait(parts.aclose())

    def ask(self, message: Question, timeout_s: float | None = None) -> Answer:
        """Return the one answer to any other request."""
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
    """A socket with heartbeats, bounded queues and no lingering, for either side."""
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for name, value in {
        zmq.LINGER: 0,
        zmq.SNDHWM: MAX_PENDING_MESSAGES,
        zmq.RCVHWM: MAX_PENDING_MESSAGES,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
        zmq.HEARTBEAT_TTL: SILENCE_MS,
    }.items():
        opened.setsockopt(name, value)
    return opened


def set_keys(opened: zmq.Socket[bytes], **keys: str) -> None:
    """Set CURVE keys, of 40 characters each."""
    for name, key in keys.items():
        try:
            opened.setsockopt(getattr(zmq, name), key.encode("ascii"))
        except (zmq.ZMQError, UnicodeEncodeError):
            opened.close(0)
            hint = "Make a pair with zmq.curve_keypair(): 40 printable characters each."
            raise InvalidOptionError(f"{name.lower()} is no CURVE key.", hint=hint) from None
