"""JSON schemas, rewritten so that the grammar library can follow them and whatever it writes is valid.

Keywords that the library does not have are expressed by those that it has, where necessary more narrowly: the items
that `contains` asks for come first, and an object has no properties but those that its schema names, unless it says
otherwise. What cannot be expressed is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations
from typing import Any

from archerfish.errors import InvalidInputError
from archerfish.text.schema_logic import (
    ALL_TYPES,
    COUNTS,
    LIMIT,
    Schema,
    SchemaLogic,
    all_of,
    any_of,
    equal_key,
    members_of,
)

MAX_EXCLUDED = 4  # alternatives of oneOf that each is told from
MAX_LISTED = 1_000  # arrays that are written out for uniqueItems
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")  # the library's
UNEVALUATED = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}
PLAIN = frozenset(
    (
        "type",
        "enum",
        "const",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "required",
        "properties",
        "patternProperties",
        "additionalProperties",
        "prefixItems",
        "items",
        LIMIT,
        *COUNTS[:6],
        *UNEVALUATED.values(),
    )
)
Options = list[Schema]  # of which a value must match at least one


def rewrite_schema(schema: Mapping[str, Any], *, is_lenient: bool = False) -> tuple[dict[str, Any], list[str]]:
    """A schema for the library, and remarks on what is not followed exactly.

    is_lenient: what cannot be expressed is left out with a remark instead of being refused.
    """
    try:
        return Rewriter(schema, is_lenient).rewrite()
    except RecursionError:
        raise InvalidInputError("The JSON schema is nested too deeply.", hint="Move parts of it to $defs.") from None
    except (AttributeError, TypeError, ValueError) as error:  # a keyword has a value of a wrong type
        raise InvalidInputError(f"The JSON schema is not well formed: {error}.") from None


@dataclass(frozen=True, slots=True)
class Described:
    """What of an object or an array a schema describes."""

    names: tuple[str, ...] = ()  # of properties
    patterns: tuple[str, ...] = ()
    num_items: int = 0  # the first ones
    is_whole: bool = False  # all properties, or all items
    is_listed: bool = False  # properties are listed as such, so that others are not meant
    optional: frozenset[str] = frozenset()  # what only some alternatives describe: names, patterns, "[]" for items

    def __add__(self, other: Described) -> Described:
        return Described(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            max(self.num_items, other.num_items),
            self.is_whole or other.is_whole,
            self.is_listed or other.is_listed,
            self.optional | other.optional,
        )


NOTHING = Described()


@dataclass(frozen=True, slots=True)
class Closer:
    """What holds for the properties or items that neither a schema nor those beside it describe.

    kind: "object" or "array" for unevaluatedProperties and unevaluatedItems; "default" for objects that do not say it.
    beside: what schemas describe that hold for the same value.
    """

    kind: str = "default"
    rest: Schema = False
    beside: Described = NOTHING


class Rewriter:
    """Rewrites one schema. Each is taken as its plain keywords, and groups of alternatives that hold beside them."""

    def __init__(self, schema: Mapping[str, Any], is_lenient: bool) -> None:
        self.remarks: list[str] = []
        self._is_lenient = is_lenient
        self._options = schema.get("x-guidance")
        self._logic = SchemaLogic(dict(schema))
        self._parts: dict[
            int, tuple[Schema, dict[str, Any], list[Options]]
        ] = {}  # with the schema, so that its id stays
        self._definitions: dict[str, str] = {}  # their names, by address and closers
        self._pending: list[tuple[str, str, tuple[Closer, ...]]] = []
        self._has_unevaluated = '"unevaluated' in json.dumps(schema)

    def rewrite(self) -> tuple[dict[str, Any], list[str]]:
        written = self._write(self._logic.root, "schema")
        if written is False:
            raise InvalidInputError("The JSON schema allows no value at all.")
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, address, closers = self._pending.pop()
            definitions[name] = self._write(self._logic.resolve(address), f"schema {address}", closers)
        whole = {} if isinstance(written, bool) else dict(written)
        if definitions:
            whole["$defs"] = definitions
        if isinstance(self._options, Mapping):
            whole["x-guidance"] = self._options
        return whole, self.remarks

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def _give_up(self, keyword: str, place: str, why: str) -> None:
        """Refuse a keyword that cannot be expressed; or leave it out, if that is allowed."""
        if not self._is_lenient:
            message = f"The JSON schema cannot be followed: {keyword} at {place} {why}."
            raise InvalidInputError(message, hint='Leave it out, or let it be ignored: "strict": false.')
        self._remark(f"{keyword} at {place} is ignored")

    # Writing

    def _write(self, schema: Schema, place: str, closers: tuple[Closer, ...] = (Closer(),)) -> Schema:
        self._logic.count_step()
        if schema is False:
            return False
        own, groups = self._split({} if schema is True else schema, place)
        if (
            not own
            and len(groups) == 1
            and len(groups[0]) == 1
            and isinstance(one := groups[0][0], dict)
            and "$ref" in one
        ):
            return self._refer(one["$ref"], closers)
        leaf = self._write_own(own, place)
        begun = [
            Closer(kind, self._write(own[keyword], f"{place}.{keyword}"))
            for kind, keyword in UNEVALUATED.items()
            if keyword in own
        ]
        found: list[tuple[Closer, list[Described]]] = []
        parts: list[Schema] = []
        for closer in (*closers, *begun):
            bare = {
                word: held for word, held in own.items() if closer not in begun or not word.startswith("unevaluated")
            }
            described = [self._describe_own(bare, closer.kind)]
            counted: list[Options] = [[] for _ in groups] if LIMIT in own and closer.kind != "default" else groups
            described += [self._describe_options(group, closer.kind, frozenset()) for group in counted]
            found.append((closer, described))
            parts.append(self._close(leaf, closer, described, place))
        for index, group in enumerate(groups, 1):
            inner = tuple(
                replace(closer, beside=sum((*described[:index], *described[index + 1 :]), closer.beside))
                for closer, described in found
            )
            parts.append(any_of([self._write(option, place, inner) for option in group]))
        self._check_count(leaf, place)
        return all_of([leaf, *parts])

    def _check_count(self, leaf: dict[str, Any], place: str) -> None:
        """Refuse a count that the library can reach by the same name again and again."""
        is_closed = leaf.get("additionalProperties") is False and not leaf.get("patternProperties")
        if not is_closed and leaf.get("minProperties", 0) > 1 + len(leaf.get("required", ())):
            self._give_up("minProperties", place, "is more than 1 where names are free")
            del leaf["minProperties"]

    def _refer(self, address: str, closers: tuple[Closer, ...]) -> Schema:
        key = f"{address} {closers}"
        if key not in self._definitions:
            self._definitions[key] = name = str(len(self._definitions))
            self._pending.append((name, address, closers))
        return {"$ref": f"#/$defs/{self._definitions[key]}"}

    def _write_own(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        """The plain keywords of a schema, with the schemas in them."""
        written: dict[str, Any] = {}
        for keyword, held in own.items():
            inside = f"{place}.{keyword}"
            if keyword in ("properties", "patternProperties"):
                written[keyword] = {name: self._write(inner, f"{inside}.{name}") for name, inner in held.items()}
            elif keyword in ("items", "additionalProperties"):
                written[keyword] = self._write(held, inside)
            elif keyword == "prefixItems":
                written[keyword] = [self._write(inner, f"{inside}[{index}]") for index, inner in enumerate(held)]
            elif keyword == "format" and held not in FORMATS:
                self._remark(f"the format {held!r} at {place} is not checked")
            elif keyword != LIMIT and keyword not in UNEVALUATED.values():
                written[keyword] = int(held) if keyword in COUNTS else held
        return written

    def _close(self, leaf: dict[str, Any], closer: Closer, described: list[Described], place: str) -> Schema:
        """A schema for what is not described; for objects that do not say, it is put into the plain keywords."""
        self._check_overlap(closer, described, place)
        total = sum(described, closer.beside)
        if total.is_whole:
            return True
        if closer.kind == "array":
            return {"prefixItems": [True] * total.num_items, "items": closer.rest}
        if closer.kind == "object":
            names, patterns = dict.fromkeys(total.names, True), dict.fromkeys(total.patterns, True)
            return {"properties": names, "patternProperties": patterns, "additionalProperties": closer.rest}
        if total.is_listed and "additionalProperties" not in leaf and "object" in leaf.get("type", "object"):
            for keyword, listed in (("properties", total.names), ("patternProperties", total.patterns)):
                for name in listed:
                    leaf.setdefault(keyword, {}).setdefault(name, True)
            leaf["additionalProperties"] = False
        return True

    def _check_overlap(self, closer: Closer, described: list[Described], place: str) -> None:
        """Refuse what two groups of alternatives may or may not describe: which of them do is not known."""
        seen: set[str] = set()
        for one in described if closer.kind != "default" else ():
            if one.optional & seen:
                self._give_up(
                    UNEVALUATED[closer.kind], place, "stands beside several alternatives that describe the same"
                )
            seen |= one.optional

    # What schemas describe

    def _describe(self, schema: Schema, kind: str, seen: frozenset[str]) -> Described:
        self._logic.count_step()
        if isinstance(schema, bool) or (LIMIT in schema and kind != "default"):
            return NOTHING
        if list(schema) == ["$ref"]:
            address = schema["$ref"]
            return NOTHING if address in seen else self._describe(self._logic.resolve(address), kind, seen | {address})
        own, groups = self._split(schema, "schema")
        found = sum((self._describe_options(group, kind, seen) for group in groups), self._describe_own(own, kind))
        return replace(found, is_listed=False) if LIMIT in schema else found

    def _describe_options(self, options: Options, kind: str, seen: frozenset[str]) -> Described:
        found = sum((self._describe(option, kind, seen) for option in options), NOTHING)
        if len(options) == 1:
            return found
        items = ("[]",) if kind == "array" and (found.num_items or found.is_whole) else ()
        return replace(found, optional=frozenset((*found.names, *found.patterns, *items)))

    def _describe_own(self, own: dict[str, Any], kind: str) -> Described:
        if LIMIT in own and kind != "default":
            return NOTHING
        if kind == "array":
            return Described(
                num_items=len(own.get("prefixItems", ())), is_whole="items" in own or UNEVALUATED[kind] in own
            )
        names, patterns = list(members_of(own, "properties")), tuple(members_of(own, "patternProperties"))
        rests = [own[keyword] for keyword in ("additionalProperties", UNEVALUATED["object"]) if keyword in own]
        if kind == "default":
            values = own.get("enum", [own.get("const")])
            names += [
                *own.get("required", ()),
                *chain.from_iterable(value for value in values if isinstance(value, dict)),
            ]
            rests = [rest for rest in rests if rest is not False]
        return Described(
            tuple(names), patterns, is_whole=bool(rests), is_listed=LIMIT not in own and bool(names or patterns)
        )

    # Parts

    def _split(self, schema: dict[str, Any], place: str) -> tuple[dict[str, Any], list[Options]]:
        known = self._parts.get(id(schema))
        if known is None:
            own = {keyword: held for keyword, held in schema.items() if keyword in PLAIN}
            if isinstance(own.get("items"), list):  # as in older drafts
                own["prefixItems"], own["items"] = own["items"], schema.get("additionalItems", True)
            for keyword, other in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
                if isinstance(own.get(keyword), bool) and own.pop(keyword) and other in own:
                    own[keyword] = own.pop(other)
            groups = [*self._combined(schema, place), *self._expressed(schema, own, place)]
            self._parts[id(schema)] = known = (schema, own, groups)
        return known[1], known[2]

    def _combined(self, schema: dict[str, Any], place: str) -> list[Options]:
        """The schemas that one refers to or combines."""
        groups: list[Options] = [[inner] for inner in schema.get("allOf", ())]
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            address = schema.get(keyword)
            if address is None:
                continue
            if keyword == "$ref" or (keyword == "$dynamicRef" and self._logic.has_one_target(address)):
                groups.append([{"$ref": address}])
            else:
                self._give_up(keyword, place, "is not supported")
        if "anyOf" in schema:
            groups.append(schema["anyOf"])
        if "oneOf" in schema:
            groups.append(self._one_of(schema["oneOf"], place))
            told_by = members_of(schema, "discriminator").get(
                "propertyName"
            )  # OpenAPI's, which pydantic writes and needs
            groups += [[{"required": [told_by]}]] if isinstance(told_by, str) else []
        return groups

    def _expressed(self, schema: dict[str, Any], own: dict[str, Any], place: str) -> list[Options]:
        """What a schema says by keywords that the library does not have."""
        groups: list[Options] = []
        if "not" in schema:
            groups.append([self._negated(schema["not"], place)])
        if "if" in schema and ("then" in schema or "else" in schema or self._has_unevaluated):
            negated = self._logic.negate(schema["if"])
            if negated is False and schema["if"] is not True:
                self._remark(f"if at {place} is taken to hold: what it says cannot be excluded")
            groups.append(
                [all_of([schema["if"], schema.get("then", True)]), all_of([negated, schema.get("else", True)])]
            )
        for keyword in ("dependencies", "dependentSchemas", "dependentRequired"):
            for name, needed in members_of(schema, keyword).items():
                inner = {"required": needed} if isinstance(needed, list) else needed
                groups.append([{"properties": {name: False}, LIMIT: True}, all_of([{"required": [name]}, inner])])
        if "propertyNames" in schema:
            groups += self._limit_names(schema["propertyNames"], place)
        if "contains" in schema:
            groups += self._contain(schema, own)
        if schema.get("uniqueItems") is True:
            groups += self._list_arrays(own, place)
        return groups

    def _negated(self, schema: Schema, place: str) -> Schema:
        negated = self._logic.negate(schema)
        if negated is False and schema is not True and schema != {}:
            self._give_up("not", place, "holds something that cannot be excluded")
            return True
        return negated

    def _one_of(self, options: Options, place: str) -> Options:
        """Alternatives that exclude each other; if that cannot be said, they are taken as they are, with a remark."""
        pairs = [
            (left, right)
            for left, right in combinations(range(len(options)), 2)
            if not self._logic.are_disjoint(options[left], options[right])
        ]
        found: Options = []
        for index, option in enumerate(options):
            others = [options[sum(pair) - index] for pair in pairs if index in pair]
            self._logic.is_exact = True
            excluded = [self._exclude(other, option) for other in others[:MAX_EXCLUDED]]
            is_lost = not self._logic.is_exact and any(self._logic.are_disjoint(option, one) for one in excluded)
            if is_lost or len(others) > MAX_EXCLUDED:
                self._remark(f"oneOf at {place} is followed as anyOf: its alternatives overlap")
                return options
            found.append(all_of([option, *excluded]))
        return found

    def _exclude(self, other: Schema, option: Schema) -> Schema:
        """A schema that excludes another; simply by leaving out what the other requires, if the option does not have
        it."""
        followed = self._logic.follow(other)
        names = self._describe(option, "default", frozenset()).names
        required = followed.get("required", ()) if isinstance(followed, dict) else ()
        absent = [name for name in required if name not in names]
        if absent and "object" in self._logic.types(option):
            return {"type": "object", "properties": dict.fromkeys(absent, False), LIMIT: True}
        return self._logic.negate(followed)

    def _limit_names(self, schema: Schema, place: str) -> list[Options]:
        schema = self._logic.follow(schema)
        if schema is False:
            return [[{"maxProperties": 0}]]
        stated = (
            {} if schema is True else {word: held for word, held in schema.items() if word in PLAIN and word != "type"}
        )
        values = self._logic.values(stated)
        groups = self._split(schema, place)[1] if isinstance(schema, dict) else []
        if not stated and not groups:
            return []
        if values is not None and len(stated) == 1 and not groups:
            allowed = {"properties": {value: True for value in values if isinstance(value, str)}}
        elif set(stated) == {"pattern"} and not groups:
            allowed = {"patternProperties": {stated["pattern"]: True}}
        elif set(stated) <= {"minLength", "maxLength"} and not groups:
            most = int(stated["maxLength"]) if "maxLength" in stated else ""
            pattern = f"^(?s:.{{{int(stated.get('minLength', 0))},{most}}})$"
            allowed = {"patternProperties": {pattern: True}}
        else:
            self._give_up("propertyNames", place, "holds more than a pattern, a length or a list of names")
            return []
        return [[{**allowed, "additionalProperties": False, LIMIT: True}]]

    def _contain(self, schema: dict[str, Any], own: dict[str, Any]) -> list[Options]:
        """The items that contains asks for come first, or after those that prefixItems describes."""
        least, most = int(schema.get("minContains", 1)), schema.get("maxContains")
        if most is None and least == 0:
            return []
        inner, other = schema["contains"], True if most is None else self._logic.negate(schema["contains"])
        options: Options = []
        for start in sorted({0, len(own.get("prefixItems", ()))}):
            for count in range(least, least + 1 if most is None else min(int(most), least + 8) + 1):
                first = [other] * start + [inner] * count
                option = {"prefixItems": first, "minItems": len(first) if count else 0}
                options.append(option if most is None else {**option, "items": other, LIMIT: True})
        return [options]

    def _list_arrays(self, own: dict[str, Any], place: str) -> list[Options]:
        """All arrays without a repeated item, if there are few."""
        if own.get("maxItems", 2) <= 1 or (own.get("items") is False and len(own.get("prefixItems", ())) <= 1):
            return []
        values = None if "prefixItems" in own else self._logic.values(own.get("items", True))
        if values is None:
            self._give_up("uniqueItems", place, "holds only for items of a known list (enum)")
            return []
        values = list({equal_key(value): value for value in values}.values())
        arrange = permutations if len(values) <= 5 else combinations
        lengths = range(int(own.get("minItems", 0)), min(len(values), int(own.get("maxItems", len(values)))) + 1)
        listed: list[Sequence[Any]] = []
        for length in lengths:
            listed += arrange(values, length) if len(listed) <= MAX_LISTED else ()
        if len(listed) > MAX_LISTED:
            self._give_up("uniqueItems", place, f"allows more than {MAX_LISTED:,} arrays")
            return []
        others = [name for name in ALL_TYPES if name != "array"]
        return [[{"enum": [list(one) for one in listed]}, {"type": others}]]
