"""Ctrl-c on the command line: the first raises KeyboardInterrupt, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def exit_at_second_interrupt() -> Iterator[None]:
    """Let a second ctrl-c end the process, also after the block, because cleaning up may take long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        exit_at_next_interrupt()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def exit_at_next_interrupt() -> None:
    """From now on, ctrl-c ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, exit_now)


def exit_now(*_: object) -> NoReturn:
    with suppress(Exception):  # the signal may have interrupted a write
        sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)
