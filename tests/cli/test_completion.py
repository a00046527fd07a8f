"""Completion of command lines in the shells that are installed, and the help that it is made from."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from archerfish.cli.commands import COMMANDS, EXIT_CODES, Command, make_parser
from archerfish.cli.completion import FILES, SHELLS, candidates, choices_of
from archerfish.cli.main import main
from archerfish.errors import ArcherfishError

# A line up to the cursor, and what it becomes.
LINES = {
    "archerfish se": {"serve"},
    "archerfish bench thr": {"throughput"},
    "archerfish bench embed --outp": {"--output"},
    "archerfish serve --device c": {"cpu", "cuda"},
    "archerfish chat --model st": {"story-rwkv7"},
    "archerfish serve --embed-mod": {"--embed-model"},
    "archerfish generate --input no": {"notes.jsonl"},
    "archerfish serve --port ": set[str](),
    "archerfish deploy ": {"ray"},
}
OURS = f'archerfish() {{ {sys.executable} -m archerfish "$@"; }}\n'
BASH = (
    OURS
    + """
compopt() { :; }  # only while a shell completes
. ./script
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _archerfish
printf '%s\\n' "${COMPREPLY[@]}"
"""
)
ZSH = (
    OURS
    + """
_describe() { print -l -- ${${(P)2}%%:*}; }
_files() { print -l -- $words[CURRENT]*(N); }
compdef() { :; }
. ./script
words=("$@") CURRENT=$#; _archerfish
"""
)


@pytest.mark.parametrize("shell", SHELLS)
def test_lines_are_completed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(SHELLS[shell], encoding="utf-8")
    (tmp_path / "notes.jsonl").touch()
    for line, expected in LINES.items():
        if shell == "fish":
            ours = f"function archerfish; {sys.executable} -m archerfish $argv; end"
            words = [shell, "--no-config", "-c", f"{ours}; source ./script; complete -C {shlex.quote(line)}"]
        else:
            words = [shell, "--norc" if shell == "bash" else "-f", "-c", BASH if shell == "bash" else ZSH, shell]
            words += [*shlex.split(line), ""] if line.endswith(" ") else shlex.split(line)
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert not done.stderr
        assert {found.split("\t")[0] for found in done.stdout.splitlines()} - {"", "--help", "script"} == expected, line


def test_what_may_follow_has_descriptions() -> None:
    assert candidates(["se"]) == {"serve": "serve chat, completions, embeddings and reranking over HTTP"}
    assert candidates(["serve", "--model", "st"]) == {"story-rwkv7": "", FILES: ""}
    assert {"bench": "", "top": "watch a running server"}.items() < candidates([""]).items()
    assert candidates(["--qui"]) == {"--quiet": ""} and candidates(["no-command", ""]) == {}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_and_completion_know_the_same(command: Command) -> None:
    parser = make_parser(command)
    shown = parser.format_help()
    assert EXIT_CODES in shown and all(example in shown for example in command.examples)
    found = choices_of(command)
    assert {flag for one in found for flag in one.flags} == set(parser.flags()) | {"-h"}
    assert all(one.description for one in found)


@pytest.mark.parametrize("example", [(c, line) for c in COMMANDS for line in c.examples], ids=lambda one: one[1])
def test_examples_of_the_help_can_be_parsed(example: tuple[Command, str]) -> None:
    command, line = example
    words = shlex.split(line.partition(" > ")[0], comments=True)
    num_words = len(command.name.split()) + 1
    assert words[:num_words] == ["archerfish", *command.name.split()]
    make_parser(command).parse(words[num_words:])


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "fish" in capsys.readouterr().err


def test_exit_codes_of_the_help_are_those_of_errors() -> None:
    def codes(cls: type[ArcherfishError]) -> set[int]:
        return {cls.exit_code}.union(*map(codes, cls.__subclasses__()))

    assert all(f" {code} " in EXIT_CODES for code in codes(ArcherfishError))
