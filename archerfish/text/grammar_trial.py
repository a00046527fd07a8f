"""Compiles the grammar on its standard input, in limited time and memory. The system ends it beyond the limits.

It runs as a script and loads llguidance's extension alone: that takes 30 ms, the whole package takes 200 ms.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from importlib import import_module


def compile_input(package: str, max_states: int, max_items: int) -> None:
    sys.path.append(package)
    library = import_module("_lib")
    limits = library.LLParserLimits(max_lexer_states=max_states, step_max_items=max_items, verbose_errors=False)
    library.LLMatcher(library.LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits).compute_bitmask()
    os._exit(0)


if __name__ == "__main__":
    max_seconds, max_bytes, stack_bytes, *limits = map(int, sys.argv[2:])
    os.nice(10)
    for what, most in ((resource.RLIMIT_CPU, max_seconds), (resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))
    threading.stack_size(stack_bytes)
    threading.excepthook = lambda _: os._exit(1)  # llguidance panicked
    threading.Thread(target=compile_input, args=(sys.argv[1], *limits)).start()
