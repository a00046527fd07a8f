"""RWKV-7 against the PyPI package `rwkv`: red if a formula, a name, the order of tokens or a state differs.

The package itself need not be here: golden logits of the smallest size were made with it (`make_golden`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.recurrent import StateShape
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.config import Config
from archerfish.models.rwkv7 import Rwkv7Model
from tests.kernels.native_support import native_ops
from tests.models.recurring import GOLDEN, SIZES, STEPS, RecurrentDriver, random_tokens, read_rwkv7, write_checkpoint

LENGTH = 100
TOLERANCE = 1e-4
Backend = Callable[..., Any]
BACKENDS = [TorchOps, native_ops]
has_rwkv = importlib.util.find_spec("rwkv") is not None
needs_rwkv = pytest.mark.skipif(not has_rwkv, reason="the package rwkv is not installed")
NAMES = ["tiny", "small", pytest.param("medium", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rwkv7")


def checkpoint(directory: Path, name: str) -> Path:
    path = directory / f"{name}.pth"
    return path if path.exists() else write_checkpoint(SIZES[name], path)


def driver(
    directory: Path, name: str, backend: Backend = native_ops, *, dtype: str = "float32", block_size: int = 16
) -> RecurrentDriver:
    config, weights = read_rwkv7(checkpoint(directory, name))
    ops = backend("cpu", dtype)
    tokens = random_tokens(SIZES[name], 3, LENGTH)
    return RecurrentDriver(ops, weights, config, tokens, block_size=block_size)


def check(ours: RecurrentDriver, theirs: Sequence[Any]) -> None:
    ours.check(STEPS, theirs, TOLERANCE)
    assert ours.num_computed == [LENGTH] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 7, 32, 256])
def test_golden_logits(backend: Backend, block_size: int, directory: Path) -> None:
    check(driver(directory, "tiny", backend, block_size=block_size), np.load(GOLDEN))


def test_golden_logits_behind_a_state_that_was_kept(directory: Path) -> None:
    golden = torch.from_numpy(np.load(GOLDEN))
    ours = driver(directory, "tiny", block_size=8)
    ours.step([(0, 45)])
    for _ in range(2):
        ours.go_back(0, 0, 40)
        for logits, place in ((ours.step([(0, 1)])[0], 40), (ours.step([(0, 50)])[0], 41)):
            torch.testing.assert_close(logits, golden[0, place : place + len(logits)], atol=TOLERANCE, rtol=TOLERANCE)
    ours.tokens[1] = ours.tokens[2] = ours.tokens[0]
    ours.go_back(1, 0, 40)  # others go on from there, together
    ours.go_back(2, 0, 40)
    for logits in ours.step([(2, 30), (1, 30)]):
        torch.testing.assert_close(logits, golden[0, 40:70], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, directory: Path) -> None:
    golden = torch.from_numpy(np.load(GOLDEN))
    ours = driver(directory, "tiny", dtype=dtype)
    assert ours.memory.wkv.dtype == torch.float32
    logits = torch.cat([ours.step([(0, 60)])[0], ours.step([(0, 1)])[0]])
    error = (logits - golden[0, :61]).norm() / golden[0, :61].norm()
    assert error < {"bfloat16": 0.06, "float16": 0.01}[dtype]


@pytest.mark.parametrize("width", [100, 130])
def test_a_width_that_makes_no_heads(width: int) -> None:
    with pytest.raises(UnsupportedModelError, match=str(width)):
        Rwkv7Model.memory_shape(Config({"hidden_size": width, "num_hidden_layers": 1}))


def test_shapes_are_known_without_weights(directory: Path) -> None:
    config, weights = read_rwkv7(checkpoint(directory, "tiny"))
    shapes = Rwkv7Model.noted(Config(config)).shapes
    assert shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert Rwkv7Model.memory_shape(Config(config)) == StateShape(2, 2, 64)
    assert StateShape(24, 16, 64).bytes_per_block(256, 2) == 24 * (16 * 64 * 64 * 4 + 2 * 1024 * 2)


def load_rwkv(path: Path) -> Any:
    """The package's own model of a checkpoint, in float32 on the CPU."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}  # read when it is first imported
    return importlib.import_module("rwkv.model").RWKV(str(path.with_suffix("")), "cpu fp32")


def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model.forward(tokens, None, full_output=True)[0]
    return logits


@needs_rwkv
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_package_rwkv(name: str, directory: Path) -> None:
    theirs = load_rwkv(checkpoint(directory, name))
    ours = driver(directory, name)
    check(ours, [their_logits(theirs, tokens) for tokens in ours.tokens])


def make_golden(directory: Path) -> None:
    theirs = load_rwkv(checkpoint(directory, "tiny"))
    logits = [their_logits(theirs, tokens).numpy() for tokens in random_tokens(SIZES["tiny"], 3, LENGTH)]
    np.save(GOLDEN, np.stack(logits).astype(np.float32))


if __name__ == "__main__":
    make_golden(Path(sys.argv[1]))
