"""`python -m archerfish` and the program `archerfish`: the command line."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command line. Until `main` handles ctrl-c, which its imports delay, ctrl-c ends the process silently."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # a shell's background job ignores ctrl-c
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from archerfish.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
