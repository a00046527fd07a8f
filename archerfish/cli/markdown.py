"""Markdown on a terminal while it is being generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archerfish.cli.output import printable

if TYPE_CHECKING:
    from rich.console import Console

FENCES = ("```", "~~~")


def split_blocks(text: str) -> list[str]:
    """Text cut after its empty lines, except those within a fenced block of code. The last part is not finished yet."""
    blocks, is_code = [""], False
    for line in text.splitlines(keepends=True):
        blocks[-1] += line
        is_code ^= line.lstrip().startswith(FENCES)
        if not line.strip() and line.endswith("\n") and not is_code:
            blocks.append("")
    return blocks


class MarkdownWriter:
    """Draws the block that is being written again with every part of it, and each finished block once."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console()
        self._live = Live(console=self.console, transient=True, auto_refresh=False)
        self._block = ""
        self._live.start()

    def write(self, text: str) -> None:
        from rich.markdown import Markdown

        *finished, self._block = split_blocks(self._block + printable(text))
        for block in finished:
            self.console.print(Markdown(block))  # above the live part
        self._live.update(Markdown(self._block), refresh=True)

    def close(self) -> None:
        from rich.markdown import Markdown

        self._live.stop()
        if self._block.strip():
            self.console.print(Markdown(self._block))
