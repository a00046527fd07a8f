"""`archerfish bench rwkv`."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

from archerfish.cli import bench_generate
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.config import EngineConfig

SHAPE_NAMES = ("tiny", "0.1b", "0.4b")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--shape", default="0.1b", choices=SHAPE_NAMES, help=(
        "random weights of this shape, unless --model names a model (default: 0.1b)"))  # fmt: skip
    parser.add_argument("--spacings", default="", metavar="A,B", help="tokens between two kept states, to be compared")
    bench_generate.add_arguments(parser)


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench import rwkv

    given = arguments.spacings
    spacings = bench_generate.read_numbers("--spacings", given) if given else list(rwkv.SPACINGS)
    report = bench_generate.new_report(out)
    with tempfile.TemporaryDirectory(prefix="archerfish-") as scratch:
        if config.model == EngineConfig().model:
            shape = rwkv.write_shape(arguments.shape, Path(scratch) / f"rwkv7-{arguments.shape}")
            config = config.replace(model=str(shape), load_format="dummy")
        with out.progress("Measuring") as progress:
            rwkv.measure(config, report, arguments.rounds, spacings, progress)
    named = config.replace(model=Path(config.model).name)
    return bench_generate.show("rwkv", report, rwkv.bars(report), named, arguments, out)
