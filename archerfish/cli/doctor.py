"""`archerfish doctor`: what this machine has, which fast paths are on, and which models fit.

It uses no network and loads no model: sizes come from the headers of files. It does not import torch, which takes
seconds:
torch's files say what it was built with, the driver knows the cards. So whether torch loads is known when a model does.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output
from archerfish.config import ConversionConfig, EngineConfig, HubConfig
from archerfish.engine.progress import size
from archerfish.errors import ArcherfishError, DeviceError, ModelError, UnreachableError, UnsupportedModelError
from archerfish.kernels.build import build_info, package_version, requirements
from archerfish.kernels.cards import Card, find_cards
from archerfish.kernels.formats import FORMATS, choose_format
from archerfish.kernels.machine import Cpu, Memory, cpu, fast_cpu_dtype, memory
from archerfish.kernels.select import fast_paths, native_error
from archerfish.models.adapter import ENCODERS, KVShape, find_model, model_class
from archerfish.models.config import Config
from archerfish.runtime.kv_pool import check_plan, plan_memory
from archerfish.store.converter import ModelConverter
from archerfish.store.format import TensorInfo, block_bytes
from archerfish.store.loader import WeightLoader
from archerfish.store.metadata import is_converted, read_metadata
from archerfish.store.names import BUILTIN_MODELS, list_models, resolve_model
from archerfish.store.sources import open_source
from archerfish.types import DTYPE_BYTES

FEATURES = (("AVX2", "avx2"), ("AVX-512", "avx512f"), ("AVX512-BF16", "avx512_bf16"), ("AMX", "amx_tile"))
ARM_FEATURES = (("NEON", "asimd"), ("SVE", "sve"), ("BF16", "bf16"), ("I8MM", "i8mm"))
# Memory besides the weights. CPU: Python, torch and batches (340-430 MB measured with MiniLM). GPU: context and
# workspaces.
CPU_OVERHEAD_BYTES = 500_000_000
GPU_OVERHEAD_BYTES = 1_000_000_000
SPARE = 0.95  # usable share of the available memory
FITS = "fits"
# Built-in models are judged before they are downloaded.
KNOWN_PARAMETERS = {"all-minilm-l6-v2": 22_713_216, "smollm2-135m-instruct": 134_515_008}


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, and the bytes of its weight files; 0 when unknown."""

    name: str
    num_parameters: int
    file_bytes: int
    remark: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[TensorInfo] = ()  # as they are stored, or will be on a CPU

    @property
    def block_bytes(self) -> int:
        """Bytes in memory on a CPU of a model with quantised matrices, which stay so; 0: it has none."""
        return 0 if native_error() else block_bytes(self.tensors)

    @property
    def gpu_bytes(self) -> int:
        """The same on a GPU."""
        from archerfish.engine.llm_loading import quantised_bytes

        try:
            return quantised_bytes(self.tensors, self.config, "cuda", "bfloat16")
        except UnsupportedModelError:
            return 0

    def weight_bytes(self, dtype: str) -> int:
        """Bytes in memory in a type, or in a weight format with the rest in two bytes; 0: unknown for this model."""
        if dtype in DTYPE_BYTES:
            return self.num_parameters * DTYPE_BYTES[dtype]
        config = Config(self.config)
        try:
            return model_class(config).noted(config, "bfloat16", choose_format(dtype)).total_bytes()
        except UnsupportedModelError:
            return 0

    def formats(self, dtype: str) -> dict[str, dict[str, int]]:
        """In which formats its layers of each kind run in the native backend, and how many do; empty where that is
        unknown."""
        from archerfish.kernels.native.weights import joined_formats, packed_format

        stored = {info.name: info.quantization.quant_type if info.quantization else info.dtype for info in self.tensors}
        found: dict[str, Counter[str]] = defaultdict(Counter)
        try:
            for names in model_class(Config(self.config)).noted(Config(self.config)).products if stored else []:
                kinds = [stored.get(name) or stored[name.removeprefix("model.")] for name in names]
                kind = ", ".join(re.sub(r"^(model\.)?(layers\.\d+\.)?|\.weight$", "", name) for name in names)
                found[kind][joined_formats(packed_format(each, dtype) for each in kinds)] += 1
        except (UnsupportedModelError, KeyError):  # an encoder; names that only the converter knows
            return {}
        return {kind: dict(counts) for kind, counts in found.items()}


def add_doctor_arguments(parser: Parser) -> None:
    help_text = "also say whether this model fits, and check its files when it is a converted directory"
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help=help_text)
    add_options(parser, HubConfig)


def run_doctor(arguments: Namespace, out: Output) -> int:
    report = examine(section(HubConfig, arguments), arguments.model, out)
    if out.as_json:
        out.result(report)
    else:
        show(report, out)
    return 0 if report["usable"] else 1


def examine(hub: HubConfig, model: str, out: Output) -> dict[str, Any]:
    """The report, as the object that --json prints."""
    has_native, dtype = not native_error(), fast_cpu_dtype()
    if has_native:
        from archerfish.kernels.native.peaks import measure_peaks
    ram = memory()
    cache = hub.cache_path()
    packages = find_packages()
    existing = next(place for place in (cache.absolute(), *cache.absolute().parents) if place.exists())
    is_writable = os.access(existing, os.W_OK)
    missing = [package["name"] for package in packages if not package["version"] and not package["needed_for"]]
    problems = [f"The package {name} is missing: pip install {name}." for name in missing]
    if not is_writable:
        problems.append(f"The cache directory {cache} cannot be written to: choose another with --cache-dir.")
    problems += find_damage(model, out)
    gpus, paths = find_cards()[0], fast_paths()
    sizes = [measure_or_explain(name, hub) for name in BUILTIN_MODELS if name != model.lower()]
    if model:
        sizes.append(measure(model, hub))
        problems += find_refusal(sizes[-1])
    cached = [found for found in list_models(hub) if found.path is not None]
    return {
        "archerfish": build_info()["version"],
        "build": build_info(),
        "python": build_info()["python"],
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": describe_cpu(cpu()),
        "memory": dataclasses.asdict(ram),
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "compilers": {name: shutil.which(name) or "" for name in ("cc", "c++", "nvcc")},
        "packages": packages,
        "fast_paths": [{"name": path.name, "on": path.is_on, "reason": path.reason} for path in paths],
        "cache": {
            "directory": str(cache),
            "writable": is_writable,
            "free_bytes": shutil.disk_usage(existing).free,
            "models": [{"name": found.name, "source": found.source, "bytes": found.num_bytes} for found in cached],
        },
        "models": [judge_model(found, ram, gpus) for found in sizes],
        "peaks": measure_peaks() if has_native else {},
        "formats": sizes[-1].formats(dtype) if model and has_native else {},
        "usable": not problems,
        "problems": problems,
    }


def find_damage(model: str, out: Output) -> list[str]:
    """Problems of a converted directory: every file is compared with its checksum."""
    if not model or not is_converted(Path(model)):
        return []
    try:
        with out.progress("Checking") as progress:
            WeightLoader(model).verify(progress)
    except ModelError as error:
        return [str(error)]
    return []


def find_refusal(found: ModelSize) -> list[str]:
    """Why a model's architecture is refused."""
    config = Config(found.config)
    try:
        if found.config and config.model_type not in ENCODERS:
            find_model(config)
    except UnsupportedModelError as error:
        return [str(error)]
    return []


def describe_cpu(processor: Cpu) -> dict[str, Any]:
    features = ARM_FEATURES if "asimd" in processor.flags else FEATURES
    found = {name: flag in processor.flags for name, flag in features}
    cores = {"usable_cores": processor.num_cores, "total_cores": os.cpu_count() or 1}
    return {"model": processor.model, **cores, "features": found}


def find_packages() -> list[dict[str, str]]:
    """The packages that archerfish requires, and those that `bench` can compare with.

    version: empty when it is not installed; needed_for: the extra that needs it, empty when archerfish always needs it.
    """
    wanted: dict[str, str] = {}
    for name, extra in requirements():
        wanted.setdefault(name, extra)
    peers = dict.fromkeys(("sentence-transformers", "onnxruntime", "openvino"), "bench")
    for name, needed_for in {**peers, "triton": "gpu kernels"}.items():
        wanted.setdefault(name, needed_for)
    return [{"name": name, "version": package_version(name), "needed_for": extra} for name, extra in wanted.items()]


def measure(name: str, hub: HubConfig) -> ModelSize:
    """The size of a model from its headers, or for a built-in model that is not on this machine from a table."""
    try:
        path = resolve_model(name, hub.replace(offline=True))
    except UnreachableError:
        builtin = BUILTIN_MODELS.get(name.lower())
        if builtin is None:
            return ModelSize(name, 0, 0, f"not on this machine; `archerfish pull {name}` gets it")
        return ModelSize(name, KNOWN_PARAMETERS.get(builtin.name, 0), builtin.wheel_bytes, "not pulled yet")
    if is_converted(path):
        metadata = read_metadata(path)
        largest = max(
            (record.num_bytes for file, record in metadata.files.items() if file.startswith("weights.")), default=0
        )
        remark = f"converted, {metadata.dtype}"
        return ModelSize(name, metadata.total_parameters, largest, remark, metadata.config, metadata.tensors)
    source = open_source(path)
    converter = ModelConverter(ConversionConfig(dtype=fast_cpu_dtype(), keep_quantized=True))
    tensors = [converter.stored_info(tensor) for tensor in source.tensors]
    return ModelSize(
        name, sum(info.num_params for info in tensors), source.num_bytes, source.kind, source.config, tensors
    )


def measure_or_explain(name: str, hub: HubConfig) -> ModelSize:
    """The size of a model; where its files are damaged, its remark says what is wrong."""
    try:
        return measure(name, hub)
    except ArcherfishError as error:
        return ModelSize(name, 0, 0, error.message)


def judge_model(found: ModelSize, ram: Memory, gpus: list[Card]) -> dict[str, Any]:
    """Whether a model fits into the available memory, in which types and weight formats."""
    narrow = fast_cpu_dtype()
    weight_bytes = {dtype: found.weight_bytes(dtype) for dtype in ("float32", "bfloat16", "float16", *FORMATS)}
    row: dict[str, Any] = {
        "name": found.name,
        "num_parameters": found.num_parameters,
        "file_bytes": found.file_bytes,
        "weight_bytes": weight_bytes,
        "remark": found.remark,
        "cpu": "unknown",
        "fits_cpu": None,
        "gpu": "unknown" if gpus else "no GPU",
        "fits_gpu": None,
    }
    if not found.num_parameters:
        return row
    formats = [name for name in FORMATS if weight_bytes[name]]
    row["kv_tokens"] = kv_tokens(found, "cuda", "bfloat16") if gpus else kv_tokens(found, "cpu", fast_cpu_dtype())

    def verdicts(dtypes: Iterable[str], more_bytes: int, available: int, total: int, blocks: int = 0) -> dict[str, str]:
        return {dtype: judge((blocks or weight_bytes[dtype]) + more_bytes, available, total) for dtype in dtypes}

    dtypes, blocks = (narrow, "float32", *formats), found.block_bytes
    on_cpu = verdicts(dtypes, CPU_OVERHEAD_BYTES, ram.available_bytes, ram.total_bytes, blocks)
    text = fits_in(on_cpu, narrow, formats)
    if on_cpu[narrow] == FITS:
        text = "fits in any type" if on_cpu["float32"] == FITS else f"fits in {narrow}, not in float32"
    row |= {"cpu": text, "fits_cpu": {dtype: verdict == FITS for dtype, verdict in on_cpu.items()}}
    if gpus:
        roomiest = max(gpus, key=lambda gpu: gpu.free_bytes)
        on_gpu = verdicts(
            ("bfloat16", *formats), GPU_OVERHEAD_BYTES, roomiest.free_bytes, roomiest.total_bytes, found.gpu_bytes
        )
        row["gpu"] = fits_in(on_gpu, "bfloat16", formats)
        row["fits_gpu"] = {dtype: verdict == FITS for dtype, verdict in on_gpu.items()}
    return row


def judge(needed_bytes: int, available_bytes: int, total_bytes: int) -> str:
    """FITS, or why the model does not fit."""
    if needed_bytes <= available_bytes * SPARE:
        return FITS
    needs = f"needs {needed_bytes / 1e9:.1f} GB"
    if needed_bytes <= total_bytes * SPARE:
        return f"does not fit now: {needs}, {available_bytes / 1e9:.1f} GB free"
    return f"does not fit: {needs}, there are {total_bytes / 1e9:.1f} GB"


def fits_in(verdicts: Mapping[str, str], dtype: str, formats: Iterable[str]) -> str:
    """The verdict on a type, or the first weight format that fits where the type does not."""
    fitting = [name for name in formats if verdicts[name] == FITS]
    return f"fits with --weights {fitting[0]} alone" if fitting and verdicts[dtype] != FITS else verdicts[dtype]


def kv_tokens(found: ModelSize, device: str, dtype: str) -> int | None:
    """Tokens whose KV an LLMEngine with default options has memory for; None for models without KV."""
    config = Config(found.config)
    try:
        shape = model_class(config).memory_shape(config)
        if not isinstance(shape, KVShape):
            return None
        weight_bytes = (found.block_bytes if device == "cpu" else found.gpu_bytes) or found.weight_bytes(dtype)
        plan = plan_memory(EngineConfig(), shape, device, dtype, weight_bytes)
        check_plan(found.name, EngineConfig(), shape, device, plan)
        return plan.num_tokens
    except UnsupportedModelError:
        return None
    except DeviceError:
        return 0


def show(report: dict[str, Any], out: Output) -> None:
    cache = report["cache"]
    paths = [(path["name"], "on" if path["on"] else "off", path["reason"]) for path in report["fast_paths"]]
    packages = [
        (p["name"], p["version"] or ("not installed" if p["needed_for"] else "missing"), p["needed_for"] or "always")
        for p in report["packages"]
    ]
    cached = [(m["name"], m["source"], size(m["bytes"])) for m in cache["models"]]
    models = [
        (
            m["name"],
            f"{m['num_parameters'] / 1e6:,.1f} M" if m["num_parameters"] else "?",
            size(m["weight_bytes"]["float32"]),
            size(m["weight_bytes"]["bfloat16"]),
            size(m["file_bytes"]),
            m["cpu"],
            *([m["gpu"]] if report["gpus"] else []),
            f"{m['kv_tokens']:,}" if m.get("kv_tokens") is not None else "-",
            m["remark"],
        )
        for m in report["models"]
    ]
    gpu = ("on the GPU",) if report["gpus"] else ()
    model_columns = ("model", "params", "float32", "2 bytes", "files", "in memory", *gpu, "KV tokens", "source")
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[object]]]] = [
        ("Machine", ("", "found"), describe_machine(report)),
        ("Fast paths (by torch's files and the driver: torch itself is not loaded)", ("path", "state", "why"), paths),
        ("Packages", ("package", "version", "needed for"), packages),
        (f"Cache: {cache['directory']} ({size(cache['free_bytes'])} free)", ("model", "source", "size"), cached),
        ("What will fit", model_columns, models),
    ]
    if report["formats"]:
        kinds = [
            (kind, ", ".join(f"{name} x {num}" for name, num in each.items()))
            for kind, each in report["formats"].items()
        ]
        tables.append((f"{models[-1][0]} on this CPU", ("layers", "format"), kinds))
    for title, columns, rows in tables:
        out.table(title, columns, rows, numbers=("size", *model_columns[1:5], "KV tokens"))
        out.line()
    for problem in report["problems"]:
        out.line(problem, "bad")
    out.line(
        "Ready." if report["usable"] else "Not ready: see the problems above.", "good" if report["usable"] else "bad"
    )


def describe_machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    processor, ram = report["cpu"], report["memory"]
    commit = f" (commit {report['build']['commit']})" if report["build"]["commit"] else ""
    limit = f" (limited by the {ram['limited_by']})" if ram["limited_by"] else ""
    gpus = "; ".join(f"{g['name']}, {size(g['free_bytes'])} of {size(g['total_bytes'])} free" for g in report["gpus"])
    return [
        ("archerfish", f"{report['archerfish']}{commit}, Python {report['python']}, {report['system']}"),
        ("processor", processor["model"]),
        ("cores", f"{processor['usable_cores']} usable of {processor['total_cores']}"),
        ("instructions", ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in processor["features"].items())),
        ("native kernels", report["build"]["instructions"] or "not compiled"),
        ("memory", f"{size(ram['available_bytes'])} available of {size(ram['total_bytes'])}{limit}"),
        ("measured", ", ".join(f"{rate:,.1f} {name}" for name, rate in report["peaks"].items()) or "-"),
        ("GPU", gpus or "none that torch computes on"),
        ("compilers", ", ".join(f"{name}: {where or 'not found'}" for name, where in report["compilers"].items())),
    ]
