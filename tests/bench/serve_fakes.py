"""Time that jumps to the next timer, and a server on a Unix socket that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import selectors
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from archerfish.bench.serve_http import Address, Pool

T = TypeVar("T")
MODELS = {"object": "list", "data": [{"id": "embedder", "kind": "embedding"}, {"id": "talker", "kind": "llm"}]}


class JumpingSelector(selectors.DefaultSelector):
    """Never waits: where nothing has happened, the clock of the loop goes on to the next timer instead.

    What is written to a Unix socket can be read at once, so nothing is under way when a select finds nothing.
    """

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("nothing will ever happen again")
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


@dataclass
class Answer:
    """What is sent after each delay; then the answer is over, or the connection is cut."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    cuts: bool = False
    hangs: bool = False  # never ends


def head(status: int = 200, kind: str = "text/event-stream", headers: Mapping[str, str] | None = None) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\n{more}".encode()


def whole(body: Any, status: int = 200, headers: Mapping[str, str] | None = None, delay_s: float = 0.0) -> Answer:
    """A JSON answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer([(delay_s, head(status, "application/json", headers) + b"Content-Length: %d\r\n\r\n" % len(data) + data)])


def error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    return whole({"error": {"message": "no", "type": "t", "param": None, "code": code}}, status, headers)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    return b"data: " + (data.encode() if isinstance(data, str) else json.dumps(data).encode()) + b"\n\n"


def token(text: str = " word", finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


def stream_bytes(num_tokens: int, usage: Mapping[str, int] | None = None) -> list[bytes]:
    """The events of a stream, in the order in which OpenAI's come."""
    opening = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    ending = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    counted = [event({"choices": [], "usage": dict(usage)})] if usage else []
    return [opening, *[token()] * num_tokens, ending, *counted, event("[DONE]")]


def stream(num_tokens: int, first_s: float, gap_s: float, usage: Mapping[str, int] | None = None) -> Answer:
    """A role at once, the first token after `first_s`, the others `gap_s` apart, and the end with the last."""
    opening, *events = stream_bytes(num_tokens, usage)
    pieces = [(0.0, head() + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(opening))]
    pieces += [(first_s if index == 0 else gap_s, chunked(one)) for index, one in enumerate(events[:num_tokens])]
    pieces.append((0.0, b"".join(chunked(one) for one in events[num_tokens:]) + b"0\r\n\r\n"))
    return Answer(pieces)


@dataclass(frozen=True)
class Asked:
    """A request as the server saw it."""

    number: int  # of its path
    at_s: float
    method: str
    path: str
    body: dict[str, Any]


Script = Callable[[Asked], Answer | Awaitable[Answer]]


class FakeServer:
    """Answers what `script` says; models and health answer by themselves."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._numbers: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self.num_connections = 0
        self.num_running = self.most_running = 0
        self.num_cut_short = 0  # the client went before the answer was out

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        opening = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = opening.split(" ", 2)
        length = int(opening.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        asked = Asked(self._numbers[path], asyncio.get_running_loop().time(), method, path, body)
        self._numbers[path] += 1
        self.asked.append(asked)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        gone = asyncio.ensure_future(reader.read(1))
        sent = asyncio.ensure_future(self._send(asked, writer))
        await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
        self.num_running -= 1
        if not sent.done():
            self.num_cut_short += 1
        for task in (gone, sent):
            task.cancel()
        results = await asyncio.gather(gone, sent, return_exceptions=True)
        return results[1] is True

    async def _send(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        answer = await self._answer(asked)
        for delay_s, piece in answer.pieces:
            if delay_s:
                await asyncio.sleep(delay_s)
            writer.write(piece)
        if answer.hangs:
            await asyncio.Event().wait()
        return not answer.cuts

    async def _answer(self, asked: Asked) -> Answer:
        if asked.path == "/v1/models":
            return whole(MODELS)
        if asked.path == "/health":
            return whole({"status": "ok"})
        answer = self._script(asked)
        return answer if isinstance(answer, Answer) else await answer


def with_server(script: Script, test: Callable[[FakeServer, Pool], Awaitable[T]]) -> T:
    """Run a test against a server, both in a loop whose time jumps."""

    async def main() -> T:
        loop = asyncio.get_running_loop()
        server = FakeServer(script)
        with tempfile.TemporaryDirectory(prefix="af") as folder:
            path = Path(folder) / "s"
            listener = await asyncio.start_unix_server(server.on_connection, path)
            pool = Pool(Address.parse(f"unix:{path}"), clock=loop.time)
            try:
                return await test(server, pool)
            finally:
                await pool.close()
                listener.close()
                for _ in range(10):  # connections notice that we are gone
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())
