"""The service that the campaign attacks: a tiny model on 127.0.0.1, and what must be true of it after each attack."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.serve.test_run import Service

LIMIT_S = 60
MIB = 1 << 20
MOST_BYTES = 12 << 30  # address space of each process, so that no attack takes the machine's memory
GROWTH = 1.15, 64 * MIB  # factor and constant by which the memory of a role may have grown after an attack
HI = [{"role": "user", "content": "the cats"}]
CHAT = "/v1/chat/completions"
STREAM = {"messages": HI, "max_tokens": 60_000, "ignore_eos": True, "stream": True}
ROLES = {"engine": "serve.host", "front end": "serve.front"}


def request(body: Any, path: str = CHAT, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def wait_until_empty(found: Callable[[], Any]) -> None:
    end, pause = time.monotonic() + LIMIT_S, threading.Event()
    while now := found():
        assert time.monotonic() < end, now
        pause.wait(0.1)


def anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # the process has just ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class Target(Service):
    """A service that has answered once. `check` compares it with what it was then."""

    def __init__(self, directory: Path, *flags: str, most_s: float = 3600) -> None:
        fixed = ("--max-cache-tokens", "65536", "--log-level", "error")
        super().__init__(directory, *fixed, *flags, max_files=1024, most_s=most_s)
        for pid in (self.process.pid, *self.children()):
            resource.prlimit(pid, resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        self.answer, self.num_children = self.chat(), len(self.children())
        self.bytes_before = self.bytes_by_role()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def of_role(self, role: str) -> list[int]:
        return sorted(pid for pid, command in self.children().items() if ROLES[role] in command)

    def bytes_by_role(self) -> dict[str, int]:
        return {role: sum(map(anonymous_bytes, self.of_role(role))) for role in ROLES}

    def chat(self) -> str:
        body = {"messages": HI, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(self.url + CHAT, json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def connect(self, buffer_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        made.settimeout(LIMIT_S)
        if buffer_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        made.connect((self.address, self.port))
        return made

    def stream(self) -> socket.socket:
        """An endless answer that has begun."""
        made, data = self.connect(), b""
        made.sendall(request(STREAM, headers="Connection: close\r\n"))
        while data.count(b"data: ") < 3:
            part = made.recv(1 << 16)
            assert part, data
            data += part
        return made

    def send(self, data: bytes, *, ends: bool = True) -> bytes:
        """All that comes back for these bytes, until the server closes. ends: the client sends no more."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):  # the server may have refused it before its end
                connection.sendall(data)
                if ends:
                    connection.shutdown(socket.SHUT_WR)
            return rest_of(connection)

    def num_running(self) -> int:
        """Requests that engines hold."""

        def found(values: Any) -> Iterator[int]:
            for name, value in values.items() if isinstance(values, dict) else ():
                yield value if name == "concurrent_requests" else sum(found(value))

        return sum(found(httpx.get(f"{self.url}/stats", timeout=LIMIT_S).json()))

    def problem(self) -> str:
        """Names what differs from the state before the attack; empty: nothing."""
        assert self.process.poll() is None, "the main process has ended"
        if len(self.children()) != self.num_children:
            return f"children: {self.children()}"
        try:
            if not self.is_healthy() or self.num_running():
                return f"/health or requests that run: {self.num_running()}"
        except (httpx.HTTPError, KeyError) as error:
            return repr(error)
        now = self.bytes_by_role()
        factor, constant = GROWTH
        grown = [role for role, before in self.bytes_before.items() if now[role] > factor * before + constant]
        return f"memory of {grown}: {self.bytes_before}, now {now}" if grown else ""

    def check(self) -> None:
        """Wait until nothing is left of an attack; then a chat gives the answer that it gave before."""
        wait_until_empty(self.problem)
        assert self.chat() == self.answer


def rest_of(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data
