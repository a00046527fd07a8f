"""`archerfish pull`, `list` and `rm`: the models on this machine; `archerfish convert` converts one for the Arrow
store."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from datetime import datetime
from typing import Any

from archerfish.cli.options import Parser, add_options, dest, section
from archerfish.cli.output import Output, seconds
from archerfish.config import ConversionConfig, EngineConfig, HubConfig
from archerfish.engine.converter import QUALITY_NAME, ModelConverter
from archerfish.engine.progress import size
from archerfish.errors import InvalidInputError
from archerfish.store.names import list_models, remove_model, resolve_model

MODEL = dest(EngineConfig, "model")  # where a command line has it


def add_pull_arguments(parser: Parser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="built-in name or Hugging Face id (org/name, org/name:file)"
    )
    parser.add_argument("--list", action="store_true", help="list the built-in models and everything in the cache")
    add_options(parser, HubConfig)


def run_pull(arguments: Namespace, out: Output) -> int:
    hub = section(HubConfig, arguments)
    if not arguments.models and not arguments.list:
        raise InvalidInputError("No model is named.", hint="Name a model; `archerfish pull --list` lists them.")
    pulled = []
    for name in arguments.models:
        with out.progress(f"Pulling {name}") as progress:
            path = resolve_model(name, hub, progress)
        out.line(f"{name}: {path}")
        pulled.append({"name": name, "path": str(path)})
    if arguments.list:
        list_all(hub, out)
    elif out.as_json:
        out.result({"models": pulled})
    return 0


def add_list_arguments(parser: Parser) -> None:
    add_options(parser, HubConfig)


def run_list(arguments: Namespace, out: Output) -> int:
    list_all(section(HubConfig, arguments), out)
    return 0


def add_rm_arguments(parser: Parser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name of a model, as `archerfish list` shows it")
    add_options(parser, HubConfig)


def run_rm(arguments: Namespace, out: Output) -> int:
    removed = []
    for name in arguments.models:
        rows = remove_model(name, section(HubConfig, arguments))
        num_bytes = sum(row.num_bytes for row in rows)
        removed.append({"name": name, "bytes": num_bytes, "paths": [str(path) for row in rows for path in row.paths]})
        out.line(f"Removed {name}: {size(num_bytes)}.")
    if out.as_json:
        out.result({"removed": removed})
    return 0


def list_all(hub: HubConfig, out: Output) -> None:
    cache = hub.cache_path()
    rows, cells = [], []
    for model in list_models(hub):
        path = model.path
        rows.append(
            {
                "name": model.name,
                "source": model.source,
                "path": str(path) if path else None,
                "bytes": model.num_bytes,
                "license": model.license,
                "description": model.description,
                "last_used": model.last_used or None,
            }
        )
        place = str(path or "not downloaded")
        if path is not None and path.is_relative_to(cache):
            place = f"{path.relative_to(cache).parent}/"
        used = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M") if model.last_used else "-"
        form = model.description if model.source == "cache" else model.source
        cells.append((model.name, form.lower().rstrip("."), size(model.num_bytes), used, model.license or "-", place))
    if out.as_json:
        out.result({"cache_dir": str(cache), "models": rows})
    out.table(
        f"Models (cache: {cache})", ("name", "form", "size", "last use", "license", "where"), cells, numbers=("size",)
    )


def add_convert_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="directory, file, built-in name or Hugging Face id")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="directory to write")
    parser.add_argument(
        "--model-type", default="auto", metavar="KIND", help="what the source is; checked (default: auto)"
    )
    add_options(parser, ConversionConfig, HubConfig)


def run_convert(arguments: Namespace, out: Output) -> int:
    config, hub = section(ConversionConfig, arguments), section(HubConfig, arguments)
    with out.progress("Converting") as progress:
        source = arguments.source
        target = arguments.output_dir
        kind = arguments.model_type
        result = ModelConverter(config, hub=hub).convert(source, target, model_type=kind, progress=progress)
    if out.as_json:
        out.result(dataclasses.asdict(result))
    rows = [
        ("model", result.model_name),
        ("directory", result.output_dir),
        ("parameters", f"{result.total_parameters:,}"),
        (
            "type",
            config.stored_dtype() if config.weights == "auto" else f"{config.weights}; others {config.stored_dtype()}",
        ),
        ("size", f"{result.file_size_mb:.1f} MB, {1 / result.compression_ratio:.2f} of the source"),
        ("validated", "yes" if result.validation_passed else "no (switched off)"),
        ("time", seconds(result.conversion_time_sec)),
    ]
    out.table("Converted", ("", "value"), [*rows, *quality_rows(result.quality)])
    return 0


def quality_rows(quality: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What quantising cost, and the layer with the largest error."""
    if quality is None:
        return []
    found = [("measured on", f"{quality['num_tokens']:,} tokens {quality['text']}")]
    if "perplexity" in quality:
        before, after, change = (quality[name] for name in ("perplexity", "perplexity_quantised", "perplexity_change"))
        found += [
            ("perplexity", f"{after:.3f}, of the original {before:.3f} ({change:+.2%})"),
            ("KL divergence", f"{quality['kl_divergence']:.4f} nats a token"),
            ("same token first", f"{quality['top1_agreement']:.1%}"),
        ]
    else:
        found += [
            ("cosine", f"{quality['cosine_mean']:.5f} on average, at least {quality['cosine_least']:.5f}"),
            ("rank correlation", f"{quality['rank_correlation']:.5f} of the similarities of all pairs"),
        ]
    worst, error = max(
        ((name, max(errors.values())) for name, errors in quality["layers"].items()), key=lambda pair: pair[1]
    )
    return [*found, ("largest error", f"{error:.2%} of a product in {worst}; all layers: {QUALITY_NAME}")]
