"""`archerfish bench gpu`: our engine on the GPU workloads, and vLLM beside it, each in a process of its own.

Weights are random, in the shapes of published models: speed does not depend on their values. See `gpu_worker` for the work.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import archerfish
from archerfish.bench.driver import PeerFailedError, WorkerProcess
from archerfish.bench.gpu_worker import Work
from archerfish.bench.report import Metric, cell, times
from archerfish.bench.stats import Summary, gain, summarize
from archerfish.bench.targets import Bar, Judged
from archerfish.errors import InvalidOptionError
from archerfish.types import Progress, no_progress

SHAPES: dict[str, dict[str, Any]] = {  # config.json by name
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 28, "bos_token_id": 151643, "eos_token_id": 151645,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1,
        "bos_token_id": 128000, "eos_token_id": 128009, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
    },
}  # fmt: skip
OURS, THEIRS = "archerfish", "vllm"
COMMON = {
    "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 512, "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": True,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {"device": "cuda", **COMMON},
    THEIRS: {**COMMON, "skip_tokenizer_init": True, "disable_log_stats": True},
}
ENVIRONMENT = {
    OURS: {},
    THEIRS: {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
}
PARTS = ("offline", "bs1", "prefill", "shared")
METRICS = (
    Metric("offline256_tok_s", "256 requests, 100-1024 in and out", higher_is_better=True),
    Metric("bs1_decode_tok_s", "one request, tokens after the first", higher_is_better=True),
    Metric("bs1_ttft_ms", "one request, first token", digits=2),
    Metric("prefill_tok_s", "64 prompts of 2048", higher_is_better=True),
    Metric("shared_prefix_req_s", "256 requests, shared prefix of 3072, 64 out", higher_is_better=True, digits=1),
    Metric("import_s", "imports", digits=2),
    Metric("start_s", "start after imports", digits=2),
)
TARGETS: dict[str, dict[str, float]] = {  # how many times vLLM's figure ours is to be, by shape and metric
    "qwen3-0.6b": {"offline256_tok_s": 1.15, "bs1_decode_tok_s": 2.5, "prefill_tok_s": 1.0, "shared_prefix_req_s": 3.0},
    "llama-3.1-8b": {"offline256_tok_s": 1.05, "bs1_decode_tok_s": 1.25, "prefill_tok_s": 1.0, "shared_prefix_req_s": 1.6},
}
WORK = Work()
Tell = Callable[[str, float], None]  # hears of every sample at once: a run takes long


def tell_nothing(name: str, value: float) -> None:
    """The Tell of callers that show nothing."""


@dataclass
class EngineRun:
    """What one engine did on one shape; where it failed, the samples until then."""

    engine: str
    shape: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    version: str = ""
    error: str = ""

    def summary(self, key: str) -> Summary | None:
        return summarize(self.samples[key]) if self.samples.get(key) else None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"engine": self.engine, "model": self.shape, "version": self.version, "error": self.error}
        for key, values in self.samples.items():
            found |= {key: round(summarize(values).median, 4), f"{key}_all": [round(value, 4) for value in values]}
        return found


@dataclass(frozen=True)
class GpuBench:
    """Which shapes, how often, which parts, and where vLLM is: "" for none, "installed", or a directory."""

    shapes: Sequence[str]
    repeats: int = 3
    parts: Sequence[str] = PARTS
    vllm: str = ""
    tell: Tell = tell_nothing
    progress: Progress = no_progress

    def run(self) -> dict[str, dict[str, EngineRun]]:
        """Runs by shape and engine. Engines take turns; an engine's failure does not end the others."""
        engines = [OURS, *([THEIRS] if self.vllm else [])]
        found: dict[str, dict[str, EngineRun]] = {}
        steps = 1 + self.repeats * len(self.parts)
        total = len(self.shapes) * len(engines) * steps
        for index, (shape, engine) in enumerate((shape, engine) for shape in self.shapes for engine in engines):
            with model_directory(shape) as directory:
                run = self._run_engine(engine, shape, directory, index * steps, total)
            found.setdefault(shape, {})[engine] = run
        return found

    def _run_engine(self, engine: str, shape: str, directory: Path, done: int, total: int) -> EngineRun:
        run = EngineRun(engine, shape)
        where = f"{shape}, {engine}"

        def take(samples: dict[str, float], what: str) -> None:
            nonlocal done
            for key, value in samples.items():
                run.samples.setdefault(key, []).append(value)
                self.tell(f"{where}: {key}", value)
            done += 1
            self.progress(done, total, f"{where}: {what}")

        self.progress(done, total, f"{where}: start")
        try:
            with WorkerProcess(worker_command(engine, directory, OPTIONS[engine], self.vllm)) as worker:
                started = worker.ask("start")
                run.version = started.pop("version")
                take(started, "start")
                worker.ask("warm_up")
                for repeat in range(self.repeats):
                    for part in self.parts:
                        take(worker.ask(part, repeat=repeat), part)
        except PeerFailedError as error:
            run.error = str(error)
        return run


@contextmanager
def model_directory(shape: str) -> Iterator[Path]:
    """A directory with the configuration of a shape and nothing else."""
    with tempfile.TemporaryDirectory(prefix="archerfish-bench-") as folder:
        directory = Path(folder) / shape
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        yield directory


def worker_command(
    engine: str, directory: Path, options: dict[str, Any], vllm: str = "", environment: dict[str, str] | None = None
) -> list[str]:
    """How to start the process of an engine: `env` because the processes that vLLM starts need its paths too."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(archerfish.__file__).parents[1])]
    if engine == THEIRS and vllm != "installed":
        paths.insert(0, vllm)
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **ENVIRONMENT[engine], **(environment or {})}
    given = {"engine": engine, "directory": str(directory), "options": options, "work": asdict(WORK)}
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, "-m", "archerfish.bench.gpu_worker", json.dumps(given)]


def find_vllm(path: str) -> str:
    """Where vLLM is, as GpuBench takes it; a directory without it is refused."""
    if not path:
        return "installed" if importlib.util.find_spec("vllm") is not None else ""
    directory = Path(path).absolute()
    if not (directory / "vllm" / "__init__.py").is_file():
        raise InvalidOptionError(f"{path} holds no vllm package.", hint="Give the directory that would be on PYTHONPATH.")
    return str(directory)


def ratio(runs: dict[str, EngineRun], metric: Metric) -> float | None:
    """How many times better our median is than vLLM's."""
    both = [runs[engine].summary(metric.key) if engine in runs else None for engine in (OURS, THEIRS)]
    ours, theirs = both
    if ours is None or theirs is None or min(ours.median, theirs.median) <= 0:
        return None
    return gain(ours.median, theirs.median, higher_is_better=metric.higher_is_better)


def judge(shape: str, runs: dict[str, EngineRun]) -> list[Judged]:
    """The ratios that a shape is held to; none without vLLM beside us, or of parts that were not run."""
    targets = TARGETS.get(shape, {})
    pairs = [(metric, ratio(runs, metric)) for metric in METRICS if metric.key in targets]
    return [
        Bar(f"{shape}: {metric.key}", targets[metric.key], at_least=True).judged(value)
        for metric, value in pairs
        if value is not None
    ]


def table(runs: dict[str, EngineRun]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of one shape: medians with their range, and how many times better ours is."""
    columns = ["", "", *runs, *(["ratio"] if THEIRS in runs else [])]
    rows = []
    for metric in METRICS:
        summaries = [run.summary(metric.key) for run in runs.values()]
        if any(summaries):
            cells = [cell(summary, metric) for summary in summaries]
            rows.append([metric.key, metric.title, *cells, *([times(ratio(runs, metric))] if THEIRS in runs else [])])
    return columns, rows


def as_dict(runs: dict[str, dict[str, EngineRun]]) -> dict[str, Any]:
    """Runs and ratios by shape, for machines."""
    return {
        shape: {
            **{engine: run.as_dict() for engine, run in of_shape.items()},
            "ratios": {metric.key: ratio(of_shape, metric) for metric in METRICS if THEIRS in of_shape},
        }
        for shape, of_shape in runs.items()
    }
