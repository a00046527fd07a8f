"""Whether and which tools an answer may call, and how its calls are found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from archerfish.errors import InvalidInputError
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError
from archerfish.serve.json_schemas import path_of
from archerfish.serve.served_texts import ServedText, blamed
from archerfish.text.tool_calls import ToolCallParser, ToolPiece, grammar_for_tools, tool_at, tool_schemas

GRAMMAR_ERROR = re.compile(
    r"^The grammar of kind lark is not valid: (?:at (?P<line>\d+)\(\d+\): )?(?:failed to compile JSON schema: )?"
    r"(?P<reason>.*?)\.?$", re.DOTALL,
)  # fmt: skip
WORDS = re.compile(r"""["']([^"']+)["']|: (\w\S*)$""")  # of a schema, in what llguidance says of it


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


def explained(error: RemoteError, grammar: str, tools: Sequence[Mapping[str, Any]]) -> RemoteError:
    """An error of a grammar that forces a call, as one of the tool whose schema it is about."""
    found = GRAMMAR_ERROR.search(error.message)
    if found is None:
        return error
    schemas, reason = tool_schemas(tools), found["reason"]
    name = tool_at(grammar, int(found["line"] or 0))
    what = "The schema of a tool" if name is None else f"The schema of the tool {name!r}"
    words = [word for pair in WORDS.findall(reason) for word in pair if word]
    places = [place for word in words if name is not None and (place := path_of(schemas[name], word))]
    where = f" (at {places[0]})" if places else ""
    return RemoteError(
        f"{what} cannot be followed{where}: {reason}.", code=error.code, status=error.status, param="tools",
        hint='Leave that out of the schema, or let the model choose: tool_choice "auto".',
    )


def choose_tools(
    text: ServedText, values: dict[str, Any], options: dict[str, Any], choice: str, is_parallel: bool | None
) -> tuple[dict[str, Any], Callable[[], CallParser]]:
    """SamplingParams with what a tool_choice asks for, and what finds the calls. options: of the template, tools among them.

    is_parallel: whether calls may be several.
    """
    if "grammar" in values:
        raise InvalidParameterError("A form of the answer and tools exclude each other; set tool_choice to none.", "tools")
    style, tools = text.call_style(options), options["tools"]
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

