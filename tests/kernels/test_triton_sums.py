"""Whole models in half precision whose layers are added up in float32, in Triton against the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.ops import LinearWeight  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.torch.wkv import TorchRecurrentOps  # isort: skip
from archerfish.kernels.triton.linear import PlainRowsWeight, RowsWeight  # isort: skip
from archerfish.kernels.triton.tiles import LinearTile  # isort: skip
from tests.kernels.test_triton_mixes import Decodes, Model, _fused_only, models  # noqa: F401  # isort: skip (fixtures)
from tests.models.decoding import Driver, make, random_tokens  # isort: skip
from tests.models.recurring import SIZES, RecurrentDriver  # isort: skip
from tests.models.recurring import random_tokens as random_state_tokens  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
MAX_ROWS = PlainRowsWeight.max_rows
DTYPE = "bfloat16" if HAS_CUDA else "float16"
NUM_STEPS = 4 if HAS_CUDA else 2  # a few rows of one step are too few to compare errors by
STEPS = [[(0, 5)], [(0, 1), (1, MAX_ROWS)], [(0, 1), (1, 1)]]  # (sequence, new tokens): many rows, and few


class WatchedOps(TritonOps):
    """Notes the types of what products are added to, of the sums, and of what is normalised.

    Attention, which takes the interpreter long, is torch's.
    """

    store_kv = TorchOps.store_kv
    paged_attention = TorchOps.paged_attention
    store_and_attend = TorchOps.store_and_attend

    def __init__(self) -> None:
        super().__init__(DEVICE, DTYPE)
        self.sums: list[torch.dtype] = []
        self.normed: list[torch.dtype] = []

    def linear(self, x: Tensor, weight: LinearWeight[Tensor], **options: Any) -> Tensor:
        y = super().linear(x, weight, **options)
        if options.get("residual") is not None:
            self.sums += [options["residual"].dtype, y.dtype]
        return y

    def normed_linear(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, total = super().normed_linear(x, *args, **options)
        self.sums.append(total.dtype)
        self.normed.append(y.dtype)
        return y, total


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowsWeight, "tile", LinearTile(64, 64, 4, 1))


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.to(DEVICE, getattr(torch, DTYPE)) for name, each in weights.items()}


def distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).square().mean().sqrt())


def backends(ours: TorchOps) -> list[TorchOps]:
    return [TorchOps(DEVICE), TorchOps(DEVICE, DTYPE), ours]


def check(drivers: Sequence[Driver | RecurrentDriver], *, keeps_last: bool = True) -> None:
    """drivers: the reference in float32, torch's in half precision, and ours."""
    found = [[torch.cat(driver.step(work, keeps_last=keeps_last)) for driver in drivers] for work in STEPS]
    expected, theirs, mine = (torch.cat(each) for each in zip(*found, strict=True))
    assert distance(mine, expected) < distance(theirs, expected)


@pytest.mark.parametrize(
    ("kind", "keeps_last"), [("llama", True), ("llama", False), ("llama-biases", True), ("qwen3", True), ("gemma2", True)]
)
def test_decoders_are_nearer_to_float32_than_with_rounded_sums(kind: str, keeps_last: bool) -> None:
    model, config = make(kind)
    weights, ours = rounded(model.state_dict()), WatchedOps()
    config = {**config, "num_hidden_layers": 2, "layer_types": None}
    check([Driver(ops, weights, config, random_tokens(2)) for ops in backends(ours)], keeps_last=keeps_last)
    assert set(ours.sums) == {torch.float32}
    assert set(ours.normed) == {getattr(torch, DTYPE)}


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1])
@pytest.mark.usefixtures("_fused_only")
def test_decodes_of_rwkv7(num_rows: int, models: dict[str, Model]) -> None:  # noqa: F811
    config, weights = models["tiny"][0], rounded(models["tiny"][1])
    ours, ops = Decodes(WatchedOps(), (config, weights), num_rows, num_rows), TorchOps(DEVICE, DTYPE)
    halves = Decodes(ops, (config, weights), num_rows, num_rows)
    reference = Decodes(TorchOps(DEVICE), (config, weights), num_rows, num_rows)
    reference.memory.inputs.copy_(ours.memory.inputs)
    expected, theirs, mine = (torch.cat([each.step() for _ in range(NUM_STEPS)]) for each in (reference, halves, ours))
    assert distance(mine, expected) < distance(theirs, expected)
    assert isinstance(ours.ops, WatchedOps)
    assert set(ours.ops.sums) == {torch.float32}


def test_other_steps_of_rwkv7(models: dict[str, Model]) -> None:  # noqa: F811
    config, weights = models["tiny"][0], rounded(models["tiny"][1])
    tokens, ours = random_state_tokens(SIZES["tiny"], 2, 40), WatchedOps()
    check([RecurrentDriver(ops, weights, config, tokens, recurrent=TorchRecurrentOps(ops)) for ops in backends(ours)])
    assert set(ours.sums) == {torch.float32}
