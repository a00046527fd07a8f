"""What is called, and how much: figures that no neighbour on the machine can change, unlike time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest


def spy_on(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Any:
    """Note the calls of a method, which goes on as before: a Mock. The calls of a class's method have its object
    too."""
    original = getattr(owner, name)
    noted = create_autospec(original, side_effect=original) if isinstance(owner, type) else Mock(side_effect=original)
    patch.setattr(owner, name, noted)
    return noted


def num_calls(function: Callable[[], object]) -> int:
    """Python functions entered while one runs. What the collector would call meanwhile, of others' objects, is put
    off."""
    found = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return found
