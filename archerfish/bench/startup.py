"""`archerfish bench startup`: from starting a process to its first token, with compilers' caches empty and then filled."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from archerfish.bench import gpu
from archerfish.bench.driver import PeerFailedError, WorkerProcess
from archerfish.bench.targets import Bar, Judged
from archerfish.store.metadata import is_converted
from archerfish.types import Progress, no_progress

STARTS = ("first", "second")
TARGETS_S = {"qwen3-0.6b": 8.0, "llama-3.1-8b": 15.0}  # for our second start
# Where torch, Triton, the driver and vLLM keep what they compiled; each engine begins with them empty.
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True)
class Start:
    """Seconds of one start. The process phase is what none of the others explains: the interpreter and the pipe."""

    shape: str
    engine: str
    start: str  # first or second
    import_s: float
    load_s: float
    first_token_s: float
    total_s: float

    @property
    def process_s(self) -> float:
        return self.total_s - self.import_s - self.load_s - self.first_token_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "process_s": self.process_s}


def ensure_store(shape: str, folder: Path) -> Path:
    """The converted directory with random weights of a shape, written once, by a process that then leaves the device."""
    options = gpu.OPTIONS[gpu.OURS]
    target = folder / f"{shape}-{options['dtype']}-random"
    if not is_converted(target):
        with gpu.model_directory(shape) as source, WorkerProcess(gpu.worker_command(gpu.OURS, source, options)) as worker:
            worker.ask("write_store", target=str(target))
    return target


def measure_startup(
    shapes: Sequence[str], folder: Path, vllm: str = "", tell: gpu.Tell = gpu.tell_nothing, progress: Progress = no_progress
) -> tuple[list[Start], dict[str, str]]:
    """Two starts of every engine on every shape, and the errors of those that failed.

    Ours maps a converted directory; vLLM has random weights in memory, so that it has no file to read.
    """
    found: list[Start] = []
    errors: dict[str, str] = {}
    engines = [gpu.OURS, *([gpu.THEIRS] if vllm else [])]
    total = len(shapes) * len(engines) * len(STARTS)
    for shape in shapes:
        for engine in engines:
            try:
                for start in start_twice(shape, engine, folder, vllm):
                    found.append(start)
                    tell(f"{shape}, {engine}: {start.start} start, s", start.total_s)
                    progress(len(found), total, f"{shape}, {engine}")
            except PeerFailedError as error:
                errors[f"{shape}, {engine}"] = str(error)
    return found, errors


def judge_starts(starts: Sequence[Start]) -> list[Judged]:
    """Our second start of each shape against what it may take."""
    return [
        Bar(f"{start.shape}: second start, s", TARGETS_S[start.shape]).judged(start.total_s)
        for start in starts
        if start.engine == gpu.OURS and start.start == STARTS[1] and start.shape in TARGETS_S
    ]


def start_twice(shape: str, engine: str, folder: Path, vllm: str) -> Iterator[Start]:
    options = gpu.OPTIONS[engine]
    store = ensure_store(shape, folder) if engine == gpu.OURS else None
    with gpu.model_directory(shape) as plain, tempfile.TemporaryDirectory(prefix="archerfish-caches-") as caches:
        environment = {name: str(Path(caches) / name) for name in CACHES}
        given = {**options, "load_format": "auto"} if store else options
        command = gpu.worker_command(engine, store or plain, given, vllm, environment)
        for start in STARTS:
            yield one_start(command, shape, engine, start)


def one_start(command: list[str], shape: str, engine: str, start: str) -> Start:
    began = time.perf_counter()
    with WorkerProcess(command) as worker:
        phases = worker.ask("start")
        first = worker.ask("first_token")
        total_s = time.perf_counter() - began
    return Start(shape, engine, start, phases["import_s"], phases["start_s"], first["first_token_s"], total_s)
