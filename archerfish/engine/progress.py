"""Progress on standard error: a bar where rich is installed, else a plain line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from archerfish.types import Progress, no_progress


@contextmanager
def progress_bar(title: str, *, show: bool, unit: str = "") -> Iterator[Progress]:
    """A Progress that draws on standard error if `show` is true."""
    if not show:
        yield no_progress
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield plain_progress(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=f"{title} {what}".strip())

        yield update


def plain_progress(title: str) -> Progress:
    def update(done: int, total: int, what: str) -> None:
        end = "\n" if total and done >= total else ""
        sys.stderr.write(f"\r{title} {what} {done}/{total or '?'}{end}")
        sys.stderr.flush()

    return update
