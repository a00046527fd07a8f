"""Which requests are let in: those that have room in the queue and can be answered in time, as far as the measured rates tell.

Nothing here knows tokens or models: a request is an estimate of how many tokens go in and come out, made before it is
tokenised, and mended when more is known. Not for several threads at once; one Admission per model, in the process that runs it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from archerfish.errors import InputTooLargeError, InvalidInputError, InvalidOptionError
from archerfish.sequence import FinishReason
from archerfish.serve.limits import RefusedError
from archerfish.serve.service_rate import Average, LittlesLaw, LittlesLawFigures, Ratio, ServiceRate
from archerfish.serve.tenants import Tenant

USUAL_BYTES_PER_TOKEN = 4.0  # until some prompts have been tokenised
# Every answer that comes too late widens the margin, and every other one narrows it, the more the sooner it came: about one in
# forty is late under overload, and the margin is soon forgotten after it.
MORE_MARGIN, LESS_MARGIN, MAX_MARGIN = 1.05, 0.999, 3.0
MAX_HASTE = 50.0
BESIDE_OTHERS = 1.25  # the margin of who is not alone: what others will do is less certain
CROWDED = 0.5  # share of the queue above which no tenant may have more than its part


class BusyError(RefusedError):
    """The queue is full."""

    status, code = 503, "overloaded"


class ShareUsedError(RefusedError):
    """The queue is crowded, and this tenant has its part of it already."""

    status, code = 429, "queue_share_used"


class TooLateError(RefusedError):
    """The answer would come too late."""

    status, code = 503, "deadline_unreachable"

    def __init__(
        self, message: str, retry_after_s: float, *, hint: str | None = None, needs_s: tuple[float, float] | None = None
    ) -> None:
        """needs_s: see `wire.Failed`."""
        super().__init__(message, retry_after_s, hint=hint)
        self.needs_s = needs_s


class ImpossibleDeadlineError(InvalidInputError):
    """The answer would come too late even if nothing else ran: trying again does not help."""

    code = "deadline_impossible"
    param = "deadline_s"

    def __init__(self, deadline_s: float, alone_s: float, *, hint: str = "") -> None:
        super().__init__(
            f"A deadline of {deadline_s:g} s cannot be met: this takes about {alone_s:.2g} s even when nothing else runs.",
            hint=f"Give it more time (deadline_s){hint}.",
        )


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Sizes; 0 stands for no limit."""

    max_queued_requests: int = 4096
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0  # of all n sequences
    max_wait_s: float = 0.0  # what a request without a deadline may be expected to wait
    is_fair: bool = True  # whether the scheduler shares between tenants ("fair-share"), or serves in order of arrival

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.name == "is_fair":
                continue
            name, value = spec.name, getattr(self, spec.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise InvalidOptionError(f"{name} must be a number of at least 0, not {value!r}.")


@dataclass(slots=True)
class _Line:
    """What one tenant has waiting."""

    weight: float = 1.0
    num_requests: int = 0
    num_sequences: int = 0
    num_prompt_tokens: float = 0.0
    num_output_tokens: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What a request has to expect, in seconds."""

    wait_s: float  # until its prompt is begun
    service_s: float  # from then to its last token

    @property
    def total_s(self) -> float:
        return self.wait_s + self.service_s


def next_margin(margin: float, deadline_s: float, seconds: float, is_late: bool) -> float:
    """After one more answer with a deadline, which took so many seconds."""
    if is_late:
        return min(MAX_MARGIN, margin * MORE_MARGIN)
    haste = min(MAX_HASTE, deadline_s / seconds) if seconds > 0 else MAX_HASTE
    return max(1.0, margin * math.pow(LESS_MARGIN, haste))


class Entry:
    """A request that was let in. Tell it what happens: `tokenized`, `started` with its first token, `ended`."""

    __slots__ = (
        "_admission", "arrived", "deadline_s", "expected_output", "is_open", "is_queued", "max_output_tokens", "num_bytes",
        "num_prompt_tokens", "num_sequences", "tenant",
    )  # fmt: skip

    def __init__(
        self, admission: Admission, tenant: Tenant, num_bytes: int, num_prompt_tokens: int, max_tokens: int, num_sequences: int
    ) -> None:
        self._admission = admission
        self.tenant = tenant
        self.num_bytes = num_bytes  # of the prompt; 0 where its tokens were counted
        self.num_prompt_tokens = num_prompt_tokens
        self.num_sequences = num_sequences
        self.max_output_tokens = max_tokens * num_sequences
        self.expected_output = admission.expected_output(self.max_output_tokens)
        self.arrived = 0.0
        self.deadline_s: float | None = None
        self.is_queued = self.is_open = True

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The real length of the prompt, in place of the estimate. InputTooLargeError where it is over the limit."""
        self._admission._tokenized(self, num_prompt_tokens)

    def started(self) -> None:
        """The first token has come."""
        self._admission._started(self)

    def ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """It is over, with so many tokens of all its sequences."""
        self._admission._ended(self, num_output_tokens, reason)


class Admission:
    """The gate of one model, and the books of what is behind it."""

    def __init__(
        self, limits: AdmissionLimits | None = None, *, max_running: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or AdmissionLimits()
        self.max_running = max_running  # sequences that the engine runs at once
        self.rate = ServiceRate()
        self.margin = 1.0  # by which expected times are stretched before they are held against a deadline
        self._clock = clock
        self._lines: dict[str, _Line] = {}  # of tenants that have something waiting
        self._num_queued = self._num_running = 0  # requests
        self._queued_sequences = self._running_sequences = 0
        self._queued_prompt = self._queued_output = 0.0
        self._running_output = 0.0  # expected of those that run, without what they have had
        self._running_prompt = self._running_whole = 0.0  # of those that run: prompts, and all output expected of them
        self._bytes_per_token = Average()
        # Of max_tokens, for each answer that was complete. With those cut short counted above the line and not below it, this
        # is what complete ones would have; counting complete ones alone would favour the short, which are in time.
        self._used_share = Ratio()
        self._law = LittlesLaw(clock)

    # Sizes

    def estimate_tokens(self, num_bytes: int) -> int:
        """Of a prompt that is not tokenised, as the prompts before it had."""
        return max(1, math.ceil(num_bytes / (self._bytes_per_token.value or USUAL_BYTES_PER_TOKEN)))

    def expected_output(self, max_output_tokens: int) -> float:
        share = self._used_share.value
        return max_output_tokens * (1.0 if share is None else min(1.0, share))

    def _check_sizes(self, num_prompt_tokens: int, max_output_tokens: int) -> None:
        limits = self.limits
        if limits.max_prompt_tokens and num_prompt_tokens > limits.max_prompt_tokens:
            raise InputTooLargeError(
                f"The prompt has {num_prompt_tokens:,} tokens; the limit is {limits.max_prompt_tokens:,}.", hint="Shorten it."
            )
        if limits.max_output_tokens and max_output_tokens > limits.max_output_tokens:
            raise InputTooLargeError(
                f"max_tokens, of all sequences together, is {max_output_tokens:,}; the limit is {limits.max_output_tokens:,}.",
                hint="Lower max_tokens or n.",
            )

    # The gate

    def check_deadline(self, deadline_s: float, max_tokens: int | None) -> None:
        """Refuse for good what cannot be in time at the measured rates. max_tokens: None where the length is left open."""
        output = 1.0 if max_tokens is None else self.expected_output(max_tokens)
        alone_s = self.rate.alone_s(output)
        if alone_s > deadline_s:
            raise ImpossibleDeadlineError(deadline_s, alone_s, hint=" or lower max_tokens" if output > 1 else "")

    def admit(
        self, tenant: Tenant, max_tokens: int, *, num_sequences: int = 1, num_prompt_tokens: int | None = None,
        num_prompt_bytes: int = 0, deadline_s: float | None = None,
    ) -> Entry:
        """Let a request in, or say at once why not and when to come back.

        max_tokens: of each sequence. Without num_prompt_tokens they are estimated from the bytes, and the limit of prompt
        tokens is checked when the prompt has been tokenised.
        """
        if max_tokens < 0 or num_sequences < 1 or (deadline_s is not None and not deadline_s > 0):
            raise InvalidInputError("max_tokens must be at least 0, n at least 1, and deadline_s above 0.")
        self._check_sizes(num_prompt_tokens or 0, max_tokens * num_sequences)
        num_tokens = self.estimate_tokens(num_prompt_bytes) if num_prompt_tokens is None else num_prompt_tokens
        num_bytes = num_prompt_bytes if num_prompt_tokens is None else 0
        entry = Entry(self, tenant, num_bytes, num_tokens, max_tokens, num_sequences)
        self._check_queue(tenant)
        self._check_time(tenant, num_tokens, max_tokens, deadline_s)
        entry.deadline_s = deadline_s
        entry.arrived = self._law.enter()
        self._count(entry, num_tokens, entry.expected_output, 1)
        return entry

    def _check_queue(self, tenant: Tenant) -> None:
        limits, num_queued = self.limits, self._num_queued
        if limits.max_queued_requests and num_queued >= limits.max_queued_requests:
            raise BusyError(f"The queue is full: {num_queued:,} requests wait.", self._one_leaves_s())
        if not limits.max_queued_requests or num_queued < CROWDED * limits.max_queued_requests:
            return
        line = self._lines.get(tenant.name, _Line())
        weights = tenant.weight + sum(other.weight for name, other in self._lines.items() if name != tenant.name)
        part = max(1, math.floor(limits.max_queued_requests * tenant.weight / weights))
        if len(self._lines) > (tenant.name in self._lines) and line.num_requests >= part:
            wait_s = self._one_leaves_s() * weights / tenant.weight
            message = f"The queue is crowded, and {tenant.name!r} has its share of it: {line.num_requests:,} requests."
            raise ShareUsedError(message, wait_s)

    def _check_time(self, tenant: Tenant, num_prompt_tokens: int, max_tokens: int, deadline_s: float | None) -> None:
        outlook = self.outlook(tenant, num_prompt_tokens, max_tokens)
        if outlook is None:
            return
        margin = self.margin * (BESIDE_OTHERS if self._num_queued or self._num_running else 1.0)
        if deadline_s is not None and margin * outlook.total_s > deadline_s:
            late_s = min(outlook.total_s - deadline_s / margin, outlook.wait_s)
            hint = None
            if outlook.service_s > deadline_s:
                hint = f"Give it more than the {outlook.service_s:.1f} s that it takes without a wait, or lower max_tokens."
            message = f"The answer is expected in {outlook.total_s:.1f} s; the deadline of {deadline_s:g} s is too near."
            raise TooLateError(message, late_s, hint=hint)
        if deadline_s is None and self.limits.max_wait_s and outlook.wait_s > self.limits.max_wait_s:
            raise BusyError(
                f"The wait would be {outlook.wait_s:.1f} s; the limit is {self.limits.max_wait_s:g} s.",
                outlook.wait_s - self.limits.max_wait_s,
            )

    # What to expect

    def outlook(self, tenant: Tenant, num_prompt_tokens: int, max_tokens: int) -> Outlook | None:
        """Expected times of a request that comes now; None while no rate has been measured."""
        num_ahead, prompt_ahead, output_ahead = self._ahead(tenant)
        num_live = self._running_sequences + num_ahead
        step_s = self.rate.decode_step_s(min(self.max_running, math.ceil(num_live) + 1))
        if step_s is None and self.rate.prefill_tokens_per_s is None:
            return None
        wait_s = self.rate.prefill_s(prompt_ahead)
        num_leaving = num_live + 1 - self.max_running
        if num_leaving > 0 and step_s is not None:  # as many must end first, at the rate at which a full batch ends
            ends = min(1.0, num_leaving / num_live)
            wait_s += ends * (self.remaining_output + output_ahead) * step_s / self.max_running
        output = self.expected_output(max_tokens)
        prompts = num_prompt_tokens + self._replaced_prompt(output)
        return Outlook(wait_s, self.rate.prefill_s(prompts) + output * (step_s or 0.0))

    def _replaced_prompt(self, num_output_tokens: float) -> float:
        """Tokens of prompts that are computed while a request writes so many: who runs leaves, and others take their places."""
        if not self._running_whole:
            return self._running_prompt
        mean_output = self._running_whole / max(1, self._running_sequences)
        return self._running_prompt * min(1.0, num_output_tokens / mean_output)

    def _ahead(self, tenant: Tenant) -> tuple[float, float, float]:
        """Sequences, prompt tokens and output tokens that wait and come before the next request of a tenant.

        With fair shares another tenant gets, while this one's own line is served, its share of the service and no more.
        """
        if not self.limits.is_fair:
            return self._queued_sequences, self._queued_prompt, self._queued_output
        own = self._lines.get(tenant.name, _Line())
        num, prompt, output = float(own.num_sequences), own.num_prompt_tokens, own.num_output_tokens
        for name, line in self._lines.items():
            if name != tenant.name:
                turns = (own.num_requests + 1) * line.weight / tenant.weight
                part = min(1.0, turns / line.num_requests)
                num += part * line.num_sequences
                prompt += part * line.num_prompt_tokens
                output += part * line.num_output_tokens
        return num, prompt, output

    def drain_s(self) -> float:
        """Until everything that is there now has been served."""
        batch = max(1, min(self.max_running, self._running_sequences + self._queued_sequences))
        output_s = (self.remaining_output + self._queued_output) * (self.rate.decode_step_s(batch) or 0.0) / batch
        return self.rate.prefill_s(self._queued_prompt) + output_s

    def _one_leaves_s(self) -> float:
        return self.drain_s() / max(1, self._num_running + self._num_queued)

    # What happens

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> None:
        """A step of the engine: tokens of prompts that it computed, tokens that it brought, and how long it took."""
        self.rate.observe(num_prompt_tokens, num_output_tokens, seconds)
        self._running_output -= num_output_tokens

    def _tokenized(self, entry: Entry, num_prompt_tokens: int) -> None:
        if entry.is_open and entry.is_queued:
            self._count(entry, num_prompt_tokens - entry.num_prompt_tokens, 0.0, 0)
        entry.num_prompt_tokens = num_prompt_tokens
        if entry.num_bytes and num_prompt_tokens:
            self._bytes_per_token.add(entry.num_bytes / num_prompt_tokens)
        self._check_sizes(num_prompt_tokens, 1)

    def _started(self, entry: Entry) -> None:
        if entry.is_open and entry.is_queued:
            self._leave_queue(entry)
            self._num_running += 1
            self._running_sequences += entry.num_sequences
            self._running_output += entry.expected_output
            self._running_prompt += entry.num_prompt_tokens
            self._running_whole += entry.expected_output

    def _leave_queue(self, entry: Entry) -> None:
        entry.is_queued = False
        self._count(entry, -entry.num_prompt_tokens, -entry.expected_output, -1)

    def _ended(self, entry: Entry, num_output_tokens: int, reason: FinishReason) -> None:
        if not entry.is_open:
            return
        entry.is_open = False
        if entry.is_queued:
            self._leave_queue(entry)
            self._running_output += num_output_tokens  # `observe` has subtracted them
        else:
            self._num_running -= 1
            self._running_sequences -= entry.num_sequences
            self._running_output += num_output_tokens - entry.expected_output
            self._running_prompt -= entry.num_prompt_tokens
            self._running_whole -= entry.expected_output
        if not self._num_running and not self._num_queued:
            self._running_output = self._running_prompt = self._running_whole = 0.0  # rounding errors end here
        if num_output_tokens and entry.max_output_tokens:
            self._used_share.add(num_output_tokens / entry.max_output_tokens, float(reason in ("stop", "length")))
        if entry.deadline_s is not None and reason in ("stop", "length", "deadline"):  # others say nothing of the time
            self.margin = next_margin(self.margin, entry.deadline_s, self._clock() - entry.arrived, reason == "deadline")
        self._law.leave(entry.arrived)

    def _count(self, entry: Entry, num_prompt_tokens: float, num_output_tokens: float, num_requests: int) -> None:
        line = self._lines.setdefault(entry.tenant.name, _Line())
        line.weight = entry.tenant.weight
        line.num_requests += num_requests
        line.num_sequences += num_requests * entry.num_sequences
        self._num_queued += num_requests
        self._queued_sequences += num_requests * entry.num_sequences
        line.num_prompt_tokens += num_prompt_tokens
        line.num_output_tokens += num_output_tokens
        if not line.num_requests:
            del self._lines[entry.tenant.name]
        self._queued_prompt += num_prompt_tokens
        self._queued_output += num_output_tokens
        if not self._lines:
            self._queued_prompt = self._queued_output = 0.0

    # Figures

    @property
    def num_queued(self) -> int:
        """Requests that were let in and have no token yet."""
        return self._num_queued

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def remaining_output(self) -> float:
        """Tokens that the running requests are still expected to bring."""
        return max(0.0, self._running_output)

    def littles_law(self) -> LittlesLawFigures:
        return self._law.figures()

    def figures(self) -> dict[str, float]:
        """For /stats and /metrics; no tenant's own."""
        law = self.littles_law()
        return {
            "queued_requests": self._num_queued,
            "running_requests": self._num_running,
            "queued_prompt_tokens": self._queued_prompt,
            "expected_output_tokens": self.remaining_output + self._queued_output,
            "drain_seconds": self.drain_s(),
            "margin": self.margin,
            "prefill_tokens_per_second": self.rate.prefill_tokens_per_s or 0.0,
            "decode_tokens_per_second": self.rate.decode_tokens_per_s or 0.0,
            "mean_requests": law.mean_requests,
            "requests_per_second": law.requests_per_s,
            "mean_seconds": law.mean_s,
        }
