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


def test_one_interrupt_of_generate_is_told() -> None:
    assert run("generate", word=PRESS) == (130, "echo \n", "Interrupted.\n")


def test_a_second_one_while_generate_tidies_up() -> None:
    assert run("generate", word=PRESS, closing=PRESS) == (130, "echo \n", "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_second_one_while_the_interpreter_ends(command: str) -> None:
    """Where Python would show a traceback."""
    code, _, error = run(command, closing=PRESS, ending=PRESS)
    assert (code, error.endswith("Interrupted.\n"), "Traceback" in error) == (130, True, False)


def test_a_second_one_during_an_answer_of_a_chat() -> None:
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

{module}.run = run
sys.exit(main({words}))
"""


@pytest.mark.parametrize("words", ["embed a", "tts a", "bench scheduler", "bench embed", "pull", "doctor"])
def test_a_second_one_of_any_other_command(words: str) -> None:
    command = words.removesuffix(" a")
    for tidying, told in ((f"{PRESS}; print('still here')", ""), ("None", "Interrupted.\n")):
        script = OTHERS.format(module=command.split()[0], tidying=tidying, words=words.split())
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", told)


def test_the_handler_goes_when_nothing_was_pressed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.ending_at_second():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_has_no_signals() -> None:
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with interrupts.ending_at_second():
            interrupts.end_at_next()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
