"""Vectors, scores and labels in the forms of Cohere, TEI and vLLM, and the prompts of embedding models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from archerfish.serve.app import create_app
from archerfish.serve.tenants import Tenants
from archerfish.serve.vector_routes import Array
from archerfish.text.tokenizer import TokenizedText

from .client import WORDS, client_of, host_with, serving
from .fake_backend import KEY, FakeBackend
from .hosting import WordEncoder

pytestmark = pytest.mark.anyio
TEXTS = ["one two", "three"]
ROWS = np.stack([WordEncoder.vector(text) for text in TEXTS])


def pairs() -> WordEncoder:
    """Its score is the number of words of a query and a document."""
    return WordEncoder("fake/pairs", is_cross_encoder=True)


class Moods(WordEncoder):
    """A classifier of three labels, whose scores are 0, the number of words, and 1."""

    def __init__(self, directory: Path, label_activation: str = "softmax") -> None:
        super().__init__("fake/moods", is_cross_encoder=True)
        self.directory, self.core.label_activation = directory, label_activation
        config = {"id2label": {"0": "sad", "1": "glad", "2": "bored"}}
        (directory / "metadata.json").write_text(json.dumps({"config": config}))

    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = None, *, is_raw: bool = False) -> Array:
        return np.asarray([[0.0, len(text.token_ids), 1.0] for text in texts], np.float32)


async def asked(client: httpx.AsyncClient, route: str, **body: Any) -> Any:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: httpx.AsyncClient, route: str, **body: Any) -> str:
    answer = await client.post(route, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


# Cohere


async def test_cohere_embeds_in_several_types() -> None:
    async with serving() as client:
        floats = await asked(client, "/v1/embed", texts=TEXTS, model=WORDS, input_type="search_document")
        assert floats["response_type"] == "embeddings_floats" and floats["texts"] == TEXTS
        np.testing.assert_allclose(floats["embeddings"], ROWS, rtol=1e-6)
        assert floats["meta"] == {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 3}}
        plain = await asked(client, "/v2/embed", texts=TEXTS)
        assert plain["embeddings"] == {"float": floats["embeddings"]}
        types = ["int8", "uint8", "binary", "ubinary", "base64"]
        found = (await asked(client, "/v2/embed", texts=TEXTS, embedding_types=types))["embeddings"]
        assert list(found) == types
        small = np.asarray(found["int8"], np.float32)
        cosines = (small * ROWS).sum(axis=1) / np.linalg.norm(small, axis=1)
        assert np.abs(small).max() == 127 and cosines.min() > 0.999
        assert (np.asarray(found["uint8"]) - 128 == small).all()
        assert found["ubinary"] == [[int(np.packbits(row > 0)[0])] for row in ROWS]
        assert found["binary"] == [[byte - 128 for byte in row] for row in found["ubinary"]]
        short = await asked(client, "/v2/embed", texts=TEXTS, output_dimension=4)
        assert [len(row) for row in short["embeddings"]["float"]] == [4, 4]
        assert "images" in await refused(client, "/v2/embed", texts=["a"], images=["data:"])


async def test_rerank_has_the_paths_of_cohere_and_jina(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, pairs())) as client:
        body = {"query": "a", "documents": ["b", "c d"], "top_n": 1}
        answers = [await asked(client, route, **body) for route in ("/rerank", "/v1/rerank", "/v2/rerank")]
        assert answers[0]["results"] == [{"index": 1, "relevance_score": 3.0}]
        assert answers[0] == answers[1] == answers[2]


# TEI


async def test_tei_embeds_and_describes_the_model() -> None:
    async with serving() as client:
        for route in ("/embed", "/"):
            np.testing.assert_allclose(await asked(client, route, inputs=TEXTS, truncate=True), ROWS, rtol=1e-6)
        assert len(await asked(client, "/embed", inputs="one", normalize=True, dimensions=3)) == 1
        info = (await client.get("/info")).json()
        assert (info["model_id"], info["max_input_length"]) == (WORDS, 512)
        assert info["model_type"] == {"embedding": {"pooling": "mean"}}
        assert "inputs" in await refused(client, "/embed", inputs=[])


async def test_tei_ranks_texts(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, pairs())) as client:
        ranks = await asked(client, "/rerank", query="a", texts=["b", "c d"], return_text=True)
        assert ranks == [{"index": 1, "score": 3.0, "text": "c d"}, {"index": 0, "score": 2.0, "text": "b"}]
        assert await refused(client, "/rerank", query="a") == "Give either documents, or in TEI's form texts."
        assert "either" in await refused(client, "/rerank", query="a", texts=["b"], documents=["c"])


async def test_labels_of_texts_and_pairs(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, Moods(tmp_path))) as client:
        one = await asked(client, "/predict", inputs="a b c")
        assert [label["label"] for label in one] == ["glad", "bored", "sad"]
        assert sum(label["score"] for label in one) == pytest.approx(1)
        raw = await asked(client, "/predict", inputs=[["a", "b c d"], ["a"]], raw_scores=True)
        assert [labels[0] for labels in raw] == [{"score": 4.0, "label": "glad"}, {"score": 1.0, "label": "glad"}]
        pair = await asked(client, "/predict", inputs=["a", "b c"])
        assert pair == one
        assert "one text or two, not 3" in await refused(client, "/predict", inputs=["a", "b", "c"])
        classes = await asked(client, "/classify", input=["a b c", "d"])
        [first, second] = classes["data"]
        assert (first["label"], first["num_classes"], second["index"]) == ("glad", 3, 1)
        assert first["probs"] == pytest.approx([one[2]["score"], one[0]["score"], one[1]["score"]])
        assert "3 labels per pair" in await refused(client, "/v1/rerank", query="a", documents=["b"])
        assert (await client.get("/info")).json()["model_type"]["reranker"]["label2id"] == {
            "sad": 0,
            "glad": 1,
            "bored": 2,
        }


async def test_probabilities_come_out_of_the_models_activation(tmp_path: Path) -> None:
    async with serving(host_with(tmp_path, Moods(tmp_path, "identity"))) as client:
        assert (await asked(client, "/classify", input="a b"))["data"][0]["probs"] == [0.0, 2.0, 1.0]
        assert [label["score"] for label in await asked(client, "/predict", inputs="a b")] == [2.0, 1.0, 0.0]


async def test_labels_need_a_cross_encoder() -> None:
    async with serving() as client:
        for route, body in (("/predict", {"inputs": "a"}), ("/classify", {"input": "a"})):
            for named in ({}, {"model": WORDS}):
                assert "can classify texts; --rerank-model" in await refused(client, route, **body, **named)


# vLLM


async def test_scores_of_one_with_each_or_in_pairs(tmp_path: Path) -> None:
    for encoder, expected in ((pairs(), [2.0, 3.0]), (WordEncoder(WORDS), None)):
        async with serving(host_with(tmp_path, encoder)) as client:
            each = await asked(client, "/score", text_1="one", text_2=["one", "two three"])
            same = await asked(client, "/v1/score", text_1=["one", "one"], text_2=["one", "two three"])
            scores = [item["score"] for item in each["data"]]
            assert each["data"] == same["data"]
            assert scores == (
                expected or pytest.approx([1.0, WordEncoder.vector("one") @ WordEncoder.vector("two three")])
            )
            assert "text_1 has 3 texts" in await refused(client, "/score", text_1=["a", "b", "c"], text_2=["d", "e"])


async def test_pooling_gives_vectors() -> None:
    async with serving() as client:
        answer = await asked(client, "/pooling", input=TEXTS, model=WORDS)
        assert [item["object"] for item in answer["data"]] == ["pooling"] * 2
        np.testing.assert_allclose([item["data"] for item in answer["data"]], ROWS, rtol=1e-6)


# Prompts and dimensions


async def test_prompt_is_chosen_by_name_or_by_type_of_text(tmp_path: Path) -> None:
    encoder = WordEncoder(WORDS)
    encoder.directory = tmp_path  # type: ignore[attr-defined]
    metadata = {
        "embedding": {"prompts": {"query": "query: ", "passage": "passage: "}},
        "config": {"is_matryoshka": True},
    }
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    async with serving(host_with(tmp_path, encoder)) as client:
        for route, member in (("/v1/embeddings", "input"), ("/v2/embed", "texts")):
            for stated, name in (("query", "query"), ("search_query", "query"), ("search_document", "passage")):
                answer = await client.post(route, json={member: ["fish"], "input_type": stated})
                assert encoder.jobs[-1] == [f"{name} fish"] and "x-archerfish-remark" not in answer.headers
        await asked(client, "/v1/embeddings", input="fish", prompt_name="passage", dimensions=3)
        await asked(client, "/embed", inputs="fish", prompt_name="passage")
        assert encoder.jobs[-2:] == [["passage fish"]] * 2
        answer = await client.post(
            "/v1/embeddings", json={"input": "fish", "input_type": "clustering", "dimensions": 3}
        )
        assert encoder.jobs[-1] == ["fish"]
        assert answer.headers["x-archerfish-remark"] == f"{WORDS} has no prompt for input_type 'clustering'"


async def test_fewer_dimensions_of_an_ordinary_model_are_remarked() -> None:
    async with serving() as client:
        answer = await client.post("/v1/embeddings", json={"input": "fish", "dimensions": 3})
        assert "was trained for fewer dimensions" in answer.headers["x-archerfish-remark"]


async def test_posts_to_the_root_need_a_key() -> None:
    app = create_app(FakeBackend(), tenants=Tenants.from_text(f"acme={KEY}"))
    async with client_of(app) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.post("/", json={"inputs": "a"})).status_code == 401
        allowed = await client.post("/", json={"inputs": "a"}, headers={"Authorization": f"Bearer {KEY}"})
        assert allowed.status_code == 200
