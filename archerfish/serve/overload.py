"""Overload control: which requests a model admits, the rate limits of tenants, and when a refused client may try again.

Each model has an `OverloadController`, which bounds its queue and refuses requests that would miss their deadline. Only
the loop of the engine process calls it, unless a comment says otherwise.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from archerfish.errors import InputTooLargeError, InvalidInputError, ServiceError
from archerfish.serve.tenants import Tenant

Array = npt.NDArray[np.float64]
Steps = deque[tuple[int, int, float]]  # prompt tokens, output tokens and seconds of each step
MAX_RETRY_AFTER_S = 60.0
OPEN_OUTPUT_TOKENS = 512  # output that is reserved for a request without max_tokens
CROWDED_SHARE = 0.5  # of the queue: above it no tenant may hold more than its own share
RECENT_STEPS = 16
STEPS_KEPT = 64  # of each kind, to which step costs are fitted
SAFETY_FACTOR = 1.5  # by which an estimate must be below a deadline while other requests are there
MAX_SLOWNESS = 2.5  # of a step, against its expected time
MAX_KNOWN_DEBTS = 2048  # of tenants, before those that were paid are forgotten
USED_SHARE_MEMORY = 64  # answers over which the used share of max_tokens is averaged


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
        self._debts: dict[
            tuple[str, str], tuple[float, float]
        ] = {}  # what was taken and not refilled at a time, and that time

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


# Estimates


class StepCost:
    """How long a step takes: step_s + prompt_token_s * prompt tokens + output_token_s * output tokens.

    The three numbers are fitted to the last steps with prompt tokens and the last steps without. Relative errors are
    minimised, and a step that is far too slow, such as the first one, which compiles kernels, counts as MAX_SLOWNESS
    times the expected time.
    """

    def __init__(self) -> None:
        self._with_prompt: Steps = deque(maxlen=STEPS_KEPT)
        self._without_prompt: Steps = deque(maxlen=STEPS_KEPT)
        self._fitted: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> None:
        if seconds > 0 and (num_prompt_tokens or num_output_tokens):
            steps = self._with_prompt if num_prompt_tokens else self._without_prompt
            steps.append((num_prompt_tokens, num_output_tokens, seconds))
            self._fitted = None

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """step_s, prompt_token_s and output_token_s; zeros before the first step. For any thread.

        A first fit weighs each step by the inverse of its time, which is too low where times vary. The second fit
        weighs it by the inverse of the expected time.
        """
        found = self._fitted
        if found is None:
            values = np.array([*self._with_prompt, *self._without_prompt], dtype=np.float64)
            rows, seconds = np.column_stack([np.ones(len(values)), values[:, :2]]), values[:, 2]
            expected = rows @ least_squares(rows / seconds[:, None], np.ones(len(rows)))
            expected = np.where(
                expected > 1e-6 * seconds, expected, seconds
            )  # no other step says anything of this kind
            slowness = np.minimum(seconds / expected, MAX_SLOWNESS)
            step_s, prompt_token_s, output_token_s = least_squares(rows / expected[:, None], slowness)
            found = self._fitted = float(step_s), float(prompt_token_s), float(output_token_s)
        return found

    def step_s(self, num_output_tokens: float) -> float:
        """A step without prompt tokens."""
        step_s, _, output_token_s = self.coefficients
        return step_s + output_token_s * num_output_tokens if num_output_tokens else 0.0

    def prompt_s(self, num_tokens: float, num_running: float = 0) -> float:
        """Prompt tokens in steps as large as the largest recent one, which also bring a token to each running
        sequence."""
        if not num_tokens or not self._with_prompt:
            return 0.0
        step_s, prompt_token_s, output_token_s = self.coefficients
        num_steps = max(1.0, num_tokens / self.largest_prompt_step)
        return prompt_token_s * num_tokens + num_steps * (step_s + output_token_s * num_running)

    def mean_prompt_token_s(self, num_running: float) -> float:
        """A prompt token with its share of a step; 0 before the first."""
        return self.prompt_s(self.largest_prompt_step, num_running) / max(1, self.largest_prompt_step)

    @property
    def largest_prompt_step(self) -> int:
        return max((step[0] for step in list(self._with_prompt)), default=0)

    @property
    def single_step_s(self) -> float:
        """A step that brings one token to one sequence; 0 unless such a step was measured."""
        return self.step_s(1) if any(step[1] == 1 for step in list(self._without_prompt)) else 0.0

    def tokens_per_s(self) -> tuple[float, float]:
        """Prompt tokens per second of steps with prompts, and output tokens per second of steps without."""
        sums = [np.sum([(0, 0, 0.0), *steps], axis=0).tolist() for steps in (self._with_prompt, self._without_prompt)]
        (num_prompt, _, prompt_s), (_, num_output, decode_s) = sums
        return num_prompt / (prompt_s or 1.0), num_output / (decode_s or 1.0)


def least_squares(rows: Array, wanted: Array) -> Array:
    """Non-negative x that minimises |rows @ x - wanted|. Columns that cannot be told apart: the second one gets the
    weight."""
    scale = np.maximum(rows.max(axis=0), 1e-12)
    scaled, ridge = rows / scale, np.array([1e-3, 1e-5, 1e-3])
    found, active = np.zeros(3), [0, 1, 2]
    while True:
        part = scaled[:, active]
        solved = np.linalg.solve(part.T @ part + np.diag(ridge[active]), part.T @ wanted)
        if solved.min() >= 0:
            found[active] = solved / scale[active]
            return found
        del active[int(solved.argmin())]


def estimate_tokens(num_characters: int) -> int:
    """Tokens of a text that has not been tokenised, of four characters each."""
    return math.ceil(num_characters / 4)


# Admission


@dataclass(slots=True)
class Backlog:
    """A request that waits, all waiting requests of a tenant, or a part of them."""

    num_requests: float = 0
    num_places: float = 0
    num_sequences: float = 0
    num_prompt_tokens: float = 0
    num_output_tokens: float = 0
    weight: float = 1.0  # of the tenant

    def add(self, other: Backlog, factor: float = 1) -> None:
        self.num_requests += factor * other.num_requests
        self.num_places += factor * other.num_places
        self.num_sequences += factor * other.num_sequences
        self.num_prompt_tokens += factor * other.num_prompt_tokens
        self.num_output_tokens += factor * other.num_output_tokens


@dataclass(eq=False, slots=True)
class AdmittedRequest:
    """A request from its admission to its end. `num_output_tokens` and `is_complete` may be set in any thread."""

    tenant: Tenant
    size: Backlog  # with the output tokens that are expected
    max_output_tokens: int
    num_reserved: int  # tokens taken from the limits of the tenant
    num_output_tokens: int = 0
    is_complete: bool = False  # whether the answer was complete when the request ended
    is_queued: bool = True
    is_ended: bool = False


@dataclass(eq=False, kw_only=True)
class OverloadController:
    """Admits requests to one model, or refuses them with the time after which to try again.

    A generation request takes one place in the queue. A request to an encoder takes one place per text and has no
    output.
    """

    rates: RateLimits
    max_queued: int = (
        4096  # requests, or texts of an encoder; may be changed. Here and in what follows, 0 stands for no limit
    )
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0  # of all n sequences together
    max_wait_s: float = 0.0  # expected wait of a request without a deadline
    max_running: int = 1  # sequences that run at once
    max_tokens: int = 0  # the longest possible output of one sequence
    # The order in which waiting requests are served: by arrival, by shares of tenants, or one text of each request in
    # turn.
    order: Literal["arrival", "fair-share", "round-robin"] = "arrival"
    clock: Callable[[], float] = time.monotonic
    cost: StepCost = field(default_factory=StepCost)
    running: set[AdmittedRequest] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._queues: dict[str, Backlog] = {}  # of tenants with waiting requests
        self._used_share = 1.0  # of max_tokens, on average
        self._num_answers = 0
        self._tokens_done = (0, 0)
        self._step_began = self.clock()
        self._recent_steps: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds

    # Admission

    def admit(
        self,
        tenant: Tenant,
        *,
        num_prompt_tokens: int,
        is_tokenized: bool = True,
        num_places: int = 1,
        num_sequences: int = 0,
        max_tokens: int | None = 0,
        deadline_s: float | None = None,
    ) -> AdmittedRequest:
        """Admit a request or raise an error.

        max_tokens: of each sequence, None if the client left it open. An encoder has no sequences. is_tokenized:
        whether num_prompt_tokens was counted; an estimate is not compared with the limit of prompt tokens.
        """
        if is_tokenized and 0 < self.max_prompt_tokens < num_prompt_tokens:
            raise self._too_long(num_prompt_tokens)
        max_output = num_sequences * (self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens))
        limit = self.max_output_tokens
        if limit and max_output > limit:
            message = f"max_tokens, of all sequences together, is {max_output:,}; the limit is {limit:,}."
            raise InputTooLargeError(message, hint="Lower max_tokens or n.")
        if max_tokens is None:
            max_output = min(max_output, num_sequences * OPEN_OUTPUT_TOKENS)
        num_output = round(max_output * self._used_share)
        size = Backlog(1, num_places, num_sequences, num_prompt_tokens, num_output, tenant.weight)
        num_reserved = num_prompt_tokens + max_output
        self.rates.take(tenant, num_reserved)
        if (
            self._queues or self.running
        ):  # an idle model admits everything: a prompt may be cached, its estimate far too long
            try:
                self._check_queue(tenant, num_places)
                self._check_time(tenant, size, deadline_s)
            except RefusedError:
                self.rates.give_back(tenant, num_reserved, num_requests=1)
                raise
        self._add_to_queue(tenant, size)
        return AdmittedRequest(tenant, size, max_output, num_reserved)

    def check_deadline(self, deadline_s: float, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """ImpossibleDeadlineError if an idle model would miss the deadline, counted from the arrival of the request.

        num_prompt_tokens: 0 if the prompt may be cached. Long texts are not taken to cost more than the largest job
        measured.
        """
        num_tokens = 1 if max_tokens is None else max(1, round(min(max_tokens, self.max_tokens) * self._used_share))
        alone_s = self.cost.prompt_s(min(num_prompt_tokens, self.cost.largest_prompt_step))
        if self.max_tokens:
            alone_s += num_tokens * self.cost.single_step_s
        if alone_s > deadline_s:
            reason = f"this takes about {alone_s:.2g} s even when nothing else runs"
            message = f"A deadline of {deadline_s:g} s cannot be met: {reason}."
            hint = f"Give it more time (deadline_s){' or lower max_tokens' if num_tokens > 1 else ''}."
            raise ImpossibleDeadlineError(message, hint=hint)

    def _too_long(self, num_prompt_tokens: int) -> InputTooLargeError:
        message = f"The prompt has {num_prompt_tokens:,} tokens; the limit is {self.max_prompt_tokens:,}."
        return InputTooLargeError(message, hint="Shorten it.")

    def _check_queue(self, tenant: Tenant, num_places: int) -> None:
        most, queue = self.max_queued, self.queue
        if not most or not queue.num_places:
            return
        next_place_s = self.drain_s() / (len(self.running) + queue.num_places)
        if queue.num_places + num_places > most:
            raise BusyError(f"The queue is full: {queue.num_places:,.0f} of {most:,} places are taken.", next_place_s)
        own = self._queues.get(tenant.name, Backlog())
        other_weights = sum(other.weight for name, other in self._queues.items() if name != tenant.name)
        weights = tenant.weight + other_weights
        share = max(1, math.floor(most * tenant.weight / weights))
        if queue.num_places >= CROWDED_SHARE * most and other_weights and own.num_places + num_places > share:
            message = (
                f"The queue is crowded, and {tenant.name!r} holds {own.num_places:,.0f} places; its share is {share:,}."
            )
            raise ShareUsedError(message, next_place_s * weights / tenant.weight)

    def _check_time(self, tenant: Tenant, size: Backlog, deadline_s: float | None) -> None:
        wait_s, service_s = self.estimate(tenant, size)
        total_s, max_wait_s = wait_s + service_s, self.max_wait_s
        if deadline_s is not None and SAFETY_FACTOR * total_s > deadline_s:
            hint = None
            if service_s > deadline_s:
                hint = f"Allow more than {service_s:.1f} s, which it takes without a wait, or ask for less."
            message = f"The answer is expected in {total_s:.1f} s, after the deadline of {deadline_s:.3g} s."
            raise TooLateError(message, min(total_s - deadline_s / SAFETY_FACTOR, wait_s), hint=hint)
        if deadline_s is None and max_wait_s and wait_s > max_wait_s:
            raise BusyError(f"The wait would be {wait_s:.1f} s; the limit is {max_wait_s:g} s.", wait_s - max_wait_s)

    # Estimates

    def estimate(self, tenant: Tenant, size: Backlog) -> tuple[float, float]:
        """How long a request would wait that came now, and how long its service would take; zeros before the first
        step."""
        ahead = self._ahead(tenant, size)
        num_running = sum(request.size.num_sequences for request in self.running)
        num_live = num_running + ahead.num_sequences
        step_s = self.cost.step_s(min(self.max_running, math.ceil(num_live) + size.num_sequences))
        wait_s = self.cost.prompt_s(ahead.num_prompt_tokens, num_running)
        num_leaving = num_live + size.num_sequences - self.max_running
        if num_leaving > 0 and num_live:  # as many must end first, at the rate at which a full batch ends
            num_output = self._num_expected_tokens() + ahead.num_output_tokens
            wait_s += min(1.0, num_leaving / num_live) * num_output * step_s / self.max_running
        if (
            self.running and len(self._recent_steps) == RECENT_STEPS
        ):  # prompts of later requests will slow down steps as before
            step_s = max(step_s, sum(self._recent_steps) / RECENT_STEPS)
        num_steps = size.num_output_tokens / max(1, size.num_sequences)
        return wait_s, self.cost.prompt_s(size.num_prompt_tokens) + num_steps * step_s

    def _ahead(self, tenant: Tenant, size: Backlog) -> Backlog:
        """What waits and will be served before the next request of a tenant."""
        queue = self.queue
        ahead = Backlog()
        if self.order == "arrival":
            return queue
        if self.order == "round-robin":
            share = min(1.0, queue.num_requests * size.num_places / queue.num_places) if queue.num_places else 0.0
            ahead.add(queue, share)
            return ahead
        own = self._queues.get(tenant.name, Backlog())
        for name, other in self._queues.items():
            turns = (own.num_requests + 1) * other.weight / tenant.weight
            ahead.add(other, 1.0 if name == tenant.name else min(1.0, turns / other.num_requests))
        return ahead

    def _num_expected_tokens(self) -> float:
        """Output tokens that running requests are still expected to bring."""
        return sum(max(0.0, one.size.num_output_tokens - one.num_output_tokens) for one in list(self.running))

    def drain_s(self) -> float:
        """Until everything that is admitted now has been served. For any thread."""
        queue = self.queue
        num_live = sum(request.size.num_sequences for request in list(self.running)) + queue.num_sequences
        batch = max(1.0, min(self.max_running, num_live))
        output_s = (self._num_expected_tokens() + queue.num_output_tokens) * self.cost.step_s(batch) / batch
        return self.cost.prompt_s(queue.num_prompt_tokens) + output_s

    def retry_after_s(self) -> float:
        """Seconds until a client may try again whose request was not served in time. For any thread."""
        return min(MAX_RETRY_AFTER_S, self.drain_s())

    # Events

    def set_prompt_tokens(self, request: AdmittedRequest, num_prompt_tokens: int) -> None:
        """Replace the estimated length of a prompt; InputTooLargeError if it is over the limit."""
        difference = num_prompt_tokens - int(request.size.num_prompt_tokens)
        if request.is_ended:
            return
        if request.is_queued:
            self._add_to_queue(request.tenant, Backlog(num_prompt_tokens=difference))
        request.size.num_prompt_tokens = num_prompt_tokens
        self.rates.give_back(request.tenant, -difference)
        request.num_reserved += difference
        if 0 < self.max_prompt_tokens < num_prompt_tokens:
            raise self._too_long(num_prompt_tokens)

    def start(self, request: AdmittedRequest) -> None:
        """The first token has come: the request leaves the queue."""
        if request.is_queued:
            request.is_queued = False
            self._add_to_queue(request.tenant, request.size, -1)
            self.running.add(request)

    def end(self, request: AdmittedRequest) -> None:
        """The request is over, whatever its result. Further calls do nothing."""
        if request.is_ended:
            return
        self.start(request)
        request.is_ended = True
        self.running.discard(request)
        num_used = int(request.size.num_prompt_tokens) + request.num_output_tokens
        self.rates.give_back(request.tenant, request.num_reserved - num_used)
        if request.is_complete and request.max_output_tokens:
            self._num_answers = min(USED_SHARE_MEMORY, self._num_answers + 1)
            share = min(1.0, request.num_output_tokens / request.max_output_tokens)
            self._used_share += (share - self._used_share) / self._num_answers

    def _add_to_queue(self, tenant: Tenant, size: Backlog, sign: int = 1) -> None:
        queue = self._queues.setdefault(tenant.name, Backlog())
        queue.weight = tenant.weight
        queue.add(size, sign)
        if not queue.num_requests:
            del self._queues[tenant.name]

    def begin_work(self) -> None:
        """The engine was idle and begins to work now: the time before does not count as slowness."""
        self._step_began = self.clock()
        self._recent_steps.clear()

    def observe(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The engine has computed so many tokens in all. A step has ended if a number has grown."""
        num_prompt, num_output = num_prompt_tokens - self._tokens_done[0], num_output_tokens - self._tokens_done[1]
        if num_prompt or num_output:
            self._tokens_done = num_prompt_tokens, num_output_tokens
            now = self.clock()
            seconds, self._step_began = now - self._step_began, now
            self.cost.observe(num_prompt, num_output, seconds)
            self._recent_steps.append(seconds)

    # Figures

    @property
    def queue(self) -> Backlog:
        """The requests of all tenants that wait. For any thread."""
        total = Backlog()
        for queue in list(self._queues.values()):
            total.add(queue)
        return total

    def stats(self) -> dict[str, float]:
        """For /stats and /metrics; nothing here belongs to a single tenant."""
        queue, (prefill_rate, decode_rate) = self.queue, self.cost.tokens_per_s()
        return {
            "queued_requests": queue.num_requests,
            "running_requests": len(self.running),
            "queued_prompt_tokens": queue.num_prompt_tokens,
            "drain_seconds": self.drain_s(),
            "expected_output_tokens": self._num_expected_tokens() + queue.num_output_tokens,
            "prefill_tokens_per_second": prefill_rate,
            "decode_tokens_per_second": decode_rate,
        }
