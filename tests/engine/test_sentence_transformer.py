"""The names of sentence-transformers on our engines, against sentence-transformers itself."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers as theirs
import torch
from sentence_transformers import util as their_util

from archerfish import ArrowEngine, CrossEncoder, HubConfig, SentenceTransformer, quantize_embeddings, remarks, util
from archerfish.errors import DeviceError, InvalidInputError, InvalidOptionError, UnsupportedModelError

TEXTS = ["hello", "A cat sat on the mat.", "dogs bark", "今天天气很好", "word " * 20, "hello"]


@pytest.fixture(scope="module")
def ours() -> SentenceTransformer:
    return SentenceTransformer(
        "sentence-transformers/all-MiniLM-L6-v2", device="cpu", model_kwargs={"torch_dtype": "float32"}
    )


@pytest.fixture(scope="module")
def peer(minilm_source: Path) -> Any:
    return theirs.SentenceTransformer(str(minilm_source), device="cpu")


def check_same(mine: Any, other: Any, atol: float = 2e-5) -> None:
    assert type(mine) is type(other)
    if isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            check_same(one, two, atol)
    else:
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.asarray(mine, np.float64), np.asarray(other, np.float64), atol=atol)


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        ({"normalize_embeddings": True}, 2e-5),
        ({"truncate_dim": 64}, 2e-5),
        ({"truncate_dim": 64, "normalize_embeddings": True}, 2e-5),
        ({"convert_to_tensor": True}, 2e-5),
        ({"convert_to_numpy": False}, 2e-5),
        ({"prompt": "query: "}, 2e-5),
        ({"prompt_name": "query"}, 2e-5),
        ({"output_value": "token_embeddings"}, 1e-4),
        ({"batch_size": 2, "show_progress_bar": False, "device": "cpu"}, 2e-5),
        ({"precision": "int8"}, 1),
        ({"precision": "uint8"}, 1),  # a number at the edge of a step may be one step off
        ({"precision": "binary"}, 0),
        ({"precision": "ubinary", "convert_to_tensor": True}, 0),
    ],
    ids=str,
)
def test_encode_gives_what_sentence_transformers_gives(
    ours: SentenceTransformer, peer: Any, options: dict[str, Any], atol: float
) -> None:
    check_same(ours.encode(TEXTS, **options), peer.encode(TEXTS, **options), atol)


def test_encode_of_one_text(ours: SentenceTransformer, peer: Any) -> None:
    for options in ({"convert_to_tensor": True}, {"output_value": "token_embeddings"}, {"precision": "ubinary"}):
        check_same(ours.encode("A cat", **options), peer.encode("A cat", **options), 1e-4)
    check_same(ours.encode("word " * 400), peer.encode("word " * 400))
    mine, other = (each.encode("A cat", output_value=None) for each in (ours, peer))
    for name in mine:
        check_same(mine[name], other[name], 1e-4)
    assert {"input_ids", "token_embeddings", "sentence_embedding"} <= mine.keys()


def test_texts_may_be_named_as_in_either_version(ours: SentenceTransformer) -> None:
    assert ours.to("cpu").eval() is ours
    expected = ours.encode(["A cat"])
    assert np.array_equal(ours.encode(sentences=["A cat"]), expected)
    assert np.array_equal(ours.encode_document(inputs=["A cat"]), expected)


def test_max_seq_length_can_be_set(ours: SentenceTransformer, peer: Any) -> None:
    before = peer.max_seq_length
    ours.max_seq_length = peer.max_seq_length = 12
    try:
        check_same(ours.encode(TEXTS), peer.encode(TEXTS))
        assert ours.tokenize(TEXTS)["input_ids"].shape == (6, 12)
    finally:
        ours.max_seq_length = peer.max_seq_length = before
    with pytest.raises(InvalidOptionError, match="has 512 positions"):
        ours.max_seq_length = 1000


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity_of_vectors(ours: SentenceTransformer, peer: Any, name: str) -> None:
    a, b = peer.encode(TEXTS), peer.encode(TEXTS[::-1])
    before = peer.similarity_fn_name
    ours.similarity_fn_name = peer.similarity_fn_name = name
    try:
        check_same(ours.similarity(a, b[:2]), peer.similarity(a, b[:2]))
        check_same(ours.similarity(list(torch.tensor(a)), b[0].tolist()), peer.similarity(a, b[0]))
        check_same(ours.similarity_pairwise(a, b), peer.similarity_pairwise(a, b))
    finally:
        ours.similarity_fn_name = peer.similarity_fn_name = before
    assert isinstance(ours.similarity("hello", TEXTS), np.ndarray)
    with pytest.raises(InvalidInputError, match="not both"):
        ours.similarity(a, TEXTS)


def test_pools_give_the_same_vectors(ours: SentenceTransformer, peer: Any) -> None:
    pool = ours.start_multi_process_pool(["cpu", "cpu"])
    check_same(ours.encode_multi_process(TEXTS, pool, chunk_size=2), peer.encode(TEXTS))
    check_same(ours.encode(TEXTS, pool=pool), peer.encode(TEXTS))
    ours.stop_multi_process_pool(pool)


def test_prompts_of_queries_and_documents(tiny_model: Any, hub: HubConfig) -> None:
    path = tiny_model()
    settings = {"prompts": {"query": "the cat : ", "passage": "the dog : "}, "default_prompt_name": "passage"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = ArrowEngine(path, hub=hub, dtype="float32")
    query, passage = engine.encode(["the cat : fish", "the dog : fish"], prompt="")
    for mine, expected in (
        (engine.encode_query("fish"), query),
        (engine.encode_document("fish"), passage),
        (engine.encode("fish"), passage),
        (engine.encode("fish", prompt="the cat : "), query),
    ):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    told = SentenceTransformer(str(path), hub=hub, dtype="float32", prompts={"query": "the dog : "}, truncate_dim=8)
    np.testing.assert_allclose(told.encode_query("fish"), passage[:8], atol=1e-5)
    assert told.get_sentence_embedding_dimension() == 8


@pytest.mark.parametrize("activation", ["Softmax", "Tanh", "ReLU", "Sigmoid", "LogSigmoid"])
def test_activations_of_cross_encoders(activation: str, tiny_model: Any, hub: HubConfig) -> None:
    stated = f"torch.nn.modules.activation.{activation}"
    config = {"num_labels": 3, "sbert_ce_default_activation_function": stated}
    path, pairs = (
        tiny_model("Bert", head="ForSequenceClassification", config=config),
        [["the cat", "sat"], ["red", "blue"]],
    )
    engine = CrossEncoder(str(path), hub=hub, dtype="float32")
    if activation == "LogSigmoid":
        with pytest.raises(UnsupportedModelError, match="activation 'logsigmoid'"):
            engine.predict(pairs)
    else:
        check_same(engine.predict(pairs), theirs.CrossEncoder(str(path), device="cpu").predict(pairs))


@pytest.mark.parametrize("num_labels", [1, 3])
def test_cross_encoder(num_labels: int, tiny_model: Any, hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("Bert", head="ForSequenceClassification", config={"num_labels": num_labels})
    peer = theirs.CrossEncoder(str(path), device="cpu")
    engine = CrossEncoder(str(path), hub=hub, dtype="float32", num_labels=num_labels)
    documents = ["the cat sat", "fish spits water", "the dog", "red blue"]
    pairs = [["the cat", text] for text in documents]
    for options in ({}, {"convert_to_tensor": True}, {"apply_softmax": True}, {"activation_fn": torch.nn.Tanh()}):
        check_same(engine.predict(pairs, **options), peer.predict(pairs, **options))
    check_same(np.asarray(engine.predict(("the cat", "the dog"))), np.asarray(peer.predict(("the cat", "the dog"))))
    if num_labels == 1:
        mine, other = (each.rank("the cat", documents, top_k=3, return_documents=True) for each in (engine, peer))
        assert [(row["corpus_id"], row["text"]) for row in mine] == [(row["corpus_id"], row["text"]) for row in other]
        assert [row["score"] for row in mine] == pytest.approx([row["score"] for row in other], abs=2e-5)
    else:
        with pytest.raises(UnsupportedModelError, match="ranking needs one"):
            engine.rank("the cat", documents)
    with pytest.raises(InvalidInputError, match="Pair 1 must be two texts"):
        engine.predict([["a", "b"], "ab"])
    assert repr(engine).startswith("CrossEncoder(") and f"labels={num_labels}" in repr(engine)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert engine.predict(pairs, apply_softmax=True).shape == engine.predict(pairs).shape
    with pytest.raises(DeviceError, match="A tensor needs torch"):
        engine.predict(pairs, convert_to_tensor=True)


def test_a_cross_encoder_needs_a_head(tiny_model: Any, hub: HubConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="SentenceTransformer"):
        CrossEncoder(str(tiny_model()), hub=hub)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is ignored"),
        ({"token": "x"}, "HF_TOKEN"),
        ({"model_kwargs": {"attn_implementation": "sdpa"}}, "attn_implementation"),
        ({"backend": "torch", "token": None}, ""),
    ],
    ids=str,
)
def test_options_without_effect_are_said_once(
    options: dict[str, Any],
    said: str,
    tiny_model: Any,
    hub: HubConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    path = str(tiny_model())
    with caplog.at_level(logging.WARNING, "archerfish"):
        engine = SentenceTransformer(path, "cpu", hub=hub, **options)
        SentenceTransformer(path, "cpu", hub=hub, **options)
    assert [said in record.message for record in caplog.records] == [True] * bool(said)
    caplog.clear()
    engine.encode("fish", device="cuda:0")
    assert [record.message for record in caplog.records] == ["device=cuda:0 is ignored: the engine was made for cpu."]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a"], "query"), {}, "batch_size must be a number .* by name"),
        (("a",), {"precision": "int8"}, "one vector has none"),
        (("a",), {"precision": "int4"}, "Known: float32"),
        (("a",), {"output_value": "tokens"}, "'token_embeddings' and None"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    minilm: ArrowEngine, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidInputError, InvalidOptionError), match=message):
        minilm.encode(*arguments, **options)


def test_functions_on_vectors() -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)
    queries = torch.from_numpy(vectors[:7] + 0.5)
    found = util.semantic_search(queries, vectors, top_k=4, corpus_chunk_size=9, query_chunk_size=3)
    expected = their_util.semantic_search(queries, torch.from_numpy(vectors), top_k=4)
    assert [[hit["corpus_id"] for hit in row] for row in found] == [
        [hit["corpus_id"] for hit in row] for row in expected
    ]
    for precision in ("float32", "int8", "uint8", "binary", "ubinary"):
        check_same(quantize_embeddings(vectors, precision), theirs.quantize_embeddings(vectors, precision), 0)
        ranges, one = np.stack([vectors.min(0), vectors.max(0)]), vectors[0]
        check_same(quantize_embeddings(one, precision, ranges), theirs.quantize_embeddings(one, precision, ranges))
    with pytest.raises(InvalidInputError, match="already"):
        quantize_embeddings(quantize_embeddings(vectors, "int8"), "int8")


def test_reprs_say_model_device_type_and_sizes(minilm: ArrowEngine) -> None:
    dtype = minilm.core.dtype
    expected = f"ArrowEngine('all-minilm-l6-v2', device='cpu', dtype='{dtype}', dimension=384, max_seq_length=256)"
    assert repr(minilm) == expected


@pytest.mark.parametrize("output_value", ["sentence_embedding", "token_embeddings"])
def test_cut_texts_are_said_once(
    output_value: str, ours: SentenceTransformer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    ours.encode(["short", "word " * 200], output_value=output_value)
    assert caplog.messages == []
    for _ in range(2):
        ours.encode(["short", "word " * 400], output_value=output_value)
    [said] = caplog.messages
    assert (
        said == "sentence-transformers/all-MiniLM-L6-v2 reads 256 tokens of a text. Longer ones were cut: split them."
    )
