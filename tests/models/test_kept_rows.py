"""The last layer computes only the rows of hidden states that are asked for; their values do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from archerfish.kernels.torch.cpu import TorchCpuOps
from archerfish.kernels.torch.reference import TorchOps
from tests.models.decoding import Driver, make, random_tokens
from tests.models.recurring import SIZES, RecurrentDriver, read_rwkv7, write_checkpoint
from tests.models.recurring import random_tokens as random_states_tokens

STEPS = [[(0, 9)], [(0, 1), (1, 17)], [(0, 1), (1, 1)], [(0, 20), (1, 3)], [(0, 1), (1, 1)]]  # (sequence, new tokens)


def check(plain: Driver | RecurrentDriver, kept: Driver | RecurrentDriver) -> None:
    """What is behind a step may depend on rows that it left out: their keys and states must be there."""
    for work in STEPS:
        expected = torch.cat([logits[-1:] for logits in plain.step(work)])
        torch.testing.assert_close(torch.cat(kept.step(work, keeps_last=True)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [TorchOps, TorchCpuOps])
@pytest.mark.parametrize("kind", ["llama", "llama-biases", "qwen3", "gemma2", "phi3"])
def test_decoders(kind: str, backend: type[TorchOps]) -> None:
    model, config = make(kind)
    plain, kept = (Driver(backend(), model.state_dict(), config, random_tokens(2)) for _ in range(2))
    assert kept.model.gives_kept_rows
    check(plain, kept)


def test_rwkv7(tmp_path: Path) -> None:
    size = min(SIZES.values(), key=lambda each: each.width)
    config, weights = read_rwkv7(write_checkpoint(size, tmp_path / "model.pth"))
    tokens = random_states_tokens(size, 2, 40)
    plain, kept = (RecurrentDriver(TorchCpuOps(), weights, config, tokens) for _ in range(2))
    assert kept.model.gives_kept_rows
    check(plain, kept)
