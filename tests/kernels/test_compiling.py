"""Kernels compiled ahead by workers, and counted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime.jit import JITFunction

from archerfish.kernels.triton import compiling

FOLDER, LIST = "A" * 52, "0" * 32 + ".json"


def test_kernels_are_compiled_and_counted(tmp_path: Path) -> None:
    """Each check of the script says what it is about."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling_script"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr[-3000:]


def test_models_that_rehearse_at_once_leave_torch_as_it_was() -> None:
    before = torch.empty, torch.empty_like, JITFunction.run
    inside, found = threading.Barrier(2), list[bool]()

    def rehearse() -> None:
        with compiling.rehearsing(compiling.Rehearsal(lambda job: None)):
            found.append(not torch.full_like(torch.empty(1000), 1.0).isnan().any() and not torch.empty(1000).any())

    def go_on() -> None:  # a thread that serves another model meanwhile
        with compiling.rehearsing(compiling.Rehearsal(lambda job: None)):
            inside.wait()
            inside.wait()

    other = threading.Thread(target=go_on)
    other.start()
    inside.wait()
    assert torch.empty(3, memory_format=torch.contiguous_format).shape == (3,)  # which zeros would not take
    waiting = threading.Thread(target=rehearse)
    waiting.start()
    inside.wait()
    for thread in (other, waiting):
        thread.join()
    assert found == [True] and (torch.empty, torch.empty_like, JITFunction.run) == before
