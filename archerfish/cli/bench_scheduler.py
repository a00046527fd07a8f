"""`archerfish bench scheduler`."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

from archerfish.cli.bench_report import add_report_arguments, finish
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import InvalidOptionError

SIZES = (10**3, 10**4, 10**5, 10**6)  # of trees, in nodes


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--sequences", type=int, default=256, metavar="N", help="running sequences (default: 256)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="steps to measure (default: 2000)")
    parser.add_argument("--nodes", type=int, default=10**6, metavar="N", help="largest tree, in nodes (default: 1000000)")
    add_report_arguments(parser)


def run(arguments: Namespace, out: Output) -> int:
    from archerfish.bench.bookkeeping import STEP_TARGET, measure_bookkeeping
    from archerfish.bench.cache import measure_cache, measure_lengths
    from archerfish.bench.report import machine

    sizes = [size for size in SIZES if size <= arguments.nodes]
    if not sizes:
        raise InvalidOptionError(f"--nodes is {arguments.nodes}; the smallest tree has {SIZES[0]:,}.")
    with out.progress("Measuring") as progress:
        steps = measure_bookkeeping(arguments.sequences, arguments.steps)
        progress(1, 3, "trees")
        costs = measure_cache(sizes)
        progress(2, 3, "lengths")
        lengths = measure_lengths()
        progress(3, 3, "")
    judged = STEP_TARGET.judged(steps.both_p99_us)
    whole: dict[str, Any] = {
        "bench": "scheduler", "machine": machine(), "steps": steps.as_dict(), "bars": [judged.as_dict()],
        "cache": [dataclasses.asdict(cost) for cost in costs], "lengths": [dataclasses.asdict(cost) for cost in lengths],
    }
    rows = [(name, f"{getattr(steps, f'{name}_p50_us'):,.0f}", f"{getattr(steps, f'{name}_p99_us'):,.0f}")
            for name in ("plan", "commit", "both")]  # fmt: skip
    out.table(f"A step of {steps.num_sequences} decoding sequences, no model", ("", "p50, us", "p99, us"), rows,
              numbers=("p50, us", "p99, us"))  # fmt: skip
    out.line(f"{judged.name}, {judged.target}: {judged.verdict}.")
    for title, found in (("By size of the tree, block by block", costs), ("By length of a prompt", lengths)):
        columns = tuple(field.name for field in dataclasses.fields(found[0]))
        cells = [tuple(cell(getattr(cost, name)) for name in columns) for cost in found]
        titles = tuple(name.replace("_", " ") for name in columns)
        out.line()
        out.table(title, titles, cells, numbers=titles)
    return finish(whole, arguments, out)


def cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
