"""Too little memory: an error of ours with a way out, and not numpy's."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.errors import OutOfMemoryError
from archerfish.kernels.select import choose_ops
from archerfish.kernels.torch.reference import TorchOps
from archerfish.serve.compute import PendingRequest
from archerfish.serve.wire import Ping
from tests.serve.client import words_host
from tests.text.tiny_tokenizers import save_text_llama

MIB = 1 << 20
LIMIT_BYTES = 1500 * MIB  # Python, numpy and stacks of threads take about 300 MiB of addresses
COMMAND = [sys.executable, "-m", "archerfish", "generate", "the cat", "--max-tokens", "2", "--dtype", "float32"]


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


def test_a_limit_of_the_process_counts_as_memory(tmp_path: Path) -> None:
    """Red if KV were planned from the memory of the machine, of which the process may have a part."""
    model = save_text_llama(tmp_path / "model", 256)
    flags = ["--model", str(model), "--load-format", "dummy", "--cache-dir", str(tmp_path / "cache")]

    def generate(*more: str) -> tuple[int, str]:
        done = subprocess.run([*COMMAND, *flags, *more], capture_output=True, text=True, check=False, preexec_fn=limit)
        return done.returncode, done.stderr

    assert generate()[0] == 0
    code, told = generate("--max-cache-tokens", "100000000")
    assert code == 5 and "(ulimit -v)" in told and "Choose a max_cache_tokens of at most" in told


@pytest.mark.parametrize("kind", ["chosen", "torch"])
def test_an_allocation_that_fails_is_an_error_of_ours(kind: str) -> None:
    ops = TorchOps() if kind == "torch" else choose_ops("cpu", "float32")
    for context, what in ((ops.computing(), "A step"), (ops.allocating("The model"), "The model")):
        with pytest.raises(OutOfMemoryError, match=f"{what} needs more memory .* Free memory or raise"), context:
            torch.empty(1 << 50) if kind == "torch" else np.empty(1 << 50)
    with pytest.raises(RuntimeError, match="another"), ops.allocating("The model"):
        raise RuntimeError("another error")


def test_a_request_without_memory_is_told_so() -> None:
    with words_host() as host:
        answers: list[Any] = []
        host.answer = lambda pending, message: answers.append(message)  # type: ignore[method-assign]
        host.fail(PendingRequest(b"", Ping(request_id="")), MemoryError())
    assert (answers[0].status, answers[0].code) == (507, "out_of_memory")
