"""What an answer must be: OpenAI's response_format and the like, as grammars."""

from __future__ import annotations

from typing import Any

from archerfish.errors import did_you_mean
from archerfish.serve.errors import InvalidParameterError, kind_of
from archerfish.serve.json_schemas import schema_complaint

SCHEMA_KEYS = ("name", "description", "schema", "strict")
FORMATS = {  # by type, as they are written
    "text": '{"type": "text"}',
    "json_object": '{"type": "json_object"}',
    "json_schema": '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    "regex": '{"type": "regex", "regex": "[0-9]+"}',
    "grammar": '{"type": "grammar", "grammar": "start: ..."}',
}


def response_grammar(value: Any, where: str = "response_format") -> dict[str, Any] | None:
    """The grammar of a response_format; json_schema is nested in chat and flat in responses."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise unknown_type(value, where)
    if kind == "json_schema":
        return {"kind": "json_schema", "value": schema_in(value, where)}
    if kind in ("regex", "grammar") and not isinstance(value.get(kind), str):
        elsewhere = next((name for name, held in value.items() if name != "type" and held), None)
        stated = kind_of(value[kind]) if kind in value else f"in {elsewhere!r}" if elsewhere else "left out"
        message = f"{where} of type {kind} must have a string in its member {kind!r}, not {stated}: {FORMATS[kind]}."
        raise InvalidParameterError(message, where)
    check_members(value, ("type", kind) if kind in ("regex", "grammar") else ("type",), f"{where} of type {kind}", where)
    if kind == "text":
        return None
    return {"kind": {"json_object": "json", "grammar": "lark"}.get(kind, kind), "value": value.get(kind)}


def unknown_type(value: Any, where: str) -> InvalidParameterError:
    kind = value.get("type") if isinstance(value, dict) else None
    *names, last = FORMATS
    meant = next((name for name in FORMATS if isinstance(value, dict) and kind is None and name in value), None)
    stated = f", not {kind!r}" if isinstance(kind, str) else "" if meant is None else f": {FORMATS[meant]}"
    hint = did_you_mean(kind, FORMATS) if isinstance(kind, str) else ""
    message = f"{where} must be an object whose type is {', '.join(names)} or {last}{stated}. {hint}"
    return InvalidParameterError(message.strip(), where)


def schema_in(value: dict[str, Any], where: str) -> dict[str, Any]:
    """The schema of a format of type json_schema."""
    is_nested = value.get("json_schema") is not None
    inner, inside = (value["json_schema"], f"{where}.json_schema") if is_nested else (value, where)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        message = f"{where} of type json_schema must hold a schema, which is an object: {FORMATS['json_schema']}."
        raise InvalidParameterError(message, where)
    if is_nested:
        check_members(value, ("type", "json_schema"), f"{where} of type json_schema", where)
    check_members(inner, SCHEMA_KEYS if is_nested else ("type", *SCHEMA_KEYS), inside, where)
    complaint = schema_complaint(schema, f"{inside}.schema")
    if complaint is not None:
        raise InvalidParameterError(complaint, where)
    return schema


def check_members(given: dict[str, Any], known: tuple[str, ...], what: str, where: str) -> None:
    """Refuse what would not count, with where it would; empty members are what clients repeat of an object."""
    misplaced = next((name for name, held in given.items() if name not in known and held), None)
    if misplaced is not None:
        hint = f"For a {misplaced}: {FORMATS[misplaced]}." if misplaced in FORMATS else did_you_mean(misplaced, known)
        raise InvalidParameterError(f"{what} has no member {misplaced!r}. {hint}".strip(), where)
