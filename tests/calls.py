"""How much Python runs: a figure that no neighbour on the machine can change, unlike time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(function: Callable[[], object]) -> int:
    """Python functions entered while one runs. What the collector would call meanwhile, of others' objects, is put off."""
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
