"""`archerfish completion SHELL`: completion for bash, zsh and fish.

Their scripts ask `archerfish completion SHELL -- WORD ...` at every tab, so that they know what this version knows.
"""

from __future__ import annotations

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from archerfish.cli.commands import COMMANDS, Command, make_parser
from archerfish.cli.options import COMMON_FLAGS, Parser
from archerfish.cli.output import Output
from archerfish.store.names import BUILTIN_MODELS

PATHS = {"FILE", "DIR", "SOURCE", "OUTPUT_DIR", "CONFIG", "MODEL"}  # names of values that may be paths of files
FILES = "@files"  # stands for the names of files, which the shells know better
SHELLS = {
    "bash": r"""# bash completion of archerfish, made by `archerfish completion bash`
_archerfish() {
  local cur=${COMP_WORDS[COMP_CWORD]} line
  COMPREPLY=()
  while IFS= read -r line; do
    if [[ $line == @files* ]]; then compopt -o filenames; COMPREPLY+=($(compgen -f -- "$cur"))
    else COMPREPLY+=("${line%%$'\t'*}"); fi
  done < <(archerfish completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)
}
complete -F _archerfish archerfish
""",
    "zsh": r"""#compdef archerfish
# zsh completion of archerfish, made by `archerfish completion zsh`
_archerfish() {
  local -a found
  found=(${(f)"$(archerfish completion zsh -- "${(@)words[2,CURRENT]}" 2> /dev/null)"})
  found=(${found//:/\\:})
  found=(${found/$'\t'/:})
  if [[ $found[-1] == @files* ]]; then found[-1]=(); _files; fi
  if (( $#found )); then _describe archerfish found; fi
}
if [ "$funcstack[1]" = "_archerfish" ]; then _archerfish "$@"; else compdef _archerfish archerfish; fi
""",
    "fish": r"""# fish completion of archerfish, made by `archerfish completion fish`
function __archerfish_found
  set -l current (commandline -ct)
  for line in (archerfish completion fish -- (commandline -opc)[2..] "$current" 2> /dev/null)
    if string match -q -- '@files*' $line; __fish_complete_path "$current"; else; printf '%s\n' $line; end
  end
end
complete -c archerfish -f -a '(__archerfish_found)'
""",
}


@dataclass(frozen=True)
class Choice:
    """A flag, or the place of a word where `flags` is empty, and what can follow."""

    flags: tuple[str, ...]
    description: str
    takes_value: bool
    values: tuple[str, ...]  # that the help lists, and FILES; empty: anything


def add_completion_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument("line", nargs="*", metavar="WORD", help="words up to the cursor, after --: list what fits")


def run_completion(arguments: Namespace, out: Output) -> int:
    text = SHELLS[arguments.shell]
    if arguments.line:
        found = candidates(arguments.line)
        sys.stdout.writelines(f"{name}\t{found[name]}\n" for name in sorted(found, key=lambda name: name == FILES))
    elif out.as_json:
        out.result({"shell": arguments.shell, "script": text})
    else:
        out.line(text.rstrip())
    return 0


def candidates(words: Sequence[str]) -> dict[str, str]:
    """What the last word may become, with descriptions. FILES among them: any file, too."""
    current, before = words[-1], list(words[:-1])
    while before and before[0].startswith("-"):
        before.pop(0)
    command = next((one for one in COMMANDS if one.name in (" ".join(before[:1]), " ".join(before[:2]))), None)
    begun, found = " ".join([*before, ""]), dict[str, str]()
    if command is not None:
        found = follow(command, before[-1], current)
    elif current.startswith("-") and not before:
        found = dict.fromkeys(COMMON_FLAGS, "")
    else:
        for other in COMMANDS:
            if other.name.startswith(begun):
                word, _, rest = other.name.removeprefix(begun).partition(" ")
                found[word] = "" if rest else other.summary
    return {name: text for name, text in found.items() if name.startswith(current) or name == FILES}


def follow(command: Command, last: str, current: str) -> dict[str, str]:
    """What may stand in a command behind the word `last`."""
    choices = choices_of(command)
    flags = {flag: one.description for one in choices for flag in one.flags}
    place = next((one for one in choices if one.takes_value and last in one.flags), None)
    place = place or next((one for one in choices if not one.flags), None)
    return flags if current.startswith("-") or place is None else dict.fromkeys(place.values, "")


def choices_of(command: Command) -> list[Choice]:
    """Flags and words of a command."""
    found = []
    for action in make_parser(command)._actions:
        metavar, values = str(action.metavar or ""), tuple(map(str, action.choices or ()))
        if metavar.startswith("{"):
            values = tuple(metavar.strip("{}").split(","))
        elif metavar == "MODEL" or action.dest.endswith((".model", "_model")):
            values = tuple(BUILTIN_MODELS)
        if metavar in PATHS or action.dest.endswith(("file", "dir", "model")):
            values += (FILES,)
        takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        text = (
            re.sub(r"\s+", " ", str(action.help or "").replace("%%", "%"))
            .split(" (default")[0]
            .split(". ")[0]
            .rstrip(".")
        )
        found.append(Choice(tuple(action.option_strings), text, takes_value, values))
    return found
