"""The whole app over an engine host: vectors and scores, models of every kind, health, figures, and an engine that
dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from archerfish.serve import wire
from archerfish.serve.app import create_app
from archerfish.serve.client import AsyncClient
from archerfish.serve.vector_routes import encode_items
from archerfish.serve.wire import Query, Report

from .client import PASS, WORDS, client_of, error_of, host_with, hosted, num_waiting, serving, until
from .hosting import FakeClock, Scripted, WordEncoder, hold

pytestmark = pytest.mark.anyio

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SIMILARITY = "/similarity"


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
        objects = {
            **body,
            "documents": [{"text": text, "id": text} for text in body["documents"]],
            "rank_fields": ["text"],
        }
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
        asking = [
            asyncio.create_task(client.post(EMBEDDINGS, json={"input": text})) for text in ("good", "some poison")
        ]
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
        await until(lambda: hosted(host).controller.num_places == 1)
        encoder.gate.set()
        assert (await first).status_code == 200
        assert encoder.jobs == [["first"]]
        assert (
            "archerfish_requests_running 1.0" in (await client.get("/metrics")).text.splitlines()
        )  # the one that asks
        assert (await client.get("/stats")).json()["host"]["live_requests"] == 1


async def test_full_queue_gives_503_with_retry_after(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    host = host_with(tmp_path, encoder, max_queue_texts=3)

    async with serving(host) as client:
        first = await hold(encoder, client.post(EMBEDDINGS, json={"input": "first"}))
        waiting = asyncio.create_task(client.post(EMBEDDINGS, json={"input": ["a", "b"]}))
        await until(lambda: num_waiting(host) == 2)
        hosted(host).controller.expect = lambda *_: (90.0, 0.0)  # for three places
        rerank = {"query": "c", "documents": ["d"]}  # two texts
        for route, body, wait_s in ((EMBEDDINGS, {"input": "c"}, "30"), (RERANK, rerank, "60")):
            refused = await client.post(route, json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == wait_s
            assert error_of(refused)["code"] == "overloaded"
            assert error_of(refused)["type"] == "server_error"
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'archerfish_refused_requests_total{code="overloaded",model_name="fake/words",tenant=""} 2.0' in lines
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


# Models


def completion(**changes: Any) -> dict[str, Any]:
    return {"prompt": "the cats", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **changes}


async def test_models_route_lists_models_of_all_kinds(tmp_path: Path) -> None:
    host = host_with(
        tmp_path, WordEncoder(WORDS), WordEncoder("fake/pairs", is_cross_encoder=True), llm={"has_text": True}
    )

    async with serving(host) as client:
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        found = {model["id"]: model for model in body["data"]}
        assert {name: model["kind"] for name, model in found.items()} == {
            WORDS: "embedding",
            "fake/pairs": "cross-encoder",
            "tiny": "generation",
        }
        assert (found[WORDS]["dimension"], found[WORDS]["max_length"]) == (8, 512)
        assert found["tiny"]["max_length"] == 256
        assert [name for name, model in found.items() if "dimension" in model] == [WORDS]
        for model in found.values():
            assert (model["object"], model["owned_by"]) == ("model", "archerfish")
            assert str(tmp_path) not in str(model)
            assert (await client.get(f"/v1/models/{model['id']}")).json() == model


async def test_one_service_generates_and_embeds(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})

    async with serving(host) as client:
        written, embedded = await asyncio.gather(
            client.post("/v1/completions", json=completion()), client.post(EMBEDDINGS, json={"input": "the cats"})
        )
        assert (written.json()["model"], written.json()["usage"]["completion_tokens"]) == ("tiny", 4)
        assert embedded.json()["model"] == WORDS
        again = await client.post("/v1/completions", json=completion(stream=True))
        assert again.headers["content-type"].startswith("text/event-stream")
        ids = (await client.post("/tokenize", json={"prompt": "the cats"})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True})).json() == {
            "prompt": "the cats"
        }
        assert (await client.post("/v1/cache/explain", json={"prompt": "the cats"})).json()["model"] == "tiny"
        wrong = await client.post("/v1/completions", json=completion(model=WORDS))
        assert (wrong.status_code, error_of(wrong)["param"]) == (400, "model")


# The backend


async def test_host_without_password_needs_no_credentials(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, WordEncoder(WORDS), front_end_pass="")) as client:
        assert (await client.post(EMBEDDINGS, json={"input": "x"})).status_code == 200
        assert (await client.get("/stats")).status_code == 200


# What it says of itself


async def test_health_runs_a_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, clock = WordEncoder(WORDS), FakeClock()
    compute = encoder.compute

    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret of the model")

    async with serving(host_with(tmp_path, encoder, clock=clock)) as client:
        assert (await client.get("/ready")).json()["status"] == "ok"
        assert encoder.jobs == []
        assert (await client.get("/health")).json()["status"] == "ok"
        assert encoder.jobs == [["health"]]
        clock.now += 2
        monkeypatch.setattr(encoder, "compute", broken)
        failing = await client.get("/health")
        assert (failing.status_code, failing.json()["status"]) == (503, "failing")
        assert "secret" not in failing.text
        assert int(failing.headers["retry-after"]) >= 1
        assert (await client.get("/ready")).status_code == 200
        monkeypatch.setattr(encoder, "compute", compute)
        encoder.gate.clear()
        monkeypatch.setattr("archerfish.serve.app.HEALTH_TIMEOUT_S", 0.02)
        slow = await client.get("/health")
        encoder.gate.set()
        assert (slow.status_code, slow.json()) == (503, {"status": "failing", "reason": "no result within 0.02 s"})


async def test_health_fails_only_when_a_job_hangs(tmp_path: Path) -> None:
    encoder, clock = WordEncoder(WORDS), FakeClock()

    async with serving(host_with(tmp_path, encoder, clock=clock)) as client:
        long = await hold(encoder, client.post(EMBEDDINGS, json={"input": "long"}))
        clock.now += 5 * 120 - 1  # five times as long as usual, for a model's first jobs
        assert (await client.get("/health")).status_code == 200
        clock.now += 2
        stuck = await client.get("/health")
        assert (stuck.status_code, stuck.json()["status"]) == (503, "failing")
        assert f"A job of {WORDS} runs and none has ended for 601 s." in stuck.json()["reason"]
        encoder.gate.set()
        assert (await long).status_code == 200


async def test_stats_have_every_model_and_the_host(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})

    async with serving(host) as client:
        await client.post("/v1/completions", json=completion())
        await client.post(EMBEDDINGS, json={"input": ["a", "b c"]})
        body = (await client.get("/stats")).json()
        assert set(body) == {"models", "host"}
        assert set(body["models"]) == {WORDS, "tiny"}
        assert (body["models"][WORDS]["num_texts"], body["models"][WORDS]["num_tokens"]) == (2, 3)
        assert body["models"]["tiny"]["completed_requests"] == 1
        assert body["models"]["tiny"]["total_tokens_generated"] == 4
        assert body["models"]["tiny"]["num_blocks_in_use"] == 0
        assert (body["host"]["clients"], body["host"]["loaded_models"]) == (1, 2)


async def test_metrics_include_front_end_and_engine(tmp_path: Path) -> None:
    host = host_with(tmp_path, WordEncoder(WORDS), llm={"has_text": True})

    async with serving(host) as client:
        await client.post(EMBEDDINGS, json={"input": ["a", "b c"]})
        await client.post(EMBEDDINGS, json={})
        await client.get("/nowhere")
        await client.get("/v1/models/words")
        for _ in range(2):
            await client.post("/v1/completions", json=completion(prompt="the cats " * 10))
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        for line in (
            'archerfish_requests_total{route="/v1/embeddings",status="200"} 1.0',
            'archerfish_requests_total{route="/v1/embeddings",status="400"} 1.0',
            'archerfish_requests_total{route="/v1/completions",status="200"} 2.0',
            'archerfish_requests_total{route="other",status="404"} 1.0',
            'archerfish_requests_total{route="/v1/models/{model_id:path}",status="200"} 1.0',
            'archerfish_texts_total{route="/v1/embeddings"} 2.0',
            'archerfish_tokens_total{route="/v1/embeddings"} 3.0',
            "# TYPE archerfish_request_seconds histogram",
            "# TYPE archerfish_requests_total counter",
            "archerfish_requests_running 1.0",
            'archerfish_encoded_texts_total{model_name="fake/words"} 2.0',
            'archerfish_encode_seconds_count{model_name="fake/words",tenant=""} 1.0',
            'archerfish_generation_tokens_total{model_name="tiny"} 8.0',
            'archerfish_time_to_first_token_seconds_count{model_name="tiny",tenant=""} 2.0',
            'archerfish_inter_token_latency_seconds_count{model_name="tiny",tenant=""} 6.0',
            'archerfish_request_success_total{finished_reason="length",model_name="tiny",tenant=""} 2.0',
            'archerfish_num_requests_running{model_name="tiny"} 0.0',
            'archerfish_num_requests_waiting{model_name="tiny"} 0.0',
            'archerfish_kv_cache_usage_perc{model_name="tiny"} 0.0',
            'archerfish_num_preemptions_total{model_name="tiny"} 0.0',
            'archerfish_prompt_tokens_total{model_name="tiny"} 184.0',
            'archerfish_request_queue_time_seconds_count{model_name="tiny",tenant=""} 2.0',
            'archerfish_request_prefill_time_seconds_count{model_name="tiny",tenant=""} 2.0',
            'archerfish_request_decode_time_seconds_count{model_name="tiny",tenant=""} 2.0',
            'archerfish_encoded_tokens_total{model_name="fake/words"} 3.0',
            "archerfish_loaded_models 2.0",
        ):
            assert line in lines, answer.text
        assert 'archerfish_prefix_cache_hits_total{model_name="tiny"} 0.0' not in lines
        names = [family.name for family in text_string_to_metric_families(answer.text)]
        assert len(names) == len(set(names))


# An engine process that goes away


async def test_dead_engine_gives_503_until_it_is_back(tmp_path: Path) -> None:
    card = {"id": WORDS, "kind": "embedding", "max_length": 512, "dimension": 8}

    def act(message: Any) -> list[wire.Message] | None:
        """The engine process dies at the first request that is not a Query."""
        return (
            [Report(request_id=message.request_id, values={"models": [card]})] if isinstance(message, Query) else None
        )

    engine = Scripted(f"ipc://{tmp_path}/socket", act)
    async with client_of(create_app(AsyncClient(engine.address, retry_after_s=6.2), credentials=PASS)) as client:
        async with asyncio.timeout(5):  # a first connection would be waited for for 10 s
            for _ in ("in flight", "afterwards"):
                lost = await client.post(EMBEDDINGS, json={"input": "x"})
                assert (lost.status_code, lost.headers["retry-after"]) == (503, "7")
                assert (error_of(lost)["code"], error_of(lost)["type"]) == ("unavailable", "server_error")
            for route in ("/health", "/ready"):
                told = await client.get(route)
                assert (told.status_code, told.headers["retry-after"]) == (503, "7")
                assert told.json()["status"] == "failing"
                assert "engine process is not there" in told.json()["reason"]
            assert (await client.get("/stats")).status_code == 503
            known = await client.get("/metrics")
            assert known.status_code == 200
            assert "archerfish_engine_up 0.0" in known.text
            assert 'archerfish_requests_total{route="/stats",status="503"} 1.0' in known.text
            assert (await client.get("/v1/models")).status_code == 200  # what was known before
        engine.die()
        with host_with(tmp_path, WordEncoder(WORDS)):
            statuses = []
            while 200 not in statuses:
                statuses.append((await client.get("/health")).status_code)
                await asyncio.sleep(0)  # a refusal alone gives nobody a turn
            assert set(statuses[:-1]) <= {503}
            assert (await client.post(EMBEDDINGS, json={"input": "x"})).status_code == 200


async def test_stopped_engine_answers_waiting_requests(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    host = host_with(tmp_path, encoder)

    async with serving(host) as client:
        waiting = await hold(encoder, client.post(EMBEDDINGS, json={"input": "x"}))
        host.stop(0)
        lost = await waiting
        encoder.gate.set()
        assert (lost.status_code, error_of(lost)["code"]) == (503, "stopped")
        assert int(lost.headers["retry-after"]) >= 1
