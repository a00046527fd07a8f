"""The adapters of a model that has been loaded: those of the start, and what routes have changed since.

Both lie in a file, which all replicas of a service write alike, so that a process that is started again has them too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from archerfish.engine.adapters import AdapterLibrary
from archerfish.errors import ArcherfishError
from archerfish.store.files import file_lock, replace_file

logger = logging.getLogger("archerfish.serve")


def read_changes(file: str) -> dict[str, dict[str, str]]:
    """By model and name: the path of an adapter that was loaded; empty: it was unloaded."""
    try:
        changes: dict[str, dict[str, str]] = json.loads(Path(file).read_bytes())
    except (OSError, ValueError):
        return {}
    return changes


def note_changes(file: str, model: str, paths: Mapping[str, str]) -> None:
    """paths: as `read_changes` has them for a model."""
    if file:
        place = Path(file)
        with file_lock(place.with_suffix(".lock"), place):
            changes = read_changes(file)
            changes[model] = {**changes.get(model, {}), **paths}
            replace_file(place, json.dumps(changes).encode())


def load_adapters(library: AdapterLibrary, model: str, modules: Mapping[str, str], file: str, *, is_only: bool) -> None:
    """modules: paths of those of the start, by name, but for names that another model has taken. is_only: they are for
    this model, and what it cannot take is an error, but not once it has been served."""
    changes = read_changes(file)
    taken = {name for other, paths in changes.items() if other != model for name, path in paths.items() if path}
    is_first = model not in changes
    wanted = {name: path for name, path in modules.items() if name not in taken} if is_first else changes[model]
    loaded: dict[str, str] = {}
    for name, path in wanted.items():
        try:
            if path:
                library.load(name, path)
                loaded[name] = path
        except ArcherfishError as error:
            if is_only and is_first:
                raise
            logger.warning("%s is served without the adapter %s: %s", model, name, error)
    if is_first:
        note_changes(file, model, loaded)
