"""RWKV-7's recurrence: chunks and joint steps against the plain loop, and the loop against the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import DeviceError
from archerfish.kernels.ops import Ops
from archerfish.kernels.recurrent import HeadInputs
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.wkv import CHUNK, TOGETHER, TorchRecurrentOps, wkv_chunked
from tests.kernels.wkv_cases import WHOLE, MixCase, SequentialOps, make_case, one_slot_batch, wkv_sequential

Tensor = torch.Tensor


def sequential(case: MixCase) -> tuple[Tensor, Tensor]:
    states = case.states.clone()
    return wkv_sequential(case.prepared(), states, case.batch), states


def chunked(case: MixCase, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    states, batch = case.states.clone(), case.batch
    out = wkv_chunked(case.prepared(), states, batch.sources, batch.targets, batch.piece_lens, batch.piece_counts, chunk)
    return out, states


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


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
        inputs = case.prepared().part(begin, end)
        wkv_sequential(inputs, alone, one_slot_batch([[1] * (end - begin)], [1]))
        assert torch.equal(alone[1], states[target])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5), chunk=st.sampled_from([1, 2, 7, 16, 32, 64]),
    seed=st.integers(0, 99), block_size=st.sampled_from([10, 16, 33, WHOLE]), is_new=st.booleans(),
)
def test_chunks_equal_the_loop(lengths: list[int], chunk: int, seed: int, block_size: int, is_new: bool) -> None:
    lengths.sort(key=lambda length: length != 1)
    case = make_case(lengths, head_dim=8, seed=seed, block_size=block_size, is_new=is_new)
    assert_same(chunked(case, chunk), sequential(case), 2e-4)


@pytest.mark.parametrize("options", [{"is_repeated": True}, {"decay": 12.0}, {"decay": -12.0}])
def test_chunks_of_hard_inputs(options: dict[str, float]) -> None:
    """One token over and over, the strongest decay, and hardly any."""
    case = make_case([100, 130], **options)  # type: ignore[arg-type]
    expected = sequential(case)
    assert_same(chunked(case), expected, 2e-4 * float(expected[0].abs().max()))


def together(case: MixCase) -> tuple[Tensor, Tensor]:
    states, batch = case.states.clone(), replace(case.batch, is_deterministic=True)
    return TorchRecurrentOps(TorchOps()).wkv(case.prepared(), states, batch), states


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=TOGETHER + 3), seed=st.integers(0, 99),
    block_size=st.sampled_from([8, 10, WHOLE]), is_new=st.booleans(),
)
def test_sequences_together_equal_the_loop(lengths: list[int], seed: int, block_size: int, is_new: bool) -> None:
    lengths.sort(key=lambda length: length != 1)
    case = make_case(lengths, head_dim=8, seed=seed, block_size=block_size, is_new=is_new)
    assert_same(together(case), sequential(case))


def test_joint_steps_are_bit_equal_for_any_cut() -> None:
    case = make_case([9, 30, 4])
    inputs, (out, states) = case.prepared(), together(case)
    alone, slot = case.states.clone(), case.targets[1]
    parts = []
    for begin, end in ((9, 10), (10, 26), (26, 39)):  # the second sequence alone, in three parts
        batch = one_slot_batch([[1] * (end - begin)], [slot], is_deterministic=True)
        parts.append(TorchRecurrentOps(TorchOps()).wkv(inputs.part(begin, end), alone, batch))
    assert torch.equal(torch.cat(parts), out[9:39])
    assert torch.equal(alone[slot], states[slot])


def test_a_sequence_mixed_alone_gives_the_same_bits() -> None:
    lengths = [1] * TOGETHER + [1, 9, 33]
    case, recurrent = make_case(lengths), TorchRecurrentOps(TorchOps())
    states = case.states.clone()
    out = recurrent.mix_heads(case.inputs, case.weights, states, replace(case.batch, is_deterministic=True))
    start = 0
    for slot, length in zip(case.targets, lengths, strict=True):
        names = ("receptance", "decay", "key", "value", "rate", "gate", "first_value", "value_mix")
        own = HeadInputs(**{name: getattr(case.inputs, name)[start : start + length] for name in names})
        alone = case.states.clone()
        batch = one_slot_batch([[1] * length], [slot], is_deterministic=True)
        assert torch.equal(recurrent.mix_heads(own, case.weights, alone, batch), out[start : start + length])
        assert torch.equal(alone[slot], states[slot])
        start += length


@pytest.mark.parametrize("has_batched_products", [True, False])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 1, 40, 3], [33, 2]])
@pytest.mark.parametrize(("has_value_mix", "block_size"), [(True, WHOLE), (False, WHOLE), (True, 9)])
def test_mixing_heads(
    lengths: list[int], has_value_mix: bool, block_size: int, has_batched_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchRecurrentOps, "has_batched_products", has_batched_products)
    case = make_case(lengths, has_value_mix=has_value_mix, num_filling=3, block_size=block_size)
    results = []
    for backend in (SequentialOps, TorchRecurrentOps):
        states = case.states.clone()
        results.append((backend(TorchOps()).mix_heads(case.inputs, case.weights, states, case.batch), states))
    assert results[0][0].shape == (sum(lengths) + 3, 128)
    assert_same(results[1], results[0])
    untouched = [slot for slot in range(len(case.states)) if slot not in case.targets]
    assert torch.equal(results[1][1][untouched].isnan(), case.states[untouched].isnan())
    assert not results[1][1][0].any()


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
