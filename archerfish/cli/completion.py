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

PATHS = {"FILE", "DIR", "SOURCE", "OUTPUT_DIR", "CONFIG", "MODEL"}  # names of values that may be paths of files


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
        is_path = metavar in PATHS or action.dest.endswith(("file", "dir", "model"))
        yield Choice(tuple(action.option_strings), text, takes_value, listed, is_path)


def families() -> dict[str, str]:
    """Commands of two words: the second words of each first one."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        first, *rest = command.name.split()
        if rest:
            found.setdefault(first, []).append(rest[0])
    return {first: " ".join(rest) for first, rest in found.items()}


# bash


def bash() -> str:
    """What can follow, by the command and the word before; "@files" at its end stands for files."""
    known = {"": " ".join(dict.fromkeys([*(command.name.split()[0] for command in COMMANDS), *COMMON_FLAGS])), **families()}
    for command in COMMANDS:
        found = list(choices_of(command))
        known[command.name] = " ".join(flag for one in found for flag in one.flags)
        for one in reversed(found):
            values = " ".join(one.values) + (" @files" if one.is_path else "")
            known |= {f"{command.name} {flag}": values for flag in one.flags or ("",) if one.takes_value}
    table = "\n".join(f"    {shlex.quote(key)}) found={shlex.quote(text)} ;;" for key, text in known.items())
    return BASH.replace("TABLE", table).replace("FAMILIES", "|".join(families()))


BASH = """# bash completion of archerfish, made by `archerfish completion bash`
_archerfish_known() {
  case $1 in
TABLE
    *) return 1 ;;
  esac
}
_archerfish() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} name= found= at=1
  while ((at < COMP_CWORD)) && [[ ${COMP_WORDS[at]} == -* ]]; do ((at++)); done
  if ((at < COMP_CWORD)); then name=${COMP_WORDS[at]}; fi
  case $name in FAMILIES) if ((at + 1 < COMP_CWORD)); then name="$name ${COMP_WORDS[at+1]}"; fi ;; esac
  COMPREPLY=()
  if [[ $cur == -* ]]; then _archerfish_known "$name"
  else _archerfish_known "$name $prev" || _archerfish_known "$name " || _archerfish_known "$name"; fi
  if [[ $found == *@files ]]; then compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); fi
  COMPREPLY+=($(compgen -W "${found%@files}" -- "$cur"))
}
complete -F _archerfish archerfish
"""


# zsh


def zsh() -> str:
    cases = []
    for command in COMMANDS:
        specs = []
        for one in choices_of(command):
            text = re.sub(r"([\[\]:\\])", r"\\\1", one.description)
            words = " ".join(one.values)
            value = f"{{{f'compadd {words}; ' if words else ''}_files}}" if one.is_path else f"({words})" if words else " "
            specs += [f"*{flag}[{text}]" + (f":value:{value}" if one.takes_value else "") for flag in one.flags]
            specs += [] if one.flags else [f"*:{text}:{value}"]
        cases.append(f"    {shlex.quote(command.name)}) _arguments -s {' '.join(map(shlex.quote, specs))} ;;")
    described = " ".join(shlex.quote(f"{c.name}:{c.summary}") for c in COMMANDS if " " not in c.name)
    seconds = "\n".join(f"    {first}) seconds=({names}) ;;" for first, names in families().items())
    parts = {"COMMANDS": f"{described} {' '.join(families())}", "SECONDS": seconds, "CASES": "\n".join(cases)}
    return re.sub("COMMANDS|SECONDS|CASES", lambda found: parts[found[0]], ZSH)


ZSH = """#compdef archerfish
# zsh completion of archerfish, made by `archerfish completion zsh`
_archerfish() {
  local name; local -a commands seconds
  commands=(COMMANDS)
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  name=$words[2]
  case $name in
SECONDS
  esac
  if (( $#seconds )); then
    if (( CURRENT == 3 )); then compadd -- $seconds; return; fi
    name="$name $words[3]"
    shift words; (( CURRENT-- ))
  fi
  shift words; (( CURRENT-- ))
  case $name in
CASES
  esac
}
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
            files = " -F" if one.is_path else ""
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
