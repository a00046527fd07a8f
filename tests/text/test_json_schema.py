"""Grammars of JSON schemas: what they accept is valid, and what cannot be followed is refused by name."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archerfish.errors import InvalidInputError
from archerfish.text.grammar import CompiledGrammar
from archerfish.text.json_schema import lenient_schema, prepare_schema
from scripts.check_json_schemas import byte_vocabulary, check_suite, takes, write_at_random

A, B = {"type": "integer"}, {"type": "string", "maxLength": 3}
CAR = {"type": "object", "properties": {"kind": {"const": "car"}, "wheels": A}, "required": ["kind"]}
BOAT = {"type": "object", "properties": {"kind": {"const": "boat"}, "sails": A}, "required": ["kind", "sails"]}
FLEET: dict[str, Any] = {  # as pydantic writes it: the tags have defaults, and the union contains itself
    "$defs": {
        "car": {"type": "object", "properties": {"kind": {"const": "car"}, "tows": {"$ref": "#/$defs/any"}}},
        "boat": BOAT,
        "any": {
            "oneOf": [{"$ref": "#/$defs/car"}, {"$ref": "#/$defs/boat"}],
            "discriminator": {"propertyName": "kind"},
        },
    },
    "$ref": "#/$defs/any",
}
# A schema, values that its grammar accepts, and values that it does not.
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    # Objects are closed unless they say otherwise.
    ({"type": "object", "properties": {"a": A}}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
    (
        {"type": "object", "properties": {"a": A}, "additionalProperties": True},
        [{"b": 1}, {"a": 1, "b": []}],
        [{"a": "x"}],
    ),
    ({"type": "object"}, [{}, {"b": {"c": 1}}], [[]]),
    ({"type": "object", "patternProperties": {"^x": A}}, [{"x1": 1}], [{"x1": ""}, {"y": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": []}], [{}, {"a": 1, "b": 2}]),
    (
        {"type": "object", "properties": {"a": A}, "allOf": [{"properties": {"b": B}, "required": ["b"]}]},
        [{"a": 1, "b": "x"}, {"b": ""}],
        [{"a": 1}, {"a": 1, "b": "x", "c": 1}],
    ),
    (
        {"type": "object", "properties": {"a": A}, "anyOf": [{"properties": {"b": B}}, {"properties": {"c": A}}]},
        [{"a": 1, "b": "x"}, {"c": 1}],
        [{"d": 1}, {"a": "x"}],
    ),
    (
        {"type": "object", "properties": {"b": B}, "$ref": "#/$defs/base", "$defs": {"base": {"properties": {"a": A}}}},
        [{"b": "x", "a": 1}],
        [{"a": 1, "c": 1}],
    ),
    (
        {"type": "object", "properties": {"child": {"$ref": "#"}, "a": A}},
        [{"child": {"child": {}}, "a": 1}],
        [{"child": {"x": 1}}],
    ),
    # Alternatives
    (FLEET, [{"kind": "car", "tows": {"kind": "boat", "sails": 1}}], [{"kind": "car", "tows": {}}, {"tows": {}}]),
    (
        {"oneOf": [CAR, BOAT]},
        [{"kind": "car"}, {"kind": "boat", "sails": 1}],
        [{"kind": "boat"}, {"kind": "car", "sails": 1}],
    ),
    (
        {"oneOf": [{**CAR, "required": []}, BOAT], "discriminator": {"propertyName": "kind"}},
        [{"kind": "car"}],
        [{}, {"wheels": 1}],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "required": ["a"], "properties": {"a": A}},
                {"type": "object", "required": ["b"], "properties": {"b": A}},
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    (
        {"type": "object", "properties": {"card": A, "bill": B}, "dependentRequired": {"card": ["bill"]}},
        [{}, {"bill": "x"}, {"card": 1, "bill": "x"}],
        [{"card": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"a": A},
            "dependentSchemas": {"a": {"properties": {"b": B}, "required": ["b"]}},
        },
        [{}, {"a": 1, "b": "x"}],
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    # Names
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": A},
        [{}, {"ab": 1}],
        [{"d": 1}, {"a": ""}],
    ),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1}, {"y": []}], [{"z": 1}]),
    # Arrays
    ({"type": "array", "contains": {"const": 7}}, [[7], [7, 1]], [[], [1]]),
    ({"type": "array", "contains": {"const": 7}, "minContains": 0}, [[], [1]], [7]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [[], ["x"]], [["x", "y"]]),
    ({"type": "array", "items": [A, B], "additionalItems": False}, [[1, "x"], [1]], [["x"], [1, "x", 1]]),
    # What nothing else describes
    ({"type": "object", "properties": {"a": A}, "unevaluatedProperties": B}, [{"a": 1, "z": "x"}], [{"z": 1}]),
    (
        {
            "type": "object",
            "allOf": [{"properties": {"a": A}}, {"$ref": "#/$defs/b"}],
            "unevaluatedProperties": False,
            "$defs": {"b": {"properties": {"b": B}, "required": ["b"]}},
        },
        [{"a": 1, "b": "x"}, {"b": "x"}],
        [{"a": 1, "b": "x", "c": 1}, {"a": 1}],
    ),
    ({"type": "array", "prefixItems": [A], "unevaluatedItems": B}, [[1], [1, "x"]], [["x"], [1, 2]]),
    # Numbers, formats, and what older drafts say otherwise
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, [4, 3.5], [3]),
    ({"type": "string", "format": "credit-card"}, ["1234"], [1]),
    ({"type": "string", "format": "date"}, ["2026-11-17"], ["today"]),
    ({"type": "array", "maxItems": 2.0, "items": A}, [[1, 2]], [[1, 2, 3]]),
    ({"const": None}, [None], [1, False]),
    ({"$ref": "other#/$defs/n", "$defs": {"x": {"$id": "other", "$defs": {"n": A}}}}, [1], ["x"]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, [None], [1]),
]
VOCABULARY = byte_vocabulary()


def grammar_of(schema: dict[str, Any]) -> CompiledGrammar:
    return CompiledGrammar(VOCABULARY, "json_schema", schema)


@pytest.mark.parametrize(
    ("schema", "accepted", "others"), CASES, ids=[json.dumps(schema)[:60] for schema, _, _ in CASES]
)
def test_a_grammar_accepts_what_its_schema_says(schema: dict[str, Any], accepted: list[Any], others: list[Any]) -> None:
    grammar = grammar_of(schema)
    assert [value for value in accepted if not takes(grammar, json.dumps(value))] == []
    assert [value for value in others if takes(grammar, json.dumps(value))] == []


def test_texts_written_at_random_are_valid() -> None:
    validators = pytest.importorskip("jsonschema_rs")
    for schema, _, _ in CASES:
        if "additionalItems" in schema or schema.get("exclusiveMinimum") is True:
            continue  # of older drafts
        grammar, validator = grammar_of(schema), validators.Draft202012Validator(schema)
        for seed in range(5):
            text = write_at_random(grammar, random.Random(seed))
            assert text is None or validator.is_valid(json.loads(text)), (schema, text)


UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
ALTERNATIVES = {"anyOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"tags": UNIQUE}}, "uniqueItems at schema.properties.tags"),
    ({"properties": {"a": {"not": {"pattern": "^a"}}}}, "not at schema.properties.a"),
    ({"type": "string", "if": {"pattern": "a"}, "then": {"minLength": 2}}, "if at schema"),
    ({"type": "array", "contains": A, "maxContains": 2}, "maxContains at schema"),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames at schema"),
    ({"propertyNames": False}, "propertyNames at schema"),
    ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, "$dynamicRef at schema"),
    ({"$recursiveRef": "#"}, "$recursiveRef at schema"),
    ({"type": "object", "minProperties": 3}, "minProperties at schema"),
    ({"type": "object", "unevaluatedProperties": False, **ALTERNATIVES}, "unevaluatedProperties at schema"),
    ({"type": "array", "unevaluatedItems": False, "allOf": [{"prefixItems": [A]}]}, "unevaluatedItems at schema"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_or_ignored_on_request(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        grammar_of(schema)
    assert f"cannot be followed: {named} " in caught.value.message
    assert '"strict": false' in str(caught.value)
    assert prepare_schema(lenient_schema(schema))[1] == [f"{named} is ignored"]
    grammar_of(lenient_schema(schema))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "https://example.com/x"}, "does not fetch resources"),
        ({"$ref": "file:///etc/hostname"}, "does not fetch resources"),
        ({"$ref": "#/$defs/x"}, "$ref names '#/$defs/x'"),
        ({"allOf": [False]}, "Unsatisfiable"),
        ({"properties": 3}, "not well formed"),
        ({"required": 3}, "not well formed"),
        ({"allOf": 3}, "not well formed"),
        ({"x-guidance": 3}, "not well formed"),
    ],
)
def test_wrong_schemas_are_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        grammar_of(schema)
    assert why in caught.value.message


def test_alternatives_of_one_of_must_be_told_apart() -> None:
    cars = {"$defs": {"car": CAR, "boat": BOAT}, "oneOf": [{"$ref": "#/$defs/car"}, {"$ref": "#/$defs/boat"}]}
    for schema in (cars, {"oneOf": [CAR, {"type": "null"}]}):
        assert takes(grammar_of(schema), '{"kind": "car", "wheels": 4}')
    overlapping = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}
    with pytest.raises(InvalidInputError, match="oneOf may overlap"):
        grammar_of(overlapping)
    remark = "oneOf at schema is followed as anyOf: its alternatives may overlap"
    assert prepare_schema(lenient_schema(overlapping))[1] == [remark]
    assert takes(grammar_of(lenient_schema(overlapping)), '"ab"')


def test_unknown_formats_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    grammar_of({"properties": {"a": {"type": "string", "format": "iban"}}})
    assert caplog.messages == ["JSON schema: the format 'iban' at schema.properties.a is not checked."]


# Schemas that cost far more than their length


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


def doubled(levels: int, **members: Any) -> dict[str, Any]:
    """Definitions that each refer twice to the next one."""
    inner = [{"$ref": f"#/$defs/d{level + 1}", **members} for level in range(levels)]
    definitions = {
        f"d{level}": {"type": "object", "properties": {"a": ref, "b": ref}} for level, ref in enumerate(inner)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": CAR}}


LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDE = {"type": "object", "properties": {f"{place:x}": {} for place in range(2_000)}}
MANY = {"type": "array", "contains": {"contains": {"contains": A, "minContains": 99}, "minContains": 99}}
# Each schema with a word of the error that refuses it, or "" for a schema that is followed.
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "unique items": ({"uniqueItems": True, "minItems": 20, "items": {"enum": list(range(40))}}, "uniqueItems"),
    "ignored unique items": (lenient_schema({"uniqueItems": True, "items": {"enum": list(range(5_000))}}), ""),
    "500 objects": ({"allOf": [{"type": "object", "properties": {f"p{n}": A}} for n in range(500)]}, "too large"),
    "20 choices": (
        {"allOf": [{"anyOf": [{"required": [x]}, {"required": [x * 2]}]} for x in LETTERS[:20]]},
        "too large",
    ),
    "levels": (nested(500), "nested too deeply"),
    "references": (doubled(60), ""),
    "copied references": (doubled(20, type="object"), "too complex to compile"),
    "bases": ({"anyOf": [{"required": ["x"], "$ref": "#/$defs/a"}] * 999, "$defs": {"a": WIDE}}, "too complex"),
    "contained items": ({**MANY, "minContains": 99}, "too complex"),
    "counts": ({"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}, ""),
    "repetitions": ({"pattern": "(a{1000}){1000}"}, ""),
    "patterns": ({"type": "string", "allOf": [{"pattern": f".*{x}.*"} for x in LETTERS]}, "too complex to compile"),
    "multiples": ({"type": "integer", "multipleOf": 999_983}, "too complex to compile"),
    "properties": ({"type": "object", "properties": {f"{n:x}": {} for n in range(4_500)}}, "too complex to compile"),
}
COMPILE_IN_LITTLE_MEMORY = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from archerfish.errors import InvalidInputError
from archerfish.text.grammar import CompiledGrammar, with_deep_stack
from scripts.check_json_schemas import byte_vocabulary
try:
    with_deep_stack(lambda: CompiledGrammar(byte_vocabulary(), "json_schema", json.load(sys.stdin), max_seconds=1))
except InvalidInputError as error:
    print(error.message)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_takes_little_time_and_memory_or_is_refused(name: str) -> None:
    schema, why = BOMBS[name]
    command = [sys.executable, "-c", COMPILE_IN_LITTLE_MEMORY]
    ended = subprocess.run(command, input=json.dumps(schema), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert why in ended.stdout and bool(why) == bool(ended.stdout), ended.stdout


SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_TEST_SUITE names no folder with the official suite")
def test_the_official_suite() -> None:
    counts = check_suite(Path(SUITE), num_texts=10)
    assert counts.wrong == []
    assert len(counts.refused) < counts.num_schemas / 3
    assert len(counts.missed) < counts.num_valid / 10
