"""A front end repeats what it has just heard from the engine process, instead of asking again."""

from __future__ import annotations

import httpx
import pytest

from archerfish.serve import refusals as refusals_module
from archerfish.serve.app import create_app
from archerfish.serve.client import Answer, Question, RemoteError
from archerfish.serve.refusals import HOLD_S, Refusals
from archerfish.serve.wire import Embed

from .fake_backend import FakeBackend, with_backend


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


class Full(FakeBackend):
    """Refuses to embed."""

    num_asked = 0

    async def ask(self, message: Question) -> Answer:
        if isinstance(message, Embed):
            self.num_asked += 1
            raise refusal()
        return await super().ask(message)


def test_who_comes_right_after_a_refusal_is_refused_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals_module, "HOLD_S", 1e6)
    backend = Full()

    async def test(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            answer = await client.post("/v1/embeddings", json={"model": "lab/vectors", "input": "x"})
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
            assert answer.json()["error"]["code"] == "overloaded"

    with_backend(backend, test, create_app)
    assert backend.num_asked == 1
