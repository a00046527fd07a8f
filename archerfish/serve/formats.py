"""What an answer must be: response formats and JSON schemas that clients send, and which tools an answer may or must
call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archerfish.errors import InvalidInputError, did_you_mean
from archerfish.params import check_grammar_size, is_number
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import UnsupportedParameterError, check_members, json_type, naming, short_value
from archerfish.text.json_schema import COUNTS, MAX_DEPTH, ONE_SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS, lenient_schema
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_calls import UNFORCED, ToolCallParser, call_at, grammar_for_tools, tool_schemas

# Response formats

LENIENT = ("response_format", "text.format")  # OpenAI's formats: without "strict" they leave out unsupported keywords
SCHEMA_MEMBERS = ("name", "description", "schema", "strict")
FORMATS = {  # an example of each type
    "text": '{"type": "text"}',
    "json_object": '{"type": "json_object"}',
    "json_schema": '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    "regex": '{"type": "regex", "regex": "[0-9]+"}',
    "grammar": '{"type": "grammar", "grammar": "start: ..."}',
}
HINTS = {name: f"For a {name}: {example}." for name, example in FORMATS.items()}


def response_grammar(value: Any, where: str) -> dict[str, Any] | None:
    """The grammar of a response_format. json_schema is a nested object in chat and flat in responses."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        found = f", not {kind!r}" if isinstance(kind, str) else ""
        hint = (
            did_you_mean(kind, FORMATS, most=0) if isinstance(kind, str) else f"An example: {FORMATS['json_schema']}."
        )
        raise InvalidInputError(
            f"{where} must be an object whose type is one of {', '.join(FORMATS)}{found}.", hint=hint
        )
    if kind == "json_schema":
        return {"kind": "json_schema", "value": format_schema(value, where)}
    if kind in ("regex", "grammar") and not isinstance(value.get(kind), str):
        raise InvalidInputError(f"{where} of type {kind} must have a string in its member {kind!r}: {FORMATS[kind]}.")
    check_members(
        value, ("type", kind) if kind in ("regex", "grammar") else ("type",), f"{where} of type {kind}", HINTS
    )
    if kind == "text":
        return None
    return {"kind": {"json_object": "json", "grammar": "lark"}.get(kind, kind), "value": value.get(kind)}


def nested_grammar(value: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """The grammar of the member "format" of a parameter whose other members are not supported."""
    for name, member in value.items():
        if name not in ("format", "verbosity", "effort") and member is not None:
            raise UnsupportedParameterError(f"{param}.{name} is not supported.", param)
    stated = value.get("format")
    return None if stated is None else response_grammar(stated, f"{param}.format")


def format_schema(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The schema of a format of type json_schema."""
    is_nested = value.get("json_schema") is not None
    inner, inside = (value["json_schema"], f"{where}.json_schema") if is_nested else (value, where)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        example = FORMATS["json_schema"]
        raise InvalidInputError(f"{where} of type json_schema must hold a schema, which is an object: {example}.")
    if is_nested:
        check_members(value, ("type", "json_schema"), f"{where} of type json_schema", HINTS)
    check_members(inner, SCHEMA_MEMBERS if is_nested else ("type", *SCHEMA_MEMBERS), inside, HINTS)
    check_grammar_size("json_schema", schema)
    check_schema(schema, f"{inside}.schema")
    if where in LENIENT and inner.get("strict") is not True:
        return lenient_schema(schema)
    return schema


# JSON schemas

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Whether a keyword may have a value, and what is expected. Others are passed on unchecked.
RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "required": (
        lambda held: isinstance(held, list) and all(isinstance(name, str) for name in held),
        "a list of names of properties",
    ),
    "enum": (lambda held: isinstance(held, list), "a list of values"),
    **dict.fromkeys(
        SCHEMA_LISTS, (lambda held: isinstance(held, list) and held, "a list of schemas that is not empty")
    ),
    "x-guidance": (lambda held: isinstance(held, dict), "an object of llguidance's options"),
    **dict.fromkeys(SCHEMA_MAPS, (lambda held: isinstance(held, dict), "an object of schemas by name")),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda held: isinstance(held, str), "a string")),
    **dict.fromkeys(
        COUNTS, (lambda held: is_number(held) and held >= 0 and held % 1 == 0, "a whole number of at least 0")
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (is_number, "a number")),
}


def check_schema(schema: Any, where: str, depth: int = 0) -> None:
    """Refuse a schema that is not well formed; the error names the place in it."""
    if isinstance(schema, bool) or schema == {}:
        return
    if not isinstance(schema, dict):
        raise InvalidInputError(f"{where} must be a JSON schema, which is an object, not {json_type(schema)}.")
    if depth > MAX_DEPTH:
        raise InvalidInputError(f"{where[:100]}... is nested too deeply.", hint=f"{MAX_DEPTH} levels are allowed.")
    stated = {keyword: held for keyword, held in schema.items() if held is not None}
    for keyword, held in stated.items():
        check_keyword(keyword, held, f"{where}.{keyword[:50]}")
    for place, inner in inner_schemas(stated, where):
        check_schema(inner, place, depth + 1)


def check_keyword(keyword: str, held: Any, place: str) -> None:
    """Check the value of a keyword, except for the schemas in it."""
    if keyword == "type":
        for name in held if isinstance(held, list) and held else [held]:
            if name not in TYPES:
                message = f"{place} must be one of {', '.join(TYPES)}, or a list of them, not {short_value(name)}."
                raise InvalidInputError(
                    message, hint=did_you_mean(name, TYPES, most=0) if isinstance(name, str) else ""
                )
    elif keyword in RULES:
        is_right, expected = RULES[keyword]
        if not is_right(held):
            raise InvalidInputError(f"{place} must be {expected}, not {short_value(held)}.")


def inner_schemas(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place."""
    for keyword, held in schema.items():
        if keyword in SCHEMA_MAPS:
            yield from ((f"{place}.{keyword}.{name[:50]}", inner) for name, inner in held.items())
        elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(held, list)):
            yield from ((f"{place}.{keyword}[{index}]", inner) for index, inner in enumerate(held))
        elif keyword in ONE_SCHEMA:
            yield f"{place}.{keyword}", held


# Tools

GRAMMAR_ERROR = re.compile(
    r"^The grammar of kind lark is not valid: (?:at (?P<line>\d+)\(\d+\): )?(?:failed to compile JSON schema: )?"
    r"(?P<reason>.*?)\.?$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    style: how the model writes calls. grammar: forces a call, if tool_choice asks for one; or allows calls and answers
    of a format. has_one_call: drop later ones. names: of the tools that may be called. remarks: what of their schemas
    is not followed.
    """

    style: str
    tools: Sequence[dict[str, Any]]
    grammar: dict[str, Any] | None
    has_one_call: bool
    names: Sequence[str]
    remarks: Sequence[str]

    @classmethod
    def choose(
        cls,
        style: str,
        tools: Sequence[dict[str, Any]],
        choice: str,
        is_parallel: bool | None,
        tokenizer: Tokenizer | None,
        answer: dict[str, Any] | None = None,
    ) -> ToolUse:
        """choice: "auto", "required" or "=" and the name of a tool. is_parallel: whether several calls are allowed.

        answer: the schema of an answer that does not call tools.
        """
        wanted: str | dict[str, Any] = {"name": choice[1:]} if choice[0] == "=" else choice
        may_repeat = is_parallel is not False if choice == "auto" else bool(is_parallel) and choice == "required"
        remarks: list[str] = []
        with naming("tools"):
            grammar = grammar_for_tools(
                style, tools, wanted, is_parallel=may_repeat, tokenizer=tokenizer, answer=answer, remarks=remarks
            )
            ToolCallParser(style, tools)
        names = [choice[1:]] if choice[0] == "=" else list(tool_schemas(tools))
        return cls(style, tools, grammar, is_parallel is False, names, remarks)

    def explain(self, error: RemoteError) -> RemoteError:
        """An error about the grammar that forces a call, as one that names the tool whose schema it is about."""
        found = GRAMMAR_ERROR.search(error.message)
        if found is None or self.grammar is None:
            return error
        line = int(found["line"] or 0)
        if str(self.grammar["value"]).splitlines()[line - 1].startswith("answer: "):
            error.message = f"The schema of the format cannot be followed: {found['reason']}."
            return error
        place = call_at(str(self.grammar["value"]), line)
        what = "The schema of a tool" if place is None else f"The schema of the tool {self.names[place]!r}"
        message = f"{what} cannot be followed: {found['reason']}."
        return RemoteError(message, code=error.code, status=error.status, param="tools", hint=UNFORCED)
