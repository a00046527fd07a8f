"""Ctrl+C in the processes of a service: the first ends them in order, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT
LAST_S = 1.0  # what a killed process is waited for, and clients who are being told that all ends


class Ending:
    """How the process that was started by a person ends. kills: what a second Ctrl+C calls; they take no locks."""

    def __init__(self) -> None:
        self.kills: list[Callable[[], None]] = []
        self.is_begun = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT where nothing else does."""
        if self.is_begun:
            self.force()
        self.is_begun = True
        raise KeyboardInterrupt

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM where nothing else does."""
        self.is_begun = True
        raise SystemExit(128 + number)

    def force(self) -> NoReturn:
        """End without a word; whatever was started ends too."""
        for kill in self.kills:
            with contextlib.suppress(Exception):
                kill()
        os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def orderly_end() -> Iterator[Ending]:
    """Let SIGINT and SIGTERM end the process by way of all that is to be tidied up, also while models are loaded."""
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    handlers = {signal.SIGINT: ending.interrupt, signal.SIGTERM: ending.terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that Ctrl+C, which reaches the whole group, does not end before it has called `ignore_interrupts`."""
    if not hasattr(signal, "pthread_sigmask"):
        return subprocess.Popen(command, **options)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Of a process that is stopped by the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """End a process without asking, and see it gone."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(LAST_S)
