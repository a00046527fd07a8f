"""Texts of the command line, of files and of standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from archerfish.errors import InvalidInputError, NotFoundError


def gather_texts(given: Sequence[str], input_file: str, fields: Sequence[str] = ("text",)) -> list[str]:
    """Texts of the command line, then of the file; of a line in JSON, the first of `fields` that it has."""
    texts = []
    for place, entry in gather_entries(given, input_file):
        text = next((entry[name] for name in fields if name in entry), None) if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise InvalidInputError(f'{place} has no string in the field "{fields[0]}".')
        texts.append(text)
    return texts


def gather_entries(given: Sequence[str], input_file: str) -> list[tuple[str, Any]]:
    """Each text and the place where it stands, for messages: those of the command line, then the lines of the file.

    Of a .jsonl file, the values of its lines. Without both, the lines of standard input if it is not a terminal.
    """
    entries: list[tuple[str, Any]] = [("", text) for text in given]
    if input_file == "-" or (not given and not input_file and not sys.stdin.isatty()):
        entries += [("", line.rstrip("\r\n")) for line in sys.stdin]
    elif input_file:
        entries += read_entries(Path(input_file))
    if not entries:
        raise InvalidInputError(
            "There is no text.", hint="Give texts as arguments, with --input FILE, or on standard input."
        )
    return entries


def read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.rstrip("\r\n") for line in file]
    except FileNotFoundError:
        raise NotFoundError(f"The input file {path} does not exist.") from None
    except OSError as error:
        raise InvalidInputError(f"The input file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"The input file {path} is not UTF-8: byte {error.start} cannot be read.") from error
    for number, line in enumerate(lines, 1):
        place = f"Line {number} of {path}"
        if path.suffix != ".jsonl":
            yield place, line
        elif line.strip():
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise InvalidInputError(f"{place} is not JSON: {error}.") from error
