"""Sparse vectors, vectors of tokens, labels and rewards over HTTP, of real engines."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import ArrowEngine, HubConfig, quantize_embeddings

from .client import host_with, serving
from .test_other_servers import asked, refused

pytestmark = pytest.mark.anyio
TEXTS = ["the cat sat on a mat .", "red blue green", "the dog"]
XLM = {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42}


@pytest.fixture
def three(tiny_model: Any, hub: HubConfig) -> Any:
    """As BGE-M3, with one vector, sparse vectors and vectors of tokens."""
    path = tiny_model("XLMRoberta", config=XLM)
    torch.manual_seed(5)
    torch.save(torch.nn.Linear(32, 1).state_dict(), path / "sparse_linear.pt")
    torch.save(torch.nn.Linear(32, 32).state_dict(), path / "colbert_linear.pt")
    return ArrowEngine(path, dtype="float32", hub=hub)


async def test_kinds_of_vectors(three: Any, tmp_path: Path) -> None:
    sparse, several = (three.encode(TEXTS, output=output) for output in ("sparse", "multi_vector"))
    async with serving(host_with(tmp_path, three)) as client:
        found = await asked(client, "/embed_sparse", inputs=TEXTS)
        for row, expected in zip(found, sparse, strict=True):
            assert {value["index"]: value["value"] for value in row} == pytest.approx(expected.as_dict(), abs=1e-5)
        pooled = await asked(client, "/pooling", input=TEXTS, task="sparse")
        assert [row["data"] for row in pooled["data"]] == found and pooled["usage"]["prompt_tokens"] > 0
        tokens = await asked(client, "/pooling", input=TEXTS, task="token_embed")
        for row, expected in zip(tokens["data"], several, strict=True):
            np.testing.assert_allclose(row["data"], expected, atol=1e-5)
        for option in ({"dimensions": 8}, {"encoding_format": "base64"}, {"output_dtype": "int8"}):
            assert "one vector a text" in await refused(client, "/pooling", input=TEXTS, task="sparse", **option)
        assert await asked(client, "/embed_all", inputs=TEXTS) == [row["data"] for row in tokens["data"]]
        dense = await asked(client, "/pooling", input=TEXTS)
        np.testing.assert_allclose([row["data"] for row in dense["data"]], three.encode(TEXTS), atol=1e-5)


async def test_numbers_of_vectors(three: Any, tmp_path: Path) -> None:
    vectors = three.encode(TEXTS)
    async with serving(host_with(tmp_path, three)) as client:
        for kind in ("binary", "ubinary"):
            answer = await asked(client, "/v1/embeddings", input=TEXTS, output_dtype=kind)
            expected = quantize_embeddings(vectors, kind)
            assert [row["embedding"] for row in answer["data"]] == expected.tolist()
            coded = await asked(client, "/v1/embeddings", input=TEXTS[0], output_dtype=kind, encoding_format="base64")
            assert base64.b64decode(coded["data"][0]["embedding"]) == expected[0].tobytes()
        small = await asked(client, "/v1/embeddings", input=TEXTS, output_dtype="int8", dimensions=16)
        rows = np.array([row["embedding"] for row in small["data"]], np.float32)
        cut = vectors[:, :16]
        assert rows.shape == (3, 16) and np.abs(rows).max(1).tolist() == [127] * 3
        cosines = (rows * cut).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(cut, axis=1)
        assert cosines.min() > 0.999


async def test_late_interaction_ranks(tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(1)
    prompts = {"query": "red ", "document": "blue "}
    peer: Any = MultiVectorEncoder(str(tiny_model().parent / "base"), device="cpu", prompts=prompts)
    peer[0].query_expansion = {"strategy": "fixed", "length": 12}
    peer.save(str(tmp_path / "model"))
    engine: Any = ArrowEngine(tmp_path / "model", dtype="float32", hub=hub)
    expected = peer.similarity(peer.encode_query(TEXTS[:1]), peer.encode_document(TEXTS))[0].tolist()
    async with serving(host_with(tmp_path, engine)) as client:
        ranks = await asked(client, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
        sizes = [len(engine.tokenize([text], prompt_name="document")[0].token_ids) for text in TEXTS]
        assert ranks["usage"]["prompt_tokens"] == 12 + sum(sizes)
        assert {row["index"]: row["relevance_score"] for row in ranks["results"]} == pytest.approx(
            dict(enumerate(expected))
        )
        rows = (await asked(client, "/pooling", input=TEXTS[:1], prompt_name="query"))["data"][0]["data"]
        assert np.shape(rows) == (12, 128)
        message = await refused(client, "/v1/embeddings", input=TEXTS)
        assert "has no dense vectors" in message


@pytest.mark.parametrize("num_labels", [1, 3])
async def test_labels_and_rewards_of_a_decoder(
    num_labels: int, tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "num_labels": num_labels}
    path = tiny_model("Qwen2", head="ForSequenceClassification", config=sizes)
    engine: Any = ArrowEngine(path, dtype="float32", hub=hub)
    raw = engine.classify(TEXTS, is_raw=True)
    async with serving(host_with(tmp_path, engine)) as client:
        plain = await asked(client, "/v1/classify", input=TEXTS, use_activation=False)
        np.testing.assert_allclose([row["probs"] for row in plain["data"]], raw, atol=1e-5)
        scaled = await asked(client, "/classify", input=TEXTS)
        powers = np.exp(raw)
        expected = powers / powers.sum(1, keepdims=True) if num_labels > 1 else 1 / (1 + np.exp(-raw))
        np.testing.assert_allclose([row["probs"] for row in scaled["data"]], expected, atol=1e-5)
        assert scaled["data"][0]["label"] == engine.labels[int(np.argmax(expected[0]))]
        np.testing.assert_allclose(engine.classify(TEXTS), expected, atol=1e-5)
