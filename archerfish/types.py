"""Small types that several layers share. This module imports nothing from archerfish."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Long work calls progress(done, total, what); total is 0 while it is unknown. The command line shows a bar.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""


class Closing(ABC):
    """A context manager that closes itself at its end."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
