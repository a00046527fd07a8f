"""metadata.json: the configuration of a converted model, where its tensors lie, and the checksums of its files.

The last entry is the SHA-256 of every byte before it.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.store.format import RowSpans, TensorInfo, make_info, make_spans, pieces_of
from archerfish.types import DTYPE_BYTES

ARROW_NAME = "weights.arrow"
PARQUET_NAME = "weights.parquet"
METADATA_NAME = "metadata.json"
TOKENIZER_NAME = "tokenizer"
FORMAT_NAME = "archerfish-store"
FORMAT_VERSION = 1
COPIED_FIELDS: dict[str, Any] = {
    "model_name": str,
    "dtype": str,
    "created": str,
    "source": dict,
    "config": dict,
    "embedding": dict | None,
    "generation_config": dict | None,
}
CHECKSUM_KEY = b',\n"checksum": "'
CHECKSUM_END = b'"\n}\n'


class FileRecord(NamedTuple):
    """Size and checksum of one file; of weights.arrow also what is needed to map it without reading it."""

    num_bytes: int
    sha256: str
    outside_crc32: int | None = None  # of all bytes outside of tensors: headers, messages, footer
    spans: tuple[RowSpans, ...] = ()
    crc32s: tuple[tuple[int, ...], ...] = ()  # of the pieces of each tensor; (): an older version wrote the file


@dataclass(frozen=True)
class StoreMetadata:
    """The contents of metadata.json."""

    model_name: str
    dtype: str
    created: str
    source: dict[str, Any]
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    embedding: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def total_parameters(self) -> int:
        return sum(info.num_params for info in self.tensors)

    @property
    def quant_types(self) -> set[str]:
        """Of the matrices that are stored in blocks."""
        return {info.quantization.quant_type for info in self.tensors if info.quantization}

    def as_dict(self) -> dict[str, Any]:
        """The JSON document, without its checksum."""
        files: dict[str, dict[str, Any]] = {}
        for name, record in self.files.items():
            files[name] = {"bytes": record.num_bytes, "sha256": record.sha256}
            if record.outside_crc32 is not None:
                buffers = [[number for span in row for number in span] for row in record.spans]
                files[name] |= {"outside_crc32": record.outside_crc32, "buffers": buffers}
            if record.crc32s:
                files[name]["piece_crc32s"] = record.crc32s
        return {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            **{key: getattr(self, key) for key in COPIED_FIELDS},
            "total_parameters": self.total_parameters,
            "num_tensors": len(self.tensors),
            "files": files,
            "tensors": [[info.name, info.dtype, list(info.shape), *(info.quantization or ())] for info in self.tensors],
        }

    def encode(self) -> bytes:
        """The bytes of metadata.json: one top-level entry per line, then the checksum."""
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.as_dict().items())
        body = ("{\n" + ",\n".join(lines)).encode()
        return body + CHECKSUM_KEY + hashlib.sha256(body).hexdigest().encode() + CHECKSUM_END


def read_metadata(directory: Path) -> StoreMetadata:
    """Read and check the metadata.json of a converted directory."""
    path = directory / METADATA_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ModelNotFoundError(f"{directory} is not a converted model: it has no {METADATA_NAME}.") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}.") from error
    found = parse_metadata(raw, path)
    return replace(found, **{key: deepcopy(getattr(found, key)) for key in COPIED_FIELDS})


@lru_cache(maxsize=4)
def parse_metadata(raw: bytes, path: Path) -> StoreMetadata:
    body, separator, tail = raw.rpartition(CHECKSUM_KEY)
    if not separator or tail != hashlib.sha256(body).hexdigest().encode() + CHECKSUM_END:
        raise CorruptFileError(f"{path} was altered or cut off: its checksum does not match.")
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT_NAME:
            raise CorruptFileError(f"{path} was not written by archerfish.")
        if document["format_version"] != FORMAT_VERSION:
            message = f"{path} has format version {document['format_version']!r}; this is version {FORMAT_VERSION}."
            raise UnsupportedModelError(
                message, hint="Convert it again, or use the version of archerfish that wrote it."
            )
        return make_metadata(document, str(path))
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} does not describe a model: {error!r}.") from error


def make_metadata(document: dict[str, Any], where: str) -> StoreMetadata:
    for key, kind in COPIED_FIELDS.items():
        if not isinstance(document[key], kind):
            raise CorruptFileError(f"{where}: {key!r} has the wrong type.")
    if document["dtype"] not in DTYPE_BYTES:
        raise CorruptFileError(f"{where}: unknown dtype {document['dtype']!r}.")
    tensors = tuple(make_info(where, *row) for row in document["tensors"])
    files = {name: FileRecord(entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()}
    if ARROW_NAME in files:
        entry, record = document["files"][ARROW_NAME], files[ARROW_NAME]
        pairs = zip(entry["buffers"], tensors, strict=True)
        spans = tuple(make_spans(numbers, info, record.num_bytes, where) for numbers, info in pairs)
        crc32s = tuple(map(tuple, entry.get("piece_crc32s", ())))
        if crc32s and [len(row) for row in crc32s] != [len(pieces_of(row)) for row in spans]:
            raise CorruptFileError(f"{where}: the checksums of {ARROW_NAME} do not match its tensors.")
        files[ARROW_NAME] = record._replace(outside_crc32=entry["outside_crc32"], spans=spans, crc32s=crc32s)
    metadata = StoreMetadata(tensors=tensors, files=files, **{key: document[key] for key in COPIED_FIELDS})
    counts = (document["total_parameters"], document["num_tensors"], len({info.name for info in tensors}))
    if counts != (metadata.total_parameters, len(tensors), len(tensors)):
        raise CorruptFileError(f"{where}: the counts of tensors and parameters do not match its list of tensors.")
    return metadata


def is_converted(path: Path) -> bool:
    """Whether a path is a converted directory. Its files are not checked."""
    has_weights = (path / ARROW_NAME).is_file() or (path / PARQUET_NAME).is_file()
    return has_weights and (path / METADATA_NAME).is_file()
