"""Reasoning: what a model thinks before what it answers, between <think> and </think> or in a channel of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from archerfish.text.chat_template import ChatTemplate

OPEN, CLOSE = "<think>", "</think>"
CHANNEL = "<|channel|>"  # before the name of a channel, in gpt-oss's vocabulary
# What is left of the headers of its messages without special tokens.
CHANNELS = ("analysis", "commentary", "final")
TURN = "assistant"
CALL_TO = " to=functions."
FORMAT = " json"
FINAL = f"{CHANNEL}final<|message|>"
CALL = f"commentary{CALL_TO}"
FIRST_HEADER = re.compile(
    r"(?: to=functions\.(?P<before>[\w.-]+?)(?=analysis|commentary))?(?P<channel>analysis|commentary|final)"
    r"(?: to=functions\.(?P<after>[\w.-]+(?=[^\w.-]))|(?<=final) json(?=\W))?"
)
HEADER = re.compile(TURN + FIRST_HEADER.pattern)
MOST_HEADER = 200  # characters
TAIL_TOKENS = (
    16  # at the end of a prompt that may hold an open mark: a mark and a line break, also one token a character
)


def has_reasoning(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    """Whether a model may write its reasoning between marks, by its vocabulary or its chat template."""
    has_token = any(tokenizer.token_to_id(name) is not None for name in (CLOSE, CHANNEL))
    return has_token or any(mark in source for source in template.sources.values() for mark in (OPEN, CLOSE))


def ends_inside(prompt_end: str, answer_start: str) -> bool:
    """Whether a prompt ends inside of reasoning. answer_start: the part of it that belongs to the answer."""
    if answer_start:
        return answer_start.rfind(OPEN) > answer_start.rfind(CLOSE)
    return prompt_end.rstrip().endswith(OPEN)


def answer_parser(
    tokenizer: Tokenizer | None, template: ChatTemplate, prompt_ids: Sequence[int]
) -> AnswerParser | None:
    """The parser of an answer to a rendered conversation; None for models without reasoning."""
    if tokenizer is None or not has_reasoning(tokenizer, template):
        return None
    return parser_for(
        tokenizer, ends_inside(tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False), "")
    )


def parser_for(tokenizer: Tokenizer, is_open: bool) -> AnswerParser:
    """is_open: the prompt ends inside of reasoning."""
    return ReasoningParser(is_open) if tokenizer.token_to_id(CHANNEL) is None else ChannelParser()


class ReasoningParser:
    """Splits an answer into reasoning and text as it comes; how it is cut into pieces does not matter.

    Reasoning is what stands between the marks at the beginning, or before the closing mark if the prompt has opened it.
    White space around it is dropped.
    """

    def __init__(self, is_open: bool) -> None:
        self._mark = CLOSE if is_open else OPEN  # the mark to find next; empty: only text follows
        self._held = ""  # what may be part of a mark, or white space beside one
        self._is_start = True  # nothing visible has come since the last mark

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the text that can be shown now."""
        held, reasoning = self._held + text, ""
        if self._mark == OPEN:
            visible = held.lstrip()
            if visible.startswith(OPEN):
                self._mark, held = CLOSE, visible.removeprefix(OPEN)
            elif is_last or not OPEN.startswith(visible):
                self._mark, self._is_start = "", False
            else:
                self._held = held
                return "", ""
        if self._mark == CLOSE:
            held = held.lstrip() if self._is_start else held
            reasoning, mark, rest = held.partition(CLOSE)
            if not mark and not is_last:
                num_held = max(n for n in range(len(CLOSE)) if held.endswith(CLOSE[:n]))
                reasoning, rest = held[: len(held) - num_held], held[len(held) - num_held :]
            self._held = reasoning[len(reasoning.rstrip()) :] + rest
            reasoning = reasoning.rstrip()
            self._is_start = self._is_start and not reasoning
            if not mark:
                return reasoning, ""
            self._mark = ""
            held = rest
            self._is_start = True
        self._held = ""
        if self._is_start:
            held = held.lstrip()
            self._is_start = not held
        return reasoning, held


class ChannelParser:
    """Splits an answer of gpt-oss, without its special tokens, by the headers of its messages.

    The channel analysis is reasoning. What calls a tool is text that begins with CALL and the tool's name, wherever the
    header has them; the other headers are dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_start, self._is_reasoning = True, False

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """As `ReasoningParser.feed`."""
        self._held += text
        parts = {True: "", False: ""}
        while True:
            found = (FIRST_HEADER.match if self._is_start else HEADER.search)(self._held)
            end = found.end() if found else 0
            rest = self._held[end : end + len(CALL_TO)]
            if found is None or (not is_last and (CALL_TO.startswith(rest) or FORMAT.startswith(rest))):
                break
            name = found["before"] or found["after"] or ""
            parts[self._is_reasoning] += self._held[: found.start()]
            self._is_start, self._is_reasoning = False, found["channel"] == "analysis" and not name
            parts[False] += f"{CALL}{name}" if name else ""
            self._held = self._held[end:]
        shown = self._held if is_last else self._held[: len(self._held) - self._num_undecided()]
        self._held = self._held[len(shown) :]
        self._is_start = self._is_start and not shown
        parts[self._is_reasoning] += shown
        return parts[True], parts[False]

    def _num_undecided(self) -> int:
        """How many of the characters that are held may be the beginning of a header."""
        begin = 0 if self._is_start else self._held.rfind(TURN)
        rest = self._held[begin + (0 if self._is_start else len(TURN)) :]
        may_be_header = any(word.startswith(rest) or rest.startswith(word) for word in (*CHANNELS, CALL_TO))
        if begin >= 0 and len(rest) < MOST_HEADER and may_be_header:
            return len(self._held) - begin
        return max(n for n in range(len(TURN)) if self._held.endswith(TURN[:n]))


AnswerParser = ReasoningParser | ChannelParser
