"""A second ctrl-c on the command line: the process ends at once, with status 130, without a word."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from archerfish.cli.interrupts import exit_at_next_interrupt, interrupt_once, signals_to

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit, signal, sys
from archerfish.cli import {command}
from archerfish.cli.main import main
from tests.cli.fake_llm import FakeLLM

class Engine(FakeLLM):
    def __exit__(self, *error):
        {closing}

engine = Engine(lambda number: {word} if number == 1 else None)
{command}.open_engine = lambda config, hub, out: engine
atexit.register(lambda: {ending})
sys.exit(main(["{command}", "a b c"]))
"""
PRESS = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(("command", "presses", "shown", "told"), [
    ("generate", {"word": PRESS}, "echo \n", "Interrupted.\n"), ("generate", {"word": PRESS, "closing": PRESS}, "echo \n", ""),
    ("generate", {"closing": PRESS, "ending": PRESS}, "echo a b c\n", "Interrupted.\n"),
    ("chat", {"closing": PRESS, "ending": PRESS}, "echo a b c\n", "Interrupted.\n"),
    ("chat", {"word": f"({PRESS}, {PRESS}, print('still here'))"}, "echo ", "ends the chat.\n"),
], ids=["first", "during cleanup", "while Python ends", "while Python ends, chat", "during an answer"])  # fmt: skip
def test_interrupts_of_a_command(command: str, presses: dict[str, str], shown: str, told: str) -> None:
    hooks = {"word": "None", "closing": "None", "ending": "None", **presses}
    script = SCRIPT.format(command=command, **hooks)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, input="", check=False)
    assert (done.returncode, done.stdout) == (130, shown)
    assert done.stderr.endswith(told) and bool(done.stderr) == bool(told) and "Traceback" not in done.stderr


def test_handler_is_restored_and_set_in_the_main_thread_only() -> None:
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with signals_to(interrupt_once):
            exit_at_next_interrupt()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    with signals_to(interrupt_once):
        assert signal.getsignal(signal.SIGINT) is interrupt_once
    assert signal.getsignal(signal.SIGINT) is before
