"""`archerfish pull`: download models, or list those on this machine."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, size
from archerfish.config import HubConfig
from archerfish.errors import InvalidInputError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="built-in name or Hugging Face id (org/name, org/name:file)")
    parser.add_argument("--list", action="store_true", help="list the built-in models and everything in the cache")
    add_options(parser, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    hub = section(HubConfig, arguments)
    if not arguments.models and not arguments.list:
        raise InvalidInputError("No model is named.", hint="Name a model; `archerfish pull --list` lists them.")
    pulled = [pull_one(name, hub, out) for name in arguments.models]
    if arguments.list:
        list_all(hub, out)
    elif out.as_json:
        out.result({"models": pulled})
    return 0


def pull_one(name: str, hub: HubConfig, out: Output) -> dict[str, str]:
    from archerfish.store.names import resolve_model

    with out.progress(f"Pulling {name}") as progress:
        path = resolve_model(name, hub, progress)
    out.line(f"{name}: {path}")
    return {"name": name, "path": str(path)}


def list_all(hub: HubConfig, out: Output) -> None:
    from archerfish.store.names import list_models

    models = list_models(hub)
    if out.as_json:
        rows = [
            {
                "name": model.name, "source": model.source, "path": str(model.path) if model.path else None,
                "bytes": model.num_bytes, "license": model.license, "description": model.description,
            }
            for model in models
        ]
        out.result({"cache_dir": str(hub.cache_path()), "models": rows})
        return
    cells = [(m.name, m.source, size(m.num_bytes), m.license or "-", place(m.path, hub)) for m in models]
    out.table(f"Models (cache: {hub.cache_path()})", ("name", "source", "size", "license", "where"), cells, numbers=("size",))


def place(path: Path | None, hub: HubConfig) -> str:
    """The place of a model, relative to the cache if it is there."""
    if path is None:
        return "not downloaded"
    cache = hub.cache_path()
    return f"{path.relative_to(cache).parent}/" if path.is_relative_to(cache) else str(path)
