"""How much Python runs: a figure that no neighbour on the machine can change, unlike time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(function: Callable[[], object]) -> int:
    """Python functions entered while one runs."""
    found = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found
