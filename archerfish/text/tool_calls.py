"""Tool calls: finding them in a model's text as it comes, describing tools in a prompt, and grammars that force a call.

A call is a JSON object with a name and arguments, alone or in a list, after the mark of the model's style. At the
beginning of a text the mark may be missing, because a special token is usually not part of the text.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from archerfish.errors import InvalidInputError, did_you_mean
from archerfish.text.grammar import JSON_OPTIONS
from archerfish.text.json_schema import lenient_schema, prepare_schema
from archerfish.text.reasoning import CHANNEL
from archerfish.text.tokenizer import Tokenizer

T = TypeVar("T")
Reader = Generator[None, str, T]  # takes one character after the other
UNFORCED = 'Leave that out of the schema, or let the model choose: tool_choice "auto".'
MAX_HELD = 1 << 16  # characters that are held back because they may become a call
ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "tool_name")
USUAL_KEYS = (*NAMES, *ARGUMENTS, "type", "id", "tool_call_id")
SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Style:
    """How the models of a family write calls."""

    mark: str  # before calls
    end: str = ""  # after calls
    separator: str = ""  # between calls without a mark
    name: str = "name"
    arguments: str = "arguments"
    is_list: bool = False  # calls are in a list
    line: str = ""  # between the marks and the calls
    sign: str = ""  # in chat templates, where that is not the mark
    is_named: bool = False  # the name stands behind the mark, and the arguments alone are JSON


STYLES = {
    "hermes": Style("<tool_call>", "</tool_call>", line="\n"),
    "llama3": Style("<|python_tag|>", separator=";", arguments="parameters"),
    "mistral": Style("[TOOL_CALLS]", is_list=True),
    "granite": Style("<|tool_call|>", is_list=True),
    "harmony": Style(
        "commentary to=functions.", sign=CHANNEL, is_named=True
    ),  # gpt-oss; special tokens are not in the text
    "cohere": Style("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters", is_list=True),
}
HARMONY_CALL = ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")  # special tokens of a call
PROMPTED_STYLE = "hermes"  # for models whose chat template does not read tools


@dataclass(slots=True)
class ToolPiece:
    """A piece of an answer: text, reasoning, the whole name of a call, or a part of the JSON of its arguments."""

    kind: Literal["text", "reasoning", "name", "arguments"]
    index: int  # which call; -1 for text and reasoning
    text: str


class NotACallError(Exception):
    """What began like a call is text."""


class ToolCallParser:
    """Splits an answer into text and calls as it comes. Whatever is not a valid call is text.

    The result does not depend on how the answer is cut into pieces. Only the given tools can be called; without tools
    every name is valid. White space around calls is dropped.
    """

    def __init__(self, style: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._style = STYLES[style]
        self._names = frozenset(tool_schemas(tools))
        self._pieces: list[tuple[Literal["text", "name", "arguments"], int, list[str]]] = []
        self.num_calls = 0
        self._has_only_calls = True  # so far the answer is white space and calls
        self._blanks = ""  # white space that is held back meanwhile
        self._tail = ""  # characters that may begin a mark
        self._queue: deque[str] = deque()  # characters to read, some of them for the second time
        self._block: Reader[None] | None = None  # reads the calls after a mark
        self._mark = ""  # before the block; empty if it began without one
        self._held: list[str] = []  # characters of the block since its last call
        self._num_before = 0  # calls before the block
        self._is_begun = False  # whether the object that is being read has been reported as a call

    def feed(self, text: str) -> list[ToolPiece]:
        """The pieces of more text of the answer. Some of it may be held back."""
        self._queue.extend(text)
        self._run()
        return self._take()

    def finish(self) -> list[ToolPiece]:
        """The pieces of the text that was held back. A truncated call stays as it is; a truncated end mark is
        dropped."""
        while self._block is not None or self._tail:
            if self._block is not None:
                self._break_off()
            elif self._has_only_calls and self.num_calls and self._style.end.startswith(self._tail):
                self._tail = ""
            else:
                self._write(self._give_back_tail())
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
                continue
            self._held.append(character)
            try:
                self._block.send(character)
            except StopIteration:  # the calls are complete; more may follow
                self._block = None
                self._blanks = ""
                self._has_only_calls = True
            except NotACallError:
                self._break_off()
            else:
                if self._is_begun:
                    self._held.clear()
                elif len(self._held) > MAX_HELD:
                    self._break_off()

    def _give_back_tail(self) -> str:
        """The first character of the tail; the others are read again."""
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
        """Emit text."""
        self._emit("text", -1, self._blanks + text)
        self._blanks, self._has_only_calls = "", False

    def _outside(self, character: str) -> None:
        self._tail += character
        marks = [self._style.mark, self._style.end] if self._has_only_calls and self.num_calls else [self._style.mark]
        if self._tail == self._style.mark:
            self._open(self._tail)
        elif self._tail in marks:
            self._tail = ""
        elif not any(mark.startswith(self._tail) for mark in marks):
            self._pass(self._give_back_tail())

    def _pass(self, character: str) -> None:
        """Handle a character that does not begin a mark."""
        if not self._has_only_calls:
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
        self._mark = mark
        self._held = list(mark)
        self._num_before = self.num_calls
        self._is_begun = False
        self._block = self._read_calls()
        next(self._block)

    def _break_off(self) -> None:
        """The block is not a valid call: emit its mark or first character as text and read the rest again."""
        self._block, held = None, self._held
        if self.num_calls > self._num_before:  # its earlier calls are complete
            self._blanks, self._has_only_calls = "", True
        elif held:
            num_first = max(1, len(self._mark))
            self._write("".join(held[:num_first]))
            held = held[num_first:]
        self._queue.extendleft(reversed(held))

    def _read_calls(self) -> Reader[None]:
        """Read what follows a mark: a call, or a list of calls."""
        if self._style.is_named and self._mark:
            yield from self._read_named()
            return
        character = yield from next_visible()
        is_list = character == "["
        if is_list:
            character = yield from next_visible()
        while character == "{":
            yield from self._read_call()
            if not is_list or (character := (yield from next_visible())) == "]":
                return
            if character != ",":
                break
            character = yield from next_visible()
        raise NotACallError

    def _read_named(self) -> Reader[None]:
        """Read a name, what says how the arguments are written, and the arguments."""
        words = ""
        while (character := (yield)) != "{":
            words += character
        known = sorted(self._names, key=len, reverse=True) or words.split()[:1]
        name = next((name for name in known if words.startswith((f"{name} ", f"{name}<")) or words == name), None)
        if name is None:
            raise NotACallError
        self._begin_call(name)
        yield from follow_value(character, self._add_arguments)
        self._held.clear()
        self._is_begun = False

    def _read_call(self) -> Reader[None]:
        """Read an object after its opening brace. A call is reported when its name is known and its arguments begin.

        Arguments are not validated, only followed to their end. Without a mark, an object with unusual keys is not a
        call.
        """
        name: str | None = None
        arguments: list[str] | None = None
        character = yield from next_visible()
        while character != "}":
            key = yield from self._read_key(character)
            character = yield from next_visible()
            text: list[str] = []
            if key in ARGUMENTS and character == "{" and arguments is None and not self._is_begun:
                arguments = text
                if name is not None:
                    self._begin_call(name)
                after = yield from follow_value(character, self._add_arguments if self._is_begun else text.append)
            else:
                after = yield from follow_value(character, text.append)
                if key in NAMES and not self._is_begun:
                    name = read_string("".join(text))
                    if name is None or (self._names and name not in self._names):
                        raise NotACallError
                elif key in ARGUMENTS and not self._is_begun and text != list("null"):
                    inner = read_string("".join(text))  # some models write the arguments as a string of JSON
                    if inner is None or not inner.lstrip().startswith("{") or arguments is not None:
                        raise NotACallError
                    arguments = [inner]
                if name is not None and arguments is not None and not self._is_begun:
                    self._begin_call(name)
                    self._add_arguments("".join(arguments))
            character = after if after.strip() else (yield from next_visible())
            if character != "}":
                character = yield from read_comma(character)
        if not self._is_begun:
            if name is None or not (self._mark or self._names):
                raise NotACallError
            self._begin_call(name)
            self._add_arguments("{}")
        self._held.clear()
        self._is_begun = False

    def _read_key(self, first: str) -> Reader[str]:
        if first != '"':
            raise NotACallError
        text: list[str] = []
        yield from follow_value(first, text.append)
        key = read_string("".join(text))
        if key is None or (not self._mark and key not in USUAL_KEYS) or (yield from next_visible()) != ":":
            raise NotACallError
        return key

    def _begin_call(self, name: str) -> None:
        """Report a call, which cannot be undone."""
        self._emit("name", self.num_calls, name)
        self.num_calls += 1
        self._is_begun = True

    def _add_arguments(self, text: str) -> None:
        self._emit("arguments", self.num_calls - 1, text)


def next_visible() -> Reader[str]:
    """The next character that is not white space."""
    while (character := (yield)).isspace():
        pass
    return character


def read_comma(character: str) -> Reader[str]:
    """The quote that follows a comma."""
    if character != "," or (yield from next_visible()) != '"':
        raise NotACallError
    return '"'


def follow_value(first: str, emit: Callable[[str], object]) -> Reader[str]:
    """Emit a JSON value up to its end, character by character; gives the character after a scalar, else "".

    Strings and brackets are tracked; the rest is not validated.
    """
    character = first
    if first in SCALAR:
        while character in SCALAR:
            emit(character)
            character = yield
        return character
    closers: list[str] = []
    is_string = is_escaped = False
    while True:
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped, is_string = character == "\\", character != '"'
        elif character == '"':
            is_string = True
        elif character in CLOSERS:
            closers.append(CLOSERS[character])
        elif closers[-1:] == [character]:
            closers.pop()
        elif not closers or not (character.isspace() or character in ":," or character in SCALAR):
            raise NotACallError
        emit(character)
        if not closers and not is_string:
            return ""
        character = yield


def read_string(text: str) -> str | None:
    """The value of a JSON string; None if the text is not one."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def style_of(chat_template: str) -> str:
    """The style of a model's calls, by the marks in its chat template, else "hermes"."""
    for name, style in STYLES.items():
        if (style.sign or style.mark) in chat_template:
            return name
    return "llama3" if "Environment: ipython" in chat_template else "hermes"


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names of tools and the schemas of their arguments, in OpenAI's or Anthropic's format."""
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
            raise InvalidInputError(
                f"The parameters of the tool {name!r} must be a JSON schema, not {type(schema).__name__}."
            )
        schema = {"type": "object", **(schema or {})}
        found[name] = schema if function.get("strict") is True else lenient_schema(schema)
    return found


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """A prompt that describes the tools and PROMPTED_STYLE to a model whose chat template does not read tools."""
    style = STYLES[PROMPTED_STYLE]
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = f'{{"name": <function-name>, "{style.arguments}": <args-json-object>}}'
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\n"
        f"For each function call, return a json object with function name and arguments within {style.mark}{style.end} "
        f"XML tags:\n{style.mark}{style.line}{call}{style.line}{style.end}"
    )


def written_calls(calls: object, where: str) -> list[str]:
    """Earlier calls as text in PROMPTED_STYLE."""
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
    style: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    *,
    is_parallel: bool = False,
    tokenizer: Tokenizer | None = None,
    answer: Mapping[str, Any] | None = None,
    remarks: list[str] | None = None,
) -> dict[str, Any] | None:
    """A grammar for `SamplingParams` that forces a call, or with "auto" and `answer` either calls or an answer of that
    schema.

    It is None if there is nothing to force. tool_choice: "auto", "none", "required", or {"name": ...} for one tool.
    is_parallel: allows several calls. With the model's tokenizer, a mark that is a special token is forced as that
    token.
    remarks: gets what of the tools' schemas is not followed.
    """
    if tool_choice == "none" or (tool_choice == "auto" and answer is None):
        return None
    written, schemas = STYLES[style], tool_schemas(tools)
    if not schemas:
        raise InvalidInputError(f"tool_choice is {tool_choice!r}, but there are no tools.", hint="Give tools.")
    chosen = list(schemas) if isinstance(tool_choice, str) else [tool_choice["name"]]
    if chosen[0] not in schemas:
        hint = did_you_mean(chosen[0], schemas)
        raise InvalidInputError(f"tool_choice names {chosen[0]!r}, which is not among the tools.", hint=hint)
    has_answer = tool_choice == "auto" and answer is not None
    rules = [
        "start: calls | answer" if has_answer else "start: calls",
        f"calls: {shape_of(written, is_parallel, tokenizer)}",
    ]
    rules.append(f"call: {' | '.join(f'call_{place}' for place in range(len(chosen)))}")
    for place, name in enumerate(chosen):
        try:
            schema, ignored = prepare_schema(schemas[name])
        except InvalidInputError as error:
            message = f"The schema of the tool {name!r} cannot be followed: {error.message}"
            raise InvalidInputError(message, hint=UNFORCED) from None
        if remarks is not None:
            remarks += [f"the tool {name!r}: {remark}" for remark in ignored]
        is_told = written.end or written.is_list or written.is_named
        if has_answer and not is_told:  # only a parser of JSON can tell it from an answer
            members = {written.name: {"const": name}, written.arguments: {"$id": f"arguments-{place}", **schema}}
            call = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
            rules.append(f"call_{place}: {json_rule({**call, 'x-guidance': schema.get('x-guidance', {})})}")
            continue
        if written.is_named:
            rules += [
                f"call_{place}: {named_call(written, name, place, tokenizer)}",
                f"arguments_{place}: {json_rule(schema)}",
            ]
            continue
        before = f'{{"{written.name}": {json.dumps(name, ensure_ascii=False)}, "{written.arguments}": '
        rules += [
            f'call_{place}: {json.dumps(before)} arguments_{place} "}}"',
            f"arguments_{place}: {json_rule(schema)}",
        ]
    if answer is not None and has_answer:
        rules.append(f"answer: {json_rule(prepare_schema(answer)[0])}")
    return {"kind": "lark", "value": "\n".join(rules) + "\n"}


def json_rule(schema: Mapping[str, Any]) -> str:
    options = {**JSON_OPTIONS, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def call_at(grammar: str, line: int) -> int | None:
    """Which call of a grammar of `grammar_for_tools` a line (counted from 1) belongs to; None if that is not known."""
    lines = grammar.splitlines()
    found = re.match(r"(?:call|arguments)_(\d+): ", lines[line - 1]) if 0 < line <= len(lines) else None
    if found is None:
        return None if any(one.startswith("call_1: ") for one in lines) else 0
    return int(found[1])


def named_call(style: Style, name: str, place: int, tokenizer: Tokenizer | None) -> str:
    """The rule of a call whose name stands behind the mark."""
    ids = {text: token_id for token_id, text in tokenizer.special_tokens.items()} if tokenizer is not None else {}
    channel, constrain, message, end = (f"<[{ids[text]}]> " if text in ids else "" for text in HARMONY_CALL)
    return f'{channel}{json.dumps(f"{style.mark}{name} ")} {constrain}"json" {message}arguments_{place} {end}'.rstrip()


def shape_of(style: Style, is_parallel: bool, tokenizer: Tokenizer | None) -> str:
    """The right side of the grammar's first rule: how an answer is made of calls."""
    special = {} if tokenizer is None else {name: token_id for token_id, name in tokenizer.special_tokens.items()}
    if style.is_list:
        calls = '"[" call (", " call)* "]"' if is_parallel else '"[" call "]"'
        before, after = (f"<[{special[text]}]>" if text in special else "" for text in (style.mark, style.end))
        return f"{before} {calls} {after}".strip()
    if not style.end:  # Llama 3 uses its mark for code and writes calls without a mark
        return f"call ({json.dumps(style.separator + ' ')} call)*" if is_parallel else "call"
    mark, end = (f"<[{special[text]}]>" if text in special else json.dumps(text) for text in (style.mark, style.end))
    one = f"{mark} {json.dumps(style.line)} call {json.dumps(style.line)} {end}"
    return f"{one} ({json.dumps(style.line)} {one})*" if is_parallel else one
