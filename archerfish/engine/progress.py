"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from archerfish.types import Progress, no_progress

BYTES_FROM = 1_000_000  # a total of this much or more is shown as bytes: no other total is so large
MAX_WIDTH = 48


@contextmanager
def progress_bar(title: str, *, show: bool, transient: bool = False) -> Iterator[Progress]:
    """A Progress that draws on standard error if `show` is true. transient: the bar is removed at the end."""
    if not show:
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=transient) as bar:
        task = bar.add_task(title, total=None, count="")

        def update(done: int, total: int, what: str) -> None:
            unit = size if total >= BYTES_FROM else "{:,}".format
            count = f"{unit(done)}/{unit(total)}" if total else unit(done)
            described = shorten(what, MAX_WIDTH) or title
            bar.update(task, completed=done, total=total or None, description=described, count=count)

        yield update


def shorten(text: str, width: int) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def size(num_bytes: float) -> str:
    """A number of bytes in decimal units, such as 45.4 MB."""
    value, units = float(num_bytes), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
