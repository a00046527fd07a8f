"""`archerfish serve` runs the HTTP service; `archerfish keys` makes an API key for one of its tenants."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack

from archerfish.cli.interrupts import exit_at_next_interrupt
from archerfish.cli.options import Parser, add_options, as_flag, dest, section
from archerfish.cli.output import Output
from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.errors import InvalidOptionError
from archerfish.serve.model_tables import ModelConfig, read_models

# Kinds of models: the flag that names one, and the section of its options.
MODEL_FLAGS = {"generation": ("--model", EngineConfig), "embedding": ("--embed-model", EmbedConfig)}
MOST_USED = (
    "engine.model",
    "embed.model",
    "serve.host",
    "serve.port",
    "serve.api_keys_file",
    "serve.loads",
    "engine.device",
    "engine.dtype",
    "engine.weights",
    "engine.max_model_len",
)
SERVED_NAME = dest(ServeConfig, "served_model_name")
LIMITS = {
    "requests_per_minute": (float, "most requests in a minute (default: no limit)"),
    "tokens_per_minute": (float, "most tokens, of prompts and answers, in a minute (default: no limit)"),
    "weight": (float, "share of the batch, relative to other tenants (default: 1)"),
    "max_priority": (int, "highest priority of its requests (default: 0)"),
}


def add_serve_arguments(parser: Parser) -> None:
    text = "model to serve: the same as --model, --embed-model or --rerank-model, whichever fits the model"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    repeatable = [SERVED_NAME, *(dest(owner, "model") for _, owner in MODEL_FLAGS.values())]
    add_options(parser, ServeConfig, EngineConfig, EmbedConfig, HubConfig, first=MOST_USED, repeatable=repeatable)


def take_models(arguments: Namespace) -> list[ModelConfig]:
    """All models after the first of each flag, which stays in the arguments, and those of the configuration file."""
    found: list[ModelConfig] = []
    for kind, (_, owner) in MODEL_FLAGS.items():
        named: list[str] = vars(arguments).get(dest(owner, "model"), [])
        if named:
            setattr(arguments, dest(owner, "model"), named[0])
            is_default = len(named) > 1 and named[0] == vars(owner)["model"]  # which other models would replace
            found += [ModelConfig(model=name, kind=kind) for name in (named if is_default else named[1:])]
    return [*found, *read_models(arguments.config)]


def name_by_flags(arguments: Namespace, out: Output) -> None:
    """Turn each MODEL into the flag of its kind, before the models that flags name."""
    from archerfish.engine.inference_core import kind_of
    from archerfish.store.names import resolve_model

    for name in reversed(arguments.models):
        with out.progress(f"Looking at {name}") as progress:
            kind = kind_of(resolve_model(name, section(HubConfig, arguments), progress))
        if kind == "cross-encoder":
            setattr(arguments, dest(ServeConfig, "rerank_model"), name)
        else:
            key = dest(MODEL_FLAGS[kind][1], "model")
            setattr(arguments, key, [name, *vars(arguments).get(key, [])])


def run_serve(arguments: Namespace, out: Output) -> int:
    name_by_flags(arguments, out)
    models = take_models(arguments)
    if SERVED_NAME in arguments:
        setattr(arguments, SERVED_NAME, ",".join(vars(arguments)[SERVED_NAME]))
    service, engine = section(ServeConfig, arguments), section(EngineConfig, arguments)
    embed, hub = section(EmbedConfig, arguments), section(HubConfig, arguments)
    for kind, (flag, owner) in MODEL_FLAGS.items():
        if service.kinds not in ("all", kind) and dest(owner, "model") in arguments:
            message = f"{flag} names a model of {kind}, but only models of {service.kinds} are served (--kinds)."
            hint = f"Name the model with {MODEL_FLAGS[service.kinds][0]}, or leave out --kinds."
            raise InvalidOptionError(message, hint=hint)
    from archerfish.serve.run import serve

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


def add_keys_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="file with the hashes of keys, for [serve] api_keys_file")
    parser.add_argument("name", metavar="TENANT", help="name of the tenant, who may have several keys")
    for name, (kind, description) in LIMITS.items():
        parser.add_argument(as_flag(name), type=kind, metavar="N", help=description)
    parser.add_argument(
        "--operator", action="store_true", help="may read the statistics of all tenants and change options"
    )


def run_keys(arguments: Namespace, out: Output) -> int:
    from archerfish.serve.tenants import add_key

    limits = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    if arguments.operator:
        limits["is_operator"] = True
    key = add_key(arguments.file, arguments.name, **limits)
    if out.as_json:
        out.result({"tenant": arguments.name, "key": key, "file": arguments.file})
    out.line(key)
    out.note("The key is shown only this once: the file keeps its hash.")
    return 0
