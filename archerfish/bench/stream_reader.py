"""Reads many streamed answers at once at as little cost as can be, in a process of its own.

One line of JSON on standard input says what to read, one on standard output what came.
"""

from __future__ import annotations

import os
import re
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

COMMAND = (sys.executable, "-m", "archerfish.bench.stream_reader")
CONTENT = b'"delta":{"content":'
WORD = re.compile(rb'"delta":\{"content":" (\d{4})"')
DONE = b"data: [DONE]"
SAMPLE_EVERY = 16  # of so many streams one is looked at token by token
PIECE_BYTES = 1 << 16


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What to read: one request, many times. processes: names and ids of those whose processor time is noted."""

    host: str
    port: int
    request: bytes
    num_streams: int
    processes: dict[str, int] = {}
    timeout_s: float = 120.0


class WasRead(msgspec.Struct, frozen=True, kw_only=True):
    """What came between the moment at which every stream had a token and the end of the first one."""

    window_s: float = 0.0
    num_tokens: int = 0
    num_reads: int = 0
    num_done: int = 0  # streams that ended as they should
    words: list[tuple[int, float]] = []  # of the sampled streams: which word came, and when, on the monotonic clock
    cpu_s: dict[str, float] = {}  # of the processes and of the reader


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond where the system tells it."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return total


class Reader:
    """All streams of a Reading."""

    def __init__(self, reading: Reading, clock: Callable[[], float] = time.monotonic) -> None:
        self.reading = reading
        self._clock = clock
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._sampled: set[int] = set()
        self._silent: set[int] = set()  # without a token so far
        self._ends: dict[int, bytes] = {}  # the last bytes of each
        self._words: list[tuple[int, float]] = []
        self._num_tokens = self._num_reads = self._num_done = 0
        self._began_s = 0.0  # when every stream had a token
        self._began_cpu_s: dict[str, float] = {}
        self._found = WasRead()

    def run(self) -> WasRead:
        ends_s = self._clock() + self.reading.timeout_s
        self._open()
        while self._sockets and self._clock() < ends_s:
            for descriptor, _ in self._poll.poll(1.0):
                data = self._sockets[descriptor].recv(PIECE_BYTES)
                if not self.take(descriptor, data):
                    self._close(descriptor)
        return self.result()

    def result(self) -> WasRead:
        return msgspec.structs.replace(self._found, num_done=self._num_done)

    def add(self, stream: int) -> None:
        """A stream that will come."""
        if len(self._ends) % SAMPLE_EVERY == 0:
            self._sampled.add(stream)
        self._ends[stream] = b""
        self._silent.add(stream)

    def take(self, stream: int, data: bytes) -> bool:
        """What one read of a stream gave; whether there will be more of it."""
        self._num_reads += 1
        gained = data.count(CONTENT)
        if gained:
            self._num_tokens += gained
            if stream in self._sampled:
                now = self._clock()
                self._words += [(int(found), now) for found in WORD.findall(data)]
            if not self._began_s:
                self._hear(stream)
        end = self._ends[stream] + data
        if data and DONE not in end:
            self._ends[stream] = end[-len(DONE) :]
            return True
        if self._began_s and not self._found.window_s:
            cpu_s = {name: value - self._began_cpu_s[name] for name, value in self._cpu().items()}
            self._found = WasRead(
                window_s=self._clock() - self._began_s, num_tokens=self._num_tokens, num_reads=self._num_reads,
                words=list(self._words), cpu_s=cpu_s,
            )  # fmt: skip
        self._num_done += bool(data)
        return False

    def _hear(self, stream: int) -> None:
        """A stream has its first token; with the last of them the counting begins."""
        self._silent.discard(stream)
        if not self._silent:
            self._began_s, self._began_cpu_s = self._clock(), self._cpu()
            self._num_tokens = self._num_reads = 0
            self._words.clear()

    def _open(self) -> None:
        for _ in range(self.reading.num_streams):
            opened = socket.create_connection((self.reading.host, self.reading.port))
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.sendall(self.reading.request)
            opened.setblocking(False)
            descriptor = opened.fileno()
            self._sockets[descriptor] = opened
            self.add(descriptor)
            self._poll.register(descriptor, select.EPOLLIN)

    def _close(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._sockets.pop(descriptor).close()

    def _cpu(self) -> dict[str, float]:
        processes = {**self.reading.processes, "reader": os.getpid()}
        return {name: cpu_seconds(pid) for name, pid in processes.items()}


def main() -> int:
    reading = msgspec.json.decode(sys.stdin.buffer.readline(), type=Reading)
    sys.stdout.buffer.write(msgspec.json.encode(Reader(reading).run()) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
