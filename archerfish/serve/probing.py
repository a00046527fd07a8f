"""Whether the models of an engine process work: answered from real steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from archerfish.errors import StoppedError
from archerfish.serve.compute import ComputeThread
from archerfish.serve.models import GENERATION, Hosted, Shelf
from archerfish.serve.pending_request import ModelHost, PendingRequest
from archerfish.serve.vitals import ComputeWatch
from archerfish.serve.wire import Failed, Message, Ping, Pong

FRESH_S = 1.0  # a real step this young proves that a model works


class Prober:
    """Answers a Ping: with a probe after a real step of every model that is loaded, unless one is fresh or one is running."""

    def __init__(
        self, shelf: Shelf, compute: ComputeThread, watch: ComputeWatch, desk: ModelHost, clock: Callable[[], float]
    ) -> None:
        self._shelf, self._compute, self._watch, self._desk, self._clock = shelf, compute, watch, desk, clock

    def answer(self, ticket: PendingRequest, message: Ping) -> None:
        if message.probe is None:
            self._desk.answer(ticket, Pong(request_id=message.request_id))
            return
        slots = self._shelf.slots if not message.probe else [self._shelf.find(message.probe, GENERATION)]
        running_s = self._compute.running_s()
        complaint = self._watch.complaint(running_s, is_loading=self._shelf.is_loading)
        if complaint:
            raise StoppedError(complaint, hint="The engine process hangs and is started again.")
        now = self._clock()
        silent = [
            slot.hosted for slot in slots
            if slot.hosted is not None and slot.lane is not None and now - slot.lane.last_done > FRESH_S
        ]  # fmt: skip
        if not silent or running_s > 0:
            self._desk.answer(ticket, Pong(request_id=message.request_id))
            return
        self._step(silent, ticket, message.request_id)

    def _step(self, silent: list[Hosted], ticket: PendingRequest, request_id: str) -> None:
        left, now = set(silent), self._clock()

        def end(hosted: Hosted, answer: Message) -> None:
            left.discard(hosted)
            if isinstance(answer, Failed):
                answer.request_id = request_id
                self._desk.answer(ticket, answer)
            elif not left:
                self._desk.answer(ticket, Pong(request_id=request_id, seconds=self._clock() - ticket.arrived))

        for hosted in silent:
            own = PendingRequest(b"", Ping(request_id=""), arrived=now, on_end=partial(end, hosted))
            try:
                hosted.probe(own)
            except Exception as error:
                self._desk.fail(own, error)
