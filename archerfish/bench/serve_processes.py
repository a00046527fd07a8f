"""The servers of `bench serve` as processes: started and stopped with all their children, and how much memory they hold."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from archerfish.bench.serve_http import Address
from archerfish.errors import InvalidOptionError, ServiceError

STOP_S = 15.0
CONNECT_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerProcess:
    """A command that serves, in a process group of its own."""

    def __init__(self, name: str, command: str) -> None:
        self.name, self.command = name, command
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (close() closes it)
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError, IndexError) as error:
            self._log.close()
            hint = "Give the command as in a shell, without pipes: --start 'ours=archerfish serve --port 8000'."
            raise InvalidOptionError(f"--start of {name}: {command!r} cannot be run: {error}.", hint=hint) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises if the process has ended."""
        if self._process.poll() is not None:
            raise ServiceError(f"{self.name} ended with {self._process.returncode}: {self.last_words()}", hint="")

    def last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:500] if lines else "it wrote nothing"

    def close(self) -> None:
        """Ask the group to end, and make it."""
        if self._log.closed:
            return
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, wanted)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                break
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # children that outlived it
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_free(name: str, address: Address) -> None:
    """Raises if something listens where a server is to be started: it would be measured in its stead."""
    with socket.socket(socket.AF_UNIX) if address.socket_path else socket.socket(family_of(address)) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(address.socket_path or (address.host, address.port))
        except OSError:
            return
    hint = f"Stop it, leave --start of {name} out, or choose another address."
    raise InvalidOptionError(f"Something answers at {address.url} already, where {name} is to be started.", hint=hint)


def family_of(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET


@dataclass(frozen=True)
class ProcessUse:
    """What a process holds."""

    num_bytes: float  # resident; what it shares counts too
    num_files: int  # sockets among them
    num_threads: int


def tree_use(pid: int) -> dict[int, ProcessUse]:
    """Of a process and all its descendants, parents first; without those of which it cannot be known."""
    found: dict[int, ProcessUse] = {}
    to_visit = [pid]
    while to_visit:
        one = to_visit.pop(0)
        folder = Path("/proc") / str(one)
        with suppress(OSError, ValueError, IndexError):
            num_bytes = int((folder / "statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
            tasks = list((folder / "task").iterdir())
            found[one] = ProcessUse(float(num_bytes), len(list((folder / "fd").iterdir())), len(tasks))
            for task in tasks:
                with suppress(OSError):
                    to_visit += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


def tree_bytes(pid: int) -> float:
    """Resident bytes of a process and all its descendants. 0 where it cannot be known."""
    return sum((use.num_bytes for use in tree_use(pid).values()), 0.0)


def allow_connections(number: int) -> None:
    """Raise this process's limit on open files as far as it may be, towards a connection for each of so many requests."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = number + 256
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
