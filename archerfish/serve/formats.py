"""What an answer must be: response formats and JSON schemas that clients send, and which tools an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archerfish.errors import did_you_mean
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import InvalidParameterError, UnsupportedParameterError, json_type, naming, short_value
from archerfish.text.schema_logic import COUNTS, ONE_SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS
from archerfish.text.tokenizer import Tokenizer
from archerfish.text.tool_calls import UNFORCED, ToolCallParser, call_at, grammar_for_tools, tool_schemas

# Response formats

SCHEMA_MEMBERS = ("name", "description", "schema", "strict")
FORMATS = {  # an example of each type
    "text": '{"type": "text"}',
    "json_object": '{"type": "json_object"}',
    "json_schema": '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    "regex": '{"type": "regex", "regex": "[0-9]+"}',
    "grammar": '{"type": "grammar", "grammar": "start: ..."}',
}


def response_grammar(value: Any, where: str) -> dict[str, Any] | None:
    """The grammar of a response_format. json_schema is a nested object in chat and flat in responses."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise unknown_format(value, where)
    if kind == "json_schema":
        return {"kind": "json_schema", "value": format_schema(value, where)}
    if kind in ("regex", "grammar") and not isinstance(value.get(kind), str):
        other = next((name for name, held in value.items() if name != "type" and held), None)
        found = json_type(value[kind]) if kind in value else f"in {other!r}" if other else "left out"
        message = f"{where} of type {kind} must have a string in its member {kind!r}, not {found}: {FORMATS[kind]}."
        raise InvalidParameterError(message, where)
    known = ("type", kind) if kind in ("regex", "grammar") else ("type",)
    check_format_members(value, known, f"{where} of type {kind}", where)
    if kind == "text":
        return None
    return {"kind": {"json_object": "json", "grammar": "lark"}.get(kind, kind), "value": value.get(kind)}


def nested_grammar(value: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """The grammar of the member "format" of a parameter whose other members are not supported."""
    for name, member in value.items():
        if name != "format" and member is not None and (name, member) != ("verbosity", "medium"):
            raise UnsupportedParameterError(f"{param}.{name} is not supported.", param)
    stated = value.get("format")
    return None if stated is None else response_grammar(stated, f"{param}.format")


def is_best_effort(value: Any) -> bool:
    """Whether a format says that its schema need not be followed exactly."""
    inner = value.get("json_schema") or value.get("format") or value if isinstance(value, dict) else {}
    return isinstance(inner, dict) and inner.get("strict") is False


def unknown_format(value: Any, where: str) -> InvalidParameterError:
    kind = value.get("type") if isinstance(value, dict) else None
    *names, last = FORMATS
    meant = next((name for name in FORMATS if isinstance(value, dict) and kind is None and name in value), None)
    found = f", not {kind!r}" if isinstance(kind, str) else "" if meant is None else f": {FORMATS[meant]}"
    hint = did_you_mean(kind, FORMATS) if isinstance(kind, str) else ""
    message = f"{where} must be an object whose type is {', '.join(names)} or {last}{found}. {hint}"
    return InvalidParameterError(message.strip(), where)


def format_schema(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The schema of a format of type json_schema."""
    is_nested = value.get("json_schema") is not None
    inner, inside = (value["json_schema"], f"{where}.json_schema") if is_nested else (value, where)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        message = f"{where} of type json_schema must hold a schema, which is an object: {FORMATS['json_schema']}."
        raise InvalidParameterError(message, where)
    if is_nested:
        check_format_members(value, ("type", "json_schema"), f"{where} of type json_schema", where)
    check_format_members(inner, SCHEMA_MEMBERS if is_nested else ("type", *SCHEMA_MEMBERS), inside, where)
    problem = find_schema_problem(schema, f"{inside}.schema")
    if problem is not None:
        raise InvalidParameterError(problem, where)
    return schema


def check_format_members(given: dict[str, Any], known: tuple[str, ...], place: str, where: str) -> None:
    """Refuse members that have no effect here; the error says where they belong. Empty members are accepted."""
    misplaced = next((name for name, held in given.items() if name not in known and held), None)
    if misplaced is not None:
        hint = f"For a {misplaced}: {FORMATS[misplaced]}." if misplaced in FORMATS else did_you_mean(misplaced, known)
        raise InvalidParameterError(f"{place} has no member {misplaced!r}. {hint}".strip(), where)


# JSON schemas

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Keywords by what they hold, beside those of schema_logic. Others are passed on unchecked.
TEXTS = ("pattern", "format", "$ref")
NUMBERS = ("minimum", "maximum", "multipleOf")
MAX_SHOWN = 40  # characters of a wrong value


def find_schema_problem(schema: Any, where: str) -> str | None:
    """What is wrong with a schema, in one sentence; None if it is well formed."""
    pending = [(where, schema)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            return f"{place} must be a JSON schema, which is an object, not {json_type(value)}."
        for keyword, held in value.items():
            problem = None if held is None else find_keyword_problem(keyword, held, f"{place}.{keyword}")
            if problem is not None:
                return problem
        pending += reversed([*inner_schemas(value, place)])
    return None


def find_keyword_problem(keyword: str, held: Any, place: str) -> str | None:
    """What is wrong with the value of a keyword; the schemas in it are checked later."""
    expected = ""
    if keyword == "type":
        return find_type_problem(held, place)
    if keyword == "required" and not (isinstance(held, list) and all(isinstance(name, str) for name in held)):
        expected = "a list of names of properties"
    elif keyword == "enum" and not isinstance(held, list):
        expected = "a list of values"
    elif keyword in SCHEMA_LISTS and not (isinstance(held, list) and held):
        expected = "a list of schemas that is not empty"
    elif keyword in SCHEMA_MAPS and not isinstance(held, dict):
        expected = "an object of schemas by name"
    elif keyword in TEXTS and not isinstance(held, str):
        expected = "a string"
    elif keyword in COUNTS and (isinstance(held, bool) or not isinstance(held, int | float) or held < 0 or held % 1):
        expected = "a whole number of at least 0"
    elif keyword in NUMBERS and (isinstance(held, bool) or not isinstance(held, int | float)):
        expected = "a number"
    return f"{place} must be {expected}, not {short_value(held, MAX_SHOWN)}." if expected else None


def find_type_problem(held: Any, place: str) -> str | None:
    for name in held if isinstance(held, list) and held else [held]:
        if name not in TYPES:
            hint = did_you_mean(name, TYPES) if isinstance(name, str) else ""
            found = short_value(name, MAX_SHOWN)
            return f"{place} must be one of {', '.join(TYPES)}, or a list of them, not {found}. {hint}".strip()
    return None


def inner_schemas(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place."""
    for keyword, held in schema.items():
        if held is None:
            continue
        if keyword in SCHEMA_MAPS:
            yield from ((f"{place}.{keyword}.{name}", inner) for name, inner in held.items())
        elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(held, list)):
            yield from ((f"{place}.{keyword}[{index}]", inner) for index, inner in enumerate(held))
        elif keyword in ONE_SCHEMA:
            yield f"{place}.{keyword}", held


# Tools

GRAMMAR_ERROR = re.compile(
    r"^The grammar of kind lark is not valid: (?:at (?P<line>\d+)\(\d+\): )?(?:failed to compile JSON schema: )?"
    r"(?P<reason>.*?)\.?$", re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    style: how the model writes calls. grammar: forces a call, if tool_choice asks for one; or allows calls and answers of a
    format. has_one_call: drop later ones. names: of the tools that may be called. remarks: what of their schemas is not
    followed.
    """

    style: str
    tools: Sequence[dict[str, Any]]
    grammar: dict[str, Any] | None
    has_one_call: bool
    names: Sequence[str]
    remarks: Sequence[str]

    @classmethod
    def choose(
        cls, style: str, tools: Sequence[dict[str, Any]], choice: str, is_parallel: bool | None, tokenizer: Tokenizer | None,
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
        return RemoteError(
            f"{what} cannot be followed: {found['reason']}.", code=error.code, status=error.status, param="tools",
            hint=UNFORCED,
        )
