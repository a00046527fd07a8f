"""Compiled kernels of a model as one file, so that a first start elsewhere is like a second one: `archerfish
kernels`."""
# mypy: allow-untyped-calls

from __future__ import annotations

import json
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from triton import __version__ as triton_version
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager, get_cache_manager

from archerfish import __version__
from archerfish.errors import CorruptFileError, InvalidInputError, NotFoundError, WriteError
from archerfish.kernels.triton.compiling import read_list

CONTENTS = "contents.json"  # the first file of an archive
NEEDED = (".json", ".cubin", ".hsaco")  # files of a kernel; the others are steps on the way to them
PLACE = re.compile(r"[A-Z2-7]{52}/[\w-][\w.-]*")
EXPORT_AGAIN = "Make it again with `archerfish kernels export MODEL FILE`."
LIST = re.compile(r"[0-9a-f]{32}\.json")


def versions() -> dict[str, Any]:
    """What kernels belong to; target: backend, architecture and threads of a warp, None where there is no card."""
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        target = None
    return {
        "archerfish": __version__,
        "triton": triton_version,
        "target": target and [target.backend, target.arch, target.warp_size],
    }


def export_kernels(lists: Sequence[Path], file: Path) -> dict[str, Any]:
    """Write the kernels of lists into a file; returns its contents."""
    held: dict[str, bytes] = {}
    kernels = {path.name: read_list(path) for path in lists}
    for digest, name in chain.from_iterable(own.items() for own in kernels.values()):
        group = get_cache_manager(digest).get_group(f"{name[:150]}.json") or {}
        paths = [Path(path) for child, path in group.items() if child.endswith(NEEDED)]
        held |= {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}
    launchers = Path(knobs.cache.dir).glob("*/*.so") if held else ()  # small, and few kernels have one of their own
    held |= {f"{path.parent.name}/{path.name}": path.read_bytes() for path in launchers}
    if not held:
        raise NotFoundError(
            "There are no compiled kernels of this model.", hint="Kernels are compiled where a GPU is used."
        )
    contents = {**versions(), "lists": kernels, "files": sorted(held)}
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with tarfile.open(part, "w:gz", compresslevel=3) as archive:
            for place, data in {CONTENTS: json.dumps(contents).encode(), **held}.items():
                entry = tarfile.TarInfo(place)
                entry.size = len(data)
                archive.addfile(entry, BytesIO(data))
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise WriteError(f"{file} cannot be written: {error}") from error
    return contents


def import_kernels(file: Path) -> dict[str, Any]:
    """Put the kernels of a file into Triton's cache; returns its contents. Nothing is written before all of it is
    checked."""
    contents, held = read_archive(file)
    groups: dict[str, dict[str, str]] = {}
    try:
        for place, data in held.items():
            folder, name = place.split("/")
            groups.setdefault(folder, {})[name] = FileCacheManager(folder).put(data, name)
        for folder, group in groups.items():
            for name in [name for name in group if name.endswith(".json")]:
                FileCacheManager(folder).put_group(name, group)
        lists = Path(knobs.cache.dir) / "archerfish"
        lists.mkdir(parents=True, exist_ok=True)
        for name, kernels in contents["lists"].items():
            (lists / name).write_text(json.dumps(kernels), encoding="utf-8")
    except OSError as error:
        raise WriteError(f"The cache in {knobs.cache.dir} cannot be written: {error}") from error
    return contents


def read_archive(file: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The contents of an archive and its files, which are those that it names."""
    try:
        with tarfile.open(file) as archive:
            found = {
                entry.name: stream.read() for entry in archive if (stream := archive.extractfile(entry)) is not None
            }
        contents = json.loads(found.pop(CONTENTS))
        is_whole = sorted(found) == contents["files"] and found
        is_inside = all(map(LIST.fullmatch, contents["lists"])) and all(map(PLACE.fullmatch, found))
        are_lists = all(isinstance(kernels, dict) for kernels in contents["lists"].values())
        is_whole = is_whole and are_lists and len(contents["target"]) == 3
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {file}.") from error
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise CorruptFileError(
            f"{file} is no archive of kernels, or a part of it is missing.", hint=EXPORT_AGAIN
        ) from error
    if not (is_whole and is_inside):
        what = "names files outside of the cache" if is_whole else "does not hold the files that it names"
        raise CorruptFileError(f"{file} {what}.", hint=EXPORT_AGAIN)
    for name, value in versions().items():
        if value is not None and contents.get(name) != value:
            what = "card" if name == "target" else name
            raise InvalidInputError(
                f"The kernels in {file} are of another {what}: {contents.get(name)}, not {value}.",
                hint="Export them on a machine with the same card and versions.",
            )
    return contents, found
