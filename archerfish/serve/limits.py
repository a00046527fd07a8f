"""Rate limits: how many requests and tokens each tenant may use per minute.

One `RateLimits` sees all requests of a process. Only the loop of the engine process calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from archerfish.errors import InputTooLargeError, ServiceError
from archerfish.serve.tenants import Tenant

MAX_KNOWN_BUCKETS = 2048


class RefusedError(ServiceError):
    """A request was refused; the client may try again after `retry_after_s`."""

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


@dataclass(slots=True)
class TokenBucket:
    """Lets through at most one minute's amount at once, and that amount per minute on average."""

    debt: float = 0.0  # what was taken and has not been refilled by `at`
    at: float = 0.0

    def refill(self, per_minute: float, now: float) -> None:
        self.debt = max(0.0, self.debt - per_minute / 60 * max(0.0, now - self.at))
        self.at = max(self.at, now)

    def wait_s(self, amount: float, per_minute: float) -> float:
        """Seconds until `amount` can be taken, counted from the last refill."""
        return max(0.0, (self.debt + amount - max(1.0, per_minute)) * 60 / per_minute)


class RateLimits:
    """Requests and tokens per minute of all tenants. Tenants carry their limits, so that changed limits apply at once.

    The tokens of a request are estimated when it is admitted and corrected later, so a tenant may exceed its limit by what
    its running requests were underestimated; it pays for that before its next request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def take(self, tenant: Tenant, num_tokens: int) -> None:
        """Take one request and its tokens from a tenant's limits; nothing is taken if an error is raised."""
        per_minute = max(1.0, tenant.tokens_per_minute)
        if tenant.tokens_per_minute and num_tokens > per_minute:
            raise OverLimitError(
                f"The request may take about {num_tokens:,} tokens; {tenant.name!r} has {per_minute:,.0f} a minute.",
                hint="Shorten the prompt or lower max_tokens.",
            )
        for kind, limit, amount in (
            ("requests", tenant.requests_per_minute, 1), ("tokens", tenant.tokens_per_minute, num_tokens)
        ):
            wait_s = self._bucket(tenant, kind, limit).wait_s(amount, limit) if limit else 0.0
            if wait_s > 1e-9:
                details = "" if kind == "requests" else f" This request may take about {amount:,} of them."
                message = f"{tenant.name!r} is over its limit of {max(1.0, limit):,.0f} {kind} a minute.{details}"
                raise RateLimitedError(message, wait_s)
        self.give_back(tenant, -num_tokens, num_requests=-1)

    def give_back(self, tenant: Tenant, num_tokens: int, num_requests: int = 0) -> None:
        """Return what was taken and not used. Negative numbers take more, even if the limits do not allow it."""
        for kind, limit, amount in (
            ("requests", tenant.requests_per_minute, num_requests), ("tokens", tenant.tokens_per_minute, num_tokens)
        ):
            if limit and amount:
                bucket = self._bucket(tenant, kind, limit)
                bucket.debt = max(0.0, bucket.debt - amount)

    def _bucket(self, tenant: Tenant, kind: str, per_minute: float) -> TokenBucket:
        now = self._clock()
        bucket = self._buckets.get((tenant.name, kind))
        if bucket is None:
            if len(self._buckets) >= MAX_KNOWN_BUCKETS:
                hour_ago = now - 3600
                self._buckets = {key: kept for key, kept in self._buckets.items() if kept.debt and kept.at > hour_ago}
            bucket = self._buckets[tenant.name, kind] = TokenBucket(at=now)
        bucket.refill(per_minute, now)
        return bucket
