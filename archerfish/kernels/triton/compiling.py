"""What a model needs compiled, found by a rehearsal and compiled by all cores; and a count of what was compiled when.

In a rehearsal a thread runs its steps as always, but launches are only noted, and memory that kernels would fill is
zero. What is not in Triton's cache goes to processes that compile it (`compile_worker.py`), while the rehearsal goes
on. The result is a list of kernels, kept in the cache: a start that finds the list and all its kernels rehearses
nothing.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import __version__ as triton_version
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, compute_cache_key

from archerfish.kernels.machine import num_usable_cores
from archerfish.kernels.triton.compile_worker import Job, compile_job
from archerfish.types import Progress

logger = logging.getLogger("archerfish.kernels")
MAX_WORKERS = 32
WORKER = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from archerfish.kernels.triton.compile_worker import main; main()"
)
SOURCES = ("kernels", "layers", "models", "runtime", "engine")  # folders that decide which kernels a model launches


# Counting


@dataclass
class CompileCounts:
    """Kernels that were compiled for one model, not those that were in the cache."""

    num_at_start: int = 0
    late: list[str] = field(default_factory=list)  # names of those compiled when the model was ready
    is_ready: bool = False


class _Thread(threading.local):
    counts: CompileCounts | None = None  # of the model that this thread computes
    rehearsal: Rehearsal | None = None


_thread = _Thread()


def count_for(counts: CompileCounts) -> None:
    """From now on, what this thread compiles counts there."""
    _thread.counts = counts


def _on_compiled(*, src: Any, cache_hit: bool, **_: Any) -> None:
    counts = _thread.counts
    if cache_hit or counts is None:
        return
    if counts.is_ready:
        counts.late.append(src.name)
        logger.warning("The kernel %s was compiled after the start: a request may have waited for it.", src.name)
    else:
        counts.num_at_start += 1


knobs.compilation.listener = _on_compiled


# Finding


class Rehearsal:
    """Notes the kernels that a thread would launch. missing: called with the job of each that is not in the cache."""

    def __init__(self, missing: Callable[[Job], None]) -> None:
        self.kernels: dict[str, str] = {}  # hash and name
        self._missing = missing
        self._seen: set[tuple[int, str]] = set()

    def note(self, kernel: Any, args: Any, options: dict[str, Any]) -> None:
        """The first half of `JITFunction.run`."""
        options = {**options, "debug": options.get("debug", kernel.debug) or knobs.runtime.debug}
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, keys, target, backend, bind = kernel.device_caches[driver.active.get_current_device()]
        bound, specialization, left = bind(*args, **options)
        key = id(kernel), compute_cache_key(keys, specialization, left)
        if key in self._seen:
            return
        self._seen.add(key)
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, left)
        source = ASTSource(kernel, signature, constants, attributes)
        whole = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
        digest = hashlib.sha256(whole.encode()).hexdigest()
        self.kernels[digest] = source.name
        if not is_cached(digest, source.name):
            where = (target.backend, target.arch, target.warp_size)
            self._missing(
                Job(kernel.__module__, kernel.__name__, signature, constants, attributes, vars(parsed), where)
            )


def is_rehearsing() -> bool:
    return _thread.rehearsal is not None


def is_cached(digest: str, name: str) -> bool:
    file = f"{name[:150]}.json"
    return file in (get_cache_manager(digest).get_group(file) or {})


_rehearsing = threading.Lock()


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """In this thread kernels are noted, not launched, and new memory is zero; other threads go on as always."""
    with _rehearsing:
        launch = JITFunction.run
        empty = torch.empty
        empty_like = torch.empty_like

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            own = _thread.rehearsal
            if own is None:
                return launch(kernel, *args, grid=grid, warmup=warmup, **options)
            return own.note(kernel, args, options)

        def new(*shape: Any, **options: Any) -> Any:
            return (empty if _thread.rehearsal is None else torch.zeros)(*shape, **options)

        def new_like(tensor: Any, **options: Any) -> Any:
            return (empty_like if _thread.rehearsal is None else torch.zeros_like)(tensor, **options)

        JITFunction.run, _thread.rehearsal = run, rehearsal
        torch.empty, torch.empty_like = new, new_like  # type: ignore[assignment]
        try:
            yield
        finally:
            JITFunction.run, _thread.rehearsal = launch, None
            torch.empty, torch.empty_like = empty, empty_like


# Compiling


class CompilePool:
    """Processes that compile kernels, one for each core; they are started for the first jobs."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            min(MAX_WORKERS, num_usable_cores()), thread_name_prefix="archerfish-compile"
        )
        self._own = threading.local()  # the process of each thread
        self._workers: list[subprocess.Popen[bytes]] = []
        self.jobs: dict[Future[None], Job] = {}

    def submit(self, job: Job) -> None:
        self.jobs[self._threads.submit(self._compile, job)] = job

    def finish(self, progress: Progress) -> int:
        """Wait for all jobs, and return how many of them the processes have done. The others are done here."""
        failed = []
        for number, future in enumerate(as_completed(self.jobs)):
            progress(number, len(self.jobs), "Compiling kernels")
            failed += [self.jobs[future]] if future.exception() else []
        for job in failed:
            try:
                compile_job(job)
            except Exception as error:  # a step that launches it will raise the error, if there is such a step
                logger.warning("The kernel %s could not be compiled: %s", job.name, error)
        return len(self.jobs) - len(failed)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def _compile(self, job: Job) -> None:
        worker = self._own.__dict__.pop("worker", None) or self._start()
        pickle.dump(job, worker.stdin)
        worker.stdin.flush()
        if (reply := worker.stdout.readline()) != b"\n":
            raise RuntimeError(reply.decode() or "The worker ended.")
        self._own.worker = worker

    def _start(self) -> Any:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(knobs.cache.dir), "TRITON_INTERPRET": "0"}
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._workers.append(worker)
        assert worker.stdin is not None
        pickle.dump(sys.path, worker.stdin)
        pickle.dump(triton_key(), worker.stdin)
        return worker


# The list


def list_path(key: str) -> Path:
    """Where the list of kernels stands that a start with this key needs, on this card and with these versions."""
    target = driver.active.get_current_target()
    parts = (key, triton_version, source_digest(), target, sorted(get_cache_invalidating_env_vars().items()))
    return Path(knobs.cache.dir) / "archerfish" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


@cache
def source_digest() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_list(path: Path) -> Mapping[str, str]:
    """The kernels of a list by their hash; none if it is not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def compile_ahead(path: Path, rehearse: Callable[[], None], counts: CompileCounts, progress: Progress) -> None:
    """Compile all kernels that `rehearse` launches, unless the list at `path` says that they are in the cache."""
    known = read_list(path)
    if known and all(is_cached(digest, name) for digest, name in known.items()):
        return
    began, pool = time.perf_counter(), CompilePool()
    rehearsal = Rehearsal(pool.submit)
    try:
        with rehearsing(rehearsal):
            rehearse()
    except Exception:  # such as another version of Triton: the first steps compile what they need
        logger.warning("Not all kernels could be compiled ahead; requests may wait for some.", exc_info=True)
        rehearsal.kernels.clear()
    else:
        num_elsewhere = pool.finish(progress)  # what is compiled here counts itself
        counts.num_at_start += num_elsewhere
        logger.info("Compiled %d kernels in %.1f s.", len(pool.jobs), time.perf_counter() - began)
    finally:
        pool.close()
    if rehearsal.kernels:
        with suppress(OSError):  # a cache that cannot be written: the next start rehearses again
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(rehearsal.kernels), encoding="utf-8")
            part.replace(path)
