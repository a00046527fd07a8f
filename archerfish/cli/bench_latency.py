"""`archerfish bench latency`."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli import bench_generate
from archerfish.cli.output import Output

add_arguments = bench_generate.add_arguments


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench.generate import latency_bars, latency_benchmark, measure_latency
    from archerfish.bench.generate_peers import find_peers

    peers = {} if arguments.no_peers else find_peers(config)[1]
    report = bench_generate.new_report(out)
    benchmark = latency_benchmark(arguments.rounds)
    with out.progress("Measuring") as progress:
        measure_latency(config, report, benchmark, peers, progress)
    return bench_generate.show("latency", report, latency_bars(report, benchmark), config, arguments, out)
