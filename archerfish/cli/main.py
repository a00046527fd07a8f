"""The command line: finds the command, parses its flags, and turns every error into a message and an exit code.

A command NAME has two functions in its module: `add_NAME_arguments(parser)` and `run_NAME(arguments, out) -> exit code`.
Only the module of the given command is imported.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from archerfish import __version__
from archerfish.background import signals_to
from archerfish.bench.table import BENCHES
from archerfish.cli.interrupts import EXIT_INTERRUPTED, interrupt_once
from archerfish.cli.options import COMMON_FLAGS, Parser, add_common, suggest_flag
from archerfish.cli.output import Output, print_error
from archerfish.errors import ArcherfishError, UnknownOptionError, did_you_mean

EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True)
class Command:
    """A command and where its code is."""

    name: str
    module: str
    summary: str
    usage: str = ""


COMMANDS = (
    Command("serve", "serve", "serve chat, completions, embeddings and reranking over HTTP", "[MODEL ...] "),
    Command("keys", "serve", "make an API key for a tenant of the service", "FILE TENANT "),
    Command("deploy ray", "deploy", "serve on a Ray cluster, or on a Ray of this machine", "[CONFIG] "),
    Command("chat", "chat", "talk to a model in the terminal", "[MESSAGE] "),
    Command("generate", "generate", "continue prompts", "[PROMPT ...] "),
    Command("embed", "embed", "turn texts into vectors", "[TEXT ...] "),
    Command("tts", "generate", "turn texts into tokens of speech", "[TEXT ...] "),
    Command("pull", "models", "download models, or list those on this machine", "[MODEL ...] "),
    Command("list", "models", "list the models on this machine: sizes, last use"),
    Command("rm", "models", "delete models from the cache", "MODEL ... "),
    Command("convert", "models", "convert a model into a directory of the Arrow store", "SOURCE OUTPUT_DIR "),
    Command("doctor", "doctor", "report what this machine has, which fast paths are on, and which models fit", "[MODEL] "),
    Command("kernels export", "models", "compile the GPU kernels of a model and write them to a file", "MODEL FILE "),
    Command("kernels import", "models", "read GPU kernels from such a file, which must be trusted like a program", "FILE "),
    Command("simulate", "simulate", "compare routing policies over many replicas in virtual time"),
    *(Command(f"bench {bench.name}", "bench", bench.summary, bench.usage) for bench in BENCHES),
)
DESCRIPTION = "archerfish: one small inference engine. `archerfish COMMAND --help` shows the options of a command."


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
        if "--debug" in arguments:
            traceback.print_exc()
        hint = "This is a bug in archerfish: please report it. --debug shows the traceback."
        unexpected = ArcherfishError(f"Unexpected {type(error).__name__}: {error}", hint=hint)
        told = error if isinstance(error, ArcherfishError) else unexpected
        print_error(told, as_json="--json" in arguments)
        return told.exit_code


def dispatch(arguments: list[str]) -> int:
    leading, rest = split_leading(arguments)
    if "--version" in leading:
        sys.stdout.write(f"archerfish {__version__}\n")
        return 0
    if "--help" in leading or "-h" in leading or not rest:
        sys.stdout.write(overview())
        return 0
    family = [command for command in COMMANDS if command.name.startswith(f"{rest[0]} ")]
    if family and {"--help", "-h"} & set(rest[1:2]):
        sys.stdout.write(overview(rest[0], family))
        return 0
    command, rest = find_command(rest)
    name, module = command.name.split()[0], importlib.import_module(f"archerfish.cli.{command.module}")
    parser = make_parser(command)
    getattr(module, f"add_{name}_arguments")(parser)
    add_common(parser)
    try:
        parsed = parser.parse([*leading, *rest])
    except SystemExit as stop:  # argparse raises it after --help and --version
        return int(stop.code or 0)
    parsed.words = rest
    code: int = getattr(module, f"run_{name}")(parsed, Output(as_json=parsed.json, quiet=parsed.quiet))
    return code


def make_parser(command: Command) -> Parser:
    usage = f"archerfish {command.name} {command.usage}[options]"
    description = f"{command.summary[0].upper()}{command.summary[1:]}."
    epilog = "Options of a [section] are also environment variables (ARCHERFISH_SECTION_NAME) and keys of the TOML file."
    return Parser(prog=f"archerfish {command.name}", usage=usage, description=description, epilog=epilog)


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


def overview(name: str = "COMMAND", listed: Sequence[Command] = COMMANDS) -> str:
    """All commands, or those that begin with one word."""
    width = max(len(command.name) for command in listed) + 2
    commands = "".join(f"  {command.name:<{width}}{command.summary}\n" for command in listed)
    return (
        f"usage: archerfish {name} [options]\n\n{DESCRIPTION}\n\ncommands:\n{commands}\n"
        "everywhere: --config FILE, --json, --quiet, --debug, --version, --help\n"
        "Every option is also an environment variable and a key of the TOML file; see docs/options.md.\n"
    )
