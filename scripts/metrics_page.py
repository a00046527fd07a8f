"""Writes the table of docs/metrics.md from the declarations of the metrics: `make docs`.

With --check, it tells whether the table is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from archerfish.observe.metrics import Metric, MetricRegistry, MetricsCollector
from archerfish.route.router import Router
from archerfish.serve.app import FrontEndSync, create_app
from archerfish.serve.catalog import Catalog
from archerfish.serve.metrics import GIVEN, process_metrics
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.routing import RoutedBackend

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
COMMAND = "python -m scripts.metrics_page"
BEGIN, END = "<!-- The table is generated: make docs -->\n", "<!-- end of the table -->"


def declared() -> list[Metric]:
    """All metrics of an engine process and a front end."""
    registry = MetricRegistry()
    backend = RoutedBackend(Router(b"secret"), registry=registry)
    create_app(backend, registry=registry).build_middleware_stack()
    front_end = FrontEndSync(Catalog(backend, ""), registry, ResultCache()).own_metrics()
    return [*MetricsCollector().metrics(), *front_end, *process_metrics(dict.fromkeys(GIVEN, 0.0))]


def shown_name(metric: Metric) -> str:
    """The name in `/metrics`, without the endings of a histogram's parts."""
    return f"{metric.name}_total" if metric.kind == "counter" and not metric.name.endswith("_total") else metric.name


def table() -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in sorted(declared(), key=shown_name):
        labels = ", ".join(f"`{name}`" for name in metric.label_names)
        lines.append(f"| `{shown_name(metric)}` | {metric.kind} | {labels} | {metric.description} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the table is out of date")
    before = page.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    text = head + BEGIN + table() + END + rest.partition(END)[2]
    if not parser.parse_args(argv).check:
        page.write_text(text, encoding="utf-8")
    elif before != text:
        sys.stderr.write(f"{page.name} is out of date: run `{COMMAND}`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
