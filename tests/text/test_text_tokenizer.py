"""The tokenizers of models that generate text."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from archerfish.errors import CorruptFileError
from archerfish.params import SamplingParams
from archerfish.store.source import WORLD_NAME
from archerfish.text.output_text import OutputText
from archerfish.text.text_tokenizer import TextTokenizer, find_text_tokenizer
from archerfish.text.world_tokenizer import BUNDLED, WorldTokenizer
from tests.text.tiny_tokenizers import byte_fallback, metaspace, smollm2_directory

TEXTS = [
    "Hello, world!",
    "",
    "   spaces  and\ttabs\n",
    "今天天气很好",
    "🚀 emoji",
    "<|im_start|>user\nhi<|im_end|>",
    "1234567890",
    "don't",
    "long " * 3000,
]


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


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [4, 5]}, {"eos_token_id": 6}, (2, 4, 5)),
        ({}, {"eos_token_id": 6}, (2, 6)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [7]}}, (2, 7)),
        ({}, {}, (2,)),
        ({"eos_token_id": "x"}, {"eos_token_id": -1}, (2,)),
    ],
)
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
    with pytest.raises(CorruptFileError, match="not hold a sound tokenizer"):
        broken.encode("x")


# The World tokenizer: greedy longest match, as the package `rwkv` does it, and text back from any tokens


WORLD = WorldTokenizer()
SHA256 = "8324476023347dec2964625ccb2075c864d250a9c6d9a74f36daba628de8c008"  # of the file in rwkv 0.8.32
WORLD_TEXTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?\n\nUser: hi\n\nAssistant:",
    "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。",
    "吾輩は猫である。名前はまだ無い。",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "ऋषियों को सताने वाले",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}  # ok\n",
    " " * 300 + "-" * 200,
    "👩‍👩‍👧‍👦🏳️‍🌈 café naïve \u0000\ufeff\u2028",
    "",
]
some_bytes = st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode()))
needs_rwkv = pytest.mark.skipif(importlib.util.find_spec("rwkv") is None, reason="the package rwkv is not installed")


@cache
def tokens_by_bytes() -> dict[bytes, int]:
    return {WORLD.token_bytes(i): i for i in range(1, 65530)}


def longest_matches(data: bytes) -> list[int]:
    """What the tokenizer promises, word for word."""
    known, ids = tokens_by_bytes(), []
    while data:
        length = next(n for n in range(min(128, len(data)), 0, -1) if data[:n] in known)
        ids.append(known[data[:length]])
        data = data[length:]
    return ids


def test_the_vocabulary_is_the_published_one() -> None:
    assert hashlib.sha256(gzip.decompress(BUNDLED.read_bytes())).hexdigest() == SHA256
    assert len(tokens_by_bytes()) == 65529 and max(map(len, tokens_by_bytes())) == 128


def test_known_ids() -> None:
    """From the package rwkv 0.8.32."""
    assert WORLD.encode("User: Hello world!\n\nAssistant:") == [24281, 59, 36786, 40213, 34, 261, 5585, 41693, 59]
    assert WORLD.encode("春眠不觉晓") == [13087, 14795, 10260, 16525, 13109]
    assert WORLD.encode_bytes(b"\xff\xfe\x00") == [256, 255, 1]


@pytest.mark.parametrize("text", WORLD_TEXTS)
def test_texts_of_many_languages(text: str) -> None:
    ids = WORLD.encode(text)
    assert ids == longest_matches(text.encode())
    assert WORLD.decode(ids) == text


@settings(deadline=None)  # the vocabulary is read by the first that comes
@given(some_bytes)
@example(bytes(range(256)))
@example(bytes(range(255, -1, -1)) * 2)
def test_any_bytes(data: bytes) -> None:
    ids = WORLD.encode_bytes(data)
    assert ids == longest_matches(data)
    assert b"".join(map(WORLD.token_bytes, ids)) == data


@settings(deadline=None)
@given(st.lists(st.integers(0, 65535), max_size=40))
def test_text_of_any_tokens_in_pieces(ids: list[int]) -> None:
    """Characters that tokens cut in two come whole, whichever tokens."""
    decoder = OutputText(WORLD, [], SamplingParams())
    pieces = [decoder.feed([token_id])[0] for token_id in ids]
    assert "".join([*pieces, decoder.feed([], "length")[0]]) == WORLD.decode(ids)


@pytest.mark.no_cover
@needs_rwkv
@settings(deadline=None)
@given(some_bytes)
@example(bytes(range(256)))
@example("".join(WORLD_TEXTS).encode())
def test_equal_to_the_package_rwkv(data: bytes) -> None:
    assert WORLD.encode_bytes(data) == their_tokenizer().encodeBytes(data)


@cache
def their_tokenizer() -> Any:
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER  # type: ignore[import-not-found, import-untyped, unused-ignore]

    spec = importlib.util.find_spec("rwkv")
    assert spec is not None and spec.origin is not None
    return TRIE_TOKENIZER(str(Path(spec.origin).with_name(WORLD_NAME)))


def test_the_tokenizer_interface() -> None:
    assert (WORLD.vocab_size, WORLD.bos_token_id, WORLD.eos_token_ids) == (65536, None, (0,))
    assert WORLD.special_tokens == {0: "<|endoftext|>"} and WORLD.token_to_id("<|endoftext|>") == 0
    assert WORLD.id_to_token(0) == "<|endoftext|>" and WORLD.id_to_token(36786) == " Hello"
    assert WORLD.token_to_id(" Hello") == 36786 and WORLD.token_to_id("no such token") is None
    assert WORLD.id_to_token(65530) is None and WORLD.token_bytes(99999) == b"" and WORLD.token_bytes(-1) == b""
    ids = [*WORLD.encode("a"), 0, 65535, *WORLD.encode("b")]
    assert WORLD.decode(ids) == "ab" and WORLD.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"
    assert WORLD.encode("\ud800!") == WORLD.encode("?!")  # half a surrogate pair, which UTF-8 does not have


@pytest.mark.no_cover
def test_a_vocabulary_of_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / WORLD_NAME).write_bytes(gzip.decompress(BUNDLED.read_bytes()))
    for path in (tmp_path, tmp_path / WORLD_NAME, BUNDLED):
        assert WorldTokenizer(path).encode(" Hello") == [36786]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("1 'a' 2", "line 1"),
        ("1 'a' 1\n1 'b' 1", "twice"),
        ("1 __import__('os') 2", "line 1"),
        ("x 'a' 1", "line 1"),
        ("1 'a' 1", "byte 0"),
        ("70000 'a' 1", "line 1"),
        ("", "line 1"),
        ("1 3 1", "line 1"),
    ],
)
def test_a_broken_vocabulary_is_refused(lines: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / WORLD_NAME
    file.write_text(lines)
    with pytest.raises(CorruptFileError, match=words):
        WorldTokenizer(file).encode("a")


def test_a_directory_without_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="cannot be read"):
        WorldTokenizer(tmp_path).encode("a")
    (tmp_path / "cut.gz").write_bytes(BUNDLED.read_bytes()[:5000])
    with pytest.raises(CorruptFileError, match="cannot be read"):
        WorldTokenizer(tmp_path / "cut.gz").encode("a")
