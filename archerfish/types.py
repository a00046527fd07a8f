"""Small types that several layers share. This module imports nothing from archerfish."""

from __future__ import annotations

from collections.abc import Callable

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
INT8 = "int8"  # a format of matrices in memory; the other one is "auto", the type of computation
SCALE_BYTES = 4  # of the scale of a row, in formats with scales

# Long work calls progress(done, total, what); total is 0 while it is unknown. The command line shows a bar.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""
