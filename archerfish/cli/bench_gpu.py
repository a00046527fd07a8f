"""`archerfish bench gpu`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from archerfish.cli.bench_report import add_report_arguments, finish, show_targets
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import ArcherfishError, InvalidOptionError, did_you_mean

if TYPE_CHECKING:
    from archerfish.bench.gpu import Tell


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repeats of every measurement (default: 3)")
    parser.add_argument("--only", default="", metavar="A,B", help="parts to run: offline, bs1, prefill, shared (default: all)")
    add_shared_arguments(parser)


def add_shared_arguments(parser: Parser) -> None:
    """Flags that `bench startup` has too."""
    parser.add_argument("--shapes", default="", metavar="A,B", help="shapes: qwen3-0.6b, llama-3.1-8b (default: both)")
    parser.add_argument("--vllm-path", default="", metavar="DIR", help="directory with vLLM (default: the installed one)")
    parser.add_argument("--no-peers", action="store_true", help="measure archerfish alone")
    add_report_arguments(parser)


def run(arguments: Namespace, out: Output) -> int:
    if arguments.repeats < 1:
        raise InvalidOptionError("--repeats must be at least 1.")
    from archerfish.bench import gpu

    parts = chosen("--only", arguments.only, gpu.PARTS)
    shapes, vllm = prepare(arguments)
    with out.progress("Measuring") as progress:
        bench = gpu.GpuBench(shapes, arguments.repeats, parts, vllm, teller(out), progress)
        runs = bench.run()
    found = machine()
    for shape, of_shape in runs.items():
        out.line(f"{shape} on {found['gpu'] or found['cpu']}, torch {found['torch']}, {found['date']}", "bold")
        columns, rows = gpu.table(of_shape)
        out.table("", columns, rows, numbers=columns[2:])
        for engine, found_run in of_shape.items():
            if found_run.error:
                out.line(f"{engine}: failed ({found_run.error})")
        out.line()
    judged = [one for shape, of_shape in runs.items() for one in gpu.judge(shape, of_shape)]
    show_targets("Bars, times vLLM", judged, out)
    bars = [one.as_dict() for one in judged]
    code = finish({"bench": "gpu", "machine": found, "shapes": gpu.as_dict(runs), "bars": bars}, arguments, out)
    return ArcherfishError.exit_code if any(of_shape[gpu.OURS].error for of_shape in runs.values()) else code


def prepare(arguments: Namespace) -> tuple[list[str], str]:
    """The shapes that are asked for and where vLLM is; a machine without the device is refused."""
    from archerfish.bench import gpu
    from archerfish.kernels.select import choose_device

    shapes = chosen("--shapes", arguments.shapes, gpu.SHAPES)
    vllm = "" if arguments.no_peers else gpu.find_vllm(arguments.vllm_path)
    choose_device(gpu.OPTIONS[gpu.OURS]["device"])
    return shapes, vllm


def chosen(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Names with commas between, in the order of the known ones; all of them where none is given."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in known:
            raise InvalidOptionError(f"{flag} does not know {name!r}.", hint=did_you_mean(name, known))
    return [name for name in known if not names or name in names]


def teller(out: Output) -> Tell:
    """Notes every sample where no progress bar shows that something is going on."""
    from archerfish.bench.gpu import tell_nothing

    return tell_nothing if out.is_rich or out.quiet else lambda name, value: out.note(f"{name}: {value:,.4g}")


def machine() -> dict[str, Any]:
    """What `bench` says of a machine, and its GPU."""
    import torch

    from archerfish.bench.report import machine

    return {**machine(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}
