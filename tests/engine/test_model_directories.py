"""Whole directories as sentence-transformers saves them, for every architecture and pooling, and cross-encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from archerfish import ArrowEngine, HubConfig
from archerfish.errors import InvalidInputError, UnsupportedModelError

TEXTS = [
    "the cat sat on a mat .",
    "",
    "fish spits water at flies , far away",
    "中国",
    "the dog " * 40,
    "red blue green " * 3,
]
SPECIAL = {
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "mask_token_id": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "DistilBert": {},
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42},
    "MPNet": {"pad_token_id": 1},
    "ModernBert": {"local_attention": 8, **SPECIAL},
    "NomicBert": {},
    "Gte": {},
    "EuroBert": {"classifier_pooling": "mean", **SPECIAL},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "Mistral": {"num_key_value_heads": 2},
}


def check_vectors(path: Path, hub: HubConfig, prompt_name: str | None = None) -> ArrowEngine:
    peer: Any = SentenceTransformer(str(path), device="cpu")
    engine = ArrowEngine(path, dtype="float32", hub=hub)
    assert engine.get_max_seq_length() == peer.max_seq_length == 24
    ours, theirs = (each.encode(TEXTS, prompt_name=prompt_name) for each in (engine, peer))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_end_to_end(family: str, tiny_model: Any, hub: HubConfig) -> None:
    check_vectors(tiny_model(family, config=FAMILIES[family]), hub)


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens"])
def test_poolings_end_to_end(mode: str, tiny_model: Any, hub: HubConfig) -> None:
    check_vectors(tiny_model(pooling_mode=mode), hub)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "ModernBert", "Gte", "Qwen3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_cross_encoders(family: str, num_labels: int, tiny_model: Any, hub: HubConfig) -> None:
    config = {**FAMILIES[family], "num_labels": num_labels}
    path = tiny_model(family, head="ForSequenceClassification", config=config)
    peer = CrossEncoder(str(path), device="cpu")
    engine = ArrowEngine(path, dtype="float32", hub=hub)
    pairs = [("the cat", text) for text in TEXTS]
    assert engine.is_cross_encoder
    np.testing.assert_allclose(engine.score_pairs(pairs), peer.predict(pairs), atol=2e-5)
    if family == "Qwen3":
        [padded] = engine._tokenize([(7, 8, 9, 0, 0)])  # as texts that end so
        assert engine.core.config.values["pad_token_id"] == 0 and padded.token_ids.tolist() == [7, 8, 9]
    mixed = engine.compute(engine.tokenize([pairs[0], "the cat"]))
    np.testing.assert_allclose(mixed[0], np.atleast_1d(engine.score_pairs(pairs[:1])[0]), atol=2e-5)
    one = peer.tokenizer(["the cat"], return_tensors="pt")
    logits = peer.model(**one).logits.detach().numpy()[0]
    np.testing.assert_allclose(mixed[1], logits if num_labels > 1 else 1 / (1 + np.exp(-logits)), atol=2e-5)
    if num_labels == 1:
        ours = engine.rerank("the cat", TEXTS)
        theirs = peer.rank("the cat", TEXTS)
        assert [r.index for r in ours] == [r["corpus_id"] for r in theirs]
    else:
        with pytest.raises(UnsupportedModelError, match="3 labels"):
            engine.rerank("the cat", TEXTS)
    with pytest.raises(UnsupportedModelError, match="cross-encoder"):
        engine.encode("the cat")


def test_an_embedding_model_scores_no_pairs(tiny_model: Any, hub: HubConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="similarity"):
        ArrowEngine(tiny_model(), hub=hub).score_pairs([("a", "b")])


def test_prompts_of_the_model(tiny_model: Any, hub: HubConfig) -> None:
    path = tiny_model()
    settings = {"prompts": {"query": "the cat : ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = check_vectors(path, hub, prompt_name="query")
    served = engine.compute(engine.tokenize(TEXTS, prompt_name="query"))
    np.testing.assert_allclose(served, engine.encode(TEXTS, prompt_name="query"), atol=2e-5)
    with pytest.raises(InvalidInputError, match="'query'"):
        engine.encode(TEXTS, prompt_name="qery")


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
def test_reference_backend_reads_every_storage_type(storage: str, tiny_model: Any, hub: HubConfig) -> None:
    """On a CPU without bfloat16 units the weights stay at their stored size and are widened as they are used."""
    from archerfish.kernels import select
    from archerfish.kernels.torch.reference import TorchOps

    path = tiny_model()
    expected = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "BACKENDS", select.BACKENDS[-1:])
        engine = ArrowEngine(path, dtype="float32", storage_dtype=storage, hub=hub)
        assert type(engine.core.ops) is TorchOps
        blocks: Any = engine.core.encoder.__dict__["blocks"]
        weight = blocks[0].up.get().tensors["weight"]
        assert str(weight.dtype) == f"torch.{storage}"
        assert (engine.encode(TEXTS) * expected).sum(1).min() > 0.9999


@pytest.mark.parametrize("has_bos", [False, True])
def test_end_tokens_that_only_the_tokenizer_config_asks_for(has_bos: bool, tiny_model: Any, hub: HubConfig) -> None:
    """As in e5-mistral, whose vector is that of the end token. Version 5 of transformers leaves such tokens out."""
    path = tiny_model("Qwen3", config=FAMILIES["Qwen3"], pooling_mode="lasttoken")
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    added = {"add_eos_token": True, "eos_token": "[SEP]", "add_bos_token": has_bos, "bos_token": "[CLS]"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **added}))
    engine = ArrowEngine(path, dtype="float32", hub=hub)
    begin, end, *words = engine.tokenizer.ids_of(["[CLS]", "[SEP]", "the", "cat"])
    first = [begin] if has_bos else []
    texts: list[str | tuple[str, str]] = ["the cat", ("the", "cat"), "the " * 90]
    short, pair, long = (text.token_ids.tolist() for text in engine.tokenizer.tokenize(texts))
    assert short == [*first, *words, end] and long == [*first, *[words[0]] * (23 - len(first)), end]
    assert pair == [*first, words[0], end, *first, words[1], end]
    np.testing.assert_allclose(engine.encode("the cat"), engine.encode([short])[0], atol=1e-6)


def test_texts_that_are_cut_at_their_beginning(tiny_model: Any, hub: HubConfig) -> None:
    path = tiny_model()
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "truncation_side": "left"}))
    peer, engine = SentenceTransformer(str(path), device="cpu"), ArrowEngine(path, dtype="float32", hub=hub)
    text = "the cat " * 20 + "sat on a mat"
    np.testing.assert_allclose(engine.encode([text, "the cat"]), peer.encode([text, "the cat"]), atol=2e-5)
    ids = engine.tokenizer.tokenize([text])[0].token_ids
    assert len(ids) == 24 and engine.tokenizer.decode(ids.tolist()).endswith("mat")
