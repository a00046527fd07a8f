"""Sparse vectors, several vectors for a text, and what comes behind a transformer, against sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SpladePooling

from archerfish import ArrowEngine, HubConfig
from archerfish.engine.inference_core import kind_of
from archerfish.errors import UnsupportedModelError

TEXTS = ["the cat sat on a mat .", "", "fish spits water at flies , far away", "the dog " * 40, "red blue green " * 3]
Peer = Any


def save(peer: Peer, target: Path) -> Path:
    peer.save(str(target))
    return target


def open_both(peer: Peer, path: Path, hub: HubConfig) -> ArrowEngine:
    return ArrowEngine(save(peer, path), dtype="float32", hub=hub)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Bert", {}),
        ("DistilBert", {}),
        ("Roberta", {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42}),
        (
            "ModernBert",
            {
                "local_attention": 8,
                "pad_token_id": 0,
                "cls_token_id": 2,
                "sep_token_id": 3,
                "bos_token_id": 2,
                "eos_token_id": 3,
            },
        ),
        ("Gte", {"pad_token_id": 0}),
    ],
)
def test_splade(family: str, config: dict[str, Any], tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    base = tiny_model(family, head="ForMaskedLM", config=config)
    transformer = modules.Transformer(str(base), transformer_task="fill-mask", max_seq_length=24)
    activation: Any = "log1p_relu" if family == "Bert" else "relu"
    peer: Peer = SparseEncoder(modules=[transformer, SpladePooling(activation_function=activation)], device="cpu")
    engine = open_both(peer, tmp_path / "model", hub)
    theirs = peer.encode(TEXTS).to_dense().numpy()
    ours = engine.encode(TEXTS)
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found.token_ids, np.flatnonzero(expected))
        np.testing.assert_allclose(found.weights, expected[found.token_ids], atol=2e-5)
    np.testing.assert_allclose(engine.similarity(TEXTS, TEXTS[:2]), theirs @ theirs[:2].T, rtol=1e-4)
    assert engine.rerank(TEXTS[0], TEXTS)[0].index == int(np.argmax(theirs @ theirs[0]))
    with pytest.raises(UnsupportedModelError, match=r"no multi_vector vectors\. It has: sparse"):
        engine.encode("the cat", output="multi_vector")


@pytest.mark.parametrize("family", ["Bert", "Gemma3Text"])
def test_dense_layers_behind_the_pooling(family: str, tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    """As in LaBSE, and in EmbeddingGemma, whose attention sees both directions."""
    both = {"use_bidirectional_attention": True, "sliding_window": 8, "num_key_value_heads": 2, "head_dim": 8}
    base = tiny_model(family, config={**both, "pad_token_id": 0} if family != "Bert" else {}).parent / "base"
    stack = [modules.Transformer(str(base), max_seq_length=24), modules.Pooling(32, "mean")]
    stack += [Dense(32, 48, bias=False, activation_function=torch.nn.Identity()), Dense(48, 16), modules.Normalize()]
    peer: Peer = SentenceTransformer(modules=stack, device="cpu")
    engine = open_both(peer, tmp_path / "model", hub)
    np.testing.assert_allclose(engine.encode(TEXTS), peer.encode(TEXTS), atol=2e-5)
    assert engine.get_embedding_dimension() == 16


def test_all_three_kinds_of_vectors(tiny_model: Any, hub: HubConfig) -> None:
    """BGE-M3: the formulas are those of its authors' FlagEmbedding."""
    path = tiny_model("XLMRoberta", config={"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42})
    torch.manual_seed(5)
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 32)
    for name, layer in (("sparse_linear", sparse), ("colbert_linear", colbert)):
        torch.save(layer.state_dict(), path / f"{name}.pt")
    engine = ArrowEngine(path, dtype="float32", hub=hub)
    model, tokenizer = (each.from_pretrained(path) for each in (transformers.AutoModel, transformers.AutoTokenizer))
    special = set(tokenizer.all_special_ids)
    for text, weights, vectors in zip(
        TEXTS, engine.encode(TEXTS, output="sparse"), engine.encode(TEXTS, output="multi_vector"), strict=True
    ):
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=24)
        with torch.inference_mode():
            hidden = model.eval()(**encoded).last_hidden_state[0]
            expected: dict[int, float] = {}
            for token, weight in zip(
                encoded["input_ids"][0].tolist(), sparse(hidden).relu()[:, 0].tolist(), strict=True
            ):
                if token not in special and weight > 0:
                    expected[token] = max(weight, expected.get(token, 0.0))
            rows = torch.nn.functional.normalize(colbert(hidden[1:]), dim=-1)
        assert weights.as_dict() == pytest.approx(expected, abs=2e-5)
        np.testing.assert_allclose(vectors, rows.numpy(), atol=2e-5)
    assert engine.encode(TEXTS).shape == (5, 32)


TEMPLATE = """{%- for m in messages if m.role == 'system' %}the {{ m.content }} {% endfor -%}
cat {{ (messages | selectattr('role', 'eq', 'query') | first).content }} dog \
{{ (messages | selectattr('role', 'eq', 'document') | first).content }} red blue"""


@pytest.mark.parametrize("has_false", [True, False])
@pytest.mark.parametrize("prompt", ["", "green"])
def test_decoders_that_rank_by_logits(
    has_false: bool, prompt: str, tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    """As Qwen3-Reranker: the score is the logit of one token less that of another."""
    config = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": has_false}
    base = tiny_model("Qwen3", head="ForCausalLM", config=config)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    transformer = modules.Transformer(str(base), transformer_task="text-generation", max_seq_length=40)
    transformer.tokenizer.padding_side = "left"
    parts = [transformer, LogitScore(9, 12 if has_false else None)]
    named = {"prompts": {"instruct": prompt}, "default_prompt_name": "instruct"} if prompt else {}
    peer: Peer = CrossEncoder(modules=parts, device="cpu", **named)
    engine = open_both(peer, tmp_path / "model", hub)
    short = [text for text in TEXTS if len(text) < 60]
    pairs = [(a, b) for a in short for b in short]
    np.testing.assert_allclose(engine.score_pairs(pairs), peer.predict(pairs), atol=2e-5)
    assert engine.rerank(short[0], short[1:])[0].index == peer.rank(short[0], short[1:])[0]["corpus_id"]
    cut = engine.pair_prompt.tokenize([("the cat", "the dog " * 40)], 24)[0]  # the end of the template stays
    assert (
        cut.is_cut
        and len(cut.token_ids) == 24
        and engine.tokenizer.decode(cut.token_ids[-3:].tolist()) == "dog red blue"
    )
    assert kind_of(tmp_path / "model") == "cross-encoder"
