"""`archerfish bench prefix`."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli import bench_generate
from archerfish.cli.output import Output

add_arguments = bench_generate.add_arguments


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench.generate import measure_prefix

    report = bench_generate.new_report(out)
    with out.progress("Measuring") as progress:
        measure_prefix(config, report, arguments.rounds, progress)
    hit_rate, passes = report.summary("hit rate, requests"), report.summary("forward passes of an exact repeat")
    bars: list[bench_generate.Bar] = [
        ("rate with the cache over without", report.ratio("requests/s, cache on", "requests/s, cache off"), "at least", 2.5),
        ("hit rate", hit_rate.median if hit_rate else None, "at least", 0.8),
        ("first token of a full hit, share of a miss", report.ratio("first token, full hit, ms", "first token, miss, ms"),
         "at most", 0.15),
        ("forward passes of an exact repeat", passes.high if passes else None, "at most", 0),
    ]
    return bench_generate.show(report, bars, config, arguments, out)
