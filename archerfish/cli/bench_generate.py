"""What `archerfish bench throughput`, `latency` and `prefix` share: their flags, their report, their bars."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from archerfish.cli.bench_report import add_report_arguments, finish, show_targets
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError

if TYPE_CHECKING:
    from archerfish.bench.generate import Report
    from archerfish.bench.targets import Judged


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of every measurement (default: 5)")
    parser.add_argument("--no-peers", action="store_true", help="measure archerfish alone")
    add_report_arguments(parser)
    add_options(parser, EngineConfig)


def engine_config(arguments: Namespace) -> EngineConfig:
    if arguments.rounds < 1:
        raise InvalidOptionError("--rounds must be at least 1.")
    return section(EngineConfig, arguments)


def read_numbers(flag: str, text: str) -> list[int]:
    """Numbers from 1 on that stand in a flag, with commas between."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InvalidOptionError(f"{flag} must be numbers from 1 on with commas between, not {text!r}.")
    return numbers


def new_report(out: Output) -> Report:
    """A report that notes every sample where no progress bar shows that something is going on."""
    from archerfish.bench.generate import Report

    if out.is_rich or out.quiet:
        return Report()
    return Report(tell=lambda name, value: out.note(f"{name}: {value:,.4g}"))


def show(bench: str, report: Report, bars: Sequence[Judged], config: EngineConfig, arguments: Namespace, out: Output) -> int:
    """The samples as a table, then the bars."""
    from archerfish.bench.report import machine

    found = machine()
    whole: dict[str, Any] = {
        "bench": bench, "model": config.model, "machine": found, **report.as_dict(), "bars": [bar.as_dict() for bar in bars],
    }  # fmt: skip
    out.line(f"{config.model} on {found['cpu']}, {found['cores']} cores, torch {found['torch']}, {found['date']}", "bold")
    rows = []
    for name in report.samples:
        summary = report.summary(name)
        if summary is not None:
            rows.append((name, f"{summary.median:,.4g}", f"{summary.low:,.4g} to {summary.high:,.4g}", str(summary.rounds)))
    rows += [(name, f"{value:,.4g}", "", "") for name, value in report.figures.items()]
    out.table("", ("", "median", "range", "rounds"), rows, numbers=("median", "range", "rounds"))
    show_targets("Bars", bars, out)
    return finish(whole, arguments, out)
