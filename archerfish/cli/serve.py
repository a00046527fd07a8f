"""`archerfish serve`: run the HTTP service."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack

from archerfish.cli.interrupts import exit_at_next_interrupt
from archerfish.cli.options import Parser, add_options, dest, section
from archerfish.cli.output import Output
from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ModelConfig, ServeConfig, read_models
from archerfish.errors import InvalidOptionError, MachineError


def add_arguments(parser: Parser) -> None:
    repeatable = [dest(EngineConfig, "model"), dest(EmbedConfig, "model")]
    add_options(parser, ServeConfig, EngineConfig, EmbedConfig, HubConfig, repeatable=repeatable)


def take_models(arguments: Namespace) -> list[ModelConfig]:
    """All models after the first of each flag, which stays in the arguments, and those of the configuration file."""
    found: list[ModelConfig] = []
    for owner, kind in ((EngineConfig, "generation"), (EmbedConfig, "embedding")):
        named: list[str] = vars(arguments).get(dest(owner, "model"), [])
        if named:
            setattr(arguments, dest(owner, "model"), named[0])
            found += [ModelConfig(model=name, kind=kind) for name in named[1:]]
    return [*found, *read_models(arguments.config)]


def run(arguments: Namespace, out: Output) -> int:
    models = take_models(arguments)
    service, engine = section(ServeConfig, arguments), section(EngineConfig, arguments)
    embed, hub = section(EmbedConfig, arguments), section(HubConfig, arguments)
    check_used(service, arguments)
    try:
        from archerfish.serve.run import serve
    except ModuleNotFoundError as error:
        raise MachineError(
            f"The service needs the package {error.name}, which is not installed.",
            hint="Run `pip install 'archerfish[serve]'`.",
        ) from error
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("Loading"))

        def announce(line: str) -> None:
            stack.close()  # removes the progress bar
            if not out.quiet:
                out.line(line)
                sys.stdout.flush()

        try:
            serve(service, engine, embed, hub, progress, models=models, announce=announce)
        finally:
            exit_at_next_interrupt()  # only the interpreter still has to end
    return 0


def check_used(service: ServeConfig, arguments: Namespace) -> None:
    """Raise an error for a flag that names a model of a kind that is not served."""
    flags = {"generation": ("--model", EngineConfig), "embedding": ("--embed-model", EmbedConfig)}
    for kind, (flag, owner) in flags.items():
        if service.kinds not in ("all", kind) and dest(owner, "model") in arguments:
            raise InvalidOptionError(
                f"{flag} names a model of {kind}, but only models of {service.kinds} are served (--kinds).",
                hint=f"Name the model with {flags[service.kinds][0]}, or leave out --kinds.",
            )
