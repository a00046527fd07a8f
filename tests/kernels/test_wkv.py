"""The reference of RWKV-7's recurrence against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archerfish.errors import DeviceError
from archerfish.kernels.ops import Ops
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.wkv import TorchRecurrentOps, WkvInputs, wkv_in_turn
from tests.kernels.wkv_cases import WHOLE, MixCase, make_case, one_slot_batch

Tensor = torch.Tensor


def sequential(case: MixCase) -> tuple[Tensor, Tensor]:
    states = case.states.clone()
    return wkv_in_turn(case.prepared(), states, case.batch), states


def test_the_loop_is_the_formula() -> None:
    case = make_case([3], num_heads=1, head_dim=4)
    inputs = case.prepared()
    out, states = sequential(case)
    state = case.states[case.targets[0], 0].double()
    for t in range(3):
        r, log_decay, k, v, z, added = (each[t, 0].double() for each in inputs)
        state = state @ (torch.diag(log_decay.exp()) - torch.outer(z, added)) + torch.outer(v, k)
        torch.testing.assert_close(out[t, 0].double(), state @ r, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[case.targets[0], 0].double(), state, atol=1e-5, rtol=1e-5)


def test_the_loop_keeps_what_a_sequence_cut_short_would_have() -> None:
    """The state behind every piece is that of a sequence which ends there; the first begins with the empty state."""
    case = make_case([11, 8], head_dim=4, block_size=4, is_new=True)
    assert case.batch.piece_counts.tolist() == [3, 2]
    assert case.batch.piece_lens.tolist() == [4, 4, 3, 4, 4]
    assert case.batch.sources.tolist() == [0, *case.targets[:2], 0, case.targets[3]]
    _, states = sequential(case)
    ends = [(0, 4), (0, 8), (0, 11), (11, 15), (11, 19)]
    for target, (begin, end) in zip(case.targets, ends, strict=True):
        alone = torch.zeros_like(case.states)
        inputs = WkvInputs(*(each[begin:end] for each in case.prepared()))
        wkv_in_turn(inputs, alone, one_slot_batch([[1] * (end - begin)], [1]))
        assert torch.equal(alone[1], states[target])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 1, 40, 3], [33, 2]])
@pytest.mark.parametrize(("has_value_mix", "block_size"), [(True, WHOLE), (False, WHOLE), (True, 9)])
def test_other_slots_and_filling_stay(lengths: list[int], has_value_mix: bool, block_size: int) -> None:
    case = make_case(lengths, has_value_mix=has_value_mix, num_filling=3, block_size=block_size)
    states = case.states.clone()
    out = TorchRecurrentOps(TorchOps()).mix_heads(case.inputs, case.weights, states, case.batch)
    assert out.shape == (sum(lengths) + 3, 128) and not out[-3:].any() and bool(out[:-3].isfinite().all())
    untouched = [slot for slot in range(len(case.states)) if slot not in case.targets]
    assert torch.equal(states[untouched].isnan(), case.states[untouched].isnan())
    assert not states[0].any()


def test_what_surrounds_the_recurrence() -> None:
    """Norm, bonus, gate, values of the first layer, removal and replacement keys, of one token over an empty state."""
    case = make_case([1], num_heads=1, head_dim=8)
    states = torch.zeros_like(case.states)
    out = TorchRecurrentOps(TorchOps()).mix_heads(case.inputs, case.weights, states, case.batch)[0]
    r, k, v, a, g = (getattr(case.inputs, name)[0] for name in ("receptance", "key", "value", "rate", "gate"))
    first, mix = case.inputs.first_value, case.inputs.value_mix
    assert first is not None and mix is not None
    v = v + (first[0] - v) * mix[0].sigmoid()
    k = k * (1 + (a.sigmoid() - 1) * case.weights.replacement)
    y = v * (k @ r)
    y = (y - y.mean()) / (y.var(unbiased=False) + 64e-5).sqrt() * case.weights.norm + case.weights.norm_bias
    torch.testing.assert_close(out, (y + (r * k * case.weights.bonus).sum() * v) * g, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[case.targets[0], 0], torch.outer(v, k), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 1], [1, 4, 2], [5]])
@pytest.mark.parametrize("block_size", [2, 3, WHOLE])
@pytest.mark.parametrize("is_new", [True, False])
def test_shift(lengths: list[int], block_size: int, is_new: bool) -> None:
    case = make_case(lengths, num_filling=2, block_size=block_size, is_new=is_new)
    batch = case.batch
    x, factors = torch.randn(sum(lengths) + 2, 6), torch.randn(3, 6)
    inputs = torch.randn(len(case.states), 6)
    before = inputs.clone()
    mixed = TorchRecurrentOps(TorchOps()).shift(x, inputs, batch, factors.flatten())
    heads = set((batch.piece_counts.cumsum() - batch.piece_counts).tolist())
    row, last = 0, before[0]
    for piece, (source, target, length) in enumerate(
        zip(batch.sources.tolist(), case.targets, batch.piece_lens.tolist(), strict=True)
    ):
        last = before[source] if piece in heads else last
        for _ in range(length):
            for result, factor in zip(mixed, factors, strict=True):
                torch.testing.assert_close(result[row], x[row] + (last - x[row]) * factor)
            last = x[row]
            row += 1
        assert torch.equal(inputs[target], last)
    others = [slot for slot in range(len(before)) if slot not in case.targets]
    assert torch.equal(inputs[others], before[others])


def test_a_backend_without_recurrent_models_says_so() -> None:
    class OtherOps(Ops[Tensor]):
        name = "other"

    concrete: Any = OtherOps
    concrete.__abstractmethods__ = frozenset()
    with pytest.raises(DeviceError, match="other"):
        concrete().recurrent()
