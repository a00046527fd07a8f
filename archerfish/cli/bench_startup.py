"""`archerfish bench startup`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from archerfish.cli.bench_gpu import add_shared_arguments, machine, prepare, teller
from archerfish.cli.bench_report import finish, show_targets
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import HubConfig
from archerfish.errors import ArcherfishError


def add_arguments(parser: Parser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--scratch", default="", metavar="DIR", help="where the weights are written, once (default: the cache)")
    add_options(parser, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    hub = section(HubConfig, arguments)
    from archerfish.bench.gpu import OURS
    from archerfish.bench.startup import judge_starts, measure_startup

    shapes, vllm = prepare(arguments)
    folder = Path(arguments.scratch) if arguments.scratch else hub.cache_path() / "bench"
    with out.progress("Measuring") as progress:
        starts, errors = measure_startup(shapes, folder, vllm, teller(out), progress)
    judged = judge_starts(starts)
    whole = {
        "bench": "startup", "machine": machine(), "starts": [start.as_dict() for start in starts], "errors": errors,
        "bars": [one.as_dict() for one in judged],
    }  # fmt: skip
    columns = ("shape", "engine", "start", "process, s", "import, s", "load, s", "first token, s", "total, s")
    rows = [
        (start.shape, start.engine, start.start,
         *(f"{value:.2f}" for value in (start.process_s, start.import_s, start.load_s, start.first_token_s, start.total_s)))
        for start in starts
    ]  # fmt: skip
    out.table("From starting a process to its first token", columns, rows, numbers=columns[3:])
    for where, error in errors.items():
        out.line(f"{where}: failed ({error})")
    show_targets("Bars", judged, out)
    code = finish(whole, arguments, out)
    return ArcherfishError.exit_code if any(where.endswith(OURS) for where in errors) else code
