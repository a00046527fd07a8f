"""Small types that several layers share. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Called as progress(done, total, what) by long work; total is 0 while unknown. The command line draws it.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """The Progress of callers that show none."""
