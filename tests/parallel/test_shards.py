"""Every architecture and weight format divided over ranks that are threads: logits are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish.kernels.formats import PLAIN, WeightFormat, choose_format
from archerfish.kernels.ranks import Ranks
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.native_support import NativeOps, native_ops
from tests.models import recurring
from tests.models.decoding import Driver, make, make_model, random_tokens
from tests.models.recurring import RecurrentDriver, StepDriver
from tests.parallel.threads import World

LAYOUTS = [(2, 1), (4, 1), (1, 2), (2, 2)]  # ranks of a stage, stages
STEPS = [[(0, 37)], [(0, 1), (1, 16)], [(0, 1), (1, 1)]]
Backend = Callable[[], Any]
MakeDriver = Callable[[Any], StepDriver]


def on_rank(backend: Backend, ranks: Ranks) -> Any:
    ops = backend()
    getattr(ops, "inner", ops).ranks = ranks
    return ops


def logits_of(driver: StepDriver) -> list[torch.Tensor]:
    return [torch.cat(driver.step(work)) for work in STEPS]


def check(backend: Backend, layout: tuple[int, int], make_driver: MakeDriver, tolerance: float = 1e-4) -> None:
    expected = logits_of(make_driver(backend()))
    found = World(*layout).run(lambda ranks: logits_of(make_driver(on_rank(backend, ranks))))
    for own in found[: layout[0]]:  # the ranks of the last stage
        for mine, one in zip(own, expected, strict=True):
            torch.testing.assert_close(mine, one, atol=tolerance, rtol=tolerance)


FAMILIES = [
    "llama", "llama-tied", "llama-biases", "llama-multi-head", "llama-one-kv-head", "qwen2", "qwen3", "mistral-window", "gemma2",
    "gemma3", "phi3",
]


@pytest.mark.parametrize("backend", [TorchOps, native_ops])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_decoders(kind: str, layout: tuple[int, int], backend: Backend) -> None:
    model, config = make(kind)
    check(backend, layout, lambda ops: Driver(ops, model.state_dict(), config, random_tokens(2)))


@pytest.fixture(scope="module")
def rwkv(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("rwkv") / "model.pth"
    return recurring.read_rwkv7(recurring.write_checkpoint(recurring.SIZES["small"], path))


@pytest.mark.parametrize("backend", [TorchOps, native_ops])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rwkv7(rwkv: tuple[dict[str, Any], dict[str, torch.Tensor]], layout: tuple[int, int], backend: Backend) -> None:
    config, weights = rwkv
    tokens = recurring.random_tokens(recurring.SIZES["small"], 2, 60)
    check(backend, layout, lambda ops: RecurrentDriver(ops, weights, config, tokens))
