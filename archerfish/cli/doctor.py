"""`archerfish doctor`: what this machine has, which fast paths are on, and which models fit.

It uses no network and loads no model.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archerfish import __version__
from archerfish.cli import fit
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, size
from archerfish.config import HubConfig
from archerfish.errors import ModelError
from archerfish.kernels.machine import Cpu, Memory, cpu, fast_cpu_dtype, memory

FEATURES = (("AVX2", "avx2"), ("AVX-512", "avx512f"), ("AVX512-BF16", "avx512_bf16"), ("AMX", "amx_tile"))
ARM_FEATURES = (("NEON", "asimd"), ("SVE", "sve"), ("BF16", "bf16"), ("I8MM", "i8mm"))
MIN_PYTHON = (3, 11)
INT8 = "int8"
ONLY_INT8 = "fits with --weights int8 alone"
COMPILERS = ("cc", "c++", "nvcc")
PEERS = ("sentence-transformers", "onnxruntime", "openvino")


def add_arguments(parser: Parser) -> None:
    help_text = "also say whether this model fits, and check its files when it is a converted directory"
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help=help_text)
    add_options(parser, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    hub = section(HubConfig, arguments)
    report = examine(hub, arguments.model, out)
    if out.as_json:
        out.result(report)
    else:
        show(report, out)
    return 0 if report["usable"] else 1


def examine(hub: HubConfig, model: str = "", out: Output | None = None) -> dict[str, Any]:
    """The report, as the object that --json prints."""
    processor, ram, disk = cpu(), memory(), hub.cache_path()
    packages = find_packages()
    problems = [*find_problems(packages, disk), *find_damage(model, out)]
    has_torch = not any(package.name == "torch" and package.is_missing for package in packages)
    gpus = find_gpus() if has_torch else []
    return {
        "archerfish": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": describe_cpu(processor),
        "memory": dataclasses.asdict(ram),
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "compilers": find_compilers(),
        "packages": [dataclasses.asdict(package) for package in packages],
        "fast_paths": describe_fast_paths() if has_torch else [],
        "cache": describe_cache(hub, disk),
        "models": judge_models(hub, model, ram, gpus),
        "usable": not problems,
        "problems": problems,
    }


def find_problems(packages: list[Package], cache: Path) -> list[str]:
    """Problems without whose solution archerfish does not work."""
    missing = [package.name for package in packages if package.is_missing]
    problems = [f"The package {name} is missing: pip install {name}." for name in missing]
    if sys.version_info < MIN_PYTHON:
        problems.append(f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed.")
    if not is_writable(cache):
        problems.append(f"The cache directory {cache} cannot be written to: choose another with --cache-dir.")
    return problems


def find_damage(model: str, out: Output | None) -> list[str]:
    """Problems of a converted directory: every file is compared with its checksum."""
    from archerfish.store.loader import WeightLoader
    from archerfish.store.metadata import is_converted

    if not model or not is_converted(Path(model)):
        return []
    try:
        with (out or Output(as_json=True)).progress("Checking") as progress:
            WeightLoader(model).verify(progress)
    except ModelError as error:
        return [str(error)]
    return []


def describe_cpu(processor: Cpu) -> dict[str, Any]:
    features = ARM_FEATURES if "asimd" in processor.flags else FEATURES
    return {
        "model": processor.model,
        "usable_cores": processor.num_cores,
        "total_cores": os.cpu_count() or 1,
        "features": {name: flag in processor.flags for name, flag in features},
    }


def describe_fast_paths() -> list[dict[str, Any]]:
    from archerfish.kernels.select import fast_paths

    return [{"name": path.name, "on": path.is_on, "reason": path.reason} for path in fast_paths()]


def describe_cache(hub: HubConfig, place: Path) -> dict[str, Any]:
    from archerfish.store.names import list_models

    cached = [model for model in list_models(hub) if model.path is not None]
    return {
        "directory": str(place),
        "writable": is_writable(place),
        "free_bytes": free_disk_bytes(place),
        "models": [{"name": model.name, "source": model.source, "bytes": model.num_bytes} for model in cached],
    }


def judge_models(hub: HubConfig, model: str, ram: Memory, gpus: list[Gpu]) -> list[dict[str, Any]]:
    """Whether the built-in models and the given model fit into the available memory."""
    from archerfish.store.names import BUILTIN_MODELS

    sizes = fit.measure_all([name for name in BUILTIN_MODELS if name != model.lower()], hub)
    if model:
        sizes.append(fit.measure(model, hub))
    return [judge_model(found, ram, gpus) for found in sizes]


def judge_model(found: fit.ModelSize, ram: Memory, gpus: list[Gpu]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": found.name,
        "num_parameters": found.num_parameters,
        "file_bytes": found.file_bytes,
        "weight_bytes": {dtype: found.weight_bytes(dtype) for dtype in ("float32", "bfloat16", "float16", INT8)},
        "remark": found.remark,
    }
    if not found.num_parameters:
        return row | {"cpu": "unknown", "fits_cpu": None, "gpu": "unknown" if gpus else "no GPU", "fits_gpu": None}
    narrow = "bfloat16" if fast_cpu_dtype() == "bfloat16" else "float16"
    int8 = [INT8] if row["weight_bytes"][INT8] else []
    verdicts = {
        dtype: fit.judge(found.weight_bytes(dtype), ram.available_bytes, ram.total_bytes, fit.CPU_OVERHEAD_BYTES)
        for dtype in (narrow, "float32", *int8)
    }
    row["kv_tokens"] = fit.kv_tokens(found, "cuda", "bfloat16") if gpus else fit.kv_tokens(found, "cpu", fast_cpu_dtype())
    row |= {"cpu": phrase(verdicts, narrow), "fits_cpu": {dtype: verdict.fits for dtype, verdict in verdicts.items()}}
    if not gpus:
        return row | {"gpu": "no GPU", "fits_gpu": None}
    roomiest = max(gpus, key=lambda gpu: gpu.free_bytes)
    on_gpu = {
        dtype: fit.judge(found.weight_bytes(dtype), roomiest.free_bytes, roomiest.total_bytes, fit.GPU_OVERHEAD_BYTES)
        for dtype in ("bfloat16", *int8)
    }
    needs_int8 = not on_gpu["bfloat16"].fits and INT8 in on_gpu and on_gpu[INT8].fits
    text = ONLY_INT8 if needs_int8 else on_gpu["bfloat16"].text
    return row | {"gpu": text, "fits_gpu": {dtype: verdict.fits for dtype, verdict in on_gpu.items()}}


def phrase(verdicts: dict[str, fit.Verdict], narrow: str) -> str:
    if verdicts["float32"].fits:
        return "fits in any type"
    if verdicts[narrow].fits:
        return f"fits in {narrow}, not in float32"
    return ONLY_INT8 if INT8 in verdicts and verdicts[INT8].fits else verdicts[narrow].text


def show(report: dict[str, Any], out: Output) -> None:
    show_machine(report, out)
    rows = [(path["name"], "on" if path["on"] else "off", path["reason"]) for path in report["fast_paths"]]
    out.table("Fast paths", ("path", "state", "why"), rows)
    out.line()
    installed = [(p["name"], p["version"] or ("not installed" if p["needed_for"] else "missing"), p["needed_for"] or "always")
                 for p in report["packages"]]  # fmt: skip
    out.table("Packages", ("package", "version", "needed for"), installed)
    out.line()
    cache = report["cache"]
    out.line(f"Cache: {cache['directory']} ({size(cache['free_bytes'])} free)", "bold")
    cached = [(m["name"], m["source"], size(m["bytes"])) for m in cache["models"]]
    out.table("", ("model", "source", "size"), cached, numbers=("size",))
    out.line()
    models = [
        (
            m["name"], f"{m['num_parameters'] / 1e6:,.1f} M" if m["num_parameters"] else "?",
            size(m["weight_bytes"]["float32"]), size(m["weight_bytes"]["bfloat16"]), size(m["file_bytes"]),
            m["cpu"], *([m["gpu"]] if report["gpus"] else []), f"{m['kv_tokens']:,}" if m.get("kv_tokens") is not None else "-",
            m["remark"],
        )
        for m in report["models"]
    ]
    gpu = ("on the GPU",) if report["gpus"] else ()
    columns = ("model", "params", "float32", "2 bytes", "files", "in memory", *gpu, "KV tokens", "source")
    out.table("What will fit", columns, models, numbers=(*columns[1:5], "KV tokens"))
    out.line()
    for problem in report["problems"]:
        out.line(problem, "bad")
    out.line("Ready." if report["usable"] else "Not ready: see the problems above.", "good" if report["usable"] else "bad")


def show_machine(report: dict[str, Any], out: Output) -> None:
    processor, ram = report["cpu"], report["memory"]
    features = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in processor["features"].items())
    limit = f" (limited by the {ram['limited_by']})" if ram["limited_by"] else ""
    gpus = "; ".join(f"{g['name']}, {size(g['free_bytes'])} of {size(g['total_bytes'])} free" for g in report["gpus"])
    rows = [
        ("archerfish", f"{report['archerfish']}, Python {report['python']}, {report['system']}"),
        ("processor", processor["model"]),
        ("cores", f"{processor['usable_cores']} usable of {processor['total_cores']}"),
        ("instructions", features),
        ("memory", f"{size(ram['available_bytes'])} available of {size(ram['total_bytes'])}{limit}"),
        ("GPU", gpus or "none found by torch"),
        ("compilers", ", ".join(f"{name}: {where or 'not found'}" for name, where in report["compilers"].items())),
    ]
    out.table("Machine", ("", "found"), rows)
    out.line()


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Package:
    """A Python package that archerfish uses. `version` is empty when it is not installed."""

    name: str
    version: str
    needed_for: str  # the extra that needs it; empty when archerfish always needs it

    @property
    def is_missing(self) -> bool:
        return not self.version and not self.needed_for


def find_gpus() -> list[Gpu]:
    """The CUDA devices that torch finds; an empty list without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return found


def find_packages() -> list[Package]:
    """The packages that archerfish requires, and those that `bench` can compare with."""
    wanted: dict[str, str] = {}
    for requirement in importlib.metadata.requires("archerfish") or []:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        if extra is None or extra[1] != "test":
            wanted.setdefault(re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0], extra[1] if extra else "")
    for name in PEERS:
        wanted.setdefault(name, "bench")
    wanted.setdefault("triton", "gpu kernels")
    return [Package(name, installed_version(name), needed_for) for name, needed_for in wanted.items()]


def installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_compilers() -> dict[str, str]:
    """The path of each compiler, or an empty string when it is not installed."""
    return {name: shutil.which(name) or "" for name in COMPILERS}


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def is_writable(path: Path) -> bool:
    return os.access(existing_parent(path), os.W_OK)


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free
