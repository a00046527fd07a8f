"""JSON schemas that clients send: whether they are well formed, and if not, where and what was expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from archerfish.errors import did_you_mean
from archerfish.serve.errors import kind_of

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Keywords by what they hold. Others are passed on as they are.
ONE_SCHEMA = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
TEXTS = ("pattern", "format", "$ref")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "multipleOf")


def schema_complaint(schema: Any, where: str) -> str | None:
    """What is wrong with a schema that stands at a place, in one sentence; None: nothing that can be seen without using it."""
    pending = [(where, schema)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            return f"{place} must be a JSON schema, which is an object, not {kind_of(value)}."
        for keyword, held in value.items():
            complaint = None if held is None else keyword_complaint(keyword, held, f"{place}.{keyword}")
            if complaint is not None:
                return complaint
        pending += reversed([*inner_schemas(value, place)])
    return None


def keyword_complaint(keyword: str, held: Any, place: str) -> str | None:
    """What is wrong with the value of a keyword itself; schemas in it are looked at later."""
    expected = ""
    if keyword == "type":
        return type_complaint(held, place)
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
    return f"{place} must be {expected}, not {shown(held)}." if expected else None


def type_complaint(held: Any, place: str) -> str | None:
    for name in held if isinstance(held, list) and held else [held]:
        if name not in TYPES:
            hint = did_you_mean(name, TYPES) if isinstance(name, str) else ""
            return f"{place} must be one of {', '.join(TYPES)}, or a list of them, not {shown(name)}. {hint}".strip()
    return None


def inner_schemas(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, and where they stand."""
    for keyword, held in schema.items():
        if held is None:
            continue
        if keyword in SCHEMA_MAPS:
            yield from ((f"{place}.{keyword}.{name}", inner) for name, inner in held.items())
        elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(held, list)):
            yield from ((f"{place}.{keyword}[{index}]", inner) for index, inner in enumerate(held))
        elif keyword in ONE_SCHEMA:
            yield f"{place}.{keyword}", held


def shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else kind_of(value)


def path_of(schema: Any, word: str) -> str | None:
    """Where a schema has a word, as a keyword or as what one holds; the first place from the top."""
    pending = deque([("", schema)])
    while pending:
        place, value = pending.popleft()
        if isinstance(value, str) and value.removeprefix("#") == word:
            return place
        if isinstance(value, dict):
            if word in value:
                return f"{place}.{word}".lstrip(".")
            pending += [(f"{place}.{key}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(f"{place}[{index}]", inner) for index, inner in enumerate(value)]
    return None
