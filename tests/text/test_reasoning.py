"""Reasoning is split from the text of an answer, however the answer is cut into pieces."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.text.chat_template import ChatTemplate
from archerfish.text.reasoning import ChannelParser, ReasoningParser, ends_inside, has_reasoning, parser_for

CASES = [
    (False, "<think>\nHm, 2.\n</think>\n\nIt is 2.\n", "Hm, 2.", "It is 2.\n"),
    (True, "\nHm.\n</think>\n\nYes", "Hm.", "Yes"),
    (False, " \n<think>a</think>b</think>c", "a", "b</think>c"),
    (False, "  No <think>a</think>", "", "  No <think>a</think>"),
    (False, "<think>a < b </ c </thin", "a < b </ c </thin", ""),
    (True, "cut off \n", "cut off", ""),
    (True, "", "", ""),
    (False, "<thi", "", "<thi"),
    (False, "\n\n", "", "\n\n"),
    (True, "</think>Yes", "", "Yes"),
    (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
]
CHANNEL_CASES = [
    ('analysisA number.assistantfinal json{"a": 1}', "A number.", '{"a": 1}'),
    ("final jsonp", "", " jsonp"),
    ("analysisWe add.assistantfinalIt is 2.", "We add.", "It is 2."),
    ("finalIt is 2.", "", "It is 2."),
    ("fin", "", "fin"),
    ("analysisWe assist", "We assist", ""),
    ("Yes, final", "", "Yes, final"),
    ("anal", "", "anal"),
    ("analysisWe ask.assistantcommentary to=functions.f json{}", "We ask.", "commentary to=functions.f json{}"),
    ("analysisWe ask.assistant to=functions.fcommentary json{}", "We ask.", "commentary to=functions.f json{}"),
    (" to=functions.fcommentary {}", "", "commentary to=functions.f {}"),
    ("analysisWe.assistantcomm", "We.assistantcomm", ""),
    ("analysis to=functions.f {}", "", "commentary to=functions.f {}"),
    ("commentaryHm.assistantfinalHi", "", "Hm.Hi"),
    (
        "analysisA.assistantcommentaryI look.assistantcommentary to=functions.f{}",
        "A.",
        "I look.commentary to=functions.f{}",
    ),
    ("An assistant there", "", "An assistant there"),
]


def split(text: str, is_open: bool, cuts: list[int], parser: ChannelParser | None = None) -> tuple[str, str]:
    used, places = parser or ReasoningParser(is_open), [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [used.feed(text[start:end]) for start, end in pairwise(places)]
    pieces.append(used.feed("", is_last=True))
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "answer"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_split_answers(is_open: bool, text: str, reasoning: str, answer: str, size: int) -> None:
    found = split(text, is_open, list(range(0, len(text), size)))
    assert found == (reasoning, answer)


@pytest.mark.parametrize(("text", "reasoning", "answer"), CHANNEL_CASES)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_channels(text: str, reasoning: str, answer: str, size: int) -> None:
    assert split(text, False, list(range(0, len(text), size)), ChannelParser()) == (reasoning, answer)


@pytest.mark.parametrize(("token", "kind"), [("<|channel|>", ChannelParser), ("</think>", ReasoningParser)])
def test_the_vocabulary_says_which_parser_there_is(token: str, kind: type) -> None:
    tokenizer: Any = SimpleNamespace(token_to_id={token: 5}.get)
    assert type(parser_for(tokenizer, False)) is kind and has_reasoning(tokenizer, ChatTemplate("x"))


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</", "<", "a", " ", "\n"])).map("".join),
    st.booleans(),
    st.lists(st.integers(0, 60)),
)
def test_pieces_do_not_matter(text: str, is_open: bool, cuts: list[int]) -> None:
    assert split(text, is_open, cuts) == split(text, is_open, [])


def test_reasoning_is_shown_as_it_comes() -> None:
    parser = ReasoningParser(False)
    assert [parser.feed(piece) for piece in ("<think>", "one ", "two</", "think>", " x")] == [
        ("", ""),
        ("one", ""),
        (" two", ""),
        ("", ""),
        ("", "x"),
    ]


def test_prompts_that_end_inside_of_reasoning() -> None:
    assert ends_inside("assistant\n<think>\n", "") and not ends_inside("<think>\n\n</think>\n\n", "")
    assert ends_inside("", "<think>Well") and not ends_inside("<think>", "<think>Well</think>So")
