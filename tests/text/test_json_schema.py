"""Grammars of JSON schemas: what they accept is valid, and what cannot be followed is refused by name."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from archerfish.errors import InvalidInputError
from archerfish.text.grammar import CompiledGrammar
from archerfish.text.json_schema import rewrite_schema
from scripts.check_json_schemas import byte_vocabulary, check_suite, takes, write_at_random

A, B = {"type": "integer"}, {"type": "string", "maxLength": 3}
CAR = {"type": "object", "properties": {"kind": {"const": "car"}, "wheels": A}, "required": ["kind"]}
BOAT = {"type": "object", "properties": {"kind": {"const": "boat"}, "sails": A}, "required": ["kind", "sails"]}
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
        [{"b": "x", "c": 1}, {"d": 1}],
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
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, "x"], [3]),
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
    ({"not": {"type": "string"}}, [1, None, {}], ["x"]),
    ({"type": "string", "not": {"enum": ["ab", "a", "c\n"]}}, ["", "b", "abc", "c", "cb"], ["ab", "a", "c\n"]),
    ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6], [3, 5]),
    ({"type": "integer", "not": {"minimum": 3}}, [2], [3]),
    (
        {"not": {"anyOf": [{"type": "object"}, {"type": "array", "minItems": 2}]}, "type": ["array", "object"]},
        [[], [1]],
        [[1, 2]],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": A, "c": A},
            "required": ["a"],
            "if": {"properties": {"a": {"const": True}}},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
        },
        [{"a": True, "b": 1}, {"a": False, "c": 1}],
        [{"a": True, "c": 1}, {"a": False, "b": 1}],
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
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    # Arrays
    ({"type": "array", "contains": {"const": 7}}, [[7], [7, 1]], [[], [1]]),
    (
        {"type": "array", "items": A, "contains": {"minimum": 5}, "maxContains": 2},
        [[5, 9], [7, 1, 1]],
        [[1], [5, 6, 7]],
    ),
    ({"type": "array", "contains": {"const": 7}, "minContains": 0}, [[], [1]], [7]),
    (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["c", "a"], ["b", "c", "a"]],
        [[], ["a", "a"], ["d"]],
    ),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [[], ["x"]], [["x", "y"]]),
    ({"type": "array", "items": [A, B], "additionalItems": False}, [[1, "x"], [1]], [["x"], [1, "x", 1]]),
    # What nothing else describes
    ({"type": "object", "properties": {"a": A}, "unevaluatedProperties": B}, [{"a": 1, "z": "x"}], [{"z": 1}]),
    (
        {
            "type": "object",
            "allOf": [{"properties": {"a": A}}],
            "anyOf": [{"properties": {"b": B}, "required": ["b"]}, {}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": 1, "c": 1}, {"b": 1}],
    ),
    (
        {"type": "array", "prefixItems": [A], "allOf": [{"prefixItems": [True, B]}], "unevaluatedItems": False},
        [[1], [1, "x"]],
        [["x"], [1, 2], [1, "x", 1]],
    ),
    # Numbers, formats, and what older drafts say otherwise
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, [4, 3.5], [3]),
    ({"type": "string", "format": "credit-card"}, ["1234"], [1]),
    ({"type": "string", "format": "date"}, ["2026-11-17"], ["today"]),
    ({"type": "array", "maxItems": 2.0, "items": A}, [[1, 2]], [[1, 2, 3]]),
    ({"const": None}, [None], [1, False]),
    ({"$ref": "other#/$defs/n", "$defs": {"x": {"$id": "other", "$defs": {"n": A}}}}, [1], ["x"]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, [None], [1]),
    (
        {"type": "object", "properties": {"next": {"$dynamicRef": "#n"}}, "$dynamicAnchor": "n"},
        [{"next": {"next": {}}}],
        [{"next": 1}],
    ),
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


def test_a_rewritten_schema_means_the_same_when_it_is_rewritten_again() -> None:
    for schema, accepted, others in CASES:
        grammar = grammar_of(rewrite_schema(schema)[0])
        assert all(takes(grammar, json.dumps(value)) for value in accepted), schema
        assert not any(takes(grammar, json.dumps(value)) for value in others), schema


def test_texts_written_at_random_are_valid() -> None:
    validators = pytest.importorskip("jsonschema_rs")
    for schema, _, _ in CASES:
        if "additionalItems" in schema or schema.get("exclusiveMinimum") is True:
            continue  # of older drafts
        grammar, validator = grammar_of(schema), validators.Draft202012Validator(schema)
        for seed in range(5):
            text = write_at_random(grammar, random.Random(seed))
            assert text is None or validator.is_valid(json.loads(text)), (schema, text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
        "uniqueItems at schema.properties.tags",
    ),
    ({"properties": {"a": {"not": {"pattern": "^a"}}}}, "not at schema.properties.a"),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames at schema"),
    ({"$recursiveRef": "#"}, "$recursiveRef at schema"),
    ({"type": "object", "minProperties": 3}, "minProperties at schema"),
    (
        {
            "unevaluatedProperties": False,
            "anyOf": [{"properties": {"a": A}}, {}],
            "oneOf": [{"properties": {"a": B}}, {"type": "null"}],
        },
        "unevaluatedProperties at schema",
    ),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_or_ignored_on_request(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        grammar_of(schema)
    assert f"cannot be followed: {named} " in caught.value.message
    assert '"strict": false' in str(caught.value)
    rewritten, remarks = rewrite_schema(schema, is_lenient=True)
    assert remarks == [f"{named} is ignored"]
    grammar_of(rewritten)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "https://example.com/x"}, "$ref names 'https://example.com/x', which is not in the JSON schema"),
        ({"$ref": "#/$defs/x"}, "$ref names '#/$defs/x'"),
        ({"allOf": [False]}, "allows no value"),
        ({"properties": 3}, "not well formed"),
        ({"required": 3}, "not well formed"),
        ({"allOf": 3}, "not well formed"),
        (
            {
                "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)},
                "$ref": "#/$defs/d0",
            },
            "too complex",
        ),
    ],
)
def test_wrong_schemas_are_refused(schema: dict[str, Any], why: str) -> None:
    if "too complex" in why:
        schema["$defs"]["d40"] = {"properties": {"a": A}}
    for is_lenient in (False, True):
        with pytest.raises(InvalidInputError) as caught:
            rewrite_schema(schema, is_lenient=is_lenient)
        assert why in caught.value.message


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"items": schema}
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        rewrite_schema(schema)


@pytest.mark.parametrize(
    ("schema", "remark"),
    [
        (
            {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
            "oneOf at schema is followed as anyOf",
        ),
        (
            {"properties": {"a": {"type": "string", "format": "iban"}}},
            "the format 'iban' at schema.properties.a is not checked",
        ),
        ({"type": "string", "if": {"pattern": "a"}, "then": {"minLength": 2}}, "if at schema is taken to hold"),
    ],
)
def test_what_is_not_followed_exactly_is_remarked(
    schema: dict[str, Any], remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, [said] = rewrite_schema(schema)
    assert said.startswith(remark)
    grammar_of(schema)
    assert caplog.messages == [f"JSON schema: {said}."]


SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_TEST_SUITE names no folder with the official suite")
def test_the_official_suite() -> None:
    counts = check_suite(Path(SUITE), num_texts=10)
    assert counts.wrong == []
    assert len(counts.refused) < counts.num_schemas / 4
    assert len(counts.missed) < counts.num_valid / 10
