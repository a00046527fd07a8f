"""`archerfish bench NAME`: runs a bench of the table, shows its report, and compares it with a baseline."""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from archerfish.background import signals_to
from archerfish.bench.report import Baseline, BenchReport, Found, compare, format_number, read_breaches, write_json
from archerfish.bench.table import BENCHES, Bench, Flag, load
from archerfish.cli.interrupts import exit_tidily
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output

EXIT_REGRESSION = 7
REPORT_FLAGS = (
    Flag("--output", "write the report as JSON to FILE", metavar="FILE"),
    Flag("--save-baseline", "write the medians and their range to FILE", metavar="FILE"),
    Flag("--tolerance", "percentage by which a median may be worse than the baseline (default: 5)", 5.0, minimum=0),
    Flag(
        "--baseline",
        f"compare with the baseline in FILE; exit with {EXIT_REGRESSION} when a figure is worse in three runs "
        "in a row (counted in FILE.breaches)",
        metavar="FILE",
    ),
)


def add_bench_arguments(parser: Parser) -> None:
    """The flags of the bench that the parser is for, of its sections, and of all reports."""
    bench = next(bench for bench in BENCHES if parser.prog == f"archerfish bench {bench.name}")
    for flag in (*bench.flags, *REPORT_FLAGS):
        flag.add_to(parser)
    add_options(parser, *bench.sections)
    parser.set_defaults(bench=bench)


def run_bench(arguments: Namespace, out: Output) -> int:
    bench: Bench = arguments.bench
    vars(arguments).update({cls.section: section(cls, arguments) for cls in bench.sections})
    if arguments.baseline:  # a wrong file is refused before the bench runs
        Baseline.read(Path(arguments.baseline))
        read_breaches(Path(arguments.baseline))
    report = BenchReport(bench.name)
    measuring: closing[Found] = closing(load(bench.function)(arguments))
    with out.progress("Measuring") as progress, signals_to(exit_tidily, signal.SIGTERM), measuring as measured:
        for number, found in enumerate(measured):
            report.add(found)
            shown = (
                found if isinstance(found, str) else f"{found.engine}: {found.metric} = {format_number(found.value)}"
            )
            progress(number + 1, 0, shown)
            if not out.shows_progress:
                out.note(shown)
    holders = [*(getattr(arguments, cls.section) for cls in bench.sections), arguments]
    report.model = Path(next(filter(None, (getattr(holder, "model", "") for holder in holders)), "")).name
    return finish(report, arguments, out)


def finish(report: BenchReport, arguments: Namespace, out: Output) -> int:
    """Show the report, write it where it is wanted, compare it with a baseline and save one; returns the exit code."""
    whole = report.as_dict()
    show(report, whole["machine"], out)
    try:
        if arguments.baseline:
            whole["compared"] = compare(Path(arguments.baseline), Baseline.of(report), arguments.tolerance)
    finally:  # the figures are not lost when the baseline is of another machine
        if arguments.output:
            write_json(Path(arguments.output), whole)
    if arguments.save_baseline:
        Baseline.of(report, tuple(bench_words(arguments.words))).write(Path(arguments.save_baseline))
    if out.as_json:
        out.result(whole)
    if "compared" not in whole:
        return 0
    show_comparison(whole["compared"], out)
    return EXIT_REGRESSION if whole["compared"]["is_regression"] else 0


def bench_words(words: Sequence[str]) -> list[str]:
    """The words of the command that say what is measured."""
    with_value = [flag.name for flag in REPORT_FLAGS]
    left_out = (*with_value, "--json", "--quiet", "--debug")
    pairs = zip(("", *words), words, strict=False)
    return [word for before, word in pairs if before not in with_value and word.split("=")[0] not in left_out]


def show(report: BenchReport, machine: dict[str, str], out: Output) -> None:
    where = f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"
    out.line(f"{report.bench}{f' of {report.model}' if report.model else ''} on {where}", "bold")
    columns, rows = report.table()
    out.table("", columns, rows, numbers=columns[1:])
    for note in report.notes:
        out.line(note)


def show_comparison(compared: dict[str, Any], out: Output) -> None:
    """The figures that are worse, by how much, and how often in a row."""
    rows = [
        (
            one["metric"],
            f"{one['before']:,.4g}",
            f"{one['now']:,.4g}",
            "" if one["change"] is None else f"{one['change']:+.1%}",
            str(one["num_in_a_row"]),
            "regression" if one["is_confirmed"] else "worse",
        )
        for one in compared["breaches"]
    ]
    out.line()
    if rows:
        columns = ("worse than the baseline", "before", "now", "worse by", "runs in a row", "")
        out.table("", columns, rows, numbers=columns[1:5])
    num_compared, num_confirmed = compared["num_compared"], sum(one["is_confirmed"] for one in compared["breaches"])
    out.line(
        f"{len(rows)} of {num_compared} figures are worse than the baseline; {num_confirmed} of them are regressions."
    )
    if missing := compared["missing"]:
        out.note(f"Not measured in this run: {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}.")
