"""`archerfish bench prefix`."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli import bench_generate
from archerfish.cli.output import Output

add_arguments = bench_generate.add_arguments


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench.generate import measure_prefix, prefix_bars

    report = bench_generate.new_report(out)
    with out.progress("Measuring") as progress:
        measure_prefix(config, report, arguments.rounds, progress)
    return bench_generate.show("prefix", report, prefix_bars(report), config, arguments, out)
