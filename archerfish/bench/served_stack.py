"""An engine process and front ends of our own, for scenarios that bring them along: paced engines and real ones."""

from __future__ import annotations

import dataclasses
import http.client
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import msgspec

from archerfish.bench import paced_process
from archerfish.bench.paced_process import Report, Setup, Task
from archerfish.config import ServeConfig
from archerfish.errors import ServiceError
from archerfish.serve.host_config import FrontConfig
from archerfish.serve.run import bind

START_S = 120.0
STOP_S = 15.0
POLL_S = 0.05


class Process:
    """A child that reads lines and answers lines, and ends when its standard input does."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=tuple(pass_fds))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.check()
            raise ServiceError(f"The process {self._process.args!r} said nothing.", hint="Its messages are above.")
        return line

    def check(self) -> None:
        if self._process.poll() is not None:
            code = self._process.returncode
            raise ServiceError(f"The process {self._process.args!r} ended with {code}.", hint="Its messages are above.")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PacedProcess(Process):
    """A paced engine in a process of its own, alone or behind a socket."""

    def __init__(self, address: str = "", front_end_pass: str = "") -> None:
        super().__init__(paced_process.COMMAND)
        self.send(Setup(address=address, front_end_pass=front_end_pass))
        self.address = self._report().address

    def do(self, task: Task) -> Report:
        self.send(task)
        return self._report()

    def _report(self) -> Report:
        return msgspec.json.decode(self.receive(), type=Report)


class FrontEnds:
    """Some front ends that accept from one socket, as `serve` starts them."""

    def __init__(self, address: str, credentials: str, number: int) -> None:
        config = ServeConfig(host="127.0.0.1", port=0, log_level="warning")
        self._listener = bind(config)
        self.host, self.port = self._listener.getsockname()[:2]
        front = FrontConfig(
            address=address, credentials=credentials, serve=dataclasses.asdict(config), listener=self._listener.fileno()
        )
        self._processes: list[Process] = []
        try:
            for _ in range(number):
                command = (sys.executable, "-m", "archerfish.serve.front")
                self._processes.append(Process(command, pass_fds=(self._listener.fileno(),)))
                self._processes[-1].send(front)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Until each of them has answered, as far as one can tell: whoever is free accepts."""
        ends_s = time.monotonic() + START_S
        num_answered = 0
        while num_answered < 4 * len(self._processes):
            if time.monotonic() > ends_s:
                raise ServiceError("The front ends do not answer.", hint="Their messages are above.")
            num_answered += self._has_answered()
            for process in self._processes:
                process.check()

    def _has_answered(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)
        return False

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def paced_stack(*numbers: int) -> Iterator[tuple[PacedProcess, list[FrontEnds]]]:
    """A paced engine process, and for each number so many front ends that are its clients."""
    credentials = secrets.token_urlsafe(32)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="archerfish-stack-"))
        engine = stack.enter_context(PacedProcess(f"ipc://{directory}/engine", credentials))
        groups = [stack.enter_context(FrontEnds(engine.address, credentials, number)) for number in numbers]
        for group in groups:
            group.wait()
        yield engine, groups


def chat_request(model: str, content: str, num_tokens: int) -> bytes:
    """A streamed chat as bytes of HTTP, over a connection that is kept."""
    body = json.dumps({
        "model": model, "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": num_tokens,
        "ignore_eos": True, "temperature": 0.0,
    }).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


