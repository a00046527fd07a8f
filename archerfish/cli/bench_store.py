"""`archerfish bench store`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from archerfish.cli.bench_report import add_report_arguments, finish
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, seconds, size
from archerfish.config import EmbedConfig, HubConfig
from archerfish.errors import InvalidOptionError


def add_arguments(parser: Parser) -> None:
    default = EmbedConfig.model
    parser.add_argument("--model", default=default, metavar="MODEL", help=f"name or path of the model (default: {default})")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of every measurement (default: 5)")
    parser.add_argument("--scratch", default="", metavar="DIR", help="directory for temporary files (default: the cache)")
    add_report_arguments(parser)
    add_options(parser, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    hub = section(HubConfig, arguments)
    if arguments.rounds < 1:
        raise InvalidOptionError("--rounds must be at least 1.")
    from archerfish.bench.report import machine
    from archerfish.bench.store import run_store_bench
    from archerfish.store.names import resolve_model

    with out.progress("Measuring") as progress:
        source = resolve_model(arguments.model, hub, progress)
        scratch = Path(arguments.scratch) if arguments.scratch else hub.cache_path()
        scratch.mkdir(parents=True, exist_ok=True)
        report = run_store_bench(source, scratch, arguments.rounds, progress)
    base = report.openings[0].seconds.median
    rows = [
        (
            opening.name, seconds(opening.seconds.median), f"{seconds(opening.seconds.low)}-{seconds(opening.seconds.high)}",
            f"{opening.seconds.median / base:.1f}x", size(opening.file_bytes), size(opening.rss_growth_bytes),
        )
        for opening in report.openings
    ]  # fmt: skip
    columns = ("all tensors of float32 weights", "open", "range", "vs archerfish", "file", "RSS growth")
    out.table("", columns, rows, numbers=columns[1:])
    out.line()
    speeds = [(name, f"{s.median:,.0f}", f"{s.low:,.0f}-{s.high:,.0f}") for name, s in report.conversions.items()]
    out.table("", ("conversion writes", "MB/s of source", "range"), speeds, numbers=("MB/s of source", "range"))
    return finish({"model": arguments.model, "machine": machine(), **report.as_dict()}, arguments, out)
