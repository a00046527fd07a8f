"""Whether and which tools an answer may call, and how its calls are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from archerfish.engine.tool_calls import ToolCallParser, ToolPiece, grammar_for_tools, style_of
from archerfish.errors import InvalidInputError
from archerfish.serve.errors import InvalidParameterError
from archerfish.serve.served_texts import ServedText, blamed


class CallParser(Protocol):
    """Text in, pieces out: ToolCallParser, or a part of what it finds."""

    def feed(self, text: str, /) -> Sequence[ToolPiece]: ...
    def finish(self) -> Sequence[ToolPiece]: ...


class FirstCall:
    """No more than one call, for callers that can do with no more; later ones are dropped."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[ToolPiece]:
        return [piece for piece in self._parser.feed(text) if piece.index <= 0]

    def finish(self) -> list[ToolPiece]:
        return [piece for piece in self._parser.finish() if piece.index <= 0]


def choose_tools(
    text: ServedText, values: dict[str, Any], tools: list[dict[str, Any]], choice: str, is_parallel: bool | None
) -> tuple[dict[str, Any], Callable[[], CallParser]]:
    """SamplingParams with what a tool_choice asks for, and what finds the calls. is_parallel: whether they may be several."""
    if "grammar" in values:
        raise InvalidParameterError("A form of the answer and tools exclude each other; set tool_choice to none.", "tools")
    style = call_style(text)
    wanted: str | dict[str, Any] = {"name": choice[1:]} if choice[0] == "=" else choice
    may_repeat = bool(is_parallel) and choice == "required"
    try:
        grammar = grammar_for_tools(style, tools, wanted, is_parallel=may_repeat, tokenizer=text.tokenizer)
        ToolCallParser(style, tools)
    except InvalidInputError as error:
        raise blamed(error, "tools") from None
    values = values if grammar is None else {**values, "grammar": grammar}
    if is_parallel is False:
        return values, lambda: FirstCall(ToolCallParser(style, tools))
    return values, lambda: ToolCallParser(style, tools)


def call_style(text: ServedText) -> str:
    """How the model was trained to write calls, as far as its chat template tells."""
    sources = text.template_sources()
    return style_of(sources.get("tool_use") or sources.get("default", ""))
