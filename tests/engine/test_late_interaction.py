"""Late-interaction models as sentence-transformers, PyLate and Stanford's code save them, against
sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder

from archerfish import LLM, ArrowEngine, HubConfig
from archerfish.cli.main import main
from archerfish.errors import CorruptFileError, InvalidInputError, UnsupportedModelError
from tests.conftest import VOCABULARY

TEXTS = ["the cat sat on a mat .", "", "fish spits water at flies , far away", "the dog " * 40, "red blue green " * 3]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Bert", {}),
    ("Roberta", {"type_vocab_size": 1, "pad_token_id": 0, "max_position_embeddings": 42}),
    (
        "ModernBert",
        {
            "local_attention": 62,
            "pad_token_id": 0,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    ("Gte", {"pad_token_id": 0}),
]
Peer = Any


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add_markers(directory: Path) -> None:
    """A token of the vocabulary that the tokenizer would take apart, and one that it knows with a space behind it."""
    file = directory / "tokenizer.json"
    stated = json.loads(file.read_text())
    first = len(stated["model"]["vocab"])
    stated["model"]["vocab"] |= {"[unused0]": first, "[unused1]": first + 1}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    stated["added_tokens"] += [
        {"id": first + 2 + i, "content": name, "normalized": True, **flags} for i, name in enumerate(("[Q] ", "[D] "))
    ]
    file.write_text(json.dumps(stated))


def save(tiny_model: Any, family: str, config: dict[str, Any], target: Path) -> Path:
    """As sentence-transformers saves a new model."""
    base = tiny_model(family, config={"vocab_size": len(VOCABULARY) + 4, **config}).parent / "base"
    add_markers(base)
    torch.manual_seed(1)
    MultiVectorEncoder(str(base), device="cpu").save(str(target))
    return target


def as_pylate(path: Path, *, has_type: bool, **stated: Any) -> None:
    """The layout of PyLate: a Dense module of its own and no others behind it, and one file that says how texts are
    read."""
    file = path / "modules.json"
    listed = [module for module in json.loads(file.read_text()) if module["type"].endswith(("Transformer", "Dense"))]
    listed[1]["type"] = "pylate.models.Dense.Dense"
    file.write_text(json.dumps(listed))
    named = {"model_type": "ColBERT"} if has_type else {}
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"similarity_fn_name": "MaxSim", **named, **stated})
    )


def as_stanford(path: Path, metadata: dict[str, Any] | None) -> None:
    """The layout of Stanford's code: one file of weights, and artifact.metadata."""
    dense = load_file(path / "1_Dense" / "model.safetensors")["linear.weight"]
    weights = {f"bert.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    for entry in (*path.glob("*_*"), path / "modules.json", path / "config_sentence_transformers.json"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
    save_file({**weights, "linear.weight": dense}, path / "model.safetensors")
    edit(path / "config.json", architectures=["HF_ColBERT"])
    if metadata is not None:
        (path / "artifact.metadata").write_text(json.dumps(metadata))


def assert_equal_to_peer(path: Path, hub: HubConfig, **options: Any) -> ArrowEngine:
    peer: Peer = MultiVectorEncoder(str(path), device="cpu")
    engine = ArrowEngine(path, dtype="float32", hub=hub)
    for name in ("encode_query", "encode_document", "encode"):
        ours, theirs = getattr(engine, name)(TEXTS, **options), getattr(peer, name)(TEXTS, **options)
        for found, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(found, np.asarray(expected), atol=2e-5, err_msg=name)
    queries, documents = peer.encode_query(TEXTS[:2]), peer.encode_document(TEXTS)
    expected = peer.similarity(queries, documents)
    np.testing.assert_allclose(engine.similarity(TEXTS[:2], TEXTS), expected, rtol=1e-4)
    torch.testing.assert_close(engine.similarity(queries, documents), expected)
    torch.testing.assert_close(
        engine.similarity_pairwise(queries, documents[:2]), peer.similarity_pairwise(queries, documents[:2])
    )
    padded = [torch.nn.functional.pad(torch.as_tensor(rows), (0, 0, 0, 40 - len(rows))) for rows in queries]
    torch.testing.assert_close(engine.similarity(torch.stack(padded), documents), expected)
    torch.testing.assert_close(engine.similarity([rows.tolist() for rows in queries], documents), expected)
    assert engine.rerank(TEXTS[0], TEXTS)[0].index == int(expected[0].argmax())
    return engine


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_query_expansion(
    family: str, config: dict[str, Any], strategy: str, attend: bool, tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    path = save(tiny_model, family, config, tmp_path / "model")
    expansion = {"strategy": strategy, "attend": attend, "length": 16}
    edit(path / "sentence_bert_config.json", query_expansion=expansion, document_length=10)
    how, words = ("meanmaxsim", [",", ".", "cat"]) if attend else ("maxsim", [])
    prompts = {"query": "red ", "document": "blue "}
    edit(path / "config_sentence_transformers.json", similarity_fn_name=how, prompts=prompts)
    edit(path / "2_MultiVectorMask" / "config.json", skiplist_words=words)
    engine = assert_equal_to_peer(path, hub)
    assert engine.get_embedding_dimension() == 128
    assert [tensor.shape for tensor in engine.encode_query(TEXTS[:2], convert_to_tensor=True)] == [(16, 128)] * 2
    with pytest.raises(InvalidInputError, match="one vector a text"):
        engine.encode(TEXTS, precision="int8")


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16, "document_length": 20},
        {
            "query_prefix": "[unused0] ",
            "document_prefix": "[unused1] ",
            "attend_to_expansion_tokens": True,
            "skiplist_words": ["cat", "[UNK]", "nowhere"],
            "prompts": {"query": "red ", "document": ""},
        },
        {"query_prefix": "say: ", "do_query_expansion": False, "query_length": 8, "skiplist_words": []},
        {"query_length": 20, "query_expansion": None},
        {"attend_to_mask_tokens": True},
    ],
)
@pytest.mark.parametrize("has_type", [True, False])
def test_models_of_pylate(
    has_type: bool, stated: dict[str, Any], tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    path = save(tiny_model, "ModernBert", FAMILIES[2][1], tmp_path / "model")
    as_pylate(path, has_type=has_type, **stated)
    assert_equal_to_peer(path, hub)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"query_maxlen": 16, "doc_maxlen": 20, "attend_to_mask_tokens": True, "dim": 128},
        {"query_maxlen": 24, "mask_punctuation": False, "query_token_id": "[unused1]", "doc_token_id": "[unused0]"},
    ],
)
def test_models_of_stanford(metadata: dict[str, Any] | None, tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    as_stanford(path, metadata)
    assert_equal_to_peer(path, hub)
    file = path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "linear.weight"}, file)
    with pytest.raises(CorruptFileError, match=r"no matrix linear\.weight"):
        ArrowEngine(path, hub=hub)


def test_tasks_are_those_of_methods(tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    """Whatever the prompt is called; and markers are not words, which become lower case."""
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    prompts = {"query": "", "document": "", "news": "red "}
    settings = {"query_length": 16, "document_length": 12}
    as_pylate(path, has_type=True, query_prefix="[Q] ", document_prefix="[D] ", prompts=prompts, **settings)
    edit(path / "sentence_bert_config.json", do_lower_case=True)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    edit(path / "tokenizer.json", normalizer={**tokenizer["normalizer"], "lowercase": False})
    engine = assert_equal_to_peer(path, hub)
    peer: Peer = MultiVectorEncoder(str(path), device="cpu")
    for name in ("encode_query", "encode_document"):
        ours, theirs = (
            getattr(each, name)(["THE Cat . " * 9, "The dog"], prompt_name="news") for each in (engine, peer)
        )
        for found, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(found, np.asarray(expected), atol=2e-5)
    nothing, some = engine.encode(["."])[0][:0], engine.encode_query(["red"])
    assert engine.similarity(some, [nothing, *engine.encode(["red"])])[0, 0] == 0


def test_lengths_of_vectors_are_those_of_the_files_or_of_the_call(
    tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    file = path / "modules.json"
    file.write_text(
        json.dumps([module for module in json.loads(file.read_text()) if not module["type"].endswith("Normalize")])
    )
    for normalizes in (False, True):
        peer: Peer = MultiVectorEncoder(str(path), device="cpu")
        found = ArrowEngine(path, dtype="float32", hub=hub).encode_query(TEXTS, normalize_embeddings=normalizes)
        for ours, theirs in zip(found, peer.encode_query(TEXTS, normalize_embeddings=normalizes), strict=True):
            np.testing.assert_allclose(ours, np.asarray(theirs), atol=2e-5, rtol=1e-5)


def test_as_vllm_has_it(tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    edit(path / "sentence_bert_config.json", query_expansion={"strategy": "fixed", "length": 16})
    edit(path / "config_sentence_transformers.json", prompts={"query": "red ", "document": "blue "})
    peer: Peer = MultiVectorEncoder(str(path), device="cpu")
    made, texts = LLM(str(path), dtype="float32", hub=hub), TEXTS[2:]
    expected = peer.similarity(peer.encode_query(TEXTS[:1]), peer.encode_document(texts))[0]
    assert [one.outputs.score for one in made.score(TEXTS[0], texts)] == pytest.approx(expected.tolist(), rel=1e-4)
    assert made.score(texts[:1], texts[1:2])[0].outputs.score > 0
    for one, theirs in zip(made.encode(texts), peer.encode(texts), strict=True):
        np.testing.assert_allclose(one.outputs.data, np.asarray(theirs), atol=2e-5)


def test_on_the_command_line(
    tiny_model: Any, hub: HubConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARCHERFISH_HUB_CACHE_DIR", str(hub.cache_dir))
    ask = ["embed", "the cat", "a dog on the mat", "--model", str(save(tiny_model, "Bert", {}, tmp_path / "model"))]
    assert main([*ask, "--similarity", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert np.shape(found["embeddings"][0]) == (4, 128) and found["similarity"][0][0] == pytest.approx(4, rel=1e-3)
    assert main(ask) == 0 and "4 x 128" in capsys.readouterr().out
    assert main([*ask, "--output", str(tmp_path / "x.npy")]) == 2 and ".jsonl" in capsys.readouterr().err
    assert main([*ask, "--output", str(tmp_path / "x.jsonl")]) == 0
    assert len(json.loads((tmp_path / "x.jsonl").read_text().splitlines()[1])["embedding"]) == 7


@pytest.mark.parametrize(
    ("family", "config", "expansion", "message"),
    [
        ("ModernBert", {"local_attention": 8}, {"length": 16}, "to 16 tokens with attend=False"),
        ("MPNet", {}, {"length": 16}, "to 16 tokens with attend=False"),
        ("Bert", {}, {"length": 50, "attend": True}, "to 50 tokens is not supported"),
    ],
)
def test_expansion_that_is_refused(
    family: str,
    config: dict[str, Any],
    expansion: dict[str, Any],
    message: str,
    tiny_model: Any,
    hub: HubConfig,
    tmp_path: Path,
) -> None:
    path = save(tiny_model, family, {**dict(FAMILIES).get(family, {}), **config}, tmp_path / "model")
    edit(path / "sentence_bert_config.json", query_expansion={"strategy": "fixed", **expansion})
    with pytest.raises(UnsupportedModelError, match=message):
        ArrowEngine(path, hub=hub)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"query_length": 0}, "query_length is 0"),
        ({"query_expansion": {"strategy": "all", "length": 3}}, "no strategy"),
        ({"query_expansion": {"strategy": "min"}}, "the length of query_expansion is None"),
        ({"query_expansion": {"strategy": "min", "length": 2}}, "the length of query_expansion is 2"),
        ({"query_expansion": {"strategy": "min", "length": 9, "token": 5}}, "the token of query_expansion is 5"),
        ({"query_expansion": {"strategy": "min", "length": 9, "token": "nothing"}}, "has no token 'nothing'"),
    ],
)
def test_settings_that_are_no_good(
    values: dict[str, Any], message: str, tiny_model: Any, hub: HubConfig, tmp_path: Path
) -> None:
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    edit(path / "sentence_bert_config.json", **values)
    with pytest.raises(CorruptFileError, match=message):
        ArrowEngine(path, hub=hub)


@pytest.mark.parametrize("values", [{"query_prefix": 5}, {"document_prefix": ["[D] "]}, {"skiplist_words": [1, 2]}])
def test_texts_that_are_none(values: dict[str, Any], tiny_model: Any, hub: HubConfig, tmp_path: Path) -> None:
    path = save(tiny_model, "Bert", {}, tmp_path / "model")
    as_pylate(path, has_type=True, **values)
    with pytest.raises(CorruptFileError, match=f"{next(iter(values))} must be text"):
        ArrowEngine(path, hub=hub)
