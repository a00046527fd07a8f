import asyncio
import base64
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from archerfish.engine.fakes import FakeCrossEncoder, FakeEngine
from archerfish.errors import InvalidOptionError
from archerfish.observe import MetricRegistry
from archerfish.serve.app import list_response

from .client import error_of, until, with_client


def test_embeddings_in_openai_shape() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/embeddings", json={"input": ["one two", "three"], "model": "fake/engine", "user": "me"})
        assert answer.status_code == 200
        body = answer.json()
        assert [item["index"] for item in body["data"]] == [0, 1]
        assert body["object"] == "list"
        assert {item["object"] for item in body["data"]} == {"embedding"}
        assert body["model"] == "fake/engine"
        assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        expected = FakeEngine().encode_batch(["one two", "three"])
        np.testing.assert_array_equal(np.asarray([item["embedding"] for item in body["data"]], np.float32), expected)

    with_client(test)


def test_base64_is_little_endian_float32() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/embeddings", json={"input": "one", "encoding_format": "base64"})
        raw = base64.b64decode(answer.json()["data"][0]["embedding"])
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), FakeEngine().encode_batch(["one"])[0])

    with_client(test)


def test_token_ids_are_taken_as_one_text_or_several() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        one = (await client.post("/v1/embeddings", json={"input": [1, 2, 3]})).json()
        several = (await client.post("/v1/embeddings", json={"input": [[1, 2, 3], [4]]})).json()
        assert [len(one["data"]), len(several["data"])] == [1, 2]
        assert one["data"][0]["embedding"] == several["data"][0]["embedding"]
        assert several["usage"]["prompt_tokens"] == 4

    with_client(test)


def test_fewer_dimensions_have_length_one() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/embeddings", json={"input": "one", "dimensions": 3})
        short = np.asarray(answer.json()["data"][0]["embedding"])
        full = FakeEngine().encode_batch(["one"])[0][:3]
        np.testing.assert_allclose(short, full / np.linalg.norm(full), rtol=1e-6)
        refused = await client.post("/v1/embeddings", json={"input": "one", "dimensions": 9})
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "dimensions"

    with_client(test)


@pytest.mark.parametrize("name", ["fake/engine", "engine", "/home/me/other", "other", None])
def test_the_model_has_several_names(name: str | None) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"input": "x"} if name is None else {"input": "x", "model": name}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        if name is not None:
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == "fake/engine"

    with_client(test, aliases=("/home/me/other",))


def test_other_models_are_not_found() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for answer in (
            await client.post("/v1/embeddings", json={"input": "x", "model": "text-embedding-ada-002"}),
            await client.get("/v1/models/text-embedding-ada-002"),
        ):
            assert answer.status_code == 404
            error = error_of(answer)
            assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")

    with_client(test)


def test_models_are_listed_with_what_they_do() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = (await client.get("/v1/models")).json()
        assert [(model["id"], model["kind"]) for model in body["data"]] == [
            ("fake/cross-encoder", "cross-encoder"), ("fake/engine", "embedding"),
        ]
        assert body["data"][1]["dimension"] == 8

    with_client(test, reranker=FakeCrossEncoder())


def test_rerank_by_cosine() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"query": "red fish", "documents": ["green bird", {"text": "red fish"}, "red bird"]}
        answer = (await client.post("/v1/rerank", json=body)).json()
        assert answer["results"][0]["index"] == 1
        assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 3
        assert "document" not in answer["results"][0]
        assert answer["usage"]["total_tokens"] == 16

    with_client(test)


def test_rerank_by_a_cross_encoder() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {
            "model": "cross-encoder", "query": "red fish", "documents": ["green bird", "red fish", "red bird"], "top_n": 2,
            "return_documents": True,
        }
        answer = (await client.post("/v1/rerank", json=body)).json()
        assert answer["model"] == "fake/cross-encoder"
        assert answer["results"] == [
            {"index": 1, "relevance_score": 1.0, "document": {"text": "red fish"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "red bird"}},
        ]
        refused = await client.post("/v1/rerank", json={**body, "model": "fake/engine"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "model")

    with_client(test, reranker=FakeCrossEncoder())


def test_a_cross_encoder_alone_ranks_and_embeds_nothing() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/rerank", json={"query": "a", "documents": ["a", "b"]})
        assert [result["index"] for result in answer.json()["results"]] == [0, 1]
        assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 400
        assert (await client.post("/similarity", json={"source": "x", "sentences": ["y"]})).status_code == 400
        assert (await client.get("/health")).status_code == 200

    with_client(test, engine=FakeCrossEncoder())


def test_an_embedding_model_is_no_reranker() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        raise AssertionError

    with pytest.raises(InvalidOptionError, match="no cross-encoder"):
        with_client(test, reranker=FakeEngine("other"))


def test_similarity_is_a_list_or_a_matrix() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        one = (await client.post("/similarity", json={"source": "a b", "sentences": ["a b", "c"]})).json()
        assert one["similarities"][0] == pytest.approx(1, abs=1e-6)
        assert one["similarities"][1] < 0.99
        several = (await client.post("/similarity", json={"source": ["c", "a b"], "sentences": ["a b", "c"]})).json()
        assert several["similarities"][1] == pytest.approx(one["similarities"], abs=1e-6)
        assert several["usage"]["total_tokens"] == 14

    with_client(test)


def test_concurrent_requests_share_a_batch() -> None:
    engine = FakeEngine()

    async def test(client: httpx.AsyncClient) -> None:
        engine.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await until(engine.entered.is_set)
        asking = [asyncio.create_task(client.post("/v1/embeddings", json={"input": str(n)})) for n in range(5)]
        depth = registry.gauge("archerfish_queue_depth", label_names=("queue",))
        await until(lambda: depth.value(queue="texts") == 5)
        engine.gate.set()
        answers = await asyncio.gather(first, *asking)
        assert [answer.status_code for answer in answers] == [200] * 6
        assert engine.batches == [["first"], ["0", "1", "2", "3", "4"]]

    registry = MetricRegistry()
    with_client(test, engine, registry=registry)


def test_a_failing_text_fails_only_its_own_request() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        good, bad = await asyncio.gather(
            client.post("/v1/embeddings", json={"input": "good"}), client.post("/v1/embeddings", json={"input": "some poison"})
        )
        assert good.status_code == 200
        assert bad.status_code == 500
        error = error_of(bad)
        assert error["type"] == "server_error"
        assert "poisoned" not in bad.text
        assert "Traceback" not in bad.text

    with_client(test, FakeEngine(poison="poison"))


def test_a_client_that_leaves_has_its_texts_dropped() -> None:
    engine = FakeEngine()
    registry = MetricRegistry()

    async def test(client: httpx.AsyncClient) -> None:
        engine.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await until(engine.entered.is_set)
        leaving = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["gone"] * 10}))
        depth = registry.gauge("archerfish_queue_depth", label_names=("queue",))
        await until(lambda: depth.value(queue="texts") == 10)
        leaving.cancel()
        await until(lambda: depth.value(queue="texts") == 0)
        engine.gate.set()
        assert (await first).status_code == 200
        assert engine.batches == [["first"]]

    with_client(test, engine, registry=registry)


def test_a_full_queue_answers_429() -> None:
    engine = FakeEngine()
    registry = MetricRegistry()

    async def test(client: httpx.AsyncClient) -> None:
        engine.gate.clear()
        first = asyncio.create_task(client.post("/v1/embeddings", json={"input": "first"}))
        await until(engine.entered.is_set)
        waiting = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a", "b"]}))
        depth = registry.gauge("archerfish_queue_depth", label_names=("queue",))
        await until(lambda: depth.value(queue="texts") == 2)
        refused = await client.post("/v1/embeddings", json={"input": "c"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(refused)["code"] == "overloaded"
        engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(first, waiting)] == [200, 200]

    with_client(test, engine, registry=registry, max_queue_texts=2)


def test_health_answers_from_a_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).json()["status"] == "ok"
        assert engine.batches == [["health"]]
        engine.poison = "health"
        failing = await client.get("/health")
        assert (failing.status_code, failing.json()) == (503, {"status": "failing", "reason": "RuntimeError"})
        engine.gate.clear()
        monkeypatch.setattr("archerfish.serve.app.HEALTH_TIMEOUT_S", 0.02)
        slow = await client.get("/health")
        engine.gate.set()
        assert (slow.status_code, slow.json()["reason"]) == (503, "no result within 0.02 s")

    with_client(test, engine)


def test_metrics_are_in_prometheus_form() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.post("/v1/embeddings", json={"input": ["a", "b c"]})
        await client.post("/v1/embeddings", json={})
        await client.get("/nowhere")
        await client.get("/v1/models/engine")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        for line in (
            'archerfish_requests_total{route="/v1/embeddings",status="200"} 1.0',
            'archerfish_requests_total{route="/v1/embeddings",status="400"} 1.0',
            'archerfish_requests_total{route="other",status="404"} 1.0',
            'archerfish_requests_total{route="/v1/models/{model_id:path}",status="200"} 1.0',
            'archerfish_texts_total{route="/v1/embeddings"} 2.0',
            'archerfish_tokens_total{route="/v1/embeddings"} 7.0',
            'archerfish_batch_size_bucket{le="2.0",queue="texts"} 1.0',
            'archerfish_batch_size_bucket{le="+Inf",queue="texts"} 1.0',
            'archerfish_batch_size_sum{queue="texts"} 2.0',
            'archerfish_queue_depth{queue="texts"} 0.0',
            "# TYPE archerfish_request_seconds histogram",
            "# TYPE archerfish_requests_total counter",
            "archerfish_requests_running 1.0",
        ):
            assert line in lines, answer.text

    with_client(test)


def test_the_page_has_everything_in_itself() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.get("/", headers={"Host": "<b>evil</b>"})
        assert answer.headers["content-type"].startswith("text/html")
        for text in ("/v1/embeddings", "/v1/rerank", "/similarity", "fake/engine", "8 dimensions"):
            assert text in answer.text
        for outside in ("src=", "<link", "@import", "<b>evil"):
            assert outside not in answer.text
        assert (await client.get("/openapi.json")).json()["paths"]["/v1/embeddings"]["post"]["requestBody"]

    with_client(test)


def test_a_long_answer_leaves_turns_to_others() -> None:
    written = 0
    seen: list[int] = []

    def items() -> Iterator[str]:
        nonlocal written
        for written in range(1, 101):
            yield str(written)

    async def watch() -> None:
        while True:
            seen.append(written)
            await asyncio.sleep(0)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        answer = await list_response('{"rows":[', items(), {"n": 100})
        watching.cancel()
        assert json.loads(bytes(answer.body)) == {"rows": list(range(1, 101)), "n": 100}

    asyncio.run(main())
    assert seen == [16, 32, 48, 64, 80, 96]
