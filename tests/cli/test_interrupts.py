"""A second ctrl-c on the command line: the process ends at once, with status 130, without a word."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from archerfish.cli import interrupts

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


def run(command: str, *, word: str = "None", closing: str = "None", ending: str = "None") -> tuple[int, str, str]:
    script = SCRIPT.format(command=command, word=word, closing=closing, ending=ending)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, input="", check=False)
    return done.returncode, done.stdout, done.stderr


def test_first_interrupt_is_reported() -> None:
    assert run("generate", word=PRESS) == (130, "echo \n", "Interrupted.\n")


def test_second_interrupt_during_cleanup() -> None:
    assert run("generate", word=PRESS, closing=PRESS) == (130, "echo \n", "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_second_interrupt_while_the_interpreter_ends(command: str) -> None:
    """Where Python would show a traceback."""
    code, _, error = run(command, closing=PRESS, ending=PRESS)
    assert (code, error.endswith("Interrupted.\n"), "Traceback" in error) == (130, True, False)


def test_second_interrupt_during_an_answer() -> None:
    code, out, error = run("chat", word=f"({PRESS}, {PRESS}, print('still here'))")
    assert (code, out, "Traceback" in error) == (130, "echo ", False)


OTHERS = """
import signal, sys
from archerfish.cli import {module}
from archerfish.cli.main import main

def run(arguments, out):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        {tidying}

{module}.run_{command} = run
sys.exit(main({words}))
"""


@pytest.mark.parametrize(("module", "words"), [("embed", "embed a"), ("models", "pull")])
def test_second_interrupt_of_other_commands(module: str, words: str) -> None:
    command = words.removesuffix(" a")
    for tidying, told in ((f"{PRESS}; print('still here')", ""), ("None", "Interrupted.\n")):
        script = OTHERS.format(module=module, command=command, tidying=tidying, words=words.split())
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", told)


def test_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.signals_to(interrupts.interrupt_once):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_set_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with interrupts.signals_to(interrupts.interrupt_once):
            interrupts.exit_at_next_interrupt()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
