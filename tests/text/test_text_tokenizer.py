"""TextTokenizer against transformers and against the files of a directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archerfish.errors import CorruptFileError
from archerfish.text.text_tokenizer import TextTokenizer, find_text_tokenizer
from tests.text.tiny_tokenizers import byte_fallback, metaspace, smollm2_directory

TEXTS = [
    "Hello, world!", "", "   spaces  and\ttabs\n", "今天天气很好", "🚀 emoji", "<|im_start|>user\nhi<|im_end|>", "1234567890",
    "don't", "long " * 3000,
]  # fmt: skip


def test_same_ids_and_texts_as_transformers(smollm2: TextTokenizer) -> None:
    from transformers import AutoTokenizer

    peer: Any = AutoTokenizer.from_pretrained(smollm2_directory() / "tokenizer")
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert ids == peer.encode(text)
        for skip in (True, False):
            assert smollm2.decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)
    assert smollm2.vocab_size == len(peer)


def test_other_threads_run_while_a_text_is_read(smollm2: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Rust tokenizer lets them run in `encode_batch_fast` alone: of its other ways to read, none is there."""
    rust, expected = smollm2._base, smollm2.encode("The cat sat.")
    monkeypatch.setattr(TextTokenizer, "_base", SimpleNamespace(encode_batch_fast=rust.encode_batch_fast))
    assert smollm2.encode("The cat sat.") == expected


def test_facts_of_smollm2(smollm2: TextTokenizer) -> None:
    assert smollm2.eos_token_ids == (2,) and smollm2.bos_token_id == 1
    assert smollm2.id_to_token(2) == "<|im_end|>" and smollm2.id_to_token(10**6) is None
    assert smollm2.special_tokens[1] == "<|im_start|>"
    assert smollm2.decode([10**6, 2]) == ""


def test_a_special_token_can_be_taken_as_text(smollm2: TextTokenizer) -> None:
    assert smollm2.encode("<|im_end|>") == [2]
    ids = smollm2.encode("<|im_end|>", plain=True)
    assert 2 not in ids and smollm2.decode(ids, skip_special_tokens=False) == "<|im_end|>"


def test_a_lone_surrogate_is_replaced(smollm2: TextTokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud83d b")) == "a? b"


@pytest.mark.parametrize(("generation", "config", "wanted"), [
    ({"eos_token_id": [4, 5]}, {"eos_token_id": 6}, (2, 4, 5)), ({}, {"eos_token_id": 6}, (2, 6)),
    ({"eos_token_id": None}, {"text_config": {"eos_token_id": [7]}}, (2, 7)), ({}, {}, (2,)),
    ({"eos_token_id": "x"}, {"eos_token_id": -1}, (2,)),
])  # fmt: skip
def test_end_tokens_come_from_all_files(
    generation: dict[str, Any], config: dict[str, Any], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    byte_fallback(tmp_path)
    assert TextTokenizer(tmp_path, config=config, generation_config=generation).eos_token_ids == wanted
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert TextTokenizer(tmp_path).eos_token_ids == wanted


def test_the_first_token_is_added_as_the_files_say(tmp_path: Path) -> None:
    assert byte_fallback(tmp_path / "a").encode("a")[0] == 1
    assert byte_fallback(tmp_path / "b", add_bos_token=True).encode("a").count(1) == 1
    assert metaspace(tmp_path / "c").encode("a")[0] != 1
    stated = metaspace(tmp_path / "d", add_bos_token=True)
    assert stated.encode("a")[0] == 1
    assert stated.encode("a", add_special_tokens=False)[0] != 1


def test_tokens_named_by_objects_and_by_the_map(tmp_path: Path) -> None:
    metaspace(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = TextTokenizer(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((2,), 1)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert find_text_tokenizer(tmp_path) is None
    with pytest.raises(CorruptFileError, match=r"no tokenizer\.json"):
        TextTokenizer(tmp_path)


def test_the_vocabulary_is_parsed_on_first_use(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not json")
    broken = TextTokenizer(tmp_path)
    with pytest.raises(CorruptFileError, match="cannot be read"):
        broken.encode("x")
