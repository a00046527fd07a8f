"""`archerfish convert`: convert a model into a directory of the Arrow store."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, seconds
from archerfish.config import ConversionConfig, HubConfig


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="directory, file, built-in name or Hugging Face id")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="directory to write")
    parser.add_argument("--model-type", default="auto", metavar="KIND", help="what the source is; checked (default: auto)")
    add_options(parser, ConversionConfig, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    config, hub = section(ConversionConfig, arguments), section(HubConfig, arguments)
    from archerfish.store.converter import ModelConverter

    with out.progress("Converting") as progress:
        result = ModelConverter(config, hub=hub).convert(
            arguments.source, arguments.output_dir, model_type=arguments.model_type, progress=progress
        )
    if out.as_json:
        out.result(dataclasses.asdict(result))
        return 0
    rows = [
        ("model", result.model_name),
        ("directory", result.output_dir),
        ("parameters", f"{result.total_parameters:,}"),
        ("type", config.stored_dtype()),
        ("size", f"{result.file_size_mb:.1f} MB, {1 / result.compression_ratio:.2f} of the source"),
        ("validated", "yes" if result.validation_passed else "no (switched off)"),
        ("time", seconds(result.conversion_time_sec)),
    ]
    out.table("Converted", ("", "value"), rows)
    return 0
