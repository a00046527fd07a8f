"""RWKV-7 in the native backend against plain torch, at every level of this machine, computed at once and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from archerfish.errors import DeviceError
from archerfish.kernels.native.recorder import Value
from archerfish.kernels.recurrent import HeadInputs, RecurrentBatch, StateMemory, StateShape
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.wkv import TorchRecurrentOps
from tests.kernels.native_support import LEVELS, NativeOps, Translated, to_arrays
from tests.kernels.wkv_cases import WHOLE, MixCase, make_case, one_slot_batch
from tests.models.recurring import GOLDEN, SIZES, STEPS, RecurrentDriver, random_tokens, read_rwkv7, write_checkpoint

TOLERANCE = 2e-5
LAYER, NUM_LAYERS = 1, 3
LENGTH = 100
CASES: list[dict[str, Any]] = [
    {"lengths": [1, 1, 1]},
    {"lengths": [1, 1, 40, 3]},
    {"lengths": [33, 2], "block_size": 9},
    {"lengths": [1, 1, 20], "block_size": 7, "has_value_mix": False},
    {"lengths": [1, 5], "is_new": True, "num_filling": 3},
    {"lengths": [1, 30, 4], "num_heads": 5, "head_dim": 32},
    {"lengths": [1, 12], "num_heads": 3, "head_dim": 20, "block_size": 5},
    {"lengths": [1, 9], "num_heads": 1, "head_dim": 3},
    {"lengths": [1, 7], "num_heads": 2, "head_dim": 130},
    {"lengths": [20], "decay": 12.0},
    {"lengths": [50], "is_repeated": True},
]


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(level=request.param)


def states_of(ops: NativeOps, case: MixCase) -> StateMemory[Any]:
    """Memory whose middle layer holds the states of a case."""
    num_slots, num_heads, head_dim = case.states.shape[:3]
    memory = ops.recurrent().new_states(num_slots, StateShape(NUM_LAYERS, num_heads, head_dim))
    memory.wkv[...] = memory.inputs[...] = np.nan
    memory.layers[LAYER].wkv[...] = case.states.numpy().swapaxes(2, 3)
    return memory


def mixed(ops: NativeOps, case: MixCase) -> tuple[torch.Tensor, torch.Tensor]:
    """What heads give, and all states after that."""
    memory = states_of(ops, case)
    out = ops.recurrent().mix_heads(
        to_arrays(case.inputs), to_arrays(case.weights), memory.layers[LAYER].wkv, to_arrays(case.batch)
    )
    assert np.isnan(np.delete(memory.wkv, LAYER, axis=1)).all()
    return torch.from_numpy(out), torch.from_numpy(memory.layers[LAYER].wkv.swapaxes(2, 3).copy())


def check_mix(ops: NativeOps, case: MixCase) -> None:
    expected_states = case.states.clone()
    expected = TorchRecurrentOps(TorchOps()).mix_heads(case.inputs, case.weights, expected_states, case.batch)
    out, states = mixed(ops, case)
    highest = max(1.0, float(expected_states.nan_to_num().abs().max()))
    torch.testing.assert_close(out, expected, atol=TOLERANCE * highest, rtol=TOLERANCE)
    torch.testing.assert_close(states, expected_states, atol=TOLERANCE * highest, rtol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("options", CASES)
def test_mixing_heads(options: dict[str, Any], ops: NativeOps) -> None:
    check_mix(ops, make_case(**options))


def with_shared_source(case: MixCase, num_sharing: int) -> MixCase:
    """All of some decodes begin from the state of the first, which none of them writes."""
    source, targets = case.targets[0], case.batch.targets.clone()
    targets[0] = next(slot for slot in range(1, len(case.states)) if slot not in case.targets)
    sources = case.batch.sources.clone()
    sources[:num_sharing] = source
    previous = case.batch.previous.clone()
    previous[:num_sharing] = -1 - source
    return replace(case, batch=replace(case.batch, sources=sources, targets=targets, previous=previous))


def test_sequences_share_a_source(ops: NativeOps) -> None:
    case = with_shared_source(make_case([1, 1, 1, 6], num_heads=3), 3)
    check_mix(ops, case)
    check_shift(ops, case, 50)


def part_of(inputs: HeadInputs[Any], begin: int, end: int) -> HeadInputs[Any]:
    return HeadInputs(*(each[begin:end] for each in inputs if each is not None))


def test_any_cut_gives_the_same_bits(ops: NativeOps) -> None:
    case = make_case([9, 30, 4])
    out, states = mixed(ops, case)
    slot = case.targets[1]
    current = case.states.clone()
    parts = []
    for begin, end in ((9, 10), (10, 26), (26, 39)):  # the second sequence alone, in three parts
        batch = one_slot_batch([[1] * (end - begin)], [slot])
        rows, current = mixed(ops, replace(case, inputs=part_of(case.inputs, begin, end), batch=batch, states=current))
        parts.append(rows)
    assert torch.equal(torch.cat(parts), out[9:39])
    assert torch.equal(current[slot], states[slot])


def check_shift(ops: NativeOps, case: MixCase, width: int, num_factors: int = 3) -> None:
    num_rows = len(case.batch.token_ids)
    x, factors = torch.randn(num_rows, width), torch.randn(num_factors, width)
    memory = ops.recurrent().new_states(len(case.states), StateShape(NUM_LAYERS, 1, width))
    inputs = memory.layers[LAYER].channel_input
    inputs[...] = np.random.default_rng(0).standard_normal(inputs.shape)
    expected_inputs = torch.from_numpy(inputs.copy())
    expected = TorchRecurrentOps(TorchOps()).shift(x, expected_inputs, case.batch, factors.flatten())
    given = ops.recurrent().shift(x.numpy(), inputs, to_arrays(case.batch), factors.flatten().numpy())
    assert len(given) == num_factors
    num_tokens = case.batch.num_tokens
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours[:num_tokens]), theirs[:num_tokens], atol=1e-6, rtol=1e-6)
    assert torch.equal(torch.from_numpy(inputs), expected_inputs)


@pytest.mark.parametrize("width", [6, 64, 100])
@pytest.mark.parametrize("lengths", [[1, 1], [1, 4, 2], [5], [1] * 9, [40, 30]])
@pytest.mark.parametrize(("block_size", "is_new"), [(2, True), (3, False), (WHOLE, False)])
def test_shift(lengths: list[int], block_size: int, is_new: bool, width: int, ops: NativeOps) -> None:
    check_shift(ops, make_case(lengths, num_filling=2, head_dim=2, block_size=block_size, is_new=is_new), width)


def test_memory_that_does_not_fit_is_refused() -> None:
    ops, case = NativeOps(), make_case([1])
    memory = states_of(ops, case)
    batch, x = to_arrays(case.batch), np.zeros((1, 128), dtype=np.float32)
    with pytest.raises(ValueError, match="fit"):
        ops.recurrent().shift(x, memory.layers[0].time_input[:, ::2], batch, np.zeros(128, dtype=np.float32))
    with pytest.raises(ValueError, match="fit"):
        states = memory.layers[0].wkv.swapaxes(2, 3)
        ops.recurrent().mix_heads(to_arrays(case.inputs), to_arrays(case.weights), states, batch)


def test_new_states_begin_with_the_empty_one() -> None:
    memory = NativeOps().recurrent().new_states(4, StateShape(2, 3, 8))
    assert memory.wkv.shape == (4, 2, 3, 8, 8) and memory.inputs.shape == (4, 2, 2, 24)
    assert memory.wkv.dtype == memory.inputs.dtype == np.float32
    assert not memory.wkv[0].any() and not memory.inputs[0].any()
    assert np.shares_memory(memory.layers[1].wkv, memory.wkv)
    assert memory.wkv.ctypes.data % 64 == memory.inputs.ctypes.data % 64 == 0


def test_decodes_are_not_recorded_as_steps() -> None:
    with pytest.raises(DeviceError, match="records no steps"):
        NativeOps().recurrent().decode_batch(np.zeros(1), cast(Any, None))


def test_golden_logits_of_a_model(ops: NativeOps, tmp_path: Path) -> None:
    config, weights = read_rwkv7(write_checkpoint(SIZES["tiny"], tmp_path / "tiny.pth"))
    tokens = random_tokens(SIZES["tiny"], 3, LENGTH)
    for block_size in (7, 256):
        ours = RecurrentDriver(cast(Any, Translated(ops, "float32")), weights, config, tokens, block_size=block_size)
        ours.check(STEPS, np.load(GOLDEN), 1e-4)
        assert ours.num_computed == [LENGTH] * 3


def test_a_shift_that_is_recorded_gives_values_of_their_own() -> None:
    ops, case = NativeOps(), make_case([3], num_heads=1, head_dim=4)
    seen: list[Any] = []
    memory, table = states_of(ops, case), np.ones((2, 4), dtype=np.float32)

    def call(batch: RecurrentBatch[Any]) -> Any:
        outs = ops.recurrent().shift(
            ops.lookup(table, batch.token_ids), memory.layers[0].time_input, batch, np.ones(12, dtype=np.float32)
        )
        seen.extend(outs)
        return outs[2]

    memory.inputs[...] = 0
    result = ops.replayed(call)(to_arrays(case.batch))
    assert len({each.number for each in seen if isinstance(each, Value)}) == 3
    np.testing.assert_array_equal(result[:, 0], [0, 1, 1])
