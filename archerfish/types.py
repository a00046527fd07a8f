"""Small types that several layers share. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
INT8 = "int8"  # a format of matrices in memory; the other one is "auto": the type that is computed in
SCALE_BYTES = 4  # of a row's scale, in formats that have one

# Called as progress(done, total, what) by long work; total is 0 while unknown. The command line draws it.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """The Progress of callers that show none."""
