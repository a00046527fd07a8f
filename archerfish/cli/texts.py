"""Texts in, vectors out: the files that `archerfish embed` reads and writes."""

from __future__ import annotations

import io
import json
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError, did_you_mean

Vectors = npt.NDArray[np.float32]


def gather_texts(given: Sequence[str], input_file: str, fields: Sequence[str] = ("text",)) -> list[str]:
    """Texts of the command line, then of a file, or of stdin if neither is given and stdin is not a terminal."""
    texts = list(given)
    if input_file == "-" or (not texts and not input_file and not sys.stdin.isatty()):
        texts += lines_of(sys.stdin)
    elif input_file:
        texts += read_texts(Path(input_file), fields)
    if not texts:
        raise InvalidInputError("There is no text.", hint="Give texts as arguments, with --input FILE, or on standard input.")
    return texts


def read_texts(path: Path, fields: Sequence[str] = ("text",)) -> list[str]:
    """The lines of a file; of a .jsonl file the first of the fields that a line has."""
    return [text_of(entry, number, path, fields) for number, entry in read_json(path)] if is_json(path) else read_lines(path)


def is_json(path: Path) -> bool:
    return path.suffix == ".jsonl"


def read_json(path: Path) -> list[tuple[int, Any]]:
    """What stands in the lines of a .jsonl file that are not empty, with their numbers."""
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


def check_output(path: Path) -> None:
    """Refuse an output that cannot be written before anything is computed."""
    if path.suffix not in WRITERS:
        hint = did_you_mean(path.suffix, WRITERS)
        raise InvalidOptionError(f"The output {path} must end with one of: {', '.join(WRITERS)}.", hint=hint)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else "lies in a directory that does not exist"
        raise InvalidOptionError(f"The output {path} {what}.")


def write_vectors(path: Path, texts: Sequence[str], vectors: Vectors) -> None:
    """Write the vectors in the form that the name asks for; the file appears whole or not at all."""
    write_atomically(path, lambda file: WRITERS[path.suffix](file, texts, vectors))


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    from archerfish.store.files import write_errors

    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    with write_errors(path):
        try:
            with temporary.open("xb") as file:
                write(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_npy(file: BinaryIO, texts: Sequence[str], vectors: Vectors) -> None:
    np.save(file, vectors)


def write_jsonl(file: BinaryIO, texts: Sequence[str], vectors: Vectors) -> None:
    with io.TextIOWrapper(file, encoding="utf-8", errors="surrogatepass", write_through=True) as lines:
        for text, vector in zip(texts, vectors, strict=True):
            lines.write(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False) + "\n")


def write_parquet(file: BinaryIO, texts: Sequence[str], vectors: Vectors) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    embeddings = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    pq.write_table(pa.table({"text": pa.array(list(texts), pa.string()), "embedding": embeddings}), file)


WRITERS: dict[str, Callable[[BinaryIO, Sequence[str], Any], None]] = {
    ".npy": write_npy, ".jsonl": write_jsonl, ".parquet": write_parquet,
}  # fmt: skip
