"""Overload control: which requests a model admits, and when a refused client may try again.

Each model has an `OverloadController`, which bounds its queue and refuses requests that would miss their deadline. Only the
loop of the engine process calls it, unless a comment says otherwise.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.serve.limits import RateLimits, RefusedError
from archerfish.serve.tenants import Tenant

Array = npt.NDArray[np.float64]
MAX_RETRY_AFTER_S = 60.0
OPEN_OUTPUT_TOKENS = 512  # output that is reserved for a request without max_tokens
CHARACTERS_PER_TOKEN = 4  # of a text that has not been tokenised
CROWDED_SHARE = 0.5  # of the queue: above it no tenant may hold more than its own share
RECENT_STEPS = 16
STEPS_KEPT = 64  # of each kind, to which step costs are fitted
SAFETY_FACTOR = 1.5  # by which an estimate must be below a deadline while other requests are there
MAX_SLOWNESS = 2.5  # of a step, against its expected time
USED_SHARE_MEMORY = 64  # answers over which the used share of max_tokens is averaged


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

    def __init__(self, deadline_s: float, alone_s: float, *, hint: str = "") -> None:
        super().__init__(
            f"A deadline of {deadline_s:g} s cannot be met: this takes about {alone_s:.2g} s even when nothing else runs.",
            hint=f"Give it more time (deadline_s){hint}.",
        )


# Estimates


class StepCost:
    """How long a step takes: step_s + prompt_token_s * prompt tokens + output_token_s * output tokens.

    The three numbers are fitted to the last steps with prompt tokens and the last steps without. Relative errors are minimised,
    and a step that is far too slow, such as the first one, which compiles kernels, counts as MAX_SLOWNESS times the expected
    time.
    """

    def __init__(self) -> None:
        self._with_prompt: deque[tuple[int, int, float]] = deque(maxlen=STEPS_KEPT)
        self._without_prompt: deque[tuple[int, int, float]] = deque(maxlen=STEPS_KEPT)
        self._fitted: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> None:
        if seconds > 0 and (num_prompt_tokens or num_output_tokens):
            steps = self._with_prompt if num_prompt_tokens else self._without_prompt
            steps.append((num_prompt_tokens, num_output_tokens, seconds))
            self._fitted = None

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """step_s, prompt_token_s and output_token_s; zeros before the first step. For any thread."""
        found = self._fitted
        if found is None:
            found = self._fitted = fit_steps([*self._with_prompt, *self._without_prompt])
        return found

    def step_s(self, num_output_tokens: float) -> float:
        """A step without prompt tokens."""
        step_s, _, output_token_s = self.coefficients
        return step_s + output_token_s * num_output_tokens if num_output_tokens else 0.0

    def prompt_s(self, num_tokens: float, num_running: float = 0) -> float:
        """Prompt tokens in steps as large as the largest of late, which also bring a token to each running sequence."""
        if not num_tokens or not self._with_prompt:
            return 0.0
        step_s, prompt_token_s, output_token_s = self.coefficients
        num_steps = max(1.0, num_tokens / self.largest_prompt_step)
        return prompt_token_s * num_tokens + num_steps * (step_s + output_token_s * num_running)

    @property
    def largest_prompt_step(self) -> int:
        return max((step[0] for step in list(self._with_prompt)), default=0)

    @property
    def single_step_s(self) -> float:
        """A step that brings one token to one sequence; 0 unless such a step was measured."""
        is_known = any(step[1] == 1 for step in list(self._without_prompt))
        return self.step_s(1) if is_known else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return tokens_per_s(list(self._with_prompt), 0)

    @property
    def output_tokens_per_s(self) -> float:
        return tokens_per_s(list(self._without_prompt), 1)


def fit_steps(steps: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """step_s, prompt_token_s and output_token_s that fit measured steps.

    A first fit weighs each step by the inverse of its time, which is too low where times vary. The second fit weighs it by the
    inverse of the expected time.
    """
    values = np.array(steps, dtype=np.float64)
    rows, seconds = np.column_stack([np.ones(len(values)), values[:, :2]]), values[:, 2]
    expected = rows @ least_squares(rows / seconds[:, None], np.ones(len(rows)))
    slowness = np.minimum(seconds / expected, MAX_SLOWNESS)
    step_s, prompt_token_s, output_token_s = least_squares(rows / expected[:, None], slowness)
    return float(step_s), float(prompt_token_s), float(output_token_s)


def least_squares(rows: Array, wanted: Array) -> Array:
    """Non-negative x that minimises |rows @ x - wanted|. What cannot be told apart goes to the second column first."""
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


def tokens_per_s(steps: list[tuple[int, int, float]], column: Literal[0, 1]) -> float:
    seconds = sum(step[2] for step in steps)
    return sum(step[column] for step in steps) / seconds if seconds else 0.0


def estimate_tokens(num_characters: int) -> int:
    """Tokens of a text that has not been tokenised."""
    return math.ceil(num_characters / CHARACTERS_PER_TOKEN)


@dataclass(frozen=True)
class Estimate:
    """How long a request would take, in seconds."""

    wait_s: float  # until its prompt is begun
    service_s: float  # from then to its last token

    @property
    def total_s(self) -> float:
        return self.wait_s + self.service_s


# Admission


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Bounds of one model; 0 stands for no limit."""

    max_queued: int = 4096  # requests, or texts of an encoder
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0  # of all n sequences together
    max_wait_s: float = 0.0  # expected wait of a request without a deadline


@dataclass(slots=True)
class Backlog:
    """Requests of one tenant that wait, or parts of them."""

    weight: float = 1.0
    num_requests: float = 0
    num_places: float = 0
    num_sequences: float = 0
    num_prompt_tokens: float = 0
    num_output_tokens: float = 0

    def add(self, other: Backlog, factor: float = 1) -> None:
        self.num_requests += factor * other.num_requests
        self.num_places += factor * other.num_places
        self.num_sequences += factor * other.num_sequences
        self.num_prompt_tokens += factor * other.num_prompt_tokens
        self.num_output_tokens += factor * other.num_output_tokens


class AdmittedRequest:
    """A request from its admission to its end. `num_output_tokens` and `is_complete` may be set in any thread."""

    __slots__ = (
        "_controller", "_num_reserved", "is_complete", "is_ended", "is_queued", "max_output_tokens", "num_output_tokens",
        "size", "tenant",
    )  # fmt: skip

    def __init__(
        self, controller: OverloadController, tenant: Tenant, size: Backlog, max_output_tokens: int, num_reserved: int
    ) -> None:
        self._controller, self.tenant, self.size = controller, tenant, size
        self.max_output_tokens = max_output_tokens
        self._num_reserved = num_reserved  # tokens taken from the limits of the tenant
        self.num_output_tokens = 0
        self.is_complete = False  # whether the answer was complete when the request ended
        self.is_queued, self.is_ended = True, False

    def set_prompt_tokens(self, num_prompt_tokens: int) -> None:
        """Replace the estimated length of the prompt; InputTooLargeError if it is over the limit."""
        if self.is_ended:
            return
        difference = num_prompt_tokens - int(self.size.num_prompt_tokens)
        if self.is_queued:
            self._controller.add_to_queue(self.tenant, Backlog(num_prompt_tokens=difference))
        self.size.num_prompt_tokens = num_prompt_tokens
        self._reserve(self._num_reserved + difference)
        self._controller.check_prompt_tokens(num_prompt_tokens)

    def start(self) -> None:
        """The first token has come: the request leaves the queue."""
        if self.is_queued and not self.is_ended:
            self._controller.leave_queue(self)
            self._controller.running.add(self)

    def end(self) -> None:
        """The request is over, whatever its result. Further calls do nothing."""
        if self.is_ended:
            return
        if self.is_queued:
            self._controller.leave_queue(self)
        self.is_ended = True
        self._controller.running.discard(self)
        self._reserve(int(self.size.num_prompt_tokens) + self.num_output_tokens)
        if self.is_complete and self.max_output_tokens:
            self._controller.learn_used_share(self.num_output_tokens / self.max_output_tokens)

    def _reserve(self, num_tokens: int) -> None:
        self._controller.rates.give_back(self.tenant, self._num_reserved - num_tokens)
        self._num_reserved = num_tokens

    @property
    def num_expected_tokens(self) -> float:
        """Output tokens that are still expected."""
        return max(0.0, self.size.num_output_tokens - self.num_output_tokens)


@dataclass(eq=False, kw_only=True)
class OverloadController:
    """Admits requests to one model, or refuses them with the time after which to try again.

    A generation request takes one place in the queue. A request to an encoder takes one place per text and has no output.
    """

    rates: RateLimits
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    max_running: int = 1  # sequences that run at once
    max_tokens: int = 0  # the longest possible output of one sequence
    # The order in which waiting requests are served: by arrival, by shares of tenants, or one text of each request in turn.
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
        self, tenant: Tenant, *, num_prompt_tokens: int, is_tokenized: bool = True, num_places: int = 1, num_sequences: int = 0,
        max_tokens: int | None = 0, deadline_s: float | None = None,
    ) -> AdmittedRequest:
        """Admit a request or raise an error.

        max_tokens: of each sequence, None if the client left it open. An encoder has no sequences. is_tokenized: whether
        num_prompt_tokens was counted; an estimate is not compared with the limit of prompt tokens.
        """
        if is_tokenized:
            self.check_prompt_tokens(num_prompt_tokens)
        max_output = num_sequences * (self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens))
        self._check_output_tokens(max_output)
        if max_tokens is None:
            max_output = min(max_output, num_sequences * OPEN_OUTPUT_TOKENS)
        size = Backlog(
            num_requests=1, num_places=num_places, num_sequences=num_sequences, num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=round(max_output * self._used_share),
        )
        num_reserved = num_prompt_tokens + max_output
        self.rates.take(tenant, num_reserved)
        try:
            self._check_queue(tenant, num_places)
            self._check_time(tenant, size, deadline_s)
        except RefusedError:
            self.rates.give_back(tenant, num_reserved, num_requests=1)
            raise
        self.add_to_queue(tenant, size)
        return AdmittedRequest(self, tenant, size, max_output, num_reserved)

    def check_deadline(self, deadline_s: float, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """ImpossibleDeadlineError if an idle model would miss the deadline, counted from the arrival of the request.

        num_prompt_tokens: 0 if the prompt may be cached. Long texts are not taken to cost more than the largest job measured.
        """
        num_tokens = 1 if max_tokens is None else max(1, round(min(max_tokens, self.max_tokens) * self._used_share))
        alone_s = self.cost.prompt_s(min(num_prompt_tokens, self.cost.largest_prompt_step))
        if self.max_tokens:
            alone_s += num_tokens * self.cost.single_step_s
        if alone_s > deadline_s:
            raise ImpossibleDeadlineError(deadline_s, alone_s, hint=" or lower max_tokens" if num_tokens > 1 else "")

    def check_prompt_tokens(self, num_prompt_tokens: int) -> None:
        limit = self.limits.max_prompt_tokens
        if limit and num_prompt_tokens > limit:
            raise InputTooLargeError(
                f"The prompt has {num_prompt_tokens:,} tokens; the limit is {limit:,}.", hint="Shorten it."
            )

    def _check_output_tokens(self, max_output_tokens: int) -> None:
        limit = self.limits.max_output_tokens
        if limit and max_output_tokens > limit:
            raise InputTooLargeError(
                f"max_tokens, of all sequences together, is {max_output_tokens:,}; the limit is {limit:,}.",
                hint="Lower max_tokens or n.",
            )

    def _check_queue(self, tenant: Tenant, num_places: int) -> None:
        most, queue = self.limits.max_queued, self.queue
        if not most or not queue.num_places:
            return
        if queue.num_places + num_places > most:
            raise BusyError(f"The queue is full: {queue.num_places:,.0f} of {most:,} places are taken.", self._next_place_s())
        own = self._queues.get(tenant.name, Backlog())
        weights = tenant.weight + sum(other.weight for name, other in self._queues.items() if name != tenant.name)
        share = max(1, math.floor(most * tenant.weight / weights))
        has_others = len(self._queues) > (tenant.name in self._queues)
        if queue.num_places >= CROWDED_SHARE * most and has_others and own.num_places + num_places > share:
            message = f"The queue is crowded, and {tenant.name!r} holds {own.num_places:,.0f} places; its share is {share:,}."
            raise ShareUsedError(message, self._next_place_s() * weights / tenant.weight)

    def _check_time(self, tenant: Tenant, size: Backlog, deadline_s: float | None) -> None:
        """An idle model admits everything: a prompt may be cached, and its estimate far too long."""
        if not self._queues and not self.running:
            return
        expected = self.estimate(tenant, size)
        if deadline_s is not None and SAFETY_FACTOR * expected.total_s > deadline_s:
            hint = None
            if expected.service_s > deadline_s:
                hint = f"Allow more than {expected.service_s:.1f} s, which it takes without a wait, or ask for less."
            message = f"The answer is expected in {expected.total_s:.1f} s, after the deadline of {deadline_s:.3g} s."
            raise TooLateError(message, min(expected.total_s - deadline_s / SAFETY_FACTOR, expected.wait_s), hint=hint)
        max_wait_s = self.limits.max_wait_s
        if deadline_s is None and max_wait_s and expected.wait_s > max_wait_s:
            message = f"The wait would be {expected.wait_s:.1f} s; the limit is {max_wait_s:g} s."
            raise BusyError(message, expected.wait_s - max_wait_s)

    # Estimates

    def estimate(self, tenant: Tenant, size: Backlog) -> Estimate:
        """How long a request would take that came now; zeros before the first step was measured."""
        ahead = self._ahead(tenant, size)
        num_running = sum(request.size.num_sequences for request in self.running)
        num_live = num_running + ahead.num_sequences
        step_s = self.cost.step_s(min(self.max_running, math.ceil(num_live) + size.num_sequences))
        wait_s = self.cost.prompt_s(ahead.num_prompt_tokens, num_running)
        num_leaving = num_live + size.num_sequences - self.max_running
        if num_leaving > 0 and num_live:  # as many must end first, at the rate at which a full batch ends
            num_output = self._num_expected_tokens() + ahead.num_output_tokens
            wait_s += min(1.0, num_leaving / num_live) * num_output * step_s / self.max_running
        num_steps = size.num_output_tokens / max(1, size.num_sequences)
        return Estimate(wait_s, self.cost.prompt_s(size.num_prompt_tokens) + num_steps * max(step_s, self._recent_step_s()))

    def _recent_step_s(self) -> float:
        """Mean of the last steps, if the engine is busy: prompts of later requests will slow down steps as those before did."""
        is_known = self.running and len(self._recent_steps) == RECENT_STEPS
        return sum(self._recent_steps) / len(self._recent_steps) if is_known else 0.0

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
        return sum(request.num_expected_tokens for request in list(self.running))

    def drain_s(self) -> float:
        """Until everything that is admitted now has been served. For any thread."""
        queue = self.queue
        num_live = sum(request.size.num_sequences for request in list(self.running)) + queue.num_sequences
        batch = max(1.0, min(self.max_running, num_live))
        output_s = (self._num_expected_tokens() + queue.num_output_tokens) * self.cost.step_s(batch) / batch
        return self.cost.prompt_s(queue.num_prompt_tokens) + output_s

    def retry_after_s(self) -> float:
        """When a client may try again whose request was not served in time. For any thread."""
        return min(MAX_RETRY_AFTER_S, self.drain_s())

    def _next_place_s(self) -> float:
        return self.drain_s() / max(1, len(self.running) + self.queue.num_places)

    # What happens

    def begin_work(self) -> None:
        """The engine was idle and begins to work now: the time before does not count as slowness."""
        self._step_began = self.clock()
        self._recent_steps.clear()

    def observe(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A step has ended, which computed so many prompt tokens and brought so many output tokens."""
        now = self.clock()
        seconds, self._step_began = now - self._step_began, now
        self.cost.observe(num_prompt_tokens, num_output_tokens, seconds)
        self._recent_steps.append(seconds)

    def observe_totals(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The same from counters of all tokens so far, which move when a step ends."""
        before, self._tokens_done = self._tokens_done, (num_prompt_tokens, num_output_tokens)
        if before != self._tokens_done:
            self.observe(num_prompt_tokens - before[0], num_output_tokens - before[1])

    def set_max_queued(self, max_queued: int) -> None:
        """Change the bound of the queue; requests that already wait stay."""
        self.limits = replace(self.limits, max_queued=max_queued)

    def learn_used_share(self, share: float) -> None:
        self._num_answers = min(USED_SHARE_MEMORY, self._num_answers + 1)
        self._used_share += (min(1.0, share) - self._used_share) / self._num_answers

    def add_to_queue(self, tenant: Tenant, size: Backlog, sign: int = 1) -> None:
        queue = self._queues.setdefault(tenant.name, Backlog())
        queue.weight = tenant.weight
        queue.add(size, sign)
        if not queue.num_requests:
            del self._queues[tenant.name]

    def leave_queue(self, request: AdmittedRequest) -> None:
        request.is_queued = False
        self.add_to_queue(request.tenant, request.size, -1)

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
        queue = self.queue
        return {
            "queued_requests": queue.num_requests,
            "running_requests": len(self.running),
            "queued_prompt_tokens": queue.num_prompt_tokens,
            "expected_output_tokens": self._num_expected_tokens() + queue.num_output_tokens,
            "drain_seconds": self.drain_s(),
            "prefill_tokens_per_second": self.cost.prompt_tokens_per_s,
            "decode_tokens_per_second": self.cost.output_tokens_per_s,
        }
