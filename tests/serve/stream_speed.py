"""How many tokens a second one front end streams, and what processor time a token costs it.

    python -m tests.serve.stream_speed [tokens/s] [streams] [seconds]

A backend in the server's own process brings one token to every stream at each step; a second process reads all streams.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import selectors
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from archerfish.serve.client import Answer, Part, Question, Waiting
from archerfish.serve.wire import Chunk, Generate, Report

from .fake_backend import MODEL, FakeBackend, ids, model_directory, text_app

WORDS = ids(" of the people, by the people, for the people")


class SteppingBackend(FakeBackend):
    """One token for every stream at a steady rate, as an engine with a full batch brings them."""

    def __init__(self, rate: float, num_streams: int, seconds: float) -> None:
        super().__init__()
        self.rate, self.num_streams, self.seconds = rate, num_streams, seconds
        self.waiting: list[tuple[str, Waiting]] = []
        self.has_all = asyncio.Event()
        self.report: dict[str, float] = {}

    async def generate(self, request: Generate) -> AsyncIterator[Part]:
        waiting = Waiting()
        self.waiting.append((request.request_id, waiting))
        if len(self.waiting) == self.num_streams:
            self.has_all.set()
        while True:
            part = await waiting.get()
            assert isinstance(part, Chunk)
            yield part
            if part.finish_reason is not None:
                return

    async def ask(self, message: Question) -> Answer:
        card = {"id": MODEL, "kind": "generation", "directory": str(model_directory()), "max_length": 10_000}
        return Report(request_id=message.request_id, values={"models": [card]})

    async def run(self) -> None:
        await self.has_all.wait()
        step_s = self.num_streams / self.rate
        num_steps = int(self.seconds / step_s)
        began, busy, late = time.perf_counter(), time.process_time(), 0.0
        for step in range(num_steps):
            reason = "length" if step == num_steps - 1 else None
            token = WORDS[step % len(WORDS)]
            for request_id, waiting in self.waiting:
                waiting.put(Chunk(request_id=request_id, token_ids=[token], finish_reason=reason))
            left = began + (step + 1) * step_s - time.perf_counter()
            late = max(late, -left)
            await asyncio.sleep(max(0.0, left))
        elapsed, cpu = time.perf_counter() - began, time.process_time() - busy
        num_tokens = num_steps * self.num_streams
        self.report = {
            "tokens_per_second": num_tokens / elapsed, "cpu_us_per_token": cpu / num_tokens * 1e6, "cpu_share": cpu / elapsed,
            "worst_lateness_ms": late * 1000,
        }


async def serve(listener: socket.socket, rate: float, num_streams: int, seconds: float) -> dict[str, float]:
    backend = SteppingBackend(rate, num_streams, seconds)
    server = uvicorn.Server(uvicorn.Config(text_app(backend), log_level="error", ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await backend.run()
    server.should_exit = True
    await serving
    return backend.report


def read_all(address: tuple[str, int], num_streams: int, results: Any) -> None:
    """Open all streams and count the tokens that arrive."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Go"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection(address)
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        selector.register(connection, selectors.EVENT_READ)
    num_open, num_tokens, num_reads = num_streams, 0, 0
    first = last = 0.0
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            last = time.perf_counter()
            first = first or last
            num_reads += 1
            num_tokens += data.count(b'"delta":{"content"')
            if not data:
                selector.unregister(key.fileobj)
                num_open -= 1
    results.put({"tokens_read": num_tokens, "tokens_per_second_read": num_tokens / (last - first), "reads": num_reads})


def main() -> None:
    rate, num_streams, seconds = (float(v) for v in (sys.argv[1:] + ["20000", "256", "5"][len(sys.argv) - 1 :]))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        results: Any = multiprocessing.get_context("spawn").Queue()
        reader = multiprocessing.get_context("spawn").Process(
            target=read_all, args=(listener.getsockname(), int(num_streams), results)
        )
        reader.start()
        uvloop = __import__("uvloop")
        report = uvloop.run(serve(listener, rate, int(num_streams), seconds))
        print(json.dumps({**report, **results.get()}, indent=2))
        reader.join()


if __name__ == "__main__":
    main()
