"""The adapters of a model that has been loaded: those of the start, and what routes have changed since.

The changes lie in a file, which all replicas of a service write alike, so that a process that is started again makes them too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from archerfish.engine.adapters import AdapterLibrary
from archerfish.errors import ArcherfishError
from archerfish.store.files import replace_file

logger = logging.getLogger("archerfish.serve")


def read_changes(file: str) -> dict[str, dict[str, str]]:
    """By model and name: the path of an adapter that was loaded; empty: it was unloaded."""
    try:
        return json.loads(Path(file).read_bytes())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def note_change(file: str, model: str, name: str, path: str) -> None:
    if file:
        changes = read_changes(file)
        changes.setdefault(model, {})[name] = path
        replace_file(Path(file), json.dumps(changes).encode())


def load_adapters(library: AdapterLibrary, model: str, modules: Mapping[str, str], file: str, *, is_only: bool) -> None:
    """modules: paths of those of the start, by name. is_only: they are for this model, and what it cannot take is an error."""
    changes = read_changes(file).get(model, {})
    for name, path in {**modules, **changes}.items():
        try:
            if path:
                library.load(name, path)
        except ArcherfishError as error:
            if is_only and name not in changes:
                raise
            logger.warning("%s is served without the adapter %s: %s", model, name, error)
