"""Streaming text equals decoding at once; red when a window is too short, a character is cut, or the cost grows."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.params import SamplingParams
from archerfish.text.output_text import BROKEN, OutputText
from archerfish.text.text_tokenizer import TextTokenizer
from tests.text import tiny_tokenizers as tiny

TEXTS = [
    "Hello, world!", "  two  spaces ", "emoji 👩‍👩‍👧‍👦 🤷🏽‍♀️ 🇩🇪 end", "今天天气很好，我们去公园散步吧。",
    "mixed 中文 and ünï\n\n\tcode",
    "العربية", "\N{REPLACEMENT CHARACTER} real", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀", "<|im_end|> inside", "",
]  # fmt: skip


@functools.cache
def made(kind: str) -> TextTokenizer:
    if kind == "smollm2":
        return TextTokenizer(tiny.smollm2_directory())
    makers: dict[str, Callable[[Path], TextTokenizer]] = {
        "byte_fallback": tiny.byte_fallback, "metaspace": tiny.metaspace, "word_pieces": tiny.word_pieces,
        "word_ends": tiny.word_ends,
        "no_strip": lambda where: tiny.byte_fallback(where, strips=False),
    }
    return makers[kind](Path(tempfile.mkdtemp()) / kind)


KINDS = ["smollm2", "byte_fallback", "no_strip", "metaspace", "word_pieces", "word_ends"]


def expected(tokenizer: TextTokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    whole, known = tokenizer.decode([*prompt, *ids], skip), tokenizer.decode(prompt, skip)
    while not whole.startswith(known):  # the output completes a character of the prompt
        known = known[:-1]
    return whole[len(known) :]


def streamed(
    tokenizer: TextTokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool, sizes: Sequence[int]
) -> list[str]:
    decoder = OutputText(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
    pieces, place, turn = [], 0, 0
    while place < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(decoder.feed(ids[place : place + size])[0])
        place, turn = place + size, turn + 1
    return [*pieces, decoder.feed([], "length")[0]]


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_joined_pieces_are_the_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer = made(kind)
    # The bytes of a byte-level vocabulary are among its first tokens, after the special ones.
    token = st.one_of(st.integers(0, min(300, tokenizer.vocab_size) - 1), st.integers(0, tokenizer.vocab_size + 5))
    ids, prompt = data.draw(st.lists(token, max_size=40)), data.draw(st.lists(token, max_size=8))
    skip, sizes = data.draw(st.booleans()), data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    assert "".join(streamed(tokenizer, prompt, ids, skip, sizes)) == expected(tokenizer, prompt, ids, skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["smollm2", "byte_fallback"])
def test_no_piece_ends_inside_a_character(kind: str, text: str) -> None:
    tokenizer = made(kind)
    prompt, ids = tokenizer.encode("the cat"), tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, prompt, ids, False, [1])
    assert "".join(pieces) == expected(tokenizer, prompt, ids, False)
    assert sum(piece.count(BROKEN) for piece in pieces) == text.count(BROKEN)


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    for kind in ("smollm2", "byte_fallback"):
        tokenizer = made(kind)
        ids = tokenizer.encode("好 🚀", add_special_tokens=False)[:-1]
        *pieces, last = streamed(tokenizer, tokenizer.encode("the"), ids, True, [1])
        assert BROKEN in last and BROKEN not in "".join(pieces)


def test_the_space_before_the_first_word_depends_on_the_prompt() -> None:
    tokenizer = made("byte_fallback")
    cat = [tokenizer.token_to_id(f"{tiny.MARK}cat") or 0]
    assert streamed(tokenizer, tokenizer.encode("the"), cat, True, [1])[0] == " cat"
    assert streamed(tokenizer, [1], cat, True, [1])[0] == "cat"


def test_a_character_that_begins_in_the_prompt() -> None:
    tokenizer = made("smollm2")
    ids = tokenizer.encode("🚀", add_special_tokens=False)
    assert len(ids) > 1
    assert "".join(streamed(tokenizer, ids[:1], ids[1:], True, [1])) == "🚀"
    other = tokenizer.encode("x", add_special_tokens=False)
    assert "".join(streamed(tokenizer, ids[:1], other, True, [1])) == "x"  # the broken one was the prompt's
    assert "".join(streamed(tokenizer, ids[:1], [], True, [1])) == ""


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", ["smollm2", "byte_fallback", "metaspace"])
def test_the_cost_of_a_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(kind)
    num_decoded = 0
    decode, token_bytes = tokenizer.decode, tokenizer.token_bytes

    def counting_decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids, skip_special_tokens)

    def counting_bytes(token_id: int) -> bytes:
        nonlocal num_decoded
        num_decoded += 1
        return token_bytes(token_id)

    monkeypatch.setattr(tokenizer, "decode", counting_decode)
    monkeypatch.setattr(tokenizer, "token_bytes", counting_bytes)
    draw = random.Random(1)
    bytes_only = list(range(len(tiny.WORDS), tokenizer.vocab_size))
    for choices in (range(tokenizer.vocab_size), bytes_only or [0]):
        num_decoded = 0
        ids = [draw.choice(choices) for _ in range(10_000)]
        text = "".join(streamed(tokenizer, ids[:3], ids, True, [1]))
        assert num_decoded <= 12 * len(ids)
        assert text == expected(tokenizer, ids[:3], ids, True)
