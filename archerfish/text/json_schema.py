"""Prepares JSON schemas for llguidance, which follows most keywords by itself.

Some keywords that llguidance does not have are expressed by others. An object that names properties has no others,
unless its schema says so. A keyword that cannot be followed is refused by name, or left out with a remark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

from archerfish.errors import InvalidInputError

Schema = dict[str, Any] | bool
MAX_DEPTH = 128  # nested schemas, as in llguidance
MAX_REMARKS, MAX_REMARK_LENGTH = 20, 200  # they go into a header
MAX_STEPS = 10_000  # schemas and names that are read or written; they take 0.1 s
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")  # llguidance's
# Keywords by the values that they have.
VALUE_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_MAPS = (*VALUE_MAPS, "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
VALUES = ("items", "additionalProperties", "additionalItems")
ITEMS_LEFT, PROPERTIES_LEFT = "unevaluatedItems", "unevaluatedProperties"
ONE_SCHEMA = (*VALUES, ITEMS_LEFT, PROPERTIES_LEFT, "not", "if", "then", "else", "contains", "propertyNames")
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
COUNTS = (*SIZES, "minContains", "maxContains")
# Keywords by what they do.
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")  # they apply schemas to the same value
DEPENDENT = ("dependencies", "dependentSchemas", "dependentRequired")
NAMING = {"properties", "patternProperties", "required", "additionalProperties", PROPERTIES_LEFT, *DEPENDENT}
LABELS = ("type", "title", "description")  # they say nothing about a name
OF_ONE_PLACE = ("$id", "id", "$anchor", "$defs", "definitions")
NOT_WRITTEN = {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"}
NOT_WRITTEN |= {"$schema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "discriminator"}
NOT_WRITTEN |= {"x-guidance", ITEMS_LEFT, PROPERTIES_LEFT, *DEPENDENT}


def lenient_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose keywords are left out if they cannot be followed."""
    return {**schema, "x-guidance": {"lenient": True, **(schema.get("x-guidance") or {})}}


def prepare_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema for llguidance, and remarks on what is not followed."""
    try:
        return Preparer(dict(schema)).prepare()
    except (AttributeError, RecursionError, TypeError, ValueError) as error:  # a keyword has a value of a wrong type
        raise InvalidInputError(f"The JSON schema is not well formed: {error}.") from None


@dataclass(slots=True)
class Names:
    """The properties that a schema names, including the schemas that it applies in place."""

    properties: dict[str, Schema] = field(default_factory=dict)
    patterns: dict[str, Schema] = field(default_factory=dict)
    is_open: bool = False  # other properties are allowed
    has_alternatives: bool = False
    refs: set[str] = field(default_factory=set)  # that were followed


class Preparer:
    """Prepares one schema.

    Each schema is written closed or open. A schema is open if others apply to the same object: the schema around them
    closes the object for all. $defs gets a copy of each target of a $ref that is needed open, or with another
    required property.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._options = dict(schema.get("x-guidance") or {})
        self._remarks: dict[str, None] = {}
        self._path = ["schema"]
        self._num_steps = 0
        self._copies: dict[str, Schema] = {}  # of targets of $refs, by their name in $defs
        self._names: dict[tuple[str, bool, str], str] = {}  # of the copies, by the parameters of _refer
        self._has_resources = '"$id":' in json.dumps([*schema.values()])  # then "#" may be another schema

    def prepare(self) -> tuple[dict[str, Any], list[str]]:
        written: Any = self._write(self._root, True)
        if self._copies:
            written["$defs"] = {**written.get("$defs", {}), **self._copies}
        if self._options:
            written["x-guidance"] = self._options
        return written, list(self._remarks)

    def _count(self, num_steps: int = 1) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise InvalidInputError("The JSON schema is too complex.", hint="Combine fewer schemas and properties.")

    def _give_up(self, keyword: str, why: str = "is not supported") -> None:
        """Refuse a keyword that cannot be followed, or leave it out."""
        place = "".join(self._path)
        if not self._options.get("lenient"):
            message = f"The JSON schema cannot be followed: {keyword} at {place} {why}."
            raise InvalidInputError(message, hint='Leave it out, or let it be ignored: "strict": false.')
        self._remark(f"{keyword} at {place} is ignored")

    def _remark(self, text: str) -> None:
        if len(self._remarks) < MAX_REMARKS:
            self._remarks[text[:MAX_REMARK_LENGTH]] = None

    def _write_at(self, step: str, schema: Schema, is_closed: bool = True, tag: str = "") -> Schema:
        """tag: a property that the schema must require."""
        if tag and isinstance(schema, dict):
            if "$ref" in schema:
                return {"$ref": self._refer(schema["$ref"], is_closed, tag)}
            schema = {**schema, "required": [*(schema.get("required") or ()), tag]}
        self._path.append(step)
        if len(self._path) > MAX_DEPTH:
            raise InvalidInputError("The JSON schema is nested too deeply.", hint="Use fewer levels.")
        written = self._write(schema, is_closed)
        self._path.pop()
        return written

    def _write(self, schema: Schema, is_closed: bool) -> Schema:
        self._count()
        if isinstance(schema, bool):
            return schema
        stated = {keyword: value for keyword, value in schema.items() if value is not None or keyword == "const"}
        num_applied = sum(len(stated[word]) if word == "allOf" else 1 for word in IN_PLACE if word in stated)
        has_names = not NAMING.isdisjoint(stated)
        is_alone = is_closed and num_applied == 1 and not has_names
        written: dict[str, Any] = {}
        for keyword, value in stated.items():
            if keyword in VALUE_MAPS:
                written[keyword] = {name: self._write_at(f".{keyword}.{name}", inner) for name, inner in value.items()}
            elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
                closes = is_alone or keyword not in IN_PLACE
                tag = tag_of(stated) if keyword in ("anyOf", "oneOf") else ""
                found = [self._write_at(f".{keyword}[{n}]", inner, closes, tag) for n, inner in enumerate(value)]
                written[self._union(stated) if keyword == "oneOf" else keyword] = found
            elif keyword in VALUES:
                written[keyword] = self._write_at(f".{keyword}", value)
            elif keyword in SIZES:
                written[keyword] = int(value)
            elif keyword == "format" and value not in FORMATS:
                self._remark(f"the format {value!r} at {''.join(self._path)} is not checked")
            elif keyword == "$ref":
                written[keyword] = self._refer(value, is_alone)
            elif keyword not in NOT_WRITTEN:
                written[keyword] = value
        self._check(stated, written)
        added = [] if NOT_WRITTEN.isdisjoint(stated) else self._express(stated)
        if (is_closed and not is_alone and (has_names or num_applied)) or PROPERTIES_LEFT in stated:
            self._close(stated, written)
        if added:
            written["allOf"] = [*written.get("allOf", ()), *added]
        return written

    def _check(self, stated: dict[str, Any], written: dict[str, Any]) -> None:
        """Give up the keywords that cannot be followed."""
        needed = {"if": ("then", "else"), "maxContains": ("contains",)}  # beside the keyword, for it to have a meaning
        for keyword in ("not", "if", "maxContains", "$dynamicRef", "$recursiveRef"):
            if keyword in stated and any(other in stated for other in needed.get(keyword, stated)):
                self._give_up(keyword)
        if stated.get("uniqueItems") and stated.get("maxItems", 2) > 1:
            self._give_up("uniqueItems")
        others = stated.get("additionalProperties", stated.get(PROPERTIES_LEFT, not stated.get("properties")))
        is_free = others is not False or "patternProperties" in stated
        if is_free and stated.get("minProperties", 0) > 1 + len(stated.get("required", ())):
            self._give_up("minProperties", "is more than 1 where names are free")  # a name may come twice
            del written["minProperties"]
        if ITEMS_LEFT in stated and any(keyword in stated for keyword in (*IN_PLACE, "if", "contains")):
            self._give_up(ITEMS_LEFT, "stands beside alternatives")
        elif ITEMS_LEFT in stated:
            written.setdefault("items", self._write_at(f".{ITEMS_LEFT}", stated[ITEMS_LEFT]))

    # Properties that no schema names

    def _close(self, stated: dict[str, Any], written: dict[str, Any]) -> None:
        """Allow no other properties, unless the schema says otherwise."""
        named, others = Names(), cast("Schema", False)
        self._collect(stated, named)
        if PROPERTIES_LEFT in stated and named.has_alternatives:
            self._give_up(PROPERTIES_LEFT, "stands beside alternatives")
        elif PROPERTIES_LEFT in stated:
            others = self._write_at(f".{PROPERTIES_LEFT}", stated[PROPERTIES_LEFT])
        elif not named.properties and not named.patterns:
            return
        if not named.is_open and "additionalProperties" not in stated:
            written["properties"] = {**named.properties, **written.get("properties", {})}
            written["patternProperties"] = {**named.patterns, **written.get("patternProperties", {})}
            written["additionalProperties"] = others

    def _collect(self, schema: Schema, found: Names) -> None:
        if isinstance(schema, bool):
            return
        names = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
        self._count(1 + len(names))
        found.properties |= dict.fromkeys(names, True)
        found.patterns |= dict.fromkeys(schema.get("patternProperties") or (), True)
        found.is_open |= (
            schema.get("additionalProperties") not in (None, False) or "enum" in schema or "const" in schema
        )
        branches = [schema.get(keyword) or () for keyword in ("anyOf", "oneOf")]
        branches += [[schema[keyword]] for keyword in ("then", "else") if schema.get(keyword) is not None]
        for keyword in DEPENDENT:
            for name, needed in (schema.get(keyword) or {}).items():
                branches.append([as_schema(needed), {"required": [name]}])
        found.has_alternatives |= any(branches)
        for member in chain(schema.get("allOf") or (), *branches):
            found.is_open |= isinstance(member, dict) and member.get(PROPERTIES_LEFT) not in (None, False)
            self._collect(member, found)
        address = schema.get("$ref")
        if isinstance(address, str) and address not in found.refs:
            found.refs.add(address)
            self._collect(self._resolve(address) or True, found)

    # References

    def _resolve(self, address: str) -> Schema | None:
        """The target of a $ref to a place in this schema. None: only llguidance can tell."""
        if self._has_resources or not f"{address}/".startswith("#/"):
            return None
        found: Any = self._root
        for step in unquote(address).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            is_index = isinstance(found, list) and step.isdecimal() and int(step) < len(found)
            found = found[int(step)] if is_index else found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            raise InvalidInputError(f"$ref names {address!r}, which is not in the JSON schema.")
        return found

    def _follow(self, schema: Schema) -> dict[str, Any]:
        """The keywords of a schema, or of the schema that its $ref names."""
        for _ in range(8):
            target = self._resolve(schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else None
            schema = schema if target is None else target
        return schema if isinstance(schema, dict) else {} if schema else {"not": {}}

    def _refer(self, address: str, is_closed: bool, tag: str = "") -> str:
        target = self._resolve(address)
        is_ready = is_closed and (not tag or tag in (self._follow(target or {}).get("required") or ()))
        if is_ready or not isinstance(target, dict):
            return address
        key = (address, is_closed, tag)
        if key not in self._names:
            self._names[key] = name = f"copy-{len(self._names)}"
            target = {keyword: value for keyword, value in target.items() if keyword not in OF_ONE_PLACE}
            self._copies[name] = self._write_at("", target, is_closed, tag)
        return f"#/$defs/{self._names[key]}"

    # Keywords that are expressed by others

    def _union(self, stated: dict[str, Any]) -> str:
        """The keyword for the alternatives of oneOf: anyOf if their types or a property tell them apart."""
        options = [self._follow(option) for option in stated["oneOf"]]
        tag = tag_of(stated)
        for name in [tag] if tag else (options or [{}])[0].get("required") or [""]:
            self._count(len(options))
            marks = [mark for option in options for mark in self._marks(option, name, bool(tag))]
            if None not in marks and len({*marks}) == len(marks) and "anyOf" not in stated:
                return "anyOf"
        if self._options.get("lenient"):
            self._remark(f"oneOf at {''.join(self._path)} is followed as anyOf: its alternatives may overlap")
        return "oneOf"

    def _marks(self, option: dict[str, Any], name: str, is_required: bool) -> list[Any]:
        """The marks by which a value belongs to an alternative: its type, or the string at `name` of an object."""
        types = option.get("type")
        if types != "object":
            types = [types] if types is None or isinstance(types, str) else types
            return [kind and (kind.replace("integer", "number"),) for kind in types]
        inner = self._follow((option.get("properties") or {}).get(name, True))
        values = inner.get("enum", [inner.get("const")]) if is_required or name in option.get("required", ()) else []
        return [value if isinstance(value, str) else None for value in values] or [None]

    def _express(self, stated: dict[str, Any]) -> list[Schema]:
        """Schemas that hold beside the written keywords."""
        found: list[Schema] = []
        for keyword in DEPENDENT:
            for name, needed in stated.get(keyword, {}).items():
                inner = self._write_at(f".{keyword}.{name}", as_schema(needed), False)
                found.append({"anyOf": [{"properties": {name: False}}, {"required": [name], "allOf": [inner]}]})
        if "propertyNames" in stated:
            rules = {word: value for word, value in self._follow(stated["propertyNames"]).items() if word not in LABELS}
            names = rules.get("enum", [rules.get("const")])
            if len(rules) > 1 or not rules.keys() <= {"pattern", "enum", "const"}:
                self._give_up("propertyNames", "holds more than a pattern or a list of names")
            elif "pattern" in rules:
                found.append({"patternProperties": {rules["pattern"]: True}, "additionalProperties": False})
            elif rules:
                listed = {name: True for name in names if isinstance(name, str)}
                found.append({"properties": listed, "additionalProperties": False})
        if "contains" in stated:  # such items come first, or after the items that prefixItems describes
            least, num_before = int(stated.get("minContains", 1)), self._num_steps
            inner = self._write_at(".contains", stated["contains"])
            starts = {0, len(stated.get("prefixItems", ()))} if least else {}
            self._count((self._num_steps - num_before) * len(starts) * least)
            items: list[list[Schema]] = [[*[True] * start, *[inner] * least] for start in starts]
            found.append({"anyOf": [{"prefixItems": first, "minItems": len(first)} for first in items] or [True]})
        return found


def tag_of(schema: dict[str, Any]) -> str:
    """The property that tells the alternatives apart, as OpenAPI states it."""
    discriminator = schema.get("discriminator")
    return str(discriminator.get("propertyName", "")) if isinstance(discriminator, dict) else ""


def as_schema(needed: Any) -> Schema:
    """The schema of a member of dependentRequired, dependentSchemas or dependencies."""
    return {"required": needed} if isinstance(needed, list) else needed
