"""What is compiled before a model is ready is all that its requests launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROUNDS = 9


KINDS = ("rwkv", "encoders", "int8", "experts", "gemma", "deterministic", "adapters")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", ["llama", *SLOW])
def test_requests_launch_nothing_that_was_not_rehearsed(kind: str, tmp_path: Path) -> None:
    """Red: a kernel that is specialised on a number which varies, or a way of sampling that `rehearsal.py` leaves
    out."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "tests.runtime.rehearsed", kind, str(tmp_path), str(ROUNDS)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "late" not in done.stdout, done.stdout
    assert " 0 requested" not in done.stdout
