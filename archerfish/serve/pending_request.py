"""A client's request inside an engine process, and the host as a model sees it.

The host's loop calls all methods of models, unless a name or a comment says otherwise. Slow work (text, computing) runs in
other threads, and the loop takes its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from archerfish.serve.tenants import ANONYMOUS, Tenant
from archerfish.serve.wire import Message


@dataclass(eq=False, slots=True)
class PendingRequest:
    """The host's record of a client's request, from its arrival to its last answer."""

    client: bytes
    message: Any
    tenant: str = ""
    caller: Tenant = ANONYMOUS
    arrived: float = 0.0
    takes_bundles: bool = False
    retry_after_s: Callable[[], float] | None = None  # the wait that its model suggests after a refusal
    is_over: bool = False
    release: Callable[[], None] | None = None  # called once at the end, so that the model frees what the request holds
    end_sequence: Callable[[int], object] | None = None  # ends one of the n sequences
    model_entry: Any = None  # the ModelEntry of its model
    model_work: Callable[[Any, PendingRequest], None] | None = None  # called when its model has been loaded
    on_end: Callable[[Message], None] | None = None  # gets the last answer, for a request that the host made itself

    @property
    def deadline(self) -> float:
        """The time of the deadline, or infinity."""
        return math.inf if self.message.deadline_s is None else self.arrived + self.message.deadline_s

    def left_s(self, now: float) -> float | None:
        """Seconds until the deadline. An invalid (negative) deadline is returned unchanged."""
        deadline_s: float | None = self.message.deadline_s
        return deadline_s if deadline_s is None or deadline_s < 0 else max(0.0, deadline_s - (now - self.arrived))


class ModelHost(Protocol):
    """The host as a model sees it. `answer`, `fail` and `post` may be called in any thread."""

    reader: Executor  # threads that tokenize; the loop wakes after each job
    compiler: Executor  # threads that compile grammars, which may take seconds
    clock: Callable[[], float]

    def answer(self, pending: PendingRequest, message: Message) -> None:
        """Send an answer at the end of this round of the loop. Any answer but a Chunk is the last one."""

    def fail(self, pending: PendingRequest, error: BaseException) -> None: ...

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop call `work`."""


def read_in_thread(
    host: ModelHost, pending: PendingRequest, work: Callable[[], Callable[[], None]], executor: Executor | None = None
) -> None:
    """Call `work` in another thread and then, in the loop, the function that it returned, unless the request is over."""

    def finish(act: Callable[[], None]) -> None:
        if not pending.is_over:
            try:
                act()
            except Exception as error:
                host.fail(pending, error)

    def run() -> None:
        if pending.is_over:
            return
        try:
            act = work()
        except BaseException as error:
            host.fail(pending, error)
        else:
            host.post(lambda: finish(act))

    (executor or host.reader).submit(run)
