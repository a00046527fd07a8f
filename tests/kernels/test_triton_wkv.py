"""Triton's mixes of RWKV-7 against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, random, untraced

from archerfish.kernels.recurrent import NO_SLOT  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.reference import TorchOps  # isort: skip
from archerfish.kernels.triton_wkv import TritonRecurrentOps  # isort: skip
from archerfish.kernels.wkv import TorchRecurrentOps  # isort: skip
from archerfish.store.rwkv_source import read_rwkv7  # isort: skip
from tests.kernels.wkv_cases import MixCase, make_case  # isort: skip
from tests.models.recurring import GOLDEN, SIZES, RecurrentDriver, random_tokens, write_checkpoint  # isort: skip

pytestmark = [untraced]
Tensor = torch.Tensor
DECODES, MIXED, LONG = [1, 1, 1], [1, 1, 5, 33], [40, 16]
NEVER = 1 << 30
if HAS_CUDA:
    MIXED, LONG = [1, 1, 5, 33, 700], [2000, 16, 333]


def both(case: MixCase, dtype: str, min_chunked: int, tolerance: float) -> None:
    """Output and states; the reference in float32."""
    states, expected_states = case.states.clone(), case.states.clone()
    out = TritonRecurrentOps(TorchOps(DEVICE, dtype), min_chunked).mix_heads(case.inputs, case.weights, states, case.batch)
    expected = TorchRecurrentOps(TorchOps(DEVICE)).mix_heads(case.inputs, case.weights, expected_states, case.batch)
    assert out.dtype == case.inputs.value.dtype
    num_tokens = case.batch.num_tokens
    scale = float(expected[:num_tokens].float().abs().max())
    torch.testing.assert_close(out[:num_tokens].float(), expected[:num_tokens].float(), atol=tolerance * scale, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", [DECODES, MIXED])
@pytest.mark.parametrize("has_value_mix", [True, False])
def test_tokens_one_by_one(lengths: list[int], has_value_mix: bool, dtype: str) -> None:
    case = make_case(lengths, device=DEVICE, dtype=dtype, has_value_mix=has_value_mix, num_filling=2)
    both(case, dtype, NEVER, max(1e-4, TOLERANCE[dtype]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", [DECODES, MIXED, LONG])
@pytest.mark.parametrize("has_value_mix", [True, False])
def test_chunks(lengths: list[int], has_value_mix: bool, dtype: str) -> None:
    case = make_case(lengths, device=DEVICE, dtype=dtype, has_value_mix=has_value_mix)
    both(case, dtype, 1, max(2e-4, TOLERANCE[dtype]))


@pytest.mark.parametrize("options", [{"is_repeated": True}, {"decay": 12.0}, {"decay": -12.0}])
def test_chunks_of_hard_inputs(options: dict[str, float]) -> None:
    both(make_case([50], device=DEVICE, **options), "float32", 1, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("min_chunked", [1, NEVER])
def test_other_heads(head_dim: int, min_chunked: int) -> None:
    both(make_case([1, 20], device=DEVICE, num_heads=3, head_dim=head_dim), "float32", min_chunked, 2e-4)


def test_rows_that_stand_for_no_sequence() -> None:
    """As steps that are recorded have them: nothing of theirs is read or written."""
    case = make_case(DECODES, device=DEVICE, num_filling=1)
    nobody = torch.tensor([NO_SLOT], device=DEVICE)
    slots = torch.cat((case.batch.state_slots, nobody))
    both(replace(case, batch=case.batch), "float32", NEVER, 1e-4)
    states = case.states.clone()
    ops = TritonRecurrentOps(TorchOps(DEVICE))
    out = ops.mix_heads(case.inputs, case.weights, states, replace(case.batch, state_slots=slots))
    expected_states = case.states.clone()
    expected = ops.mix_heads(case.inputs, case.weights, expected_states, case.batch)
    torch.testing.assert_close(out[:3], expected[:3], atol=0, rtol=0)
    torch.testing.assert_close(states, expected_states, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("lengths", "width", "num_factors"), [(DECODES, 128, 6), (MIXED, 96, 6), ([7], 1200, 1)])
def test_shift(lengths: list[int], width: int, num_factors: int, dtype: str) -> None:
    case = make_case(lengths, device=DEVICE, num_filling=2)
    x, factors = random(sum(lengths) + 2, width, dtype=dtype), random(num_factors * width)
    inputs = random(12, 3, width, dtype=dtype)[:, 1]
    expected_inputs = inputs.clone()
    mixed = TritonRecurrentOps(TorchOps(DEVICE, dtype)).shift(x, inputs, case.batch, factors)
    expected = TorchRecurrentOps(TorchOps(DEVICE, dtype)).shift(x, expected_inputs, case.batch, factors)
    assert len(mixed) == num_factors
    for mine, theirs in zip(mixed, expected, strict=True):
        mine, theirs = mine[: sum(lengths)], theirs[: sum(lengths)]
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(inputs, expected_inputs)


def test_a_whole_model(tmp_path: Path) -> None:
    """Over memory of all layers, with decodes and chunks in one step; golden logits of the package rwkv."""
    config, weights = read_rwkv7(write_checkpoint(SIZES["tiny"], tmp_path / "tiny.pth"))
    golden = torch.from_numpy(np.load(GOLDEN))
    ops = TorchOps(DEVICE)
    tokens = random_tokens(SIZES["tiny"], 3, 100)
    driver = RecurrentDriver(ops, weights, config, tokens, recurrent=TritonRecurrentOps(ops))
    for work in ([(0, 20)], [(0, 1), (1, 18), (2, 3)], [(2, 1), (0, 1), (1, 1)]):
        before = list(driver.num_computed)
        for (i, count), logits in zip(work, driver.step(work), strict=True):
            torch.testing.assert_close(logits.cpu(), golden[i, before[i] : before[i] + count], atol=2e-4, rtol=2e-4)
