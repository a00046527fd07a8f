"""Signals on the command line. The first ctrl-c raises KeyboardInterrupt, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from archerfish.background import is_importing

EXIT_INTERRUPTED = 128 + signal.SIGINT


def interrupt_once(_: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, or end the process while it imports. The next ctrl-c ends the process, also after the
    block, because cleaning up may take long."""
    if is_importing(frame):
        exit_now()
    exit_at_next_interrupt()
    raise KeyboardInterrupt


def exit_tidily(number: int, _: object) -> NoReturn:
    """Raise SystemExit, so that processes and files of the command are cleaned up. The signal is ignored meanwhile."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def exit_at_next_interrupt() -> None:
    """From now on, ctrl-c ends the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, exit_now)


def exit_now(*_: object) -> NoReturn:
    with suppress(Exception):  # the signal may have interrupted a write
        sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)
