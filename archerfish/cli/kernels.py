"""`archerfish kernels export` and `import`: the compiled GPU kernels of a model as one file, for an image or a volume."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from archerfish.cli.options import Parser, add_options, dest, section
from archerfish.cli.output import Output
from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.engine.progress import size
from archerfish.errors import DeviceError
from archerfish.kernels.select import without_triton


def add_kernels_arguments(parser: Parser) -> None:
    if parser.prog.endswith("export"):
        parser.add_argument("name", metavar="MODEL", help="model; give the options that it will be served with")
    parser.add_argument("file", metavar="FILE", help="the archive, such as kernels.tar.gz")
    if parser.prog.endswith("export"):
        add_options(parser, EngineConfig, HubConfig)


def run_kernels(arguments: Namespace, out: Output) -> int:
    why_not = without_triton("cuda", "bfloat16")
    if why_not:
        raise DeviceError(f"There are no GPU kernels here: {why_not}.")
    from archerfish.kernels.triton.archive import export_kernels, import_kernels

    file = Path(arguments.file)
    contents = export_kernels(list_of(arguments, out), file) if "name" in arguments else import_kernels(file)
    shown: dict[str, Any] = {"file": str(file), "kernels": len(contents["kernels"]), "bytes": file.stat().st_size}
    shown |= {name: contents[name] for name in ("archerfish", "triton", "target")}
    if out.as_json:
        out.result(shown)
    card, version = contents["target"], contents["triton"]
    out.line(f"{shown['kernels']} kernels for {card}, Triton {version}: {file}, {size(shown['bytes'])}")
    return 0


def list_of(arguments: Namespace, out: Output) -> Path:
    """The list of kernels of a model, which is started for it."""
    from archerfish.engine.inference_core import kind_of
    from archerfish.store.names import resolve_model

    hub = section(HubConfig, arguments)
    with out.progress(f"Loading {arguments.name}") as progress:
        engine: Any
        if kind_of(resolve_model(arguments.name, hub, progress)) == "generation":
            from archerfish.engine.llm_engine import LLMEngine

            setattr(arguments, dest(EngineConfig, "model"), arguments.name)
            engine = LLMEngine(section(EngineConfig, arguments), hub=hub, progress=progress)
            ops = engine.runner.ops
        else:
            from archerfish.engine.arrow_engine import ArrowEngine

            setattr(arguments, dest(EmbedConfig, "model"), arguments.name)
            engine = ArrowEngine(section(EmbedConfig, arguments), hub=hub, progress=progress)
            ops = engine.core.ops
    with engine:
        found: Path | None = getattr(ops, "kernel_list", None)
    if found is None:
        raise DeviceError(f"{arguments.name} compiles no kernels on this machine.", hint="Export them on one with a GPU.")
    return found
