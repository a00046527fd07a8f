"""Output of commands: rich tables and progress bars on a terminal, plain columns elsewhere, JSON with --json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from archerfish.engine.progress import progress_bar
from archerfish.errors import ArcherfishError
from archerfish.types import Progress

if TYPE_CHECKING:
    from rich.table import Table

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except tab and line feed
STYLES = {"good": "32", "bad": "31", "dim": "2", "bold": "1", "error": "1;31"}


class Output:
    """Writes the result of a command to stdout and its remarks to stderr."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet

    @property
    def is_rich(self) -> bool:
        return sys.stdout.isatty() and not self.as_json

    @property
    def shows_progress(self) -> bool:
        return sys.stderr.isatty() and not self.quiet

    def result(self, data: Any) -> None:
        """Write one JSON object to stdout."""
        sys.stdout.write(json.dumps(data, ensure_ascii=False, default=str) + "\n")

    def line(self, text: str = "", style: str = "") -> None:
        """Write a line of the result; with --json, nothing."""
        if not self.as_json:
            sys.stdout.write((styled(text, style) if style and self.is_rich else text) + "\n")

    def note(self, text: str) -> None:
        """Write a remark to stderr; with --quiet or --json, nothing."""
        self.part(text)
        self.part("\n")

    def part(self, text: str) -> None:
        """Write a part of a remark."""
        if text and not self.quiet and not self.as_json:
            sys.stderr.write(styled(text, "dim") if sys.stderr.isatty() else text)
            sys.stderr.flush()

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = ()
    ) -> None:
        """Write a table whose columns in `numbers` are aligned right; with --json, nothing."""
        if self.as_json:
            return
        texts = [[str(cell) for cell in row] for row in rows]
        if self.is_rich:
            from rich.console import Console

            Console().print(make_table(title, columns, texts, numbers))
            return
        all_rows = [list(columns), *texts]
        widths = [max(map(len, cells)) for cells in zip(*all_rows, strict=True)]
        if title:
            self.line(title)
        for row in all_rows:
            padded = zip(columns, row, widths, strict=True)
            self.line(
                "  ".join(f"{cell:{'>' if name in numbers else '<'}{width}}" for name, cell, width in padded).rstrip()
            )

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        """A progress bar on stderr if that is a terminal."""
        return progress_bar(title, show=self.shows_progress, transient=True)


def printable(text: str) -> str:
    """Text without control characters, which could move the cursor of a terminal or change its settings."""
    return text if text.isprintable() else CONTROL.sub("", text)


def styled(text: str, style: str) -> str:
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_number = name in numbers
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number or index == 0
        )
    for row in rows:
        table.add_row(*(Text(cell, style=cell_style(cell)) for cell in row))
    return table


def cell_style(cell: str) -> str:
    """The colour of a cell: green or red for a verdict, none for other cells."""
    if cell in ("yes", "on", "met") or cell.startswith("fits"):
        return "green"
    return "red" if cell in ("no", "off", "not met", "missing") or cell.startswith("does not fit") else ""


def seconds(value: float) -> str:
    """A duration with its unit, such as 4.2 ms or 1.35 s."""
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.0995 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min"


def print_error(error: ArcherfishError, *, as_json: bool) -> None:
    """Write the message and the hint to stderr; with --json also an object to stdout."""
    message = styled(error.message, "error") if sys.stderr.isatty() else f"Error: {error.message}"
    sys.stderr.write("\n".join(filter(None, (message, error.hint))) + "\n")
    if as_json:
        body = {"type": type(error).__name__, "code": error.code, "message": error.message, "hint": error.hint}
        sys.stdout.write(json.dumps({"error": body}, ensure_ascii=False) + "\n")
