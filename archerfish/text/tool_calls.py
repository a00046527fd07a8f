"""Calls of tools in what a model writes: found while the text comes, and forced by a grammar.

A call is a JSON object with a name and arguments, alone or in a list, after a mark of the model's style. At the beginning of a
text the mark may be missing: where it is a special token, it is often not in the text.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from archerfish.errors import InvalidInputError, did_you_mean
from archerfish.text.grammar import JSON_OPTIONS
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_object import CallObject, Outcome

MAX_HELD = 1 << 16  # characters that may become a call; more are text


@dataclass(frozen=True)
class Style:
    """How models of a family write calls."""

    mark: str  # stands before calls
    end: str = ""  # and this after them
    separator: str = ""  # may stand between calls that have no mark
    arguments: str = "arguments"
    is_list: bool = False  # calls stand in a list
    line: str = ""  # what the models write between the marks and the calls


STYLES = {
    "hermes": Style("<tool_call>", "</tool_call>", line="\n"),
    "llama3": Style("<|python_tag|>", separator=";", arguments="parameters"),
    "mistral": Style("[TOOL_CALLS]", is_list=True),
}
PROMPTED_STYLE = "hermes"  # which models are asked for whose chat template knows no tools
FAMILIES = {"mistral": "mistral", "mixtral": "mistral", "ministral": "mistral", "llama4": "llama3", "mllama": "llama3"}


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """Some text of an answer, the name of a call, which comes whole, or a part of its arguments, which are JSON."""

    kind: Literal["text", "name", "arguments"]
    index: int  # which call; -1 for text
    text: str


class ToolCallParser:
    """Takes an answer apart as it comes. How it is cut into pieces does not matter; what is no right call is text.

    Only tools that were given can be called; without any, all names are right. Blanks alone beside calls are dropped.
    """

    def __init__(self, style: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._style = find_style(style)
        self._names = frozenset(tool_schemas(tools))
        self._pieces: list[tuple[Literal["text", "name", "arguments"], int, list[str]]] = []
        self.num_calls = 0
        self._is_bare = True  # nothing but blanks and calls has come
        self._blanks = ""  # held back while it is
        self._tail = ""  # the beginning of a mark, perhaps
        self._block: _Block | None = None
        self._queue: deque[str] = deque()  # characters to come, those that are looked at again among them

    def feed(self, text: str) -> list[ToolPiece]:
        """What more of the answer brings; some of it may be held back."""
        self._queue.extend(text)
        self._run()
        return self._take()

    def finish(self) -> list[ToolPiece]:
        """What was held back. A call that is cut off stays as far as it came; of the end mark of one, nothing is shown."""
        while self._block is not None or self._tail:
            if self._block is not None:
                self._break_off(self._block)
            elif self._is_bare and self.num_calls and self._style.end.startswith(self._tail):
                self._tail = ""
            else:
                first = self._give_back_tail()
                self._write(first)
            self._run()
        if not self.num_calls:
            self._emit("text", -1, self._blanks)
        self._blanks = ""
        return self._take()

    def _run(self) -> None:
        while self._queue:
            character = self._queue.popleft()
            if self._block is None:
                self._outside(character)
            elif (outcome := self._block.step(character)) == "done":
                self._close()
            elif outcome == "broken":
                self._break_off(self._block)

    def _give_back_tail(self) -> str:
        """The first character of the tail; the others are looked at again."""
        tail, self._tail = self._tail, ""
        self._queue.extendleft(reversed(tail[1:]))
        return tail[0]

    def _take(self) -> list[ToolPiece]:
        pieces, self._pieces = self._pieces, []
        return [ToolPiece(kind, index, "".join(parts)) for kind, index, parts in pieces]

    def _emit(self, kind: Literal["text", "name", "arguments"], index: int, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][:2] == (kind, index):
            self._pieces[-1][2].append(text)
        else:
            self._pieces.append((kind, index, [text]))

    def _write(self, text: str) -> None:
        """Text that is nothing else."""
        self._emit("text", -1, self._blanks + text)
        self._blanks, self._is_bare = "", False

    # Outside of calls

    def _outside(self, character: str) -> None:
        self._tail += character
        marks = [self._style.mark, self._style.end] if self._is_bare and self.num_calls else [self._style.mark]
        if self._tail == self._style.mark:
            self._open(self._tail)
        elif self._tail in marks:
            self._tail = ""
        elif not any(mark.startswith(self._tail) for mark in marks):
            self._pass(self._give_back_tail())

    def _pass(self, character: str) -> None:
        """A character that begins no mark."""
        if not self._is_bare:
            self._write(character)
        elif character.isspace():
            self._blanks += character
        elif character in "{[":
            self._open("")
            self._queue.appendleft(character)
        elif not (self.num_calls and character == self._style.separator):
            self._write(character)

    def _open(self, mark: str) -> None:
        self._tail = ""
        self._block = _Block(self, mark)

    # Inside

    def _close(self) -> None:
        """Calls have ended well: what follows may be more of them."""
        self._block, self._blanks, self._is_bare = None, "", True

    def _break_off(self, block: _Block) -> None:
        """What is no call is text, in which calls may begin; its first character, or its mark, begins none."""
        held, self._block = block.held, None
        if block.num_calls:
            self._close()  # an end that is well written may follow what is not
        elif held:
            num_first = max(1, len(block.mark))
            self._write("".join(held[:num_first]))
            held = held[num_first:]
        self._queue.extendleft(reversed(held))

    def begin_call(self, name: str) -> int:
        index = self.num_calls
        self.num_calls += 1
        self._emit("name", index, name)
        return index

    def add_arguments(self, index: int, text: str) -> None:
        self._emit("arguments", index, text)

    def knows(self, name: str) -> bool:
        return not self._names or name in self._names

    @property
    def has_tools(self) -> bool:
        return bool(self._names)


class _Block:
    """What follows a mark: a call, or a list of them."""

    def __init__(self, parser: ToolCallParser, mark: str) -> None:
        self.parser, self.mark = parser, mark
        self.held = list(mark)  # since the last call
        self.num_calls = 0
        self._is_list = False
        self._state: Literal["open", "item", "object", "next"] = "open"
        self._object: CallObject | None = None

    def step(self, character: str) -> Outcome:
        self.held.append(character)
        if self._state == "object":
            return self._in_object(character)
        if character.isspace():
            return "going"
        if character == "{" and self._state in ("open", "item"):
            self._object, self._state = self._new_object(), "object"
            return "going"
        if character == "[" and self._state == "open":
            self._is_list, self._state = True, "item"
            return "going"
        if self._state == "next" and character == ",":
            self._state = "item"
            return "going"
        return "done" if self._state == "next" and character == "]" else "broken"

    def _new_object(self) -> CallObject:
        is_strict = not self.mark
        return CallObject(self.parser, is_strict=is_strict, needs_arguments=is_strict and not self.parser.has_tools)

    def _in_object(self, character: str) -> Outcome:
        assert self._object is not None
        outcome = self._object.step(character)
        if self._object.index is not None:
            self.held = []
        if outcome == "going":
            return "broken" if len(self.held) > MAX_HELD else "going"
        self.num_calls += self._object.index is not None
        if outcome == "broken":
            self.held = self.held or [character]
            return "broken"
        self._state = "next"
        return "going" if self._is_list else "done"


def style_of(chat_template: str, model_type: str = "") -> str:
    """The style in which a model calls tools, as its chat template shows or its family has it; "hermes" if nothing tells."""
    for name, style in STYLES.items():
        if style.mark in chat_template:
            return name
    if "Environment: ipython" in chat_template:
        return "llama3"
    return FAMILIES.get(model_type, "hermes")


def find_style(name: str) -> Style:
    style = STYLES.get(name)
    if style is None:
        raise InvalidInputError(f"There is no style of tool calls {name!r}.", hint=did_you_mean(name, STYLES))
    return style


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names of tools and the schemas of their arguments, whether written as OpenAI or as Anthropic has them."""
    found: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            hint = 'Give {"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            raise InvalidInputError(f"tools[{place}] has no name.", hint=hint)
        if name in found:
            raise InvalidInputError(f"Two tools are called {name!r}.")
        schema = function.get("parameters", function.get("input_schema"))
        if schema is not None and not isinstance(schema, Mapping):
            raise InvalidInputError(f"The parameters of the tool {name!r} must be a JSON schema, not {type(schema).__name__}.")
        found[name] = {"type": "object", **(schema or {})}
    return found


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells a model of tools and of PROMPTED_STYLE, where its chat template does not."""
    style = STYLES[PROMPTED_STYLE]
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = f'{{"name": <function-name>, "{style.arguments}": <args-json-object>}}'
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\n"
        f"For each function call, return a json object with function name and arguments within {style.mark}{style.end} "
        f"XML tags:\n{style.mark}{style.line}{call}{style.line}{style.end}"
    )


def calls_in_words(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without messages of tools: calls are in the assistant's text, results in what the user says next."""
    found: list[dict[str, Any]] = []
    is_result = False  # whether the last message has nothing but results
    for place, message in enumerate(messages):
        said = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        content = message.get("content") or ""
        if message.get("tool_calls"):
            calls = written_calls(message["tool_calls"], f'messages[{place}]["tool_calls"]')
            said["content"] = "\n".join([content, *calls] if content else calls)
        is_tool = message["role"] == "tool"
        if is_tool:
            said = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if is_result and said["role"] == "user":  # in one message, as many templates want turns to alternate
            found[-1] = {**said, "content": f"{found[-1]['content']}\n{said['content']}"}
        else:
            found.append(said)
        is_result = is_tool
    return found


def written_calls(calls: object, where: str) -> list[str]:
    """Earlier calls as a model of PROMPTED_STYLE writes them."""
    style = STYLES[PROMPTED_STYLE]
    texts: list[str] = []
    for place, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            hint = 'Give {"type": "function", "function": {"name": ..., "arguments": {...}}}.'
            raise InvalidInputError(f"{where}[{place}] has no name.", hint=hint)
        shown = json.dumps({"name": name, style.arguments: function.get("arguments") or {}}, ensure_ascii=False)
        texts.append(f"{style.mark}{style.line}{shown}{style.line}{style.end}")
    return texts


def grammar_for_tools(
    style: str, tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], *, is_parallel: bool = False,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any] | None:
    """A grammar for `SamplingParams` under which an answer is a call; None where tool_choice ("auto", "none") forces none.

    tool_choice: "required", or a mapping that names a function. is_parallel: several calls may come. With the model's
    tokenizer, a mark that is a special token is written as that.
    """
    if tool_choice in ("auto", "none"):
        return None
    written, schemas = find_style(style), tool_schemas(tools)
    if not schemas:
        raise InvalidInputError(f"tool_choice is {tool_choice!r}, but there are no tools.", hint="Give tools.")
    chosen = list(schemas) if tool_choice in ("required", "any") else [chosen_name(tool_choice, schemas)]
    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(chosen)))}"]
    for place, name in enumerate(chosen):
        before = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{written.arguments}": '
        schema = {**schemas[name], "x-guidance": {**JSON_OPTIONS, **schemas[name].get("x-guidance", {})}}
        rules += [f'call_{place}: {literal(before)} arguments_{place} "}}"', f"arguments_{place}: %json {json.dumps(schema)}"]
    return {"kind": "lark", "value": "\n".join([f"start: {shape_of(written, is_parallel, tokenizer)}", *rules]) + "\n"}


def tool_at(grammar: str, line: int) -> str | None:
    """The tool that a line, counted from 1, of a grammar of `grammar_for_tools` is about; where it has one tool, that."""
    lines = grammar.splitlines()
    calls = [one for one in lines if re.match(r"call_\d+: ", one)]
    number = re.match(r"arguments_(\d+): ", lines[line - 1]) if 0 < line <= len(lines) else None
    if number is None and len(calls) > 1:
        return None
    before, _ = json.JSONDecoder().raw_decode(calls[int(number[1]) if number else 0].partition(": ")[2])
    name, _ = json.JSONDecoder().raw_decode(before.removeprefix('{"name": '))
    return str(name)


def shape_of(style: Style, is_parallel: bool, tokenizer: Tokenizer | None) -> str:
    """How calls stand in an answer, as the right side of a rule."""
    special = {} if tokenizer is None else {name: token_id for token_id, name in tokenizer.special_tokens.items()}
    if style.is_list:
        mark = f"<[{special[style.mark]}]> " if style.mark in special else ""
        calls = '"[" call (", " call)* "]"' if is_parallel else '"[" call "]"'
        return mark + calls
    if not style.end:  # the mark of Llama 3 is for code; it writes calls without one
        return f"call ({literal(style.separator + ' ')} call)*" if is_parallel else "call"
    mark, end = (f"<[{special[text]}]>" if text in special else literal(text) for text in (style.mark, style.end))
    one = f"{mark} {literal(style.line)} call {literal(style.line)} {end}"
    return f"{one} ({literal(style.line)} {one})*" if is_parallel else one


def literal(text: str) -> str:
    return json.dumps(text)


def chosen_name(tool_choice: str | Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """The function that a tool_choice names."""
    function = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        hint = 'Use "auto", "none", "required" or {"type": "function", "function": {"name": ...}}.'
        raise InvalidInputError(f"tool_choice {tool_choice!r} names no function.", hint=hint)
    if name not in known:
        raise InvalidInputError(f"tool_choice names {name!r}, which is not among the tools.", hint=did_you_mean(name, known))
    return name
