"""The text of an output: tokens become characters, and stop strings end it."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.params import SamplingParams
from archerfish.sequence import FinishReason
from archerfish.text.output_text import BROKEN, OutputText, StopStrings
from archerfish.text.text_tokenizer import TextTokenizer
from tests.text import tiny_tokenizers as tiny

SHORT = st.text("ab", min_size=1, max_size=4)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """End, start and name of the stop that is complete first; of those the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end, end - len(longest), longest
    return None


@given(st.lists(SHORT, min_size=1, max_size=4), st.lists(st.text("abc", max_size=5), max_size=8), st.booleans())
def test_stops_do_not_depend_on_the_pieces(stops: list[str], pieces: list[str], include: bool) -> None:
    finder = StopStrings(stops, include)
    shown = "".join([finder.feed(piece) for piece in pieces]) + finder.held
    text = "".join(pieces)
    wanted = first_stop(text, stops)
    if wanted is None:
        assert (shown, finder.matched) == (text, None)
    else:
        end, start, stop = wanted
        assert (shown, finder.matched) == (text[: end if include else start], stop)


@given(st.lists(SHORT, min_size=1, max_size=4), st.text("abc", max_size=12))
def test_only_the_beginning_of_a_stop_is_held_back(stops: list[str], text: str) -> None:
    finder, shown = StopStrings(stops), ""
    for character in text:
        shown += finder.feed(character)
        if finder.matched:
            return
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)
    longer = [text[i:] for i in range(len(shown)) if any(stop.startswith(text[i:]) for stop in stops)]
    assert longer == []


@pytest.mark.no_cover
def test_the_cost_is_linear() -> None:
    stops = [f"{'a' * 1000}{i}" for i in range(16)]

    def cost(num_characters: int) -> float:
        finder = StopStrings(stops)
        started = time.process_time()
        for _ in range(num_characters):
            finder.feed("a")
        return time.process_time() - started

    cost(100)
    assert cost(8000) < 30 * cost(1000) + 0.05  # a rescan of what is held would be hundreds of times as much


def output_text(smollm2: TextTokenizer, **params: Any) -> OutputText:
    return OutputText(smollm2, smollm2.encode("The answer:"), SamplingParams(**params))


def run(
    smollm2: TextTokenizer, text: str, finish: FinishReason | None = "length", **params: Any
) -> tuple[str, str | None, int]:
    """Feed a text token by token, as the engine does, until a stop is found."""
    output = output_text(smollm2, **params)
    ids, shown = smollm2.encode(text, add_special_tokens=False), ""
    for place, token_id in enumerate(ids):
        piece, stop = output.feed([token_id], finish if place == len(ids) - 1 else None)
        shown += piece
        if stop:
            return shown, stop, output.num_tokens
    return shown, None, output.num_tokens


def test_a_stop_string_across_tokens_ends_the_text(smollm2: TextTokenizer) -> None:
    text = " one\n\nUser: two"
    shown, stop, num_tokens = run(smollm2, text, stop=["\nUser:"])
    assert (shown, stop) == (" one\n", "\nUser:")
    assert num_tokens < len(smollm2.encode(text))
    assert run(smollm2, text, stop="\nUser:", include_stop_str_in_output=True)[0] == " one\n\nUser:"


def test_text_without_a_whole_stop_is_shown(smollm2: TextTokenizer) -> None:
    assert run(smollm2, " 42 🚀 is it")[:2] == (" 42 🚀 is it", None)
    assert run(smollm2, " one\n\nUser", stop=["\nUser:"])[:2] == (" one\n\nUser", None)


def test_several_tokens_at_once_stop_at_the_right_one(smollm2: TextTokenizer) -> None:
    ids = smollm2.encode(" a b c d", add_special_tokens=False)
    output = output_text(smollm2, stop=" c")
    assert output.feed(ids, "length") == (" a b", " c")
    assert output.num_tokens == 3
    assert output.feed(ids, None)[0] == ""


def test_end_token_is_hidden_unless_it_is_asked_for(smollm2: TextTokenizer) -> None:
    end = smollm2.eos_token_ids[0]
    ids = [*smollm2.encode(" yes", add_special_tokens=False), end]
    for params in ({}, {"skip_special_tokens": False}):
        output = output_text(smollm2, **params)
        assert output.feed(ids, "stop", (end,)) == (" yes", None)
        assert (output.num_tokens, output.num_shown) == (len(ids), len(ids) - 1)
    wanted = output_text(smollm2, skip_special_tokens=False, include_stop_str_in_output=True)
    assert wanted.feed(ids, "stop", (end,)) == (" yes<|im_end|>", None)
    ignored = output_text(smollm2, skip_special_tokens=False, ignore_eos=True)
    assert ignored.feed(ids, "length", (end,)) == (" yes<|im_end|>", None)
    assert output_text(smollm2, stop_token_ids=ids[-2:-1]).feed(ids[:-1], "stop", ids[-2:-1]) == ("", None)


def test_tokens_are_counted_without_a_tokenizer() -> None:
    output = OutputText(None, [1], SamplingParams())
    assert output.feed([5, 6]) == ("", None)
    assert output.feed([7, 8], "stop", (8,)) == ("", None)
    assert (output.num_tokens, output.num_shown) == (4, 3)


def test_a_stop_before_min_tokens_is_text(smollm2: TextTokenizer) -> None:
    text = " x x x x x"
    assert run(smollm2, text, stop=" x", min_tokens=3, max_tokens=8) == (" x x", " x", 3)
    assert run(smollm2, text, stop=" x", max_tokens=8) == ("", " x", 1)


def test_a_broken_character_at_the_end_is_shown(smollm2: TextTokenizer) -> None:
    ids = smollm2.encode("🚀", add_special_tokens=False)
    output = output_text(smollm2)
    assert output.feed(ids[:-1]) == ("", None)
    assert output.feed([], "abort") == ("\N{REPLACEMENT CHARACTER}", None)


# Streaming text equals decoding at once; red when a window is too short, a character is cut, or the cost grows


TEXTS = [
    "Hello, world!",
    "  two  spaces ",
    "emoji 👩‍👩‍👧‍👦 🤷🏽‍♀️ 🇩🇪 end",
    "今天天气很好，我们去公园散步吧。",
    "mixed 中文 and ünï\n\n\tcode",
    "العربية",
    "\N{REPLACEMENT CHARACTER} real",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀",
    "<|im_end|> inside",
    "",
]


@functools.cache
def made(kind: str) -> TextTokenizer:
    if kind == "smollm2":
        return TextTokenizer(tiny.smollm2_directory())
    makers: dict[str, Callable[[Path], TextTokenizer]] = {
        "byte_fallback": tiny.byte_fallback,
        "metaspace": tiny.metaspace,
        "word_pieces": tiny.word_pieces,
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
    pieces = []
    place = 0
    turn = 0
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
