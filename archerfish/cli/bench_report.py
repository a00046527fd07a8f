"""What all benches share: their report as JSON, their targets, and a baseline that a run is held against."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import InvalidOptionError

if TYPE_CHECKING:
    from archerfish.bench.baseline import Compared
    from archerfish.bench.targets import Judged

EXIT_REGRESSION = 7
DEFAULT_TOLERANCE = 5.0
SHOWN_FLAGS = ("--json", "--quiet", "--debug")
REPORT_FLAGS = ("--output", "--baseline", "--save-baseline", "--tolerance", "--html")  # with a value each


def add_report_arguments(parser: Parser) -> None:
    parser.add_argument("--output", default="", metavar="FILE", help="write the JSON report to FILE")
    parser.add_argument("--baseline", type=baseline_file, default="", metavar="FILE", help=(
        f"compare with the baseline in FILE; exit with {EXIT_REGRESSION} when a figure is worse in three runs on end "
        "(kept beside it, in FILE.breaches)"))  # fmt: skip
    parser.add_argument("--save-baseline", default="", metavar="FILE", help="write the medians and their spread to FILE")
    parser.add_argument("--tolerance", type=tolerance, default=DEFAULT_TOLERANCE, metavar="PERCENT", help=(
        f"how much worse than the baseline a median may be (default: {DEFAULT_TOLERANCE:g})"))  # fmt: skip


def baseline_file(text: str) -> str:
    """Read at once: who names a wrong file learns it before the bench runs."""
    from archerfish.bench.baseline import Baseline, History

    if text:
        Baseline.read(Path(text))
        History(Path(text)).read()
    return text


def tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidOptionError(f"--tolerance takes a number of per cent from 0 on, not {text!r}.")
    return value


def words_of_bench(words: Sequence[str]) -> list[str]:
    """Those that say what is measured, without those that say what becomes of it."""
    kept = list[str]()
    for before, word in zip(("", *words), words, strict=False):
        if before not in REPORT_FLAGS and word.split("=")[0] not in (*REPORT_FLAGS, *SHOWN_FLAGS):
            kept.append(word)
    return kept


def finish(whole: dict[str, Any], arguments: Namespace, out: Output) -> int:
    """Write the report where it is wanted, compare it with a baseline and save one; the exit code of the comparison."""
    compared: Compared | None = None
    try:
        if arguments.baseline:
            from archerfish.bench.baseline import Baseline, compare

            compared = compare(Path(arguments.baseline), Baseline.of(whole), arguments.tolerance)
            whole = {**whole, "compared": compared.as_dict()}
    finally:  # what was measured is not lost with a baseline of another machine
        if arguments.output:
            from archerfish.cli.texts import write_atomically

            text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
            write_atomically(Path(arguments.output), lambda file: (file.write(text.encode()), None)[1])
    if arguments.save_baseline:
        from archerfish.bench.baseline import Baseline

        Baseline.of(whole, words_of_bench(arguments.words)).write(Path(arguments.save_baseline))
    if out.as_json:
        out.result(whole)
    if compared is None:
        return 0
    show_comparison(compared, out)
    return EXIT_REGRESSION if compared.regressions else 0


def show_comparison(compared: Compared, out: Output) -> None:
    """What got worse, by how much, how often in a row."""
    out.line()
    rows = [
        (one.metric, f"{one.before:,.4g}", f"{one.now:,.4g}", f"{one.change:+.1%}", str(one.num_in_a_row),
         "regression" if one.is_confirmed else "worse")
        for one in compared.breaches
    ]  # fmt: skip
    count = len(compared.comparisons)
    if rows:
        columns = ("worse than the baseline", "before", "now", "worse by", "runs on end", "")
        out.table("", columns, rows, numbers=columns[1:5])
    confirmed = len(compared.regressions)
    out.line(f"{len(rows)} of {count} figures are worse than the baseline; {confirmed} of them are regressions.")
    for names, what in ((compared.missing, "were not measured now"), (compared.unjudged, "have no direction that is bad")):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            out.note(f"Not compared, as they {what}: {shown}.")


def show_targets(title: str, judged: Sequence[Judged], out: Output, digits: int = 4) -> None:
    """What was measured beside what is wanted."""
    from archerfish.bench.targets import row_of

    if judged:
        out.line()
        out.table(title, ("target", "measured", "wanted", ""), [row_of(one, digits) for one in judged], numbers=("measured",))
