"""`archerfish kernels export` and `import`: the compiled GPU kernels of a model as one file, for an image or a volume."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from archerfish.cli.options import Parser, add_options, dest, section
from archerfish.cli.output import Output
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.progress import size
from archerfish.errors import DeviceError
from archerfish.kernels.select import without_triton

MODEL = dest(EngineConfig, "model")


def add_kernels_arguments(parser: Parser) -> None:
    if parser.prog.endswith("export"):
        add_options(parser, EngineConfig, HubConfig)
        parser.add_argument(MODEL, metavar="MODEL", help="model; give the options that it will be served with")
    parser.add_argument("file", metavar="FILE", help="the archive, such as kernels.tar.gz")


def run_kernels(arguments: Namespace, out: Output) -> int:
    why_not, file = without_triton("cuda", ""), Path(arguments.file)
    if why_not:
        raise DeviceError(f"There are no GPU kernels here: {why_not}.")
    from archerfish.kernels.triton.archive import export_kernels, import_kernels

    contents = export_kernels(find_lists(arguments, out), file) if MODEL in arguments else import_kernels(file)
    num_kernels = len({digest for kernels in contents.pop("lists").values() for digest in kernels})
    shown = {"file": str(file), **contents, "kernels": num_kernels}
    if out.as_json:
        out.result(shown)
    card = " ".join(map(str, contents["target"][:2]))
    out.line(f"{file}: {shown['kernels']} kernels for {card}, Triton {contents['triton']}, {size(file.stat().st_size)}")
    return 0


def find_lists(arguments: Namespace, out: Output) -> list[Path]:
    """The lists of kernels of a model, which is started for it, and of its draft model."""
    from archerfish.engine.llm import LLM

    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    with out.progress(f"Loading {config.model}") as progress, LLM(config, hub=hub, progress=progress) as llm:
        if hasattr(llm, "encoder"):
            ops: list[Any] = [llm.encoder.core.ops]
        else:
            drafter: Any = llm.scheduler.speculation and llm.scheduler.speculation.model
            ops = [llm.runner.ops] + ([drafter.runner.ops] if drafter else [])
    found = [path for one in ops if (path := getattr(one, "kernel_list", None)) is not None]
    if not found:
        raise DeviceError(f"{config.model} compiles no kernels on this machine.", hint="Export them on one with a GPU.")
    return found
