"""The parts of `kernels/triton/compiling.py` with kernels that are really compiled: `python -m
tests.kernels.compiling_script`.

A process of its own: Triton must not interpret here. Its cache is the directory TRITON_CACHE_DIR.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
import torch
from triton.runtime.jit import JITFunction

from archerfish.kernels.triton import compiling, sampling
from archerfish.kernels.triton.compile_worker import Job, compile_job
from archerfish.kernels.triton.compiling import (
    CompileCounts,
    Rehearsal,
    compile_ahead,
    is_cached,
    read_list,
    rehearsing,
)
from archerfish.kernels.triton.encoder import normalize_kernel
from archerfish.kernels.triton.scores import mask_kernel
from archerfish.types import no_progress
from tests.runtime.rehearsed import pretend_card

X, IDS = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64)


def mask(chunk: int) -> None:
    mask_kernel[(1, 1)](X, IDS, IDS, 64, 1, chunk=chunk)


def two_kernels() -> None:
    assert torch.empty(3).eq(0).all()
    for _ in range(2):
        mask(64)
        normalize_kernel[(1,)](X, X, 4, 64, width=64, block=64, many=1)


def compiled_here(work: Callable[[], None]) -> list[Job]:
    """What launching would compile in this process; there is no card to launch on."""
    jobs: list[Job] = []
    with rehearsing(Rehearsal(jobs.append)):
        work()
    for job in jobs:
        compile_job(job)
    return jobs


def check_hashes() -> None:
    """The hash of a kernel does not depend on which functions had one before."""
    functions = [function for function in vars(sampling).values() if isinstance(function, JITFunction)]
    found = []
    for order in (functions, functions[::-1]):
        for function in functions:
            function.hash, function.used_global_vals = None, {}
        found.append({function.__name__: function.cache_key for function in order})
    assert found[0] == found[1] and len(found[0]) > 10


def check_start(patch: pytest.MonkeyPatch) -> None:
    """Two workers compile, and a second start compiles and starts nothing."""
    counts = CompileCounts()
    shown = list[tuple[int, int]]()
    path = compiling.list_path("model")
    compile_ahead(path, two_kernels, counts, lambda done, total, what: shown.append((done, total)))
    assert counts == CompileCounts(num_at_start=2) and shown == [(0, 2), (1, 2)]
    assert sorted(read_list(path).values()) == ["mask_kernel", "normalize_kernel"]
    assert all(is_cached(digest, name) for digest, name in read_list(path).items())
    assert compiled_here(two_kernels) == []  # with the hashes that this process finds
    assert not compiling.is_rehearsing() and compiling.list_path("other") != path
    again = CompileCounts()
    with patch.context() as inner:
        inner.setattr(compiling, "rehearsing", None)
        inner.setattr("subprocess.Popen", None)
        compile_ahead(path, two_kernels, again, no_progress)
    assert again == CompileCounts()


def check_late(records: list[logging.LogRecord]) -> None:
    """What is compiled after the start is counted and logged."""
    counts = CompileCounts(is_ready=True)
    compiling.count_for(counts)
    assert len(compiled_here(lambda: mask(128))) == 1
    assert (counts.num_at_start, counts.late) == (0, ["mask_kernel"])
    assert "mask_kernel" in records[-1].getMessage() and records[-1].levelno == logging.WARNING
    assert compiled_here(lambda: mask(128)) == [] and len(counts.late) == 1


def check_failures(patch: pytest.MonkeyPatch) -> None:
    """Without workers kernels are compiled in place; a rehearsal that fails leaves no list."""
    for number, worker in enumerate(("import sys; sys.exit(3)", "raise SystemExit"), 1):
        counts = CompileCounts()
        compiling.count_for(counts)
        with patch.context() as inner:
            inner.setattr(compiling, "WORKER", worker)
            if number == 2:
                inner.setattr(sys, "executable", "/no/such/python")
            compile_ahead(compiling.list_path(worker), lambda: mask(256 * number), counts, no_progress)  # noqa: B023
        assert (counts.num_at_start, counts.late) == (1, [])
        assert compiled_here(lambda: mask(256 * number)) == []  # noqa: B023

    def fails() -> None:
        mask(64)
        raise RuntimeError("no such step")

    compile_ahead(compiling.list_path("fails"), fails, CompileCounts(), no_progress)
    assert read_list(compiling.list_path("fails")) == {} and not compiling.is_rehearsing()


def main() -> None:
    pretend_card()
    patch, records = pytest.MonkeyPatch(), list[logging.LogRecord]()
    patch.setattr(compiling.logger, "handle", records.append)
    check_hashes()
    check_start(patch)
    check_late(records)
    check_failures(patch)
    print("passed")


if __name__ == "__main__":
    main()
