"""What `archerfish bench throughput`, `latency` and `prefix` share: their flags, their report, their bars."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from archerfish.cli.bench_embed import finish
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import EngineConfig
from archerfish.errors import InvalidOptionError

if TYPE_CHECKING:
    from archerfish.bench.generate import Report

Bar = tuple[str, float | None, str, float]  # name, measured, "at least" or "at most", wanted


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of every measurement (default: 5)")
    parser.add_argument("--no-peers", action="store_true", help="measure archerfish alone")
    parser.add_argument("--output", default="", metavar="FILE", help="write the JSON report to FILE")
    add_options(parser, EngineConfig)


def engine_config(arguments: Namespace) -> EngineConfig:
    if arguments.rounds < 1:
        raise InvalidOptionError("--rounds must be at least 1.")
    return section(EngineConfig, arguments)


def new_report(out: Output) -> Report:
    """A report that notes every sample where no progress bar shows that something is going on."""
    from archerfish.bench.generate import Report

    if out.is_rich or out.quiet:
        return Report()
    return Report(tell=lambda name, value: out.note(f"{name}: {value:,.4g}"))


def show(report: Report, bars: Sequence[Bar], config: EngineConfig, arguments: Namespace, out: Output) -> int:
    """The samples as a table, then the bars."""
    from archerfish.bench.report import machine

    found = machine()
    met: list[dict[str, Any]] = [
        {"name": name, "value": value, "wanted": f"{how} {wanted:g}", "is_met": is_met(value, how, wanted)}
        for name, value, how, wanted in bars
    ]
    whole: dict[str, Any] = {"model": config.model, "machine": found, **report.as_dict(), "bars": met}
    finish(whole, arguments.output, out)
    if out.as_json:
        return 0
    out.line(f"{config.model} on {found['cpu']}, {found['cores']} cores, torch {found['torch']}, {found['date']}", "bold")
    rows = []
    for name in report.samples:
        summary = report.summary(name)
        if summary is not None:
            rows.append((name, f"{summary.median:,.4g}", f"{summary.low:,.4g} to {summary.high:,.4g}", str(summary.rounds)))
    rows += [(name, f"{value:,.4g}", "", "") for name, value in report.figures.items()]
    out.table("", ("", "median", "range", "rounds"), rows, numbers=("median", "range", "rounds"))
    if met:
        out.line()
        shown = ["-" if bar["value"] is None else f"{bar['value']:,.4g}" for bar in met]
        cells = [(bar["name"], text, bar["wanted"], verdict(bar["is_met"])) for bar, text in zip(met, shown, strict=True)]
        out.table("Bars", ("bar", "measured", "wanted", ""), cells, numbers=("measured",))
    return 0


def is_met(value: float | None, how: str, wanted: float) -> bool | None:
    if value is None:
        return None
    return value >= wanted if how == "at least" else value <= wanted


def verdict(found: bool | None) -> str:
    return "not measured" if found is None else "met" if found else "not met"
