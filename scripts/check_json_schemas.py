"""Holds the grammars of JSON schemas against the official JSON-Schema-Test-Suite.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m scripts.check_json_schemas JSON-Schema-Test-Suite

For every schema it counts whether it is refused; whether its grammar accepts the instances that the suite calls valid,
in any order of their properties; and whether it accepts invalid ones, or writes texts at random that a validator (the
package jsonschema_rs or jsonschema) finds invalid. There must be none of the latter.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from archerfish.errors import InvalidInputError
from archerfish.text.grammar import CompiledGrammar, with_deep_stack

END = 256
MAX_STEPS = 400
SIMPLE = frozenset(b'"{}[],:ab01-.')
CLOSING = frozenset(b'}]"')


class ByteTokens:
    """A tokenizer whose tokens are bytes, in the form that the grammar library takes."""

    eos_token_id, bos_token_id = END, None
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@dataclass
class Counts:
    """What was found, by group of the suite."""

    num_schemas: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_valid: int = 0
    missed: list[str] = field(default_factory=list)
    num_written: int = 0

    def report(self) -> str:
        return (
            f"{self.num_schemas} schemas, {len(self.refused)} refused; {len(self.wrong)} accepted but invalid; "
            f"{len(self.missed)} of {self.num_valid} valid instances not accepted; {self.num_written} texts written at random"
        )


def written_forms(value: Any) -> Iterator[str]:
    """A value as JSON, with the properties of its objects in any order."""
    if isinstance(value, dict):
        for order in permutations(value):
            for inner in product(*(list(islice(written_forms(value[name]), 6)) for name in order)):
                yield "{" + ", ".join(f"{json.dumps(n)}: {v}" for n, v in zip(order, inner, strict=True)) + "}"
    elif isinstance(value, list):
        for inner in product(*(list(islice(written_forms(item), 6)) for item in value)):
            yield f"[{', '.join(inner)}]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def takes(grammar: CompiledGrammar, text: str) -> bool:
    try:
        bits = np.zeros(9, dtype=np.int32)
        grammar.start().fill([*text.encode()], bits)
    except InvalidInputError:
        return False
    return bool(bits[END // 32] >> END % 32 & 1)


def write_at_random(grammar: CompiledGrammar, chance: random.Random) -> str | None:
    """A text of the grammar; None if it did not come to an end."""
    matcher = grammar.start()
    output = bytearray()
    bits = np.zeros(9, dtype=np.int32)
    for step in range(MAX_STEPS):
        matcher.fill(list(output), bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        closing = [byte for byte in allowed if byte in CLOSING]
        if END in allowed and (step > MAX_STEPS // 4 or len(allowed) == 1 or chance.random() < 0.3):
            return output.decode()
        simple = [byte for byte in allowed if byte in SIMPLE]
        if step > MAX_STEPS // 4 and closing:
            output.append(chance.choice(closing))
        else:
            kept = simple if simple and chance.random() < 0.8 else [byte for byte in allowed if byte != END]
            output.append(chance.choice(kept))
    return None


def validator_of(schema: Any) -> Callable[[Any], bool]:
    package = import_module("jsonschema_rs" if find_spec("jsonschema_rs") else "jsonschema")
    is_valid: Callable[[Any], bool] = package.Draft202012Validator(schema).is_valid
    return is_valid


def check_group(vocabulary: Any, group: dict[str, Any], name: str, counts: Counts, num_texts: int) -> None:
    schema = group["schema"]
    compiled = schema if isinstance(schema, dict) else {"allOf": [schema]}
    counts.num_schemas += 1
    try:
        grammar = with_deep_stack(lambda: CompiledGrammar(vocabulary, "json_schema", compiled))
    except InvalidInputError as error:
        counts.refused.append(f"{name}: {error}")
        return
    for test in group["tests"]:
        is_taken = any(takes(grammar, text) for text in islice(written_forms(test["data"]), 200))
        counts.num_valid += test["valid"]
        if is_taken and not test["valid"]:
            counts.wrong.append(f"{name}: {test['description']}: {json.dumps(test['data'])}")
        elif test["valid"] and not is_taken:
            counts.missed.append(f"{name}: {test['description']}: {json.dumps(test['data'])}")
    try:
        is_valid = validator_of(schema)
    except Exception as error:  # the validator does not know what the schema refers to
        print(f"{name}: no validator: {error}")
        return
    for seed in range(num_texts):
        text = write_at_random(grammar, random.Random(seed))
        counts.num_written += text is not None
        if text is not None and not is_valid(json.loads(text)):
            counts.wrong.append(f"{name}: written at random: {text}")


def byte_vocabulary() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(ByteTokens()))


def check_suite(folder: Path, num_texts: int) -> Counts:
    vocabulary, counts = byte_vocabulary(), Counts()
    for path in sorted(folder.glob("tests/draft2020-12/*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            check_group(vocabulary, group, f"{path.stem}: {group['description']}", counts, num_texts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=20, help="texts that are written at random for each schema")
    parser.add_argument(
        "--list", action="store_true", help="say what is refused, and which valid instances are not accepted"
    )
    options = parser.parse_args()
    counts = check_suite(options.folder, options.texts)
    for line in counts.wrong + (counts.refused + counts.missed if options.list else []):
        print(line)
    print(counts.report())
    sys.exit(bool(counts.wrong))


if __name__ == "__main__":
    main()
