"""Limits of tenants on what writes nothing (vectors, scores, tokens), and the gate of models that only read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.serve.admission import BusyError, TooLateError
from archerfish.serve.gate import ReadingGate
from archerfish.serve.limits import OverLimitError, RateLimitedError, RateLimits
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants, add_key

from .client import PASS, WORDS, app_of, entered, error_of, with_app
from .hosting import WordEncoder, add_encoder, add_llm, make_host

PAIRS = "fake/pairs"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


Test = Callable[[httpx.AsyncClient, WordEncoder], Any]


def with_limits(directory: Path, test: Test, **limits: float) -> None:
    """A service of a tenant with limits, over a model that writes, one of vectors and one of scores."""
    keys, encoder = directory / "keys.toml", WordEncoder(WORDS)
    key = add_key(keys, "alice", **limits)
    host = make_host(directory, front_end_pass=PASS, api_keys_file=str(keys), clock=Clock())
    add_llm(host, directory, has_text=True)
    add_encoder(host, encoder)
    add_encoder(host, WordEncoder(PAIRS, is_cross_encoder=True))

    async def main(client: httpx.AsyncClient) -> None:
        client.headers["Authorization"] = f"Bearer {key}"
        await test(client, encoder)

    with host:
        with_app(main, app_of(host, tenants=Tenants.from_file(keys)))


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": WORDS, "input": "some words"}),
    ("/v1/rerank", {"model": PAIRS, "query": "a", "documents": ["b c"]}),
    ("/v1/rerank", {"model": WORDS, "query": "a", "documents": ["b c"]}),
    ("/similarity", {"model": WORDS, "source": "a", "sentences": ["b"]}),
    ("/tokenize", {"model": "tiny", "prompt": "some words"}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
    ("/v1/cache/explain", {"model": "tiny", "prompt": "some words"}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
def test_requests_are_counted_on_every_route(tmp_path: Path, route: str, body: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, encoder: WordEncoder) -> None:
        for _ in range(2):
            assert (await client.post(route, json=body)).status_code == 200
        refused = await client.post(route, json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "30"

    with_limits(tmp_path, test, requests_per_minute=2)


def test_tokens_of_texts_are_counted_as_they_are(tmp_path: Path) -> None:
    """Estimates are set right: 100 tokens a minute are ten times ten words, however many letters these have."""

    async def test(client: httpx.AsyncClient, encoder: WordEncoder) -> None:
        body = {"model": WORDS, "input": " ".join(["extraordinarily"] * 10)}
        for _ in range(10):
            answer = await client.post("/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 10)
        refused = await client.post("/v1/embeddings", json=body)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "6"

    with_limits(tmp_path, test, tokens_per_minute=100)


def test_tokens_that_a_front_end_counts_are_set_right(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, encoder: WordEncoder) -> None:
        prompt = "some words, of which this tokenizer makes a token of each byte or so"
        count = (await client.post("/tokenize", json={"model": "tiny", "prompt": prompt})).json()["count"]
        assert count > len(prompt) // 4
        left = 200 - count
        ids = {"model": "tiny", "tokens": [5] * (left + 1)}
        refused = await client.post("/detokenize", json=ids)
        assert refused.status_code == 429, refused.text
        assert (await client.post("/detokenize", json={**ids, "tokens": [5] * left})).status_code == 200

    with_limits(tmp_path, test, tokens_per_minute=200)


def test_texts_over_a_limit_are_refused_before_they_are_tokenised(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, encoder: WordEncoder) -> None:
        tokenized: list[Any] = []
        encoder.tokenize = lambda texts: tokenized.append(texts) or []  # type: ignore[method-assign, func-returns-value]
        answer = await client.post("/v1/embeddings", json={"model": WORDS, "input": "word " * 1000})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_over_limit")
        assert not tokenized

    with_limits(tmp_path, test, tokens_per_minute=100)


def test_a_refusal_says_how_long_nothing_is_allowed() -> None:
    clock = Clock()
    rates, tenant = RateLimits(clock), Tenant(name="t", namespace="n", tokens_per_minute=60)
    rates.admit(tenant, 50)
    with pytest.raises(RateLimitedError) as small:
        rates.admit(tenant, 20)
    assert [small.value.retry_after_s, small.value.blocked_s] == pytest.approx([10, 0])  # 10 tokens may be had now
    rates.charge(tenant, 40, is_spent=True)
    with pytest.raises(RateLimitedError) as owing:
        rates.charge(tenant, 1)
    assert [owing.value.retry_after_s, owing.value.blocked_s] == pytest.approx([31, 31])
    rates.charge(tenant, -40, is_spent=True)
    rates.charge(tenant, 10)


# The gate of readers


def reading(clock: Clock, **options: float) -> ReadingGate:
    """A gate that has seen a hundred tokens a second."""
    gate = ReadingGate(RateLimits(clock), clock=clock, **options)
    first = gate.admit(ANONYMOUS, 1, num_tokens=100)
    clock.now += 1.0
    gate.observe(100)
    first.ended()
    return gate


def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    gate = reading(Clock())
    gate.admit(ANONYMOUS, 1, num_tokens=100, deadline_s=1.0)
    message = r"^The answer is expected in 2\.0 s; the deadline is too near\. "  # true of all to whom it is repeated
    with pytest.raises(TooLateError, match=message) as caught:
        gate.admit(ANONYMOUS, 1, num_tokens=100, deadline_s=2.0)  # which is 1.25 times too near, beside another
    assert caught.value.status == 503 and caught.value.retry_after_s == pytest.approx(0.4)
    gate.admit(ANONYMOUS, 1, num_tokens=100, deadline_s=2.6)


@pytest.mark.parametrize("num_bytes", [4, 400, 4000])
def test_a_refusal_says_what_would_have_done(num_bytes: int) -> None:
    """For it and for texts of other sizes: a front end refuses who has less, and nobody who would be let in."""
    gate = reading(Clock())
    gate.admit(ANONYMOUS, 1, num_tokens=100)
    with pytest.raises(TooLateError) as caught:
        gate.admit(ANONYMOUS, 1, num_bytes=400, deadline_s=0.5)
    assert caught.value.needs_s is not None
    least_s, character_s = caught.value.needs_s
    needed_s = least_s + (num_bytes - 400) * character_s
    with pytest.raises(TooLateError):
        gate.admit(ANONYMOUS, 1, num_bytes=num_bytes, deadline_s=needed_s - 0.01)
    gate.admit(ANONYMOUS, 1, num_bytes=num_bytes, deadline_s=needed_s + 0.01)


def test_a_long_list_delays_a_short_one_little() -> None:
    gate = reading(Clock(), max_wait_s=5.0)
    gate.admit(ANONYMOUS, 1000, num_tokens=100_000)
    gate.admit(ANONYMOUS, 1, num_tokens=100, deadline_s=3.0)
    with pytest.raises(BusyError):
        gate.admit(ANONYMOUS, 1000, num_tokens=100)


def test_what_admission_refuses_costs_no_tokens() -> None:
    clock, tenant = Clock(), Tenant(name="t", namespace="n", tokens_per_minute=1000)
    gate = reading(clock)
    gate.admit(ANONYMOUS, 1, num_tokens=100)
    for _ in range(20):
        with pytest.raises(TooLateError):
            gate.admit(tenant, 1, num_tokens=900, deadline_s=0.1)
    gate.admit(tenant, 1, num_tokens=900)
    with pytest.raises(OverLimitError):
        gate.admit(tenant, 1, num_tokens=1001)


def test_probes_of_an_idle_model_do_not_make_it_seem_slow() -> None:
    clock = Clock()
    gate = reading(clock)
    for _ in range(100):
        clock.now += 10.0
        gate.observe(3)
    gate.admit(ANONYMOUS, 1, num_tokens=100, deadline_s=1.1)


def test_answers_that_came_too_late_widen_the_margin_and_what_had_none_says_nothing() -> None:
    clock = Clock()
    gate = reading(clock)
    margins = []
    for seconds, is_late in ((2.0, True), (0.1, None), (0.1, False)):
        one = gate.admit(ANONYMOUS, 1, num_tokens=10, deadline_s=1.0)
        clock.now += seconds
        one.is_late = is_late
        one.ended()
        margins.append(gate.margin)
    assert margins[0] == margins[1] > 1.0
    assert 1.0 <= margins[2] < margins[1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500), st.integers(1, 500), st.booleans()), max_size=30))
def test_the_books_of_a_gate_are_empty_when_all_have_left(requests: list[tuple[int, int, int, bool]]) -> None:
    gate = ReadingGate(RateLimits(Clock()), clock=Clock())
    passes = []
    for num_texts, num_bytes, num_tokens, is_read in requests:
        passes.append(gate.admit(ANONYMOUS, num_texts, num_bytes=num_bytes))
        if is_read:
            passes[-1].tokenized(num_tokens)
    assert gate.num_requests == len(requests)
    assert gate.num_tokens == sum(one.num_tokens for one in passes)
    for one in passes * 2:
        one.ended()
    assert (gate.num_requests, gate.num_texts, gate.num_tokens) == (0, 0, 0)


def test_texts_whose_deadline_passes_in_the_queue_are_answered(tmp_path: Path) -> None:
    clock, encoder = Clock(), WordEncoder(WORDS)
    host = make_host(tmp_path, front_end_pass=PASS, clock=clock)
    add_encoder(host, encoder)

    async def test(client: httpx.AsyncClient) -> None:
        encoder.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await entered(encoder)
        body = {"input": "second", "deadline_s": 5.0}
        late = asyncio.create_task(client.post("/v1/embeddings", json=body))
        hosted: Any = next(iter(host.shelf))
        while not hosted._queue:
            await asyncio.sleep(0)
        clock.now = 6.0
        encoder.gate.set()
        answer = await late
        assert (answer.status_code, error_of(answer)["code"]) == (503, "deadline_unreachable")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await first).status_code == 200
        assert encoder.jobs == [["first"]]
        assert (hosted.num_queued, hosted.gate.num_requests) == (0, 0)

    with host:
        with_app(test, app_of(host))


def test_an_answer_after_its_deadline_counts_as_late(tmp_path: Path) -> None:
    clock, encoder = Clock(), WordEncoder(WORDS)
    host = make_host(tmp_path, front_end_pass=PASS, clock=clock)
    add_encoder(host, encoder)

    async def test(client: httpx.AsyncClient) -> None:
        encoder.gate.clear()
        asked = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first", "deadline_s": 5.0}))
        await entered(encoder)
        clock.now = 6.0
        encoder.gate.set()
        assert (await asked).status_code == 200
        hosted: Any = next(iter(host.shelf))
        assert hosted.gate.margin > 1.0

    with host:
        with_app(test, app_of(host))


def test_what_cannot_be_done_by_its_deadline_is_not_begun(tmp_path: Path) -> None:
    """A job takes a second, as the first has shown; what has half a second left is refused, not computed in vain."""
    clock, encoder = Clock(), WordEncoder(WORDS)
    host = make_host(tmp_path, front_end_pass=PASS, clock=clock)
    add_encoder(host, encoder)

    async def test(client: httpx.AsyncClient) -> None:
        encoder.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await entered(encoder)
        rest = [
            asyncio.create_task(client.post("/v1/embeddings", json={"input": word, "deadline_s": deadline_s}))
            for word, deadline_s in (("second", 5.5), ("third", 60.0))
        ]
        hosted: Any = next(iter(host.shelf))
        while len(hosted._queue) < 2:
            await asyncio.sleep(0)
        clock.now = 5.0
        encoder.gate.set()
        assert [(await answer).status_code for answer in (first, *rest)] == [200, 503, 200]
        assert encoder.jobs == [["first"], ["third"]]

    with host:
        with_app(test, app_of(host))


@pytest.mark.parametrize("deadline_s", [0, -1, "soon"])
def test_deadlines_are_above_zero(tmp_path: Path, deadline_s: Any) -> None:
    async def test(client: httpx.AsyncClient, encoder: WordEncoder) -> None:
        answer = await client.post("/v1/embeddings", json={"model": WORDS, "input": "x", "deadline_s": deadline_s})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "deadline_s")

    with_limits(tmp_path, test)
