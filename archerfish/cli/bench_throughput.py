"""`archerfish bench throughput`."""

from __future__ import annotations

from argparse import Namespace

from archerfish.cli import bench_generate
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import InvalidOptionError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--batches", default="", metavar="A,B", help="numbers of sequences at once (default: 8,16,32,64)")
    bench_generate.add_arguments(parser)


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench import generate
    from archerfish.bench.generate_peers import find_peers

    try:
        batches = [int(word) for word in arguments.batches.split(",")] if arguments.batches else list(generate.BATCHES)
    except ValueError:
        raise InvalidOptionError(f"--batches must be numbers with commas between, not {arguments.batches!r}.") from None
    peers = {} if arguments.no_peers else find_peers(config)[0]
    report = bench_generate.new_report(out)
    with out.progress("Measuring") as progress:
        generate.measure_throughput(config, report, arguments.rounds, batches, peers, progress)
    return bench_generate.show("throughput", report, generate.throughput_bars(report, batches, peers), config, arguments, out)
