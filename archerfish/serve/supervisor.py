"""Keeps an engine process running: starts it, waits until it serves, starts it again when it dies or hangs, stops it.

    with Supervisor(HostConfig(models=(ModelSpec(kind="generation"),))) as supervisor:
        client = supervisor.client()

Clients see by themselves that their connection has broken, in this process and in others. The process ends with the one that
supervises it, however that one ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from archerfish.errors import ArcherfishError, MachineError, StoppedError
from archerfish.serve.client import AsyncClient
from archerfish.serve.host_config import HostConfig, check_address
from archerfish.serve.signals import kill_process, start_process
from archerfish.serve.vitals import BEAT_S, Pulse

logger = logging.getLogger("archerfish.serve")
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.25, 15.0
STEADY_S = 60.0  # a process that lived so long has not died of its start
KILL_AFTER_S = 5.0  # beyond the grace of the process itself


class EngineStartError(MachineError):
    """The engine process ended before it served."""

    code = "engine_start_failed"


class Supervisor:
    """One engine process and its successors, all at one address. One that hangs (`vitals`) is killed, and so started again.

    config.address: empty for a socket in a new private directory, which goes when the supervisor stops. on_change is told
    whether the process serves, in a thread of the supervisor's. command: for tests.
    """

    def __init__(
        self, config: HostConfig, *, on_change: Callable[[bool], None] = lambda is_serving: None,
        command: tuple[str, ...] = (sys.executable, "-m", "archerfish.serve.engine_process"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = "" if config.address else tempfile.mkdtemp(prefix="archerfish-")  # 0700: nobody else may connect
        self.config = config if config.address else msgspec.structs.replace(config, address=f"ipc://{self._directory}/engine")
        check_address(self.config)
        self.address = self.config.address
        self.is_serving = False
        self.num_starts = self.num_hangs = 0
        self.start_s = 0.0  # what the last start took
        self._command, self._on_change, self._clock = command, on_change, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._is_killed = False
        self._lock = threading.Lock()  # over _process and whether it may be replaced
        self._watcher = threading.Thread(target=self._watch, name="archerfish-supervisor", daemon=True)

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 between two."""
        process = self._process
        return 0 if process is None or process.returncode is not None else process.pid

    def start(self) -> None:
        """Start the process and return when it serves; an error says why it does not."""
        atexit.register(self.stop)
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        self._watcher.start()

    def client(self, **options: Any) -> AsyncClient:
        """A client for an event loop of this process."""
        usual = {"server_key": self.config.public_key, "retry_after_s": max(1.0, self.start_s)}
        return AsyncClient(self.address, **{**usual, **options})


    def _launch(self) -> None:
        started = time.monotonic()
        with self._lock:
            if self._is_stopping.is_set():
                raise StoppedError("The supervisor has been stopped.")
            process = self._process = start_process(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self.config) + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        told = msgspec.json.decode(line, type=dict[str, str]) if line.startswith(b"{") else {}
        if "address" not in told:
            code = process.wait()
            message = told.get("error") or f"The engine process ended while it started, with status {code}; its log says why."
            raise EngineStartError(message, hint=told.get("hint", ""))
        self.address = told["address"]  # with the port that was taken, which its successors take too
        self.config = msgspec.structs.replace(self.config, address=self.address)
        self.start_s = time.monotonic() - started
        self.num_starts += 1
        self._tell(True)

    def _tell(self, is_serving: bool) -> None:
        self.is_serving = is_serving
        try:
            self._on_change(is_serving)
        except Exception:
            logger.exception("on_change failed.")

    def _watch(self) -> None:
        """Wait for the end of the process, ever again."""
        num_quick = 0
        while not self._is_stopping.is_set():
            process, began = self._process, time.monotonic()
            assert process is not None
            self._attend(process)
            code = process.wait()
            close_pipes(process)
            if self._is_stopping.is_set() or self._is_killed:
                return
            if self.is_serving:
                self._tell(False)
                logger.error("The engine process has died (%s) and is started again.", named(code))
            num_quick = 0 if time.monotonic() - began > STEADY_S else num_quick + 1
            self._is_stopping.wait(backoff_s(num_quick))
            try:
                self._launch()
            except StoppedError:
                return
            except (ArcherfishError, OSError) as error:
                logger.error("The engine process could not be started again: %s", error)

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the process has ended, or has been killed because it hangs."""
        assert process.stdout is not None
        if process.stdout.closed:  # it was attended to before, and no other could be started
            return
        pulse, pipe = Pulse(self.config.silence_s, self._clock), process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                data = os.read(pipe, 1 << 16) if selector.select(BEAT_S) else None
                if data == b"":
                    return
                complaint = pulse.hear(data or b"")
                if complaint and not self._is_stopping.is_set():  # else it is closing, and who stops it has a limit of his own
                    self.num_hangs += 1
                    self._tell(False)
                    logger.error("The engine process hangs and is killed: %s", complaint)
                    process.kill()
                    return

    def stop(self, grace_s: float | None = None) -> None:
        """Let the process finish what runs, then end it; nothing of it stays behind."""
        with self._lock:
            self._is_stopping.set()
            process = self._process
        if process is not None:
            end(process, self.config.grace_s + KILL_AFTER_S if grace_s is None else grace_s)
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        if process is not None:
            close_pipes(process)
        if self.is_serving:
            self._tell(False)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
        elif self.config.address.startswith("ipc://"):
            Path(self.config.address.removeprefix("ipc://")).unlink(missing_ok=True)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the process without asking, from wherever a signal comes: no lock is taken, no thread waited for."""
        self._is_killed = True
        if self._process is not None:
            kill_process(self._process)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, and SIGKILL for one that does not heed it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        logger.error("The engine process did not end within %.0f s and is killed.", grace_s)
        process.kill()
        process.wait()


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def backoff_s(num_quick: int) -> float:
    """How long to wait before the next start, after so many processes in a row that did not live long."""
    return 0.0 if num_quick < 2 else min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_quick - 2, 10))


def named(code: int) -> str:
    """A process's status in words."""
    return signal.Signals(-code).name if code < 0 else f"status {code}"
