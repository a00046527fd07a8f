"""`archerfish bench embed`: us and the peers that are installed, on the same texts in one run."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from archerfish.cli.bench_report import add_report_arguments, finish, show_targets
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import EmbedConfig, HubConfig
from archerfish.errors import InvalidOptionError, did_you_mean


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds of every measurement (default: 5; quick: 2)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and texts; peers embed a sample of the documents")
    parser.add_argument("--engines", default="", metavar="A,B", help="only these (default: all that are installed)")
    parser.add_argument("--documents", type=int, default=10_000, metavar="N", help="documents in one call (default: 10000)")
    add_report_arguments(parser)
    add_options(parser, EmbedConfig, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    config, hub = section(EmbedConfig, arguments), section(HubConfig, arguments)
    keys, effort = choose_engines(arguments.engines), choose_effort(arguments)
    from archerfish.bench import report
    from archerfish.bench.embed import EmbedBench, make_texts
    from archerfish.bench.peers import PeerOptions
    from archerfish.bench.texts import TextMaker
    from archerfish.store.names import resolve_model

    with out.progress(f"Pulling {config.model}") as progress:
        source = resolve_model(config.model, hub, progress)
    options = PeerOptions(
        source=str(source), device=config.device, num_threads=config.num_threads, cache_dir=str(hub.cache_path()),
        embed=dataclasses.asdict(config),
    )
    texts = make_texts(TextMaker.from_directory(source), effort, config.device)
    with out.progress("Measuring") as progress:
        results = EmbedBench(keys, options, effort, progress=progress).run(texts)
    ours = next((key for key in keys if key.startswith("archerfish")), "")
    dtype = "float32" if ours.endswith("float32") else config.dtype
    size = float32_bytes(source)
    whole = report.as_json(results, ours, size, dtype, config.model)
    if not out.as_json:
        show(results, ours, whole, out)
        title = f"Bars ({'; '.join(whole['caveats'])}: not decisive)" if whole["caveats"] else "Bars"
        show_targets(title, report.bars(results, ours, size, dtype), out, digits=6)
    return finish(whole, arguments, out)


def choose_engines(given: str) -> list[str]:
    from archerfish.bench.peers import ENGINES

    usual = [key for key, engine in ENGINES.items() if engine.by_default]
    keys = [key.strip() for key in given.split(",") if key.strip()] or usual
    for key in keys:
        if key not in ENGINES:
            raise InvalidOptionError(f"There is no engine {key!r}.", hint=did_you_mean(key, ENGINES))
    return keys


def choose_effort(arguments: Namespace) -> Any:
    from archerfish.bench.embed import QUICK, Effort

    if arguments.rounds < 0 or arguments.documents < 1:
        raise InvalidOptionError("--rounds and --documents must be at least 1.")
    effort = QUICK if arguments.quick else Effort()
    return dataclasses.replace(effort, rounds=arguments.rounds or effort.rounds, num_documents=arguments.documents)


def float32_bytes(source: Path) -> int:
    """What the weights would take in float32."""
    from archerfish.cli.fit import measure_path

    return measure_path("", source).weight_bytes("float32")


def show(results: dict[str, Any], ours: str, whole: dict[str, Any], out: Output) -> None:
    from archerfish.bench.report import table

    found = whole["machine"]
    out.line(f"{whole['model']} on {found['cpu']}, {found['cores']} cores, torch {found['torch']}, {found['date']}", "bold")
    columns, rows = table(results, ours)
    out.table("", columns, rows, numbers=columns[1:])
    for result in results.values():
        if result.state != "ok":
            out.line(f"{result.label}: {result.state} ({result.reason})")
