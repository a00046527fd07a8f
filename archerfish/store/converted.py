"""Converted copies of models in the cache, made once. Imports little: an engine asks on every load."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from archerfish.config import ConversionConfig, HubConfig
from archerfish.errors import ModelNotFoundError
from archerfish.store.files import lock_or_write_error, write_errors
from archerfish.store.format import ARROW_NAME, METADATA_NAME, PARQUET_NAME
from archerfish.store.metadata import is_converted
from archerfish.types import Progress, no_progress

CONVERSION_VERSION = 2  # raised when conversions come out differently, so that cached ones are made anew


def ensure_converted(
    source: Path, *, dtype: str, hub: HubConfig | None = None, progress: Progress = no_progress, keep_quantized: bool = False
) -> Path:
    """The converted directory of a source: the source itself if it is one, else one in the cache, made once.

    `dtype` is float32, bfloat16 or float16, or auto for the default of ConversionConfig. The cached directory is keyed by the
    names, sizes and times of the source's files, so that a changed source is converted again.
    """
    if is_converted(source):
        return source
    if source.name in (ARROW_NAME, PARQUET_NAME) and is_converted(source.parent):
        return source.parent
    if not source.exists():
        raise ModelNotFoundError(f"{source} does not exist.")
    hub = hub or HubConfig()
    config = ConversionConfig(dtype=dtype, write_parquet=False, keep_quantized=keep_quantized)
    target = hub.cache_path() / "converted" / cached_name(source, config)
    if (target / METADATA_NAME).is_file():
        return target
    from archerfish.store.converter import ModelConverter

    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with lock_or_write_error(target.with_name(f"{target.name}.lock"), target):
        if not (target / METADATA_NAME).is_file():
            ModelConverter(config, hub=hub).convert(source, target, progress=progress)
    return target


def cached_name(source: Path, config: ConversionConfig) -> str:
    kind = config.stored_dtype() + ("-quantized" if config.keep_quantized else "")
    parts = repr((CONVERSION_VERSION, str(source.absolute()), fingerprint_parts(source)))
    fingerprint = hashlib.sha256(parts.encode()).hexdigest()[:16]
    stem = source.stem if source.is_file() else source.resolve().name
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', stem).strip('.-') or 'model'}-{kind}-{fingerprint}"


def fingerprint_parts(source: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and modification times of the files that a conversion depends on."""
    if source.suffix == ".gguf" and source.is_file():
        stat = source.stat()
        return [(source.name, stat.st_size, stat.st_mtime_ns)]
    parts = []
    pending = [(str(source if source.is_dir() else source.parent), "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not prefix and not entry.name.startswith("."):
                        pending.append((entry.path, f"{entry.name}/"))
                    continue
                if entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110 (a link to nothing is nothing)
                    continue
                stat = entry.stat()
                parts.append((prefix + entry.name, stat.st_size, stat.st_mtime_ns))
    return sorted(parts)
