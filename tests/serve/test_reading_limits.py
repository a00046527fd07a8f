"""Limits of tenants and deadlines of requests that generate nothing: vectors, scores and token counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from archerfish.serve.tenants import Tenants, add_key

from .client import WORDS, entered, error_of, host_with, serving
from .hosting import FakeClock, WordEncoder, add_llm

pytestmark = pytest.mark.anyio
PAIRS = "fake/pairs"


@asynccontextmanager
async def limited(directory: Path, encoder: WordEncoder | None = None, **limits: float) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a tenant with limits, of a service of a generation model, an embedding model and a cross-encoder."""
    keys = directory / "keys.toml"
    key = add_key(keys, "alice", **limits)
    encoders = encoder or WordEncoder(WORDS), WordEncoder(PAIRS, is_cross_encoder=True)
    host = host_with(directory, *encoders, api_keys_file=str(keys), clock=FakeClock())
    add_llm(host, directory, has_text=True)
    async with serving(host, tenants=Tenants.from_file(keys)) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        yield client


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
async def test_requests_are_counted_on_every_route(tmp_path: Path, route: str, body: dict[str, Any]) -> None:
    async with limited(tmp_path, requests_per_minute=2) as client:
        for _ in range(2):
            assert (await client.post(route, json=body)).status_code == 200
        refused = await client.post(route, json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "30"


async def test_tokens_of_texts_are_corrected_after_tokenisation(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=100) as client:
        body = {"model": WORDS, "input": " ".join(["extraordinarily"] * 10)}  # 10 tokens, estimated as 40
        for _ in range(7):
            answer = await client.post("/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 10)
        refused = await client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "6")


async def test_tokens_that_a_front_end_counts_are_set_right(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=200) as client:
        prompt = "some words, of which this tokenizer makes a token of each byte or so"
        count = (await client.post("/tokenize", json={"model": "tiny", "prompt": prompt})).json()["count"]
        assert count > len(prompt) // 4
        left = 200 - count
        ids = {"model": "tiny", "tokens": [5] * (left + 1)}
        refused = await client.post("/detokenize", json=ids)
        assert refused.status_code == 429, refused.text
        assert (await client.post("/detokenize", json={**ids, "tokens": [5] * left})).status_code == 200


async def test_texts_over_a_limit_are_refused_before_they_are_tokenised(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    async with limited(tmp_path, encoder, tokens_per_minute=100) as client:
        tokenized: list[Any] = []
        encoder.tokenize = lambda texts: tokenized.append(texts) or []  # type: ignore[method-assign, func-returns-value]
        answer = await client.post("/v1/embeddings", json={"model": WORDS, "input": "word " * 1000})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_over_limit")
        assert not tokenized


async def test_texts_that_would_miss_their_deadline_are_not_computed(tmp_path: Path) -> None:
    """A job takes five seconds, as the first shows: one deadline has passed then, one would pass before the next job ends."""
    clock, encoder = FakeClock(), WordEncoder(WORDS)
    host = host_with(tmp_path, encoder, clock=clock)

    async with serving(host) as client:
        encoder.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await entered(encoder)
        rest = [
            asyncio.create_task(client.post("/v1/embeddings", json={"input": word, "deadline_s": deadline_s}))
            for word, deadline_s in (("second", 4.0), ("third", 5.5), ("fourth", 60.0))
        ]
        hosted: Any = host.models.loaded[0]
        while len(hosted._queue) < 3:
            await asyncio.sleep(0)
        clock.now += 5.0
        encoder.gate.set()
        answers = [await answer for answer in (first, *rest)]
        assert [answer.status_code for answer in answers] == [200, 503, 503, 200]
        for answer in answers[1:3]:
            assert error_of(answer)["code"] == "deadline_unreachable"
            assert int(answer.headers["retry-after"]) >= 1
        assert encoder.jobs == [["first"], ["fourth"]]
        assert hosted.controller.queue.num_places == 0


async def test_deadlines_are_above_zero(tmp_path: Path) -> None:
    async with limited(tmp_path) as client:
        for deadline_s in (0, -1, "soon"):
            answer = await client.post("/v1/embeddings", json={"model": WORDS, "input": "x", "deadline_s": deadline_s})
            assert (answer.status_code, error_of(answer)["param"]) == (400, "deadline_s")
