"""What follows from JSON schemas: what their references name, what negates them, and which exclude each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urljoin

from archerfish.errors import InvalidInputError

Schema = dict[str, Any] | bool
MAX_STEPS = 20_000  # schemas that are looked at for one, again and again where they are combined; they take a second
ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords by what they hold.
ONE_SCHEMA = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "$anchor",
    )
)
LIMIT = "x-archerfish-limit"  # marks a schema that limits values, but does not evaluate their properties and items
NOT_NEGATED = frozenset(
    (
        "pattern",
        "format",
        "multipleOf",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "uniqueItems",
        "oneOf",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
    )
)
# The keyword that a number's, a length's or a count's negation has, the type that it needs, and what is added to the
# value.
OPPOSITES = {
    "minimum": ("exclusiveMaximum", "number", 0),
    "exclusiveMinimum": ("maximum", "number", 0),
    "maximum": ("exclusiveMinimum", "number", 0),
    "exclusiveMaximum": ("minimum", "number", 0),
    "minLength": ("maxLength", "string", -1),
    "maxLength": ("minLength", "string", 1),
    "minItems": ("maxItems", "array", -1),
    "maxItems": ("minItems", "array", 1),
    "minProperties": ("maxProperties", "object", -1),
    "maxProperties": ("minProperties", "object", 1),
}


def all_of(schemas: Iterable[Schema]) -> Schema:
    kept = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def any_of(schemas: Iterable[Schema]) -> Schema:
    kept = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in kept):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def members_of(schema: Schema, keyword: str) -> dict[str, Any]:
    found = schema.get(keyword) if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def type_of(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def equal_key(value: Any) -> str:
    """The same text for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return f"[{','.join(map(equal_key, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{equal_key(value[name])}' for name in sorted(value))}}}"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def other_strings(words: Iterable[str]) -> str:
    """A pattern of all strings but these."""

    def after(ends: Sequence[str]) -> str:
        if not ends:
            return r"(?s:.*)"
        branches: dict[str, list[str]] = {}
        for end in ends:
            if end:
                branches.setdefault(end[0], []).append(end[1:])
        firsts = "".join(re.escape(first) for first in branches)
        choices = [f"[^{firsts}](?s:.*)" if firsts else r"(?s:.+)"]
        choices += [re.escape(first) + after(rest) for first, rest in branches.items()]
        return f"(?:{'|'.join(choices)})" + ("" if "" in ends else "?")

    return f"^{after(sorted(set(words)))}$"


class SchemaLogic:
    """A schema and the schemas in it, by address."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._documents: dict[str, Any] = {}
        self._anchors: dict[str, Any] = {}
        self._dynamic: list[str] = []
        self._open: list[str] = []  # addresses that are being negated
        self._num_steps = 0
        self.is_exact = True  # set to False when a negation lacks something
        self.root = self._read(schema, "")
        self._documents.setdefault("", self.root)

    def _read(self, schema: Any, base: str) -> Any:
        """A copy in which references are whole addresses."""
        if not isinstance(schema, dict):
            return schema
        copy: dict[str, Any] = {}
        name = schema.get("$id")
        if isinstance(name, str) and name.startswith("#"):
            self._anchors[base + name] = copy
        elif isinstance(name, str):
            base = address_of(base, name).rstrip("#")
            self._documents[base] = copy
        for keyword, held in schema.items():
            if held is None and keyword != "const":
                continue
            if keyword in (*SCHEMA_MAPS, "dependencies") and isinstance(held, dict):
                copy[keyword] = {name: self._read(inner, base) for name, inner in held.items()}
            elif (keyword in SCHEMA_LISTS or keyword == "items") and isinstance(held, list):
                copy[keyword] = [self._read(inner, base) for inner in held]
            elif keyword in ONE_SCHEMA:
                copy[keyword] = self._read(held, base)
            elif keyword in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(held, str):
                copy[keyword] = address_of(base, held)
            else:
                copy[keyword] = held
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[f"{base}#{schema[keyword]}"] = copy
                self._dynamic += [f"{base}#{schema[keyword]}"] * (keyword == "$dynamicAnchor")
        return copy

    def count_step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise InvalidInputError(
                "The JSON schema is too complex: it combines too many schemas.", hint="Make it simpler."
            )

    def resolve(self, address: str) -> Schema:
        document, _, fragment = address.partition("#")
        found: Any = self._anchors.get(address)
        if found is None and (not fragment or fragment.startswith("/")):
            found = self._documents.get(document)
            for step in unquote(fragment).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                is_index = isinstance(found, list) and step.isdecimal() and int(step) < len(found)
                found = found[int(step)] if is_index else found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            hint = "Put what it names into $defs of the schema; nothing is fetched from elsewhere."
            raise InvalidInputError(f"$ref names {address!r}, which is not in the JSON schema.", hint=hint)
        return found

    def has_one_target(self, address: str) -> bool:
        """Whether a $dynamicRef can only mean what a $ref would."""
        name = address.partition("#")[2]
        return address not in self._dynamic or sum(one.partition("#")[2] == name for one in self._dynamic) == 1

    def follow(self, schema: Schema) -> Schema:
        """The schema that one names which is nothing but a reference."""
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema or set(schema) - ANNOTATIONS - {"$ref"}:
                break
            schema = self.resolve(schema["$ref"])
        return schema

    # Exclusion

    def types(self, schema: Schema) -> frozenset[str]:
        """The types of values that may match. Whole numbers count as numbers."""
        schema = self.follow(schema)
        if isinstance(schema, bool):
            return frozenset(ALL_TYPES if schema else ())
        stated = schema.get("type", list(ALL_TYPES))
        found = {"number" if name == "integer" else name for name in ([stated] if isinstance(stated, str) else stated)}
        values = self.values(schema)
        return frozenset(found if values is None else found & {type_of(value) for value in values})

    def values(self, schema: Schema) -> list[Any] | None:
        """The values that may match, if they are few."""
        schema = self.follow(schema)
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
        known: dict[Any, list[Any]] = {"boolean": [False, True], "null": [None]}
        return known.get(schema["type"]) if isinstance(schema.get("type"), str) else None

    def are_disjoint(self, left: Schema, right: Schema, depth: int = 4) -> bool:
        """Whether it is certain that no value matches both."""
        self.count_step()
        left, right = self.follow(left), self.follow(right)
        if not self.types(left) & self.types(right):
            return True
        if not depth or not isinstance(left, dict) or not isinstance(right, dict):
            return False
        few, others = self.values(left), self.values(right)
        if few is not None and others is not None:
            return not {equal_key(value) for value in few} & {equal_key(value) for value in others}
        for one, other in ((left, right), (right, left)):
            if any(self.are_disjoint(inner, other, depth - 1) for inner in one.get("allOf", ())):
                return True
            if one.get("anyOf") and all(self.are_disjoint(inner, other, depth - 1) for inner in one["anyOf"]):
                return True
            if self.types(one) & self.types(other) == {"object"} and self._lacks_a_match(one, other, depth):
                return True
        return False

    def _lacks_a_match(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether a property that one requires cannot match the other."""
        mine, theirs = members_of(one, "properties"), members_of(other, "properties")
        is_closed = other.get("additionalProperties") is False and not other.get("patternProperties")
        return any(
            self.are_disjoint(mine.get(name, True), theirs[name], depth - 1) if name in theirs else is_closed
            for name in one.get("required", ())
        )

    # Negation

    def negate(self, schema: Schema) -> Schema:
        """A schema of values that do not match. It may lack some of them: it is False if nothing is known about
        them."""
        self.count_step()
        if isinstance(schema, bool):
            return not schema
        found = any_of(self._negations(schema))
        return found if isinstance(found, bool) else {"allOf": [found], LIMIT: True}

    def _negations(self, schema: dict[str, Any]) -> list[Schema]:
        """For each keyword, values that do not match it."""
        found: list[Schema] = []
        has_part = "prefixItems" in schema and "items" in schema
        if has_part or "integer" in schema.get("type", ()) or not NOT_NEGATED.isdisjoint(schema):
            self.is_exact = False
        if "type" in schema:
            others = [name for name in ALL_TYPES if name not in self.types({"type": schema["type"]})]
            found.append({"type": others} if others else False)
        if "const" in schema or "enum" in schema:
            found += other_values([schema["const"]] if "const" in schema else schema["enum"])
        for keyword, (opposite, kind, more) in OPPOSITES.items():
            held: Any = schema.get(keyword)
            if type_of(held) == "number" and (not more or held + more >= 0):
                found.append({"type": kind, opposite: held + more})
        found += self._negate_properties(schema)
        found += self._negate_items(schema)
        found += [self.negate(inner) for inner in schema.get("allOf", ())]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found.append(all_of([self.negate(inner) for inner in schema[keyword]]))
        if "not" in schema:
            found.append(schema["not"])
        if "if" in schema:
            found.append(all_of([schema["if"], self.negate(schema.get("then", True))]))
            found.append(all_of([self.negate(schema["if"]), self.negate(schema.get("else", True))]))
        address = schema.get("$ref")
        if address is not None and address not in self._open:
            self._open.append(address)
            found.append(self.negate(self.resolve(address)))
            self._open.pop()
        return found

    def _negate_properties(self, schema: dict[str, Any]) -> list[Schema]:
        found: list[Schema] = [{"type": "object", "properties": {name: False}} for name in schema.get("required", ())]
        for name, inner in members_of(schema, "properties").items():
            negated = self.negate(inner)
            found.append(negated and {"type": "object", "required": [name], "properties": {name: negated}})
        for name, needed in {
            **members_of(schema, "dependentRequired"),
            **members_of(schema, "dependentSchemas"),
        }.items():
            inner = {"required": needed} if isinstance(needed, list) else needed
            found.append(all_of([{"type": "object", "required": [name]}, self.negate(inner)]))
        return found

    def _negate_items(self, schema: dict[str, Any]) -> list[Schema]:
        found: list[Schema] = []
        first = schema.get("prefixItems", [])
        for index, inner in enumerate(first):
            negated = self.negate(inner)
            found.append(
                negated and {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [negated]}
            )
        if isinstance(schema.get("items"), list):
            return found
        if schema.get("items") is False:
            found.append({"type": "array", "minItems": len(first) + 1})
        elif "items" in schema and not first and (negated := self.negate(schema["items"])):
            found.append({"type": "array", "contains": negated})
        if "contains" in schema and schema.get("minContains", 1) == 1 and (negated := self.negate(schema["contains"])):
            found.append({"type": "array", "items": negated})
        return found


def address_of(base: str, reference: str) -> str:
    return base.partition("#")[0] + reference if reference.startswith("#") else urljoin(base, reference)


def other_values(values: Sequence[Any]) -> list[Schema]:
    """Values that are none of these. Arrays and objects are left out if there is one among these."""
    kinds = {type_of(value) for value in values}
    found: list[Schema] = [{"type": [name for name in ALL_TYPES if name not in kinds]}]
    if "string" in kinds:
        found.append({"type": "string", "pattern": other_strings(value for value in values if isinstance(value, str))})
    if "boolean" in kinds:
        found += [{"const": value} for value in (False, True) if not any(value is one for one in values)]
    if "number" in kinds:
        numbers = sorted(value for value in values if type_of(value) == "number")
        found.append({"type": "number", "exclusiveMaximum": numbers[0]})
        found.append({"type": "number", "exclusiveMinimum": numbers[-1]})
        for low, high in pairwise(numbers):
            found.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} if low < high else False)
    return found
