"""Draws docs/terminal.svg: runs real commands in a pseudo-terminal and keeps what they print."""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = [
    'archerfish generate "An archerfish is a fish that" --max-tokens 48 --temperature 0',
    'archerfish embed "An archerfish spits water." "A fish that shoots flies." "The stock market fell." --similarity',
    "archerfish doctor",
]
WIDTH = 118
LINES = 26  # of each command


def run(command: str) -> str:
    """Output of a command that believes it writes to a terminal."""
    chunks: list[bytes] = []

    def keep(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        chunks.append(data)
        return b"" if not data else b" "

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ |= {"COLUMNS": str(WIDTH), "TERM": "xterm-256color", "PATH": path}
    pty.spawn(shlex.split(command), keep)
    text = b"".join(chunks).decode().replace("\r\n", "\n").replace(str(Path.home()), "~")
    return re.sub(
        r"(Linux) [^,]+|, nvcc: \S+", r"\1", text
    )  # not of interest: which kernel, and who has a CUDA compiler


def main() -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in COMMANDS:
            console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
            lines = run(command).rstrip().split("\n")
            console.print(Text.from_ansi("\n".join(lines[:LINES])))
            console.print(Text("…\n", style="dim") if len(lines) > LINES else Text(""))
        console.save_svg(str(Path(__file__).with_name("terminal.svg")), title="archerfish")


if __name__ == "__main__":
    main()
