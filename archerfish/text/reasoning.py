"""Reasoning: what a model thinks before what it answers, between <think> and </think> or in a channel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from archerfish.text.chat_template import ChatTemplate

OPEN, CLOSE = "<think>", "</think>"
CHANNEL = "<|channel|>"  # before the name of a channel, in gpt-oss's vocabulary
TAIL_TOKENS = 16  # at the end of a prompt that may hold an open mark: a mark and a line break, also one token a character


class Marks(NamedTuple):
    """What stands around reasoning in an answer, and what an answer without it begins with.

    call: what stands between reasoning and a call of a tool; its second part is text.
    """

    open: str = OPEN
    close: str = CLOSE
    none: str = ""
    call: tuple[str, str] = ("", "")


THINK = Marks()
# What is left of channels and turns without special tokens. Tools are called in the channel commentary.
CHANNELS = Marks("analysis", "assistantfinal", "final", ("assistant", "commentary"))


def marks_of(tokenizer: Tokenizer) -> Marks:
    return THINK if tokenizer.token_to_id(CHANNEL) is None else CHANNELS


def has_reasoning(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    """Whether a model may write its reasoning between marks, by its vocabulary or its chat template."""
    has_token = any(tokenizer.token_to_id(name) is not None for name in (CLOSE, CHANNEL))
    return has_token or any(mark in source for source in template.sources.values() for mark in (OPEN, CLOSE))


def ends_inside(prompt_end: str, answer_start: str) -> bool:
    """Whether a prompt ends inside of reasoning. answer_start: the part of it that belongs to the answer."""
    if answer_start:
        return answer_start.rfind(OPEN) > answer_start.rfind(CLOSE)
    return prompt_end.rstrip().endswith(OPEN)


def answer_parser(tokenizer: Tokenizer | None, template: ChatTemplate, prompt_ids: Sequence[int]) -> ReasoningParser | None:
    """The parser of an answer to a rendered conversation; None for models without reasoning."""
    if tokenizer is None or not has_reasoning(tokenizer, template):
        return None
    is_open = ends_inside(tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False), "")
    return ReasoningParser(is_open, marks_of(tokenizer))


class ReasoningParser:
    """Splits an answer into reasoning and text as it comes; how it is cut into pieces does not matter.

    Reasoning is what stands between the marks at the beginning, or before the closing mark if the prompt has opened it. White
    space around it is dropped.
    """

    def __init__(self, is_open: bool, marks: Marks = THINK) -> None:
        self._marks = marks
        self._mark = marks.close if is_open else marks.open  # the mark to find next; empty: only text follows
        self._held = ""  # what may be part of a mark, or white space beside one
        self._is_start = True  # nothing visible has come since the last mark

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the text that can be shown now."""
        held, reasoning, (opening, closing, none, call) = self._held + text, "", self._marks
        if self._mark == opening:
            visible = held.lstrip()
            if visible.startswith(opening):
                self._mark, held = closing, visible.removeprefix(opening)
            elif none and visible.startswith(none):
                self._mark, held = "", visible.removeprefix(none)
            elif is_last or not (opening.startswith(visible) or none.startswith(visible)):
                self._mark, self._is_start = "", False
            else:
                self._held = held
                return "", ""
        if self._mark == closing:
            held = held.lstrip() if self._is_start else held
            marks = [closing, "".join(call)] if call[1] else [closing]
            place, mark = min(((held.find(mark), mark) for mark in marks if mark in held), default=(len(held), ""))
            reasoning, rest = held[:place], (call[1] if mark in marks[1:] else "") + held[place + len(mark) :]
            if not mark and not is_last:
                num_held = max(n for mark in marks for n in range(len(mark)) if held.endswith(mark[:n]))
                reasoning, rest = held[: len(held) - num_held], held[len(held) - num_held :]
            self._held = reasoning[len(reasoning.rstrip()) :] + rest
            reasoning = reasoning.rstrip()
            self._is_start = self._is_start and not reasoning
            if not mark:
                return reasoning, ""
            self._mark, held, self._is_start = "", rest, True
        self._held = ""
        if self._is_start:
            held = held.lstrip()
            self._is_start = not held
        return reasoning, held
