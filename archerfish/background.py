"""Work in a background thread, values that are made when they are first needed, and handlers of signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

R = TypeVar("R")


class Lazy(Generic[R]):
    """A value that is made once, at the first call of `get`."""

    def __init__(self, make: Callable[[], R]) -> None:
        self._make: Callable[[], R] | None = make
        self.made: list[R] = []  # the value, once it is made
        self._lock = threading.Lock()

    def get(self) -> R:
        if not self.made:
            with self._lock:
                if self._make is not None:
                    self.made.append(self._make())
                    self._make = None
        return self.made[0]


class WeakCache(Generic[R]):
    """A function whose results are kept as long as its first argument lives. The others must be hashable."""

    def __init__(self, find: Callable[..., R]) -> None:
        self._find = find
        self._found: WeakKeyDictionary[object, dict[tuple[Any, ...], R]] = WeakKeyDictionary()

    def __call__(self, first: object, *others: Any) -> R:
        found = self._found.setdefault(first, {})
        if others not in found:
            found[others] = self._find(first, *others)
        return found[others]

    def keep(self, result: R, first: object, *others: Any) -> None:
        """Give this result from now on."""
        self._found.setdefault(first, {})[others] = result


def in_background(work: Callable[[], R], name: str, *, daemon: bool = False) -> Future[R]:
    """Run `work` in a new thread. At exit, Python waits for the thread unless it is a daemon."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name=f"archerfish-{name}", daemon=daemon).start()
    return future


_fork_waits_for: set[Future[Any]] = set()


def finish_before_fork(running: Future[R]) -> Future[R]:
    """Have a fork wait for this work: its thread, and the locks that it holds, would be lost in the child."""
    _fork_waits_for.add(running)
    running.add_done_callback(_fork_waits_for.discard)
    return running


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: wait(list(_fork_waits_for)))


def is_importing(frame: FrameType | None) -> bool:
    """True if the interrupted code imports a module, which may turn an exception into an ImportError or lose it."""
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@contextmanager
def signals_to(handler: Callable[..., None], *numbers: int) -> Iterator[None]:
    """Let `handler` handle these signals during the block, unless it sets another. Outside of the main thread, do
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) == handler:  # bound methods are equal, not identical
                signal.signal(number, earlier)
