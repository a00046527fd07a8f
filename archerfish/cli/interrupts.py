"""Ctrl-c on the command line: the first raises as usual, the second ends the process at once and without a word."""

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
def ending_at_second() -> Iterator[None]:
    """Also after it, once there was a first: what is tidied up then may take longer than somebody wants to wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        end_at_next()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def end_at_next() -> None:
    """From now on ctrl-c ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, leave)


def leave(*_: object) -> NoReturn:
    with suppress(Exception):  # it may be interrupted in the middle of a write
        sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)
