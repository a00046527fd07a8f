"""How much a tenant may ask for: buckets of requests and of tokens, each of which holds a minute's worth when full.

What a request will cost is not known when it comes: its estimate is reserved then and set right when it ends. So a tenant may
be over its limit by what its running requests took more than was estimated, and pays for that before the next one.
Not for several threads at once; one process must see all requests of a tenant, or the limit holds in each process alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from archerfish.errors import InputTooLargeError, InvalidOptionError, ServiceError
from archerfish.serve.tenants import Tenant

MINUTE_S = 60.0
MAX_IDLE_TENANTS = 1024
MAX_BLOCKED_S = 1.0


class RefusedError(ServiceError):
    """Not now, but after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float, *, hint: str | None = None) -> None:
        self.retry_after_s = retry_after_s
        wait = retry_after(retry_after_s)
        seconds = "1 second" if wait == "1" else f"{wait} seconds"
        super().__init__(message, hint=f"Try again in {seconds}." if hint is None else hint)


class RateLimitedError(RefusedError):
    """A tenant is over its own limit."""

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float, blocked_s: float = 0.0) -> None:
        """blocked_s: until its limits allow anything at all, however small."""
        super().__init__(message, retry_after_s)
        self.blocked_s = blocked_s


class OverLimitError(InputTooLargeError):
    """One request that asks for more than its tenant's bucket ever holds: trying again does not help."""

    code = "request_over_limit"


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, rounded up, at least 1."""
    return str(max(1, math.ceil(seconds - 1e-6)))  # a rounding error is no reason to wait a second longer


class TokenBucket:
    """Lets through at most `burst + rate * t` in any t seconds.

    Its state is the moment at which it will be full, so that nothing has to be refilled, and the moment from which on an
    amount can be had is exact. A clock that goes back is taken to stand still.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._check(rate, burst)
        self.rate = rate  # a second
        self.burst = burst
        self._clock = clock
        self._now = clock()
        self._full_at = self._now

    @staticmethod
    def _check(rate: float, burst: float) -> None:
        if not (math.isfinite(rate) and math.isfinite(burst) and rate > 0 and burst > 0):
            raise InvalidOptionError(f"rate and burst of a bucket must be above 0: {rate}, {burst}.")

    def now(self) -> float:
        self._now = max(self._now, self._clock())
        return self._now

    @property
    def level(self) -> float:
        """What can be had now; below 0 after a settlement that took more than there was."""
        return self.burst - max(0.0, self._full_at - self.now()) * self.rate

    @property
    def is_full(self) -> bool:
        return self._full_at <= self.now()

    def free_at(self, amount: float) -> float:
        """The moment from which on this amount can be had, if nothing else is taken before."""
        return self._full_at - (self.burst - amount) / self.rate if amount <= self.burst else math.inf

    def add(self, amount: float) -> None:
        """Give back what was taken and not used; below 0: take more, whether it is there or not."""
        self._full_at = max(self._full_at, self.now()) - amount / self.rate

    def change(self, rate: float, burst: float) -> None:
        """Other limits from now on; a level that is above the new burst is cut."""
        self._check(rate, burst)
        level, now = self.level, self.now()
        self.rate, self.burst = rate, burst
        self._full_at = now + (burst - level) / rate


class Reservation:
    """What a request was let in for. Ends once: settled with what it took, or cancelled if it never ran."""

    __slots__ = ("_requests", "_tokens", "is_open", "num_tokens")

    def __init__(self, requests: TokenBucket | None, tokens: TokenBucket | None, num_tokens: int) -> None:
        self._requests = requests
        self._tokens = tokens
        self.num_tokens = num_tokens
        self.is_open = True

    def change(self, num_tokens: int) -> None:
        """A better estimate, such as the length of the tokenised prompt."""
        if self.is_open and self._tokens is not None:
            self._tokens.add(self.num_tokens - num_tokens)
        self.num_tokens = num_tokens

    def settle(self, num_tokens: int) -> None:
        """The request has ended and took so many tokens, prompt and output."""
        if self.is_open:
            self.change(num_tokens)
            self.is_open = False

    def cancel(self) -> None:
        """The request was refused elsewhere, and nothing of it was computed."""
        if self.is_open:
            self.settle(0)
            if self._requests is not None:
                self._requests.add(1)


class Blocked:
    """Tenants whose limits allow nothing for a while, so that their requests are refused before they are read.

    It remembers that for a second at most: what a running request gives back, or a changed file of keys, counts soon.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, float]] = {}  # until when it is remembered, and until when it holds

    def note(self, tenant: Tenant, blocked_s: float) -> None:
        now = self._clock()
        if len(self._until) >= MAX_IDLE_TENANTS:
            self._until = {name: times for name, times in self._until.items() if times[0] > now}
        self._until[tenant.name] = now + min(blocked_s, MAX_BLOCKED_S), now + blocked_s

    def check(self, tenant: Tenant) -> None:
        """RateLimitedError for one that is blocked."""
        if not self._until or (times := self._until.get(tenant.name)) is None:
            return
        now = self._clock()
        if now < times[0]:
            raise RateLimitedError(f"{tenant.name!r} is over its limit.", times[1] - now, times[1] - now)
        del self._until[tenant.name]


class RateLimits:
    """The buckets of all tenants. A tenant's limits are read anew with each request, so that a changed file counts at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def admit(self, tenant: Tenant, num_tokens: int) -> Reservation:
        """Reserve a request and its estimated tokens, prompt and output; refused, nothing is taken."""
        requests = self._bucket(tenant.name, "requests", tenant.requests_per_minute)
        tokens = self._bucket(tenant.name, "tokens", tenant.tokens_per_minute)
        if tokens is not None and num_tokens > tokens.burst:
            raise OverLimitError(
                f"The request may take about {num_tokens:,} tokens; {tenant.name!r} has {tokens.burst:,.0f} a minute.",
                hint="Shorten the prompt or lower max_tokens.",
            )
        for kind, bucket, amount in (("requests", requests, 1), ("tokens", tokens, num_tokens)):
            if bucket is not None and bucket.free_at(amount) > bucket.now():
                least = max(one.free_at(1) - one.now() for one in (requests, tokens) if one is not None)
                self._refuse(tenant, kind, bucket, amount, least)
        if requests is not None:
            requests.add(-1)
        if tokens is not None:
            tokens.add(-num_tokens)
        return Reservation(requests, tokens, num_tokens)

    def charge(self, tenant: Tenant, num_tokens: int, *, is_spent: bool = False) -> None:
        """Of what is known to take so many tokens; is_spent: of a request that was let in before, also below 0."""
        if not is_spent:
            self.admit(tenant, num_tokens)
        elif (tokens := self._bucket(tenant.name, "tokens", tenant.tokens_per_minute)) is not None:
            tokens.add(-num_tokens)

    def _refuse(self, tenant: Tenant, kind: str, bucket: TokenBucket, amount: float, blocked_s: float) -> None:
        wish = "" if kind == "requests" else f" This request may take about {amount:,.0f} of them."
        raise RateLimitedError(
            f"{tenant.name!r} is over its limit of {bucket.burst:,.0f} {kind} a minute.{wish}",
            bucket.free_at(amount) - bucket.now(), max(0.0, blocked_s),
        )

    def _bucket(self, name: str, kind: str, per_minute: float) -> TokenBucket | None:
        if not per_minute:
            return None
        rate, burst = per_minute / MINUTE_S, max(1.0, per_minute)
        bucket = self._buckets.get((name, kind))
        if bucket is None:
            if len(self._buckets) >= 2 * MAX_IDLE_TENANTS:  # a full one is as good as a new one
                self._buckets = {place: kept for place, kept in self._buckets.items() if not kept.is_full}
            bucket = self._buckets[name, kind] = TokenBucket(rate, burst, self._clock)
        elif (bucket.rate, bucket.burst) != (rate, burst):
            bucket.change(rate, burst)
        return bucket
