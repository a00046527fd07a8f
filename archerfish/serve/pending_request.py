"""A client's request inside an engine process, and what a model sees of its host.

The host's loop calls all methods of models, except where a name or a comment says otherwise; what takes long (text, computing)
runs in other threads and leaves its results for the loop.
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
    """A request of a client, from its arrival to its last answer."""

    client: bytes
    message: Any
    tenant: str = ""
    caller: Tenant = ANONYMOUS
    arrived: float = 0.0
    takes_bundles: bool = False
    retry_after_s: Callable[[], float] | None = None  # how long its model thinks one should wait before the next
    is_over: bool = False
    release: Callable[[], None] | None = None  # called once when it is over: what it holds in its model goes back
    end_sequence: Callable[[int], object] | None = None  # ends one of n sequences, once they run
    slot: Any = None  # of its model
    model_work: Callable[[Any, PendingRequest], None] | None = None  # what to do with it once its model is loaded
    on_end: Callable[[Message], None] | None = None  # of a request of our own

    @property
    def deadline(self) -> float:
        """The moment, which counts from the arrival; infinite for a request that has none."""
        return math.inf if self.message.deadline_s is None else self.arrived + self.message.deadline_s

    def left_s(self, now: float) -> float | None:
        """What is left of its time; a deadline that makes no sense stays as it is."""
        deadline_s: float | None = self.message.deadline_s
        return deadline_s if deadline_s is None or deadline_s < 0 else max(0.0, deadline_s - (now - self.arrived))


class ModelHost(Protocol):
    """What a model sees of its host. `answer`, `fail` and `post` may be called in any thread."""

    reader: Executor  # threads for texts on their way in; the loop wakes after each job
    compiler: Executor  # the same for grammars, which may take seconds
    clock: Callable[[], float]

    def answer(self, ticket: PendingRequest, message: Message) -> None:
        """Send an answer with all others of this round; any but a Chunk is the last."""

    def fail(self, ticket: PendingRequest, error: BaseException) -> None: ...

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop do something."""


def read_in_thread(
    desk: ModelHost, ticket: PendingRequest, work: Callable[[], Callable[[], None]], executor: Executor | None = None
) -> None:
    """Do something with texts in another thread, then what it returns in the loop, unless the request is over by then."""

    def settle(act: Callable[[], None]) -> None:
        if not ticket.is_over:
            try:
                act()
            except Exception as error:
                desk.fail(ticket, error)

    def run() -> None:
        if ticket.is_over:
            return
        try:
            act = work()
        except BaseException as error:
            desk.fail(ticket, error)
        else:
            desk.post(lambda: settle(act))

    (executor or desk.reader).submit(run)
