"""Settings of sentence-transformers and tokenizers of a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from archerfish import ArrowEngine, HubConfig
from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.source import read_embedding
from archerfish.store.sources import open_source
from archerfish.store.tokenizer_files import write_tokenizer_files
from tests.store.models import VOCABULARY, convert, some_weights, write_json, write_model

PREFIX = "sentence_transformers.models."


def write_modules(root: Path, *kinds: str, paths: tuple[str, ...] = ()) -> None:
    folders = paths or tuple("" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds))
    entries = [{"idx": i, "name": str(i), "path": folders[i], "type": PREFIX + kind} for i, kind in enumerate(kinds)]
    write_json(root / "modules.json", entries)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
        ({}, "mean"),
    ],
)
def test_pooling_modes_of_both_config_styles(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    write_modules(tmp_path, "Transformer", "Pooling")
    write_json(tmp_path / "1_Pooling" / "config.json", pooling)
    found = read_embedding(tmp_path)
    assert found is not None and found["pooling_mode"] == expected and found["normalize"] is False


def test_sentence_transformers_settings(source: Path, tmp_path: Path) -> None:
    write_modules(source, "Transformer", "Pooling", "Normalize")
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode": "mean", "include_prompt": False})
    write_json(source / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    prompts = {
        "prompts": {"query": "query: ", "none": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "cosine",
    }
    write_json(source / "config_sentence_transformers.json", prompts)
    assert convert(source, tmp_path / "out", model_type="sentence-transformers").get_metadata()["embedding"] == {
        "pooling_mode": "mean",
        "normalize": True,
        "max_seq_length": 256,
        "do_lower_case": True,
        "include_prompt": False,
        "prompts": {"query": "query: "},
        "default_prompt_name": "query",
        "similarity_fn_name": "cosine",
    }


@pytest.mark.parametrize("style", ["version 4", "version 5"])
def test_cross_encoder_settings(tmp_path: Path, style: str) -> None:
    kind: dict[str, Any] = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    if style == "version 4":
        source = write_model(tmp_path / "s", **kind, sentence_transformers={"activation_fn": "Sigmoid"})
    else:
        source = write_model(tmp_path / "s", **kind)
        write_modules(source, "Transformer")
        write_json(source / "sentence_bert_config.json", {"transformer_task": "sequence-classification"})
        write_json(
            source / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "activation_fn": "Sigmoid"}
        )
    found = convert(source, tmp_path / "out", model_type="cross-encoder").get_metadata()
    assert found["embedding"] is None and found["config"]["sentence_transformers"] == {"activation_fn": "Sigmoid"}


def test_transformer_in_a_subdirectory(tmp_path: Path) -> None:
    source = tmp_path / "old"
    write_model(source / "0_Transformer")
    write_modules(source, "Transformer", "Pooling", paths=("0_Transformer", "1_Pooling"))
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_json(source / "0_Transformer" / "sentence_roberta_config.json", {"max_seq_length": 128})
    loader = convert(source, tmp_path / "out")
    assert loader.get_metadata()["embedding"]["max_seq_length"] == 128
    assert torch.equal(loader.get_layer("scale"), some_weights()["scale"].half())


@pytest.mark.parametrize(
    ("kinds", "pooling", "error", "message"),
    [
        (["Transformer", "Pooling", "LSTM"], {}, UnsupportedModelError, "Pooling LSTM. docs/embed.md"),
        (["Pooling", "Transformer"], {}, UnsupportedModelError, "Pooling Transformer"),
        (["Transformer", "Pooling"], None, CorruptFileError, "1_Pooling"),
        (["Transformer", "Pooling"], {"pooling_mode": ["cls", "mean"]}, UnsupportedModelError, "'cls', 'mean'"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, UnsupportedModelError, "median"),
    ],
)
def test_unsupported_modules_are_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any] | None, error: type[Exception], message: str
) -> None:
    write_modules(tmp_path, *kinds)
    if pooling is not None:
        write_json(tmp_path / "1_Pooling" / "config.json", pooling)
    with pytest.raises(error, match=message):
        read_embedding(tmp_path)


def test_broken_modules_json_is_refused(tmp_path: Path) -> None:
    assert read_embedding(tmp_path) is None
    write_modules(tmp_path, "Transformer", paths=("../elsewhere",))
    with pytest.raises(CorruptFileError, match=r"modules\.json"):
        read_embedding(tmp_path)
    (tmp_path / "modules.json").write_text("[1")
    with pytest.raises(CorruptFileError, match=r"modules\.json is not valid JSON"):
        read_embedding(tmp_path)


def built(source: Path) -> Tokenizer:
    write_tokenizer_files(source, source / "built")
    tokenizer = Tokenizer.from_file(str(source / "built" / "tokenizer.json"))
    shutil.rmtree(source / "built")
    return tokenizer


def test_wordpiece_from_vocab_txt(source: Path) -> None:
    write_json(source / "tokenizer_config.json", {"do_lower_case": True})
    tokenizer = built(source)
    tokens = ["[CLS]", "hello", "world", "##ly", "caf", "##e", "你", "[UNK]", "[SEP]"]
    assert tokenizer.encode("Hello WORLDly CAFÉ 你x").tokens == tokens
    pair = tokenizer.encode("hello", "[MASK]")
    assert pair.tokens == ["[CLS]", "hello", "[SEP]", "[MASK]", "[SEP]"] and pair.type_ids == [0, 0, 0, 1, 1]
    write_json(source / "tokenizer_config.json", {"do_lower_case": False})
    assert built(source).encode("Hello A").tokens == ["[CLS]", "[UNK]", "A", "[SEP]"]


def test_mpnet_and_roberta_vocabularies(tmp_path: Path) -> None:
    mpnet = write_model(tmp_path / "mpnet", model_type="mpnet")
    (mpnet / "vocab.txt").write_text("\n".join(["<s>", "<pad>", "</s>", "[UNK]", "<mask>", "hello"]))
    assert built(mpnet).encode("hello", "hello").tokens == ["<s>", "hello", "</s>", "</s>", "hello", "</s>"]
    assert built(mpnet).encode("hello <mask>").ids == [0, 5, 4, 2]
    roberta = write_model(tmp_path / "roberta", vocabulary=False, model_type="roberta")
    write_json(roberta / "vocab.json", {"<s>": 0, "</s>": 1, "<mask>": 2, "h": 3, "i": 4, "hi": 5, "Ġ": 6, "Ġhi": 7})
    (roberta / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n")
    assert built(roberta).encode("hi hi<mask>").tokens == ["<s>", "hi", "Ġhi", "<mask>", "</s>"]
    assert built(roberta).decode(built(roberta).encode("hi hi").ids) == "hi hi"


def test_unsupported_tokenizers_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "vocab.txt").write_text("hello\n")
    with pytest.raises(CorruptFileError, match="unk_token"):
        write_tokenizer_files(source, tmp_path / "t")
    (source / "vocab.txt").unlink()
    (source / "sentencepiece.bpe.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        write_tokenizer_files(source, tmp_path / "t")
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="a sound tokenizer"):
        write_tokenizer_files(source, tmp_path / "t")
    (source / "tokenizer.json").unlink()
    write_json(source / "vocab.json", {})
    (source / "merges.txt").write_text("")
    with pytest.raises(UnsupportedModelError, match=r"vocab\.json"):
        write_tokenizer_files(source, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_tokenizer_files_are_copied(source: Path, tmp_path: Path) -> None:
    write_tokenizer_files(source, tmp_path / "built")
    (source / "tokenizer.json").write_bytes((tmp_path / "built" / "tokenizer.json").read_bytes())
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    write_tokenizer_files(source, tmp_path / "copied")
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.txt", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "copied" / name).read_bytes() == (source / name).read_bytes()
    assert len(json.loads((tmp_path / "copied" / "tokenizer.json").read_text())["model"]["vocab"]) == len(VOCABULARY)


def test_what_is_no_model(tmp_path: Path) -> None:
    """An adapter's directory, a pointer to a file, and a configuration that names nothing."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/model"}')
    with pytest.raises(
        UnsupportedModelError, match=r"is an adapter, not a model\. Give .* \(a/model\), .*--lora-modules"
    ):
        open_source(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="a pointer of Git LFS"):
        open_source(tmp_path)
    write_model(tmp_path / "x", some_weights())
    write_json(tmp_path / "x" / "config.json", {"model_type": "t5"})
    with pytest.raises(UnsupportedModelError, match="No encoder for model_type 't5'"):
        ArrowEngine(tmp_path / "x", hub=HubConfig(cache_dir=str(tmp_path / "cache")))
    assert not list((tmp_path / "cache").rglob("*.arrow")), "it was converted first"
