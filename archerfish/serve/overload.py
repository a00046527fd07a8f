"""Overload control: which requests a model admits, the rate limits of tenants, and when a refused client may try again.

Each model has an `OverloadController`, which bounds its queue and refuses requests that would miss their deadline. Only
the loop of the engine process calls it, unless a comment says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from archerfish.errors import InputTooLargeError, InvalidInputError, ServiceError
from archerfish.sequence import OPEN_OUTPUT_TOKENS
from archerfish.serve.tenants import ANONYMOUS, Tenant

MAX_RETRY_AFTER_S = 60.0
CROWDED_SHARE = 0.5  # of the queue: above it no tenant may hold more than its own share
SAFETY_FACTOR = 1.5  # by which an estimate must be below a deadline while other requests are there
MAX_KNOWN_DEBTS = 2048  # of tenants, before those that were paid are forgotten


class RefusedError(ServiceError):
    """A request was refused; the client may try again after `retry_after_s`."""

    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float, *, hint: str | None = None) -> None:
        self.retry_after_s = retry_after_s
        wait = retry_after(retry_after_s)
        seconds = "1 second" if wait == "1" else f"{wait} seconds"
        super().__init__(message, hint=f"Try again in {seconds}." if hint is None else hint)


class RateLimitedError(RefusedError):
    """A tenant is over its own limit."""

    status, code = 429, "rate_limit_exceeded"


class OverLimitError(InputTooLargeError):
    """A single request asks for more than its tenant may use in a minute: trying again does not help."""

    code = "request_over_limit"


def retry_after(seconds: float) -> str:
    """The value of the Retry-After header: whole seconds, rounded up, at least 1."""
    return str(max(1, math.ceil(seconds - 1e-6)))  # a rounding error must not cost a whole second


class RateLimits:
    """Requests and tokens per minute of all tenants: at most the amount of one minute at once, and that amount on
    average.

    Only the loop of the engine process calls this. Tenants carry their limits, so that changed limits apply at once.
    The tokens of a request are estimated when it is admitted and corrected later, so a tenant may exceed its limit by
    what its running requests were underestimated; it pays for that before its next request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # What was taken and not refilled at a time, and that time.
        self._debts: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, tenant: Tenant, num_tokens: int) -> None:
        """Take one request and its tokens from a tenant's limits; nothing is taken if an error is raised."""
        per_minute = max(1.0, tenant.tokens_per_minute)
        if tenant.tokens_per_minute and num_tokens > per_minute:
            message = (
                f"The request may take about {num_tokens:,} tokens; {tenant.name!r} has {per_minute:,.0f} a minute."
            )
            raise OverLimitError(message, hint="Shorten the prompt or lower max_tokens.")
        for kind, limit, amount in limits_of(tenant, 1, num_tokens):
            excess = self._debt(tenant.name, kind, limit) + amount - max(1.0, limit) if limit else 0.0
            if excess > 1e-9 * limit:
                details = "" if kind == "requests" else f" This request may take about {amount:,} of them."
                message = f"{tenant.name!r} is over its limit of {max(1.0, limit):,.0f} {kind} a minute.{details}"
                raise RateLimitedError(message, excess * 60 / limit)
        self.give_back(tenant, -num_tokens, num_requests=-1)

    def give_back(self, tenant: Tenant, num_tokens: int, num_requests: int = 0) -> None:
        """Return what was taken and not used. Negative numbers take more, even if the limits do not allow it."""
        for kind, limit, amount in limits_of(tenant, num_requests, num_tokens):
            if limit and amount:
                debt, now = self._debt(tenant.name, kind, limit), self._clock()
                if len(self._debts) >= MAX_KNOWN_DEBTS and (tenant.name, kind) not in self._debts:
                    self._debts = {key: kept for key, kept in self._debts.items() if kept[0] and kept[1] > now - 3600}
                self._debts[tenant.name, kind] = max(0.0, debt - amount), now

    def _debt(self, name: str, kind: str, per_minute: float) -> float:
        debt, at = self._debts.get((name, kind), (0.0, 0.0))
        return max(0.0, debt - per_minute / 60 * (self._clock() - at))


def limits_of(tenant: Tenant, num_requests: int, num_tokens: int) -> Iterable[tuple[str, float, int]]:
    """What is limited, its limit per minute, and the amount of it."""
    return ("requests", tenant.requests_per_minute, num_requests), ("tokens", tenant.tokens_per_minute, num_tokens)


class BusyError(RefusedError):
    """The queue is full, or the wait would be too long."""

    status, code = 503, "overloaded"


class ShareUsedError(RefusedError):
    """The queue is crowded, and this tenant already holds its share of it."""

    status, code = 429, "queue_share_used"


class TooLateError(RefusedError):
    """The answer would miss its deadline because of other requests."""

    status, code = 503, "deadline_unreachable"


class ImpossibleDeadlineError(InvalidInputError):
    """The answer would miss its deadline even if nothing else ran: trying again does not help."""

    code = "deadline_impossible"
    param = "deadline_s"


def estimate_tokens(num_characters: int) -> int:
    """Tokens of a text that has not been tokenised, of four characters each."""
    return math.ceil(num_characters / 4)


# Admission


@dataclass(eq=False, slots=True)
class AdmittedRequest:
    """A request from its admission to its end. `num_output_tokens` may be set in any thread."""

    tenant: Tenant
    num_prompt_tokens: int = 0
    num_places: int = 1  # in the queue: one, or of an encoder the number of texts
    num_sequences: int = 1  # of an encoder none
    max_tokens: int | None = None  # of each sequence; None: the client left it open
    priority: int = 0
    deadline_s: float | None = None
    num_reserved: int = 0  # tokens taken from the limits of the tenant
    num_output_tokens: int = 0
    is_ended: bool = False


@dataclass(eq=False, kw_only=True)
class OverloadController:
    """Admits requests to one model, or refuses them with the time after which to try again.

    A generation request takes one place in the queue. A request to an encoder takes one place per text and has no
    output.
    """

    rates: RateLimits
    # Seconds that a request would wait while others are served, and seconds of its own service. The second argument is
    # the admitted requests that the queue of the model does not have yet. For any thread.
    expect: Callable[[AdmittedRequest, list[AdmittedRequest]], tuple[float, float]]
    max_queued: int = 4096  # requests, or texts of an encoder; may be changed. Here and below, 0 means no limit
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0  # of all n sequences together
    max_wait_s: float = 0.0  # expected wait of a request without a deadline
    max_tokens: int = 0  # the longest possible output of one sequence
    waiting: dict[AdmittedRequest, bool] = field(default_factory=dict)  # for a first token; whether `expect` sees it
    running: set[AdmittedRequest] = field(default_factory=set)

    # Admission

    def admit(self, request: AdmittedRequest, *, is_tokenized: bool = True) -> AdmittedRequest:
        """Admit a request or raise an error.

        is_tokenized: whether num_prompt_tokens was counted; an estimate is not compared with the limit of prompt
        tokens.
        """
        tenant, num_prompt_tokens = request.tenant, request.num_prompt_tokens
        if is_tokenized and 0 < self.max_prompt_tokens < num_prompt_tokens:
            raise self._too_long(num_prompt_tokens)
        most = self.max_tokens if request.max_tokens is None else min(request.max_tokens, self.max_tokens)
        limit, max_output = self.max_output_tokens, request.num_sequences * most
        if limit and max_output > limit:
            message = f"max_tokens, of all sequences together, is {max_output:,}; the limit is {limit:,}."
            raise InputTooLargeError(message, hint="Lower max_tokens or n.")
        if request.max_tokens is None:
            max_output = min(max_output, request.num_sequences * OPEN_OUTPUT_TOKENS)
        request.num_reserved = num_prompt_tokens + max_output
        self.rates.take(tenant, request.num_reserved)
        if self.waiting or self.running:  # an idle model admits everything: most of a prompt may be cached
            try:
                self._check_queue(request)
                self._check_time(request)
            except RefusedError:
                self.rates.give_back(tenant, request.num_reserved, num_requests=1)
                raise
        self.waiting[request] = False
        return request

    def check_deadline(self, deadline_s: float, alone_s: float, hint: str = "") -> None:
        """ImpossibleDeadlineError if an idle model would miss the deadline, counted from the arrival of the request."""
        if alone_s > deadline_s:
            reason = f"this takes about {alone_s:.2g} s even when nothing else runs"
            message = f"A deadline of {deadline_s:g} s cannot be met: {reason}."
            raise ImpossibleDeadlineError(message, hint=f"Give it more time (deadline_s){hint}.")

    def _too_long(self, num_prompt_tokens: int) -> InputTooLargeError:
        message = f"The prompt has {num_prompt_tokens:,} tokens; the limit is {self.max_prompt_tokens:,}."
        return InputTooLargeError(message, hint="Shorten it.")

    def _check_queue(self, request: AdmittedRequest) -> None:
        most, tenant, num_places = self.max_queued, request.tenant, self.num_places
        if not most or not num_places:
            return
        if num_places + request.num_places > most:
            message = f"The queue is full: {num_places:,} of {most:,} places are taken."
            raise BusyError(message, self._next_place_s(request, num_places))
        own = sum(one.num_places for one in self.waiting if one.tenant.name == tenant.name)
        weights = {one.tenant.name: one.tenant.weight for one in self.waiting if one.tenant.name != tenant.name}
        other_weights = sum(weights.values())
        share = max(1, math.floor(most * tenant.weight / (tenant.weight + other_weights)))
        if num_places >= CROWDED_SHARE * most and other_weights and own + request.num_places > share:
            message = f"The queue is crowded, and {tenant.name!r} holds {own:,} places; its share is {share:,}."
            raise ShareUsedError(message, self._next_place_s(request, own))

    def _next_place_s(self, request: AdmittedRequest, num_taken: int) -> float:
        """Seconds until a request finds its places, of taken ones that become free one after another."""
        return self._expect(request)[0] * min(1.0, request.num_places / num_taken)

    def _check_time(self, request: AdmittedRequest) -> None:
        deadline_s, (wait_s, service_s) = request.deadline_s, self._expect(request)
        total_s, max_wait_s = wait_s + service_s, self.max_wait_s
        if deadline_s is not None and SAFETY_FACTOR * total_s > deadline_s:
            hint = None
            if service_s > deadline_s:
                hint = f"Allow more than {service_s:.1f} s, which it takes without a wait, or ask for less."
            message = f"The answer is expected in {total_s:.1f} s, after the deadline of {deadline_s:.3g} s."
            raise TooLateError(message, min(total_s - deadline_s / SAFETY_FACTOR, wait_s), hint=hint)
        if deadline_s is None and max_wait_s and wait_s > max_wait_s:
            raise BusyError(f"The wait would be {wait_s:.1f} s; the limit is {max_wait_s:g} s.", wait_s - max_wait_s)

    def _expect(self, request: AdmittedRequest) -> tuple[float, float]:
        return self.expect(request, [one for one, is_read in list(self.waiting.items()) if not is_read])

    def retry_after_s(self, tenant: Tenant) -> float:
        """Seconds until a client may try again whose request was not served in time. For any thread."""
        return min(MAX_RETRY_AFTER_S, self._expect(AdmittedRequest(tenant))[0])

    # Events

    def set_prompt_tokens(self, request: AdmittedRequest, num_prompt_tokens: int) -> None:
        """Replace the estimated length of a prompt; InputTooLargeError if it is over the limit."""
        if request.is_ended:
            return
        difference = num_prompt_tokens - request.num_prompt_tokens
        request.num_prompt_tokens = num_prompt_tokens
        self.rates.give_back(request.tenant, -difference)
        request.num_reserved += difference
        if 0 < self.max_prompt_tokens < num_prompt_tokens:
            raise self._too_long(num_prompt_tokens)

    def enter(self, request: AdmittedRequest) -> None:
        """The request is in the queue of the model from now on."""
        if request in self.waiting:
            self.waiting[request] = True

    def start(self, request: AdmittedRequest) -> None:
        """The first token has come."""
        if not request.is_ended:
            self.waiting.pop(request, None)
            self.running.add(request)

    def end(self, request: AdmittedRequest) -> None:
        """The request is over, whatever its result. Further calls do nothing."""
        if request.is_ended:
            return
        self.start(request)
        request.is_ended = True
        self.running.discard(request)
        num_used = request.num_prompt_tokens + request.num_output_tokens
        self.rates.give_back(request.tenant, request.num_reserved - num_used)

    # Figures

    @property
    def num_places(self) -> int:
        """Places of the requests that wait. For any thread."""
        return sum(one.num_places for one in list(self.waiting))

    def stats(self) -> dict[str, float]:
        """For /stats; nothing here belongs to a single tenant."""
        num_waiting, wait_s = len(self.waiting), self.retry_after_s(ANONYMOUS)
        return {"queued_requests": num_waiting, "running_requests": len(self.running), "wait_seconds": wait_s}
