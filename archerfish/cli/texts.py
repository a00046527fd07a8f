"""Texts of the command line, of files and of standard input; files that appear whole or not at all."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from archerfish.errors import InvalidInputError, NotFoundError


def gather_texts(given: Sequence[str], input_file: str, fields: Sequence[str] = ("text",)) -> list[str]:
    """Texts of the command line, then of the file. Without both, the lines of standard input if it is not a terminal."""
    texts = list(given)
    if input_file == "-" or (not texts and not input_file and not sys.stdin.isatty()):
        texts += lines_of(sys.stdin)
    elif input_file:
        texts += read_texts(Path(input_file), fields)
    if not texts:
        raise InvalidInputError("There is no text.", hint="Give texts as arguments, with --input FILE, or on standard input.")
    return texts


def read_texts(path: Path, fields: Sequence[str] = ("text",)) -> list[str]:
    """The lines of a file. Of each line of a .jsonl file, the first of `fields` that it has."""
    return [text_of(entry, number, path, fields) for number, entry in read_json(path)] if is_json(path) else read_lines(path)


def is_json(path: Path) -> bool:
    return path.suffix == ".jsonl"


def read_json(path: Path) -> list[tuple[int, Any]]:
    """Line number and value of each line of a .jsonl file that is not empty."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except ValueError as error:
                raise InvalidInputError(f"Line {number} of {path} is not JSON: {error}.") from error
    return found


def text_of(entry: Any, number: int, path: Path, fields: Sequence[str]) -> str:
    text = next((entry[name] for name in fields if name in entry), None) if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise InvalidInputError(f'Line {number} of {path} has no string in the field "{fields[0]}".')
    return text


def read_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            return lines_of(file)
    except FileNotFoundError:
        raise NotFoundError(f"The input file {path} does not exist.") from None
    except OSError as error:
        raise InvalidInputError(f"The input file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"The input file {path} is not UTF-8: byte {error.start} cannot be read.") from error


def lines_of(file: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in file]


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Create or replace a file with what `write` writes. After an error the old file is still there."""
    from archerfish.store.files import write_errors

    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    with write_errors(path):
        try:
            with temporary.open("xb") as file:
                write(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
