"""The gate in front of a model that writes: limits of tenants, room in the queue, and what can be answered in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from archerfish.sequence import FinishReason
from archerfish.serve.admission import Admission, AdmissionLimits, Entry
from archerfish.serve.limits import RateLimits, Reservation
from archerfish.serve.tenants import Tenant


class Pass:
    """A request that was let in, until it is over. Methods are for the thread of its `Gate`; the counts are for any."""

    __slots__ = ("_reservation", "_ticket", "num_output", "num_prompt", "reason")

    def __init__(self, ticket: Entry, reservation: Reservation) -> None:
        self._ticket, self._reservation = ticket, reservation
        self.num_prompt = ticket.num_prompt_tokens
        self.num_output = 0  # tokens of the answer so far
        self.reason: FinishReason = "abort"  # why it ended, unless somebody says otherwise before it does

    def tokenized(self, num_prompt: int) -> None:
        """The real length of the prompt; InputTooLargeError where it is over the limit."""
        self._reservation.change(num_prompt + self._reservation.num_tokens - self.num_prompt)
        self.num_prompt = num_prompt
        self._ticket.tokenized(num_prompt)

    def started(self) -> None:
        """Its first token has come."""
        self._ticket.started()

    def ended(self) -> None:
        """It is over; once is enough."""
        if self._reservation.is_open:
            self._ticket.ended(self.num_output, self.reason)
            self._reservation.settle(self.num_prompt + self.num_output)


class Gate:
    """Lets requests in to one model, or says at once why not and when to come back."""

    def __init__(
        self, rates: RateLimits, limits: AdmissionLimits, *, max_running: int, max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rates: of all models of a process. max_tokens: the longest answer, for requests that leave it open."""
        self.admission = Admission(limits, max_running=max_running, clock=clock)
        self.rates, self.max_tokens = rates, max_tokens
        self._clock = clock
        self._seen = (0, 0)  # tokens of prompts computed and tokens brought, in all
        self._since = clock()  # when the counters changed last, or work began

    def admit(
        self, tenant: Tenant, *, max_tokens: int | None, num_sequences: int, num_prompt_tokens: int | None = None,
        num_prompt_bytes: int = 0, deadline_s: float | None = None,
    ) -> Pass:
        """Without num_prompt_tokens they are estimated, so that a request is refused before it is tokenised."""
        admission = self.admission
        most = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        known = num_prompt_tokens is not None
        num_prompt = num_prompt_tokens if num_prompt_tokens is not None else admission.estimate_tokens(num_prompt_bytes)
        reservation = self.rates.admit(tenant, num_prompt + most * num_sequences)
        if not admission.num_queued and not admission.num_running:
            self._since = self._clock()
        try:
            ticket = admission.admit(
                tenant, most, num_sequences=num_sequences, num_prompt_tokens=num_prompt if known else None,
                num_prompt_bytes=num_prompt_bytes, deadline_s=deadline_s,
            )
        except BaseException:
            reservation.cancel()
            raise
        return Pass(ticket, reservation)

    def set_queue(self, max_requests: int) -> None:
        """Another limit of the queue, for those who come from now on."""
        self.admission.limits = replace(self.admission.limits, max_queued_requests=max_requests)

    def watch(self, num_prompt: int, num_output: int) -> None:
        """Learn from the counters of the engine how fast it is: tokens of prompts computed and tokens brought, in all."""
        if (num_prompt, num_output) == self._seen:
            return
        now = self._clock()
        before, self._seen = self._seen, (num_prompt, num_output)
        self.admission.observe(num_prompt - before[0], num_output - before[1], now - self._since)
        self._since = now
