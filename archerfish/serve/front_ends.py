"""Further front ends of a service: processes that accept from one listening socket, each replaced when it dies."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

import msgspec

from archerfish.serve.front import GRACE_S, FrontConfig
from archerfish.serve.signals import LAST_S, kill_process, start_process
from archerfish.serve.supervisor import STEADY_S, backoff_s, named

logger = logging.getLogger("archerfish.serve")
KILL_AFTER_S = 5.0  # beyond the grace of the process itself


class FrontEnds:
    """So many of them, from `start` until they are told to `stop`. config.listener: the socket that they accept from."""

    def __init__(
        self, config: FrontConfig, number: int, *, command: tuple[str, ...] = (sys.executable, "-m", "archerfish.serve.front"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.num_restarts = 0
        self._config, self._number, self._command, self._clock = config, number, command, clock
        self._is_stopping = threading.Event()
        self._is_killed = False
        self._lock = threading.Lock()  # over the processes and whether they may be replaced
        self._keepers: list[threading.Thread] = []

    def start(self) -> None:
        for place in range(self._number):
            process = self._launch()
            assert process is not None
            self.processes.append(process)
            keeper = threading.Thread(target=self._keep, args=(place,), name=f"archerfish-front-{place}", daemon=True)
            self._keepers.append(keeper)
            keeper.start()

    def _launch(self) -> subprocess.Popen[bytes] | None:
        """A new one; None once all are being stopped."""
        with self._lock:
            if self._is_stopping.is_set():
                return None
            process = start_process(self._command, stdin=subprocess.PIPE, pass_fds=(self._config.listener,), bufsize=0)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its keeper sees
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        return process

    def _keep(self, place: int) -> None:
        """Replace the front end of a place, ever again."""
        num_quick = 0
        while True:
            process, began = self.processes[place], self._clock()
            code = process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if self._is_stopping.is_set() or self._is_killed:
                return
            logger.error("A front end has died (%s) and is started again.", named(code))
            num_quick = 0 if self._clock() - began > STEADY_S else num_quick + 1
            successor = None
            while successor is None:
                if self._is_stopping.wait(backoff_s(num_quick)):
                    return
                try:
                    successor = self._launch()
                except OSError as error:
                    num_quick += 1
                    logger.error("A front end could not be started: %s", error)
            self._replace(place, successor)

    def _replace(self, place: int, successor: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self.processes[place] = successor
            self.num_restarts += 1
            if self._is_stopping.is_set():
                successor.terminate()

    def stop(self) -> None:
        """Tell all to finish what they do and end, without waiting until they have."""
        with self._lock:
            self._is_stopping.set()
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

    def close(self) -> None:
        """Stop them; when this returns, none is left."""
        self.stop()
        for process in self.processes:
            try:
                process.wait(GRACE_S + KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for keeper in self._keepers:
            keeper.join()

    def kill(self) -> None:
        """End all of them, with a moment to tell their clients; from wherever a signal comes: no lock is taken."""
        self._is_killed = True
        processes, end = list(self.processes), self._clock() + 2 * LAST_S
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - self._clock()))
            kill_process(process)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
