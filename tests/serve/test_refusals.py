"""A front end repeats what it has just heard from the engine process, instead of asking again."""

from __future__ import annotations

import pytest

from archerfish.serve.client import RemoteError
from archerfish.serve.refusals import HOLD_S, Refusals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(code: str = "overloaded") -> RemoteError:
    return RemoteError("The queue is full.", code=code, status=503, retry_after_s=2.5)


def test_a_refusal_counts_for_a_moment_and_for_its_own() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.check("model", "me")
    refusals.hear("model", "me", refusal())
    with pytest.raises(RemoteError, match="queue is full") as raised:
        refusals.check("model", "me")
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (503, "overloaded", 2.5)
    refusals.check("other", "me")
    refusals.check("model", "you")
    clock.now = HOLD_S
    refusals.check("model", "me")


def test_what_says_nothing_of_the_model_is_not_kept() -> None:
    refusals = Refusals(Clock())
    refusals.hear("model", "me", refusal("input_too_large"))
    refusals.check("model", "me")
