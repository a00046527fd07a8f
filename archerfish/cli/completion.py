"""`archerfish completion SHELL`: completion for bash, zsh and fish, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from archerfish.cli.commands import COMMANDS, Command, make_parser
from archerfish.cli.options import COMMON_FLAGS, Parser
from archerfish.cli.output import Output
from archerfish.store.names import BUILTIN_MODELS

PATHS = {"FILE", "DIR", "SOURCE", "OUTPUT_DIR", "CONFIG", "TEXT"}  # names of values that may be paths of files


@dataclass(frozen=True)
class Choice:
    """A flag, or the place of a word where `flags` is empty, and what can follow."""

    flags: tuple[str, ...]
    description: str
    takes_value: bool
    values: tuple[str, ...]  # that the help lists; empty: anything
    is_path: bool


def add_completion_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")


def run_completion(arguments: Namespace, out: Output) -> int:
    text = SHELLS[arguments.shell]()
    out.result({"shell": arguments.shell, "script": text}) if out.as_json else out.line(text.rstrip())
    return 0


def choices_of(command: Command) -> Iterator[Choice]:
    """Flags and words of a command."""
    for action in make_parser(command)._actions:
        metavar, listed = str(action.metavar or ""), tuple(map(str, action.choices or ()))
        if metavar.startswith("{"):
            listed = tuple(metavar.strip("{}").split(","))
        elif metavar == "MODEL" or action.dest.endswith((".model", "_model")):
            listed = tuple(BUILTIN_MODELS)
        takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        text = re.sub(r"\s+", " ", str(action.help or "").replace("%%", "%")).split(" (default")[0].split(". ")[0].rstrip(".")
        is_path = metavar in PATHS or metavar == "MODEL" or action.dest.endswith(("file", "dir", ".model"))
        yield Choice(tuple(action.option_strings), text, takes_value, listed, is_path)


# bash


def bash() -> str:
    flags, values, words = [], [], []
    for command in COMMANDS:
        name = shlex.quote(command.name)
        found = list(choices_of(command))
        flags.append(f"    {name}) flags={shlex.quote(' '.join(flag for one in found for flag in one.flags))} ;;")
        listed = next((one.values for one in found if not one.flags and one.values), ())
        words += [f"    {name}) words={shlex.quote(' '.join(listed))} ;;"]
        for one in found:
            if one.takes_value and one.flags:
                pattern = "|".join(shlex.quote(f"{command.name} {flag}") for flag in one.flags)
                text = " ".join(one.values) + (" @files" if one.is_path else "")
                values.append(f"    {pattern}) values={shlex.quote(text)} ;;")
    return BASH.format(
        commands=shlex.quote(" ".join(dict.fromkeys(command.name.split()[0] for command in COMMANDS))), flags="\n".join(flags),
        common=shlex.quote(" ".join(COMMON_FLAGS)), values="\n".join(values), words="\n".join(words),
        seconds="\n".join(f"    {first}) seconds='{names}' ;;" for first, names in families().items()),
    )  # fmt: skip


BASH = """# bash completion of archerfish, made by `archerfish completion bash`
_archerfish() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} name= seconds= flags= words= values=none at=1
  COMPREPLY=()
  while ((at < COMP_CWORD)) && [[ ${{COMP_WORDS[at]}} == -* ]]; do ((at++)); done
  ((at < COMP_CWORD)) && name=${{COMP_WORDS[at]}}
  case $name in
{seconds}
  esac
  if [[ $seconds ]]; then
    if ((at + 1 >= COMP_CWORD)); then COMPREPLY=($(compgen -W "$seconds --help" -- "$cur")); return; fi
    name="$name ${{COMP_WORDS[at+1]}}"
  fi
  if [[ ! $name ]]; then COMPREPLY=($(compgen -W {commands}" "{common} -- "$cur")); return; fi
  case "$name $prev" in
{values}
  esac
  if [[ $values != none ]]; then
    [[ $values == *@files ]] && compopt -o filenames; [[ $values == *@files ]] && COMPREPLY=($(compgen -f -- "$cur"))
    COMPREPLY+=($(compgen -W "${{values%@files}}" -- "$cur"))
    return
  fi
  case $name in
{flags}
  esac
  if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur")); return; fi
  case $name in
{words}
  esac
  compopt -o filenames
  COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
}}
complete -F _archerfish archerfish
"""


def families() -> dict[str, str]:
    """Commands of two words: the second words of each first one."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        first, *rest = command.name.split()
        if rest:
            found.setdefault(first, []).append(rest[0])
    return {first: " ".join(rest) for first, rest in found.items()}


# zsh


def zsh() -> str:
    cases = []
    for command in COMMANDS:
        specs = []
        for one in choices_of(command):
            action = f"({' '.join(one.values)})" if one.values and not one.is_path else "_files" if one.is_path else " "
            text = re.sub(r"([\[\]:\\])", r"\\\1", one.description)
            if not one.flags:
                specs.append(f"*:{text}:" + (f'{{compadd {" ".join(one.values)}; _files}}' if one.values else "_files"))
            value = f":value:{action}" if one.takes_value else ""
            if one.values and one.is_path and one.flags:
                value = f':value:{{compadd {" ".join(one.values)}; _files}}'
            specs += [f"*{flag}[{text}]{value}" for flag in one.flags]
        lines = " \\\n        ".join(map(shlex.quote, specs))
        cases.append(f"    {shlex.quote(command.name)}) _arguments -s \\\n        {lines} ;;")
    described = " ".join(shlex.quote(f"{c.name.split()[0]}:{c.summary}") for c in COMMANDS if " " not in c.name)
    families_ = "\n".join(f"    {first}) seconds=({names}) ;;" for first, names in families().items())
    return ZSH.format(commands=f"{described} {' '.join(families())}", seconds=families_, cases="\n".join(cases))


ZSH = """#compdef archerfish
# zsh completion of archerfish, made by `archerfish completion zsh`
_archerfish() {{
  local name; local -a commands seconds
  commands=({commands})
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  name=$words[2]
  case $name in
{seconds}
  esac
  if (( $#seconds )); then
    if (( CURRENT == 3 )); then compadd -- $seconds; return; fi
    name="$name $words[3]"
    shift words; (( CURRENT-- ))
  fi
  shift words; (( CURRENT-- ))
  case $name in
{cases}
  esac
}}
if [ "$funcstack[1]" = "_archerfish" ]; then _archerfish "$@"; else compdef _archerfish archerfish; fi
"""


# fish


def fish() -> str:
    lines = ["# fish completion of archerfish, made by `archerfish completion fish`", FISH, "complete -c archerfish -f"]
    for first, names in families().items():
        lines.append(f"complete -c archerfish -n '__archerfish_is' -a {first}")
        lines.append(f"complete -c archerfish -n '__archerfish_is {first}' -a '{names}'")
    for command in COMMANDS:
        when = f"complete -c archerfish -n '__archerfish_is {command.name}'"
        if " " not in command.name:
            lines.append(f"complete -c archerfish -n '__archerfish_is' -a {command.name} -d {fish_quote(command.summary)}")
        for one in choices_of(command):
            values = f" -a {fish_quote(' '.join(one.values))}" if one.values else ""
            files = " -F" if one.is_path or not one.flags else ""
            value = f" -r{files or ' -f'}{values}" if one.takes_value else ""
            names = "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in one.flags)
            lines.append(f"{when}{names}{value if one.flags else files + values} -d {fish_quote(one.description)}")
    return "\n".join(lines) + "\n"


FISH = """function __archerfish_is --description 'whether the command is the given words'
  set -l words (commandline -opc)[2..]
  set -l plain (string match -v -- '-*' $words)
  test (count $argv) = 0; and test (count $plain) = 0; and return 0
  test (count $argv) -gt 0; or return 1
  contains -- "$argv[1]" deploy kernels bench; and test (count $argv) = 1; and test (count $plain) != 1; and return 1
  test "$plain[1..$(count $argv)]" = "$argv"
end"""


def fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
