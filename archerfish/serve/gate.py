"""Gates in front of models: limits of tenants, room in the queue, and what can be answered in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from archerfish.sequence import FinishReason
from archerfish.serve.admission import (
    BESIDE_OTHERS,
    USUAL_BYTES_PER_TOKEN,
    Admission,
    AdmissionLimits,
    BusyError,
    Entry,
    TooLateError,
    next_margin,
)
from archerfish.serve.limits import RateLimits, Reservation
from archerfish.serve.service_rate import Average, Ratio
from archerfish.serve.tenants import Tenant

MAX_RETRY_AFTER_S = 60.0
USUAL_OUTPUT = 512  # tokens that are reserved for an answer whose length is left open; it pays in the end for what it had


class Pass:
    """A request that was let in, until it is over. Methods are for the thread of its `Gate`; the counts are for any."""

    __slots__ = ("_entry", "_reservation", "num_output", "num_prompt", "reason")

    def __init__(self, entry: Entry, reservation: Reservation) -> None:
        self._entry, self._reservation = entry, reservation
        self.num_prompt = entry.num_prompt_tokens
        self.num_output = 0  # tokens of the answer so far
        self.reason: FinishReason = "abort"  # why it ended, unless somebody says otherwise before it does

    def tokenized(self, num_prompt: int) -> None:
        """The real length of the prompt; InputTooLargeError where it is over the limit."""
        self._reservation.change(num_prompt + self._reservation.num_tokens - self.num_prompt)
        self.num_prompt = num_prompt
        self._entry.tokenized(num_prompt)

    def started(self) -> None:
        """Its first token has come."""
        self._entry.started()

    def ended(self) -> None:
        """It is over; once is enough."""
        if self._reservation.is_open:
            self._entry.ended(self.num_output, self.reason)
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
        reserved = min(most, USUAL_OUTPUT) if max_tokens is None else most
        reservation = self.rates.admit(tenant, num_prompt + reserved * num_sequences)
        if not admission.num_queued and not admission.num_running:
            self._since = self._clock()
        try:
            entry = admission.admit(
                tenant, most, num_sequences=num_sequences, num_prompt_tokens=num_prompt if known else None,
                num_prompt_bytes=num_prompt_bytes, deadline_s=deadline_s,
            )
        except BaseException:
            reservation.cancel()
            raise
        return Pass(entry, reservation)

    def check_deadline(self, deadline_s: float, max_tokens: int | None) -> None:
        """ImpossibleDeadlineError for one that no waiting would help. deadline_s: all of it, not what is left."""
        self.admission.check_deadline(deadline_s, None if max_tokens is None else min(max_tokens, self.max_tokens))

    def set_queue(self, max_requests: int) -> None:
        """Another limit of the queue, for those who come from now on."""
        self.admission.limits = replace(self.admission.limits, max_queued_requests=max_requests)

    def retry_after_s(self) -> float:
        """When to come back for who was refused for want of room, or of time."""
        return min(MAX_RETRY_AFTER_S, self.admission.drain_s())

    def watch(self, num_prompt: int, num_output: int) -> None:
        """Learn from the counters of the engine how fast it is: tokens of prompts computed and tokens brought, in all."""
        if (num_prompt, num_output) == self._seen:
            return
        now = self._clock()
        before, self._seen = self._seen, (num_prompt, num_output)
        if self.admission.num_queued or self.admission.num_running:  # else a probe after an idle time, which would count
            self.admission.observe(num_prompt - before[0], num_output - before[1], now - self._since)
        self._since = now


class ReadingPass:
    """Texts that were let in to be read, until their request is over. For the thread of its gate."""

    __slots__ = ("_gate", "_num_bytes", "_reservation", "arrived", "deadline_s", "is_late", "num_texts", "num_tokens")

    def __init__(
        self, gate: ReadingGate, reservation: Reservation, num_texts: int, num_tokens: int, num_bytes: int,
        deadline_s: float | None,
    ) -> None:
        self._gate, self._reservation = gate, reservation
        self.num_texts, self.num_tokens = num_texts, num_tokens
        self._num_bytes = num_bytes  # of which the tokens are estimated; 0 where they were counted
        self.deadline_s, self.arrived = deadline_s, gate.clock()
        self.is_late: bool | None = None  # whether its answer came too late; None: there was none

    def tokenized(self, num_tokens: int) -> None:
        """How many tokens there really are."""
        if self._reservation.is_open:
            self._gate.num_tokens += num_tokens - self.num_tokens
            self._reservation.change(num_tokens)
            self._gate.learn_size(self._num_bytes, num_tokens)
            self.num_tokens = num_tokens

    def ended(self) -> None:
        """It is over; once is enough."""
        if self._reservation.is_open:
            self._reservation.settle(self.num_tokens)
            self._gate.leave(self)


class ReadingGate:
    """Lets texts in to a model that reads and writes nothing, one text of each request in turn."""

    def __init__(self, rates: RateLimits, *, max_wait_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """max_wait_s: what a request without a deadline may be expected to wait; 0: no limit."""
        self.rates, self.max_wait_s = rates, max_wait_s
        self.num_requests = self.num_texts = self.num_tokens = 0  # inside
        self.margin = 1.0  # as that of Admission
        self.clock = clock
        self._speed = Ratio()  # seconds, tokens
        self._bytes_per_token = Average()
        self._since = clock()

    def admit(
        self, tenant: Tenant, num_texts: int, *, num_tokens: int = 0, num_bytes: int = 0, deadline_s: float | None = None
    ) -> ReadingPass:
        """num_tokens of texts that came as ids, num_bytes of the others, whose tokens are estimated."""
        known, num_tokens = num_tokens, self.estimate_tokens(num_tokens, num_bytes)
        reservation = self.rates.admit(tenant, num_tokens)
        if not self.num_requests:
            self._since = self.clock()
        try:
            self._check_time(num_texts, num_tokens, deadline_s)
        except BaseException:
            reservation.cancel()
            raise
        self.num_requests += 1
        self.num_texts += num_texts
        self.num_tokens += num_tokens
        return ReadingPass(self, reservation, num_texts, num_tokens, 0 if known else num_bytes, deadline_s)

    def estimate_tokens(self, num_tokens: int, num_bytes: int) -> int:
        """Of texts that came as so many ids, and of others with so many bytes."""
        return num_tokens + round(num_bytes / self._size_of_token)

    @property
    def _size_of_token(self) -> float:
        return self._bytes_per_token.value or USUAL_BYTES_PER_TOKEN

    def wait_s(self, num_texts: int) -> float:
        """What a request that comes now waits, in all, for others: each of them has as many texts read as itself."""
        if not self.num_texts:
            return 0.0
        num_ahead = min(self.num_texts, self.num_requests * num_texts)
        return num_ahead / self.num_texts * self.num_tokens * (self._speed.value or 0.0)

    def retry_after_s(self) -> float:
        """When all that is inside now has been read."""
        return min(MAX_RETRY_AFTER_S, self.num_tokens * (self._speed.value or 0.0))

    def _check_time(self, num_texts: int, num_tokens: int, deadline_s: float | None) -> None:
        wait_s = self.wait_s(num_texts)
        total_s = wait_s + num_tokens * (self._speed.value or 0.0)
        margin = self.margin * (BESIDE_OTHERS if self.num_requests else 1.0)
        if deadline_s is not None and margin * total_s > deadline_s:
            message = f"The answer is expected in {total_s:.1f} s; the deadline is too near."
            character_s = (self._speed.value or 0.0) / self._size_of_token
            needs_s = margin * total_s, margin * character_s
            raise TooLateError(message, min(total_s - deadline_s / margin, wait_s), needs_s=needs_s)
        if deadline_s is None and self.max_wait_s and wait_s > self.max_wait_s:
            message = f"The wait would be {wait_s:.1f} s; the limit is {self.max_wait_s:g} s."
            raise BusyError(message, wait_s - self.max_wait_s)

    def observe(self, num_tokens: int) -> None:
        """So many tokens have been read since the last time, or since work began."""
        now = self.clock()
        if now > self._since and self.num_requests:  # without any: a probe after an idle time
            self._speed.add(now - self._since, num_tokens)
        self._since = now

    def learn_size(self, num_bytes: int, num_tokens: int) -> None:
        if num_bytes and num_tokens:
            self._bytes_per_token.add(num_bytes / num_tokens)

    def leave(self, entry: ReadingPass) -> None:
        self.num_requests -= 1
        self.num_texts -= entry.num_texts
        self.num_tokens -= entry.num_tokens
        if entry.deadline_s is not None and entry.is_late is not None:
            self.margin = next_margin(self.margin, entry.deadline_s, self.clock() - entry.arrived, entry.is_late)
