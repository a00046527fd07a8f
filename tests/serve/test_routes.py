"""Embeddings, reranking and similarity, over an engine host in a thread."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.serve.vector_routes import encode_items

from .client import WORDS, error_of, host_with, hosted, num_waiting, serving, until
from .hosting import WordEncoder, hold

pytestmark = pytest.mark.anyio

EMBEDDINGS, RERANK, SIMILARITY = "/v1/embeddings", "/v1/rerank", "/similarity"


def pairs() -> WordEncoder:
    """Its score is the number of words of a query and a document."""
    return WordEncoder("fake/pairs", is_cross_encoder=True)


async def ask(route: str, *bodies: dict[str, Any]) -> list[Any]:
    """The answers of a service with one embedding model."""
    async with serving() as client:
        answers = [await client.post(route, json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [200] * len(bodies)
    return [answer.json() for answer in answers]


# Embeddings


async def test_embeddings_in_openai_shape() -> None:
    [body] = await ask(EMBEDDINGS, {"input": ["one two", "three"], "model": WORDS, "user": "me"})
    assert [(item["index"], item["object"]) for item in body["data"]] == [(0, "embedding"), (1, "embedding")]
    assert (body["object"], body["model"]) == ("list", WORDS)
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    expected = [WordEncoder.vector("one two"), WordEncoder.vector("three")]
    np.testing.assert_array_equal(np.asarray([item["embedding"] for item in body["data"]], np.float32), expected)


async def test_token_ids_are_one_text_or_several() -> None:
    one, several = await ask(EMBEDDINGS, {"input": [1, 2, 3]}, {"input": [[1, 2, 3], [4]]})
    assert [len(one["data"]), len(several["data"])] == [1, 2]
    assert one["data"][0]["embedding"] == several["data"][0]["embedding"]
    assert several["usage"]["prompt_tokens"] == 4


async def test_fewer_dimensions_have_length_one() -> None:
    short, whole = await ask(EMBEDDINGS, {"input": "one", "dimensions": 3}, {"input": "one", "dimensions": 8})
    full = WordEncoder.vector("one")
    np.testing.assert_allclose(short["data"][0]["embedding"], full[:3] / np.linalg.norm(full[:3]), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(whole["data"][0]["embedding"], np.float32), full)


# Ranking


async def test_rerank_by_cosine() -> None:
    [answer] = await ask(RERANK, {"query": "red fish", "documents": ["green bird", {"text": "red fish"}, "red bird"]})
    scores = [result["relevance_score"] for result in answer["results"]]
    assert answer["results"][0] == {"index": 1, "relevance_score": pytest.approx(1, abs=1e-6)}
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert answer["usage"]["total_tokens"] == 8


async def test_rerank_prefers_the_cross_encoder(tmp_path: Path) -> None:
    words, scorer = WordEncoder(WORDS), pairs()

    async with serving(host_with(tmp_path, words, scorer)) as client:
        body: dict[str, Any] = {"query": "fish", "documents": ["fish", "one two three", "one two"], "top_n": 2}
        body["return_documents"] = True
        for named in ({}, {"model": "pairs"}):
            answer = (await client.post(RERANK, json={**body, **named})).json()
            assert answer["model"] == "fake/pairs"
            assert answer["results"] == [
                {"index": 1, "relevance_score": 4.0, "document": {"text": "one two three"}},
                {"index": 2, "relevance_score": 3.0, "document": {"text": "one two"}},
            ]
        assert words.jobs == []
        answer = (await client.post(RERANK, json={**body, "model": WORDS})).json()
        assert answer["model"] == WORDS
        assert answer["results"][0]["document"] == {"text": "fish"}
        assert len(scorer.jobs) == 2
        objects = {**body, "documents": [{"text": text, "id": text} for text in body["documents"]], "rank_fields": ["text"]}
        assert (await client.post(RERANK, json={**objects, "model": WORDS})).json()["results"] == answer["results"]


async def test_cross_encoder_cannot_embed(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, pairs())) as client:
        answer = await client.post(RERANK, json={"query": "a", "documents": ["a", "b c"]})
        assert [result["index"] for result in answer.json()["results"]] == [1, 0]
        for route, body in ((EMBEDDINGS, {"input": "x"}), (SIMILARITY, {"source": "x", "sentences": ["y"]})):
            for named in ({}, {"model": "pairs"}):
                refused = await client.post(route, json={**body, **named})
                assert (refused.status_code, error_of(refused)["param"]) == (400, "model")
        assert (await client.get("/health")).status_code == 200


async def test_similarity_is_a_list_or_a_matrix() -> None:
    sentences = {"sentences": ["a b", "c"]}
    one, several = await ask(SIMILARITY, {"source": "a b", **sentences}, {"source": ["c", "a b"], **sentences})
    assert one["similarities"][0] == pytest.approx(1, abs=1e-6)
    assert one["similarities"][1] < 0.99
    assert several["similarities"][1] == pytest.approx(one["similarities"], abs=1e-6)
    assert several["usage"]["total_tokens"] == 6


# Several requests at once


async def test_failing_text_fails_only_its_own_request(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    host = host_with(tmp_path, encoder)

    async with serving(host) as client:
        first = await hold(encoder, client.post(EMBEDDINGS, json={"input": "first"}))
        asking = [asyncio.create_task(client.post(EMBEDDINGS, json={"input": text})) for text in ("good", "some poison")]
        await until(lambda: num_waiting(host) == 2)
        encoder.gate.set()
        _, good, bad = await asyncio.gather(first, *asking)
        assert sorted(encoder.jobs[1]) == ["good", "some poison"]  # together, and then each alone
        assert good.status_code == 200
        assert bad.status_code == 500
        error = error_of(bad)
        assert error["type"] == "server_error"
        assert "poisoned" not in bad.text
        assert "Traceback" not in bad.text


async def test_disconnect_drops_queued_texts(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    host = host_with(tmp_path, encoder)

    async with serving(host) as client:
        first = await hold(encoder, client.post(EMBEDDINGS, json={"input": "first"}))
        leaving = asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["gone"] * 10}))
        await until(lambda: num_waiting(host) == 10)
        leaving.cancel()
        await until(lambda: hosted(host).controller.queue.num_places == 1)
        encoder.gate.set()
        assert (await first).status_code == 200
        assert encoder.jobs == [["first"]]


async def test_full_queue_gives_503_with_retry_after(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    host = host_with(tmp_path, encoder, max_queue_texts=3)

    async with serving(host) as client:
        first = await hold(encoder, client.post(EMBEDDINGS, json={"input": "first"}))
        waiting = asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["a", "b"]}))
        await until(lambda: num_waiting(host) == 2)
        hosted(host).controller.drain_s = lambda: 90.0  # type: ignore[method-assign]  # for three places
        for route, body in ((EMBEDDINGS, {"input": "c"}), (RERANK, {"query": "c", "documents": ["d"]})):
            refused = await client.post(route, json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "30"
            assert error_of(refused)["code"] == "overloaded"
            assert error_of(refused)["type"] == "server_error"
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'archerfish_refused_requests_total{code="overloaded",model_name="fake/words"} 2.0' in lines
        assert 'archerfish_requests_total{route="/v1/embeddings",status="503"} 1.0' in lines
        encoder.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(first, waiting)] == [200, 200]


async def test_writing_a_long_answer_lets_other_tasks_run() -> None:
    written = 0
    seen: list[int] = []

    def items() -> Iterator[int]:
        nonlocal written
        while written < 100:
            written += 1
            yield written

    async def watch() -> None:
        while True:
            seen.append(written)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    encoded = await encode_items(items())
    watching.cancel()
    assert [int(bytes(item)) for item in encoded] == list(range(1, 101))
    assert seen == [16, 32, 48, 64, 80, 96]
