"""Refusals of the engine process that were heard a moment ago: a front end that repeats them has time for what is let in."""

from __future__ import annotations

import time
from collections.abc import Callable

from archerfish.serve.client import RemoteError

HOLD_S = 0.05  # for which nobody else is asked: short against what waits in front of a model that refuses
CODES = ("deadline_unreachable", "overloaded")  # that say something of the model, not of the request


class Refusals:
    """For a model and a tenant, the last refusal for want of time or room, as long as it counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, str], tuple[float, RemoteError]] = {}

    def check(self, model: str, tenant: str) -> None:
        """Raise again what was heard less than HOLD_S ago."""
        heard = self._heard.get((model, tenant))
        if heard is None:
            return
        if self._clock() - heard[0] < HOLD_S:
            raise heard[1].again()
        del self._heard[model, tenant]

    def hear(self, model: str, tenant: str, error: RemoteError) -> None:
        """What the engine process answered with."""
        if error.code in CODES:
            self._heard[model, tenant] = (self._clock(), error)
