"""The command line: finds the command, parses its flags, and turns every error into a message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from archerfish.background import signals_to
from archerfish.cli.commands import COMMANDS, Command, make_parser, overview
from archerfish.cli.interrupts import EXIT_INTERRUPTED, interrupt_once
from archerfish.cli.options import COMMON_FLAGS, Parser, show_version, suggest_flag
from archerfish.cli.output import Output, print_error
from archerfish.errors import ArcherfishError, MachineError, OutOfMemoryError, UnknownOptionError, did_you_mean

EXIT_BROKEN_PIPE = 141
PACKAGES = {
    "zmq": "pyzmq",
    "sentence_transformers": "sentence-transformers",
}  # modules with another name than their package


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error becomes a message; --debug shows its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with signals_to(interrupt_once, signal.SIGINT):
            code = dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # flushing stdout at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:  # a short message instead of a traceback
        told = as_ours(error)
        if "--debug" in arguments:
            traceback.print_exc()
        print_error(told, as_json="--json" in arguments)
        return told.exit_code


def as_ours(error: Exception) -> ArcherfishError:
    """The error as one of archerfish's. Of a missing package it says which extra brings it."""
    from archerfish.kernels.build import requirements

    if isinstance(error, ArcherfishError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError.of("The command", error)
    package = PACKAGES.get(str(error.name), str(error.name)) if isinstance(error, ModuleNotFoundError) else ""
    extra = next((extra for name, extra in requirements() if package == name), None) if package else None
    if extra is not None:
        hint = f"Run `pip install '{f'archerfish[{extra}]' if extra else package}'`."
        return MachineError(f"This needs the package {package}, which is not installed.", hint=hint)
    hint = "This is a bug in archerfish: please report it. --debug shows the traceback."
    return ArcherfishError(f"Unexpected {type(error).__name__}: {error}", hint=hint)


def dispatch(arguments: list[str]) -> int:
    leading, rest = split_leading(arguments)
    if "--version" in leading:
        return show_version(as_json="--json" in leading)
    if "--help" in leading or "-h" in leading or not rest:
        sys.stdout.write(overview())
        return 0
    family = [command for command in COMMANDS if command.name.startswith(f"{rest[0]} ")]
    if family and {"--help", "-h"} & set(rest[1:2]):
        sys.stdout.write(overview(rest[0], family))
        return 0
    command, rest = find_command(rest)
    parser = make_parser(command)
    try:
        parsed = parser.parse([*leading, *rest])
    except SystemExit as stop:  # argparse raises it after --help and --version
        return int(stop.code or 0)
    parsed.words = rest
    code: int = getattr(command.code, f"run_{command.name.split()[0]}")(
        parsed, Output(as_json=parsed.json, quiet=parsed.quiet)
    )
    return code


def split_leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The common flags in front of the command, and the rest from the command on."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        flag = arguments[at].split("=", 1)[0]
        if flag not in (*COMMON_FLAGS, "-h"):
            raise UnknownOptionError(f"`archerfish` has no option {flag}.", hint=suggest_flag(flag, COMMON_FLAGS))
        at += 2 if arguments[at] == "--config" else 1
    return arguments[:at], arguments[at:]


def find_command(words: list[str]) -> tuple[Command, list[str]]:
    """The command that the first word or two name, and the arguments after it."""
    known = {command.name: command for command in COMMANDS}
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in known:
            return known[name], words[length:]
    finder = Parser(add_help=False)
    finder.add_argument("--baseline", nargs="?")
    file = finder.parse_known_args(words[1:])[0].baseline
    if words[0] == "bench" and words[1:2] and words[1].startswith("-") and file:
        from archerfish.bench.report import Baseline

        baseline = Baseline.read(Path(file))
        if f"bench {baseline.bench}" not in known:
            raise UnknownOptionError(f"The baseline is of a bench {baseline.bench!r}, which does not exist.")
        return known[f"bench {baseline.bench}"], [*baseline.words, *words[1:]]
    family = [name for name in known if name.startswith(f"{words[0]} ")]
    if family:
        hint = f"There are: {', '.join(f'`archerfish {name}`' for name in family)}."
        raise UnknownOptionError(f"`archerfish {words[0]}` needs the name of what to run.", hint=hint)
    raise UnknownOptionError(f"There is no command {words[0]!r}.", hint=did_you_mean(words[0], known))
