"""A server that streams chat chunks at a given rate and computes nothing: to measure what a client can take.

python -m archerfish.bench.fake_stream_server --port 8099 --chunks-per-second 20000 --streams 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]}).encode()


def event(data: dict[str, object] | str) -> bytes:
    """A server-sent event as one chunk of a chunked body."""
    line = b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"
    return f"{len(line):x}\r\n".encode() + line + b"\r\n"


def chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    made = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_750_000_000, "model": "fake"}
    return event({**made, "choices": [choice]})


TOKEN = chunk({"content": " word"})
END = chunk({}, "length") + event("[DONE]") + b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One client: max_tokens chunks, `interval_s` apart, each in a write of its own."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET"):
            self.received = b""
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
            return
        try:
            asked = json.loads(body)
        except ValueError:
            return  # the rest is still to come
        self.received = b""
        self.transport.write(HEAD)
        self.step(int(asked.get("max_tokens", 16)), self.loop.time())

    def step(self, left: int, due: float) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(TOKEN if left else END)
        if left:
            due += self.interval_s
            self.loop.call_at(due, self.step, left - 1, due)


async def serve(host: str, port: int, socket_path: str, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    if socket_path:
        server = await loop.create_unix_server(lambda: Stream(interval_s), socket_path, backlog=4096)
    else:
        server = await loop.create_server(lambda: Stream(interval_s), host, port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--socket", default="", help="a path instead of host and port")
    parser.add_argument("--chunks-per-second", type=float, default=20_000.0)
    parser.add_argument("--streams", type=int, default=256)
    given = parser.parse_args()
    asyncio.run(serve(given.host, given.port, given.socket, given.streams / given.chunks_per_second))


if __name__ == "__main__":
    main()
