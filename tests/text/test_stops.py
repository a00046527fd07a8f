"""Stop strings in streams, and the text of an output as the engine makes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.params import SamplingParams
from archerfish.sequence import FinishReason
from archerfish.text.output_text import OutputText, StopStrings
from archerfish.text.text_tokenizer import TextTokenizer

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
