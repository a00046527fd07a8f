"""Completion of command lines in the shells that are installed, and the help that it is made from."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from archerfish.cli.commands import COMMANDS, EXIT_CODES, Command, make_parser
from archerfish.cli.completion import SHELLS, choices_of
from archerfish.cli.main import main
from archerfish.errors import ArcherfishError

# A line up to the cursor, and what it becomes.
LINES = {
    "archerfish se": {"serve"}, "archerfish bench thr": {"throughput"}, "archerfish bench embed --outp": {"--output"},
    "archerfish serve --device c": {"cpu", "cuda"}, "archerfish chat --model st": {"story-rwkv7"},
    "archerfish serve --embed-mod": {"--embed-model"}, "archerfish generate --input no": {"notes.jsonl"},
    "archerfish serve --port ": set[str](), "archerfish deploy ": {"ray", "--help"},
}  # fmt: skip
BASH = """
compopt() { :; }  # only while a shell completes
. ./script
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _archerfish
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
_describe() { local -a given=(${(P)2}); print -l ${given%%:*}; }
_arguments() { shift; print -l "$@"; }
compdef() { :; }
. ./script
words=("$@") CURRENT=$#; _archerfish
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {name: make() for name, make in SHELLS.items()}


def complete(shell: str, script: str, line: str, where: Path) -> set[str]:
    (where / "script").write_text(script, encoding="utf-8")
    (where / "notes.jsonl").touch()
    if shell == "fish":
        words = [shell, "--no-config", "-c", f"source ./script; complete -C {shlex.quote(line)}"]
    else:
        words = [shell, "--norc" if shell == "bash" else "-f", "-c", BASH if shell == "bash" else ZSH, shell]
        words += [*shlex.split(line), ""] if line.endswith(" ") else shlex.split(line)
    done = subprocess.run(words, cwd=where, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return {found.split("\t")[0] for found in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_lines_are_completed(shell: str, scripts: dict[str, str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for line, expected in LINES.items():
        assert complete(shell, scripts[shell], line, tmp_path) - {"--help"} == expected - {"--help"}, line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_is_told_commands_and_flags(scripts: dict[str, str], tmp_path: Path) -> None:
    """With stand-ins for zsh's functions that show what they are given."""
    assert {"serve", "bench", "completion"} <= complete("zsh", scripts["zsh"], "archerfish se", tmp_path)
    given = complete("zsh", scripts["zsh"], "archerfish bench embed --", tmp_path)
    assert "*--output[write the report as JSON to FILE]:value:{_files}" in given
    given = complete("zsh", scripts["zsh"], "archerfish serve --", tmp_path)
    assert any(one.startswith("*--device[") and one.endswith(":value:(cpu cuda mps auto)") for one in given)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_and_completion_know_the_same(command: Command) -> None:
    parser = make_parser(command)
    shown = parser.format_help()
    assert EXIT_CODES in shown and all(example in shown for example in command.examples)
    found = list(choices_of(command))
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
