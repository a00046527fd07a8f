"""Triton's mixes of RWKV-7 against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, assert_near, random, untraced

from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, ON_DEVICE, DecodeState, Input  # isort: skip
from archerfish.kernels.recurrent import NO_SLOT  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.recurrent import TritonRecurrentOps  # isort: skip
from archerfish.kernels.torch.wkv import TorchRecurrentOps  # isort: skip
from archerfish import LLMEngine, SamplingParams  # isort: skip
from archerfish.engine import llm_loading  # isort: skip
from archerfish.runtime.runner import ModelRunner  # isort: skip
from tests.engine.tiny_rwkv import save_tiny_rwkv  # isort: skip
from tests.kernels.wkv_cases import WHOLE, MixCase, make_case  # isort: skip

pytestmark = [untraced]
Tensor = torch.Tensor
DECODES = [1, 1, 1]
MIXED = [1, 1, 5, 33]
LONG = [40, 16]
NEVER = 1 << 30
if HAS_CUDA:
    MIXED, LONG = [1, 1, 5, 33, 700], [2000, 16, 333]


def both(case: MixCase, dtype: str, min_chunked: int, tolerance: float) -> None:
    """Output and states; the reference in float32."""
    states, expected_states = case.states.clone(), case.states.clone()
    out = TritonRecurrentOps(TorchOps(DEVICE, dtype), min_chunked).mix_heads(
        case.inputs, case.weights, states, case.batch
    )
    expected = TorchRecurrentOps(TorchOps(DEVICE)).mix_heads(case.inputs, case.weights, expected_states, case.batch)
    assert out.dtype == case.inputs.value.dtype
    num_tokens = case.batch.num_tokens
    scale = float(expected[:num_tokens].float().abs().max())
    torch.testing.assert_close(
        out[:num_tokens].float(), expected[:num_tokens].float(), atol=tolerance * scale, rtol=tolerance
    )
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("lengths", "min_chunked"), [(DECODES, NEVER), (MIXED, NEVER), (DECODES, 1), (MIXED, 1), (LONG, 1)]
)
@pytest.mark.parametrize("has_value_mix", [True, False])
def test_mixing_heads(lengths: list[int], min_chunked: int, has_value_mix: bool, dtype: str) -> None:
    """One token after the other, and in chunks."""
    case = make_case(lengths, device=DEVICE, dtype=dtype, has_value_mix=has_value_mix, num_filling=2)
    both(case, dtype, min_chunked, max(2e-4, TOLERANCE[dtype]))


@pytest.mark.parametrize("options", [{"is_repeated": True}, {"decay": 12.0}, {"decay": -12.0}])
def test_chunks_of_hard_inputs(options: dict[str, float]) -> None:
    both(make_case([50], device=DEVICE, **options), "float32", 1, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("min_chunked", [1, NEVER])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([1, 20], {"num_heads": 3, "head_dim": 16}),
        ([1, 20], {"num_heads": 3, "head_dim": 32}),
        *(
            (lengths, {"head_dim": 16, "block_size": block_size, "is_new": is_new})
            for lengths in ([1, 1, 5], [1, 23, 9])
            for block_size, is_new in ((4, False), (7, True))
        ),
    ],
)
def test_other_heads_and_blocks(lengths: list[int], options: dict[str, Any], min_chunked: int) -> None:
    """A state is kept behind every block."""
    both(make_case(lengths, device=DEVICE, **options), "float32", min_chunked, 2e-4)


def decode_inputs(num: int) -> Tensor:
    """Three sequences: inside of a block, behind one, and new; the rest is filling."""
    words = torch.zeros((NUM_INPUTS, num), dtype=torch.int64)
    words[Input.POSITION], words[Input.ROW] = FILLING_POSITION, 5
    words[Input.TOKEN, :3] = torch.tensor([ON_DEVICE, 12, 13])
    words[Input.ROW, :3] = torch.tensor([2, 0, 1])
    words[Input.POSITION, :3] = torch.tensor([6, 8, 0])
    words[Input.BLOCK, :3] = torch.tensor([9, 4, 7])
    words[Input.SOURCE, :3] = torch.tensor([9, 3, NO_BLOCK])
    return words.to(DEVICE)


def test_inputs_of_decodes_are_staged() -> None:
    ops = TorchOps(DEVICE)
    state = DecodeState(torch.arange(70, 76, device=DEVICE), torch.zeros((6, 1), dtype=torch.int32, device=DEVICE))
    batch, sampling = TritonRecurrentOps(ops).decode_batch(decode_inputs(5), state)
    assert batch.token_ids[:3].tolist() == [72, 12, 13]
    assert batch.sources.tolist() == [10, 4, 0, NO_SLOT, NO_SLOT]
    assert batch.targets.tolist() == [10, 5, 8, NO_SLOT, NO_SLOT]
    assert batch.previous.tolist() == [-11, -5, -1, 0, 0]
    assert (batch.num_tokens, batch.num_decodes, batch.num_sequences) == (5, 5, 5)
    expected, expected_sampling = TorchRecurrentOps(ops).decode_batch(decode_inputs(5), state)
    assert expected.num_tokens == 3
    for mine, theirs in ((batch.sources, expected.sources), (batch.targets, expected.targets)):
        assert mine[:3].tolist() == theirs.tolist()
    for mine, theirs in ((batch.token_ids, expected.token_ids), (batch.previous, expected.previous)):
        assert mine[:3].tolist() == theirs[:3].tolist()
    assert sampling.positions is not None and expected_sampling.positions is not None
    assert sampling.positions.tolist() == expected_sampling.positions.tolist() == [7, 9, 1, 0, 0]


def test_rows_that_stand_for_no_sequence() -> None:
    """As steps that are recorded have them: nothing of theirs is read or written."""
    case = make_case(DECODES, device=DEVICE, num_filling=2)
    ops, state = TorchOps(DEVICE), TorchOps(DEVICE).new_decode_state(5, 1)
    triton_ops, torch_ops = TritonRecurrentOps(ops), TorchRecurrentOps(ops)
    batch, _ = triton_ops.decode_batch(decode_inputs(5), state)
    expected_batch, _ = torch_ops.decode_batch(decode_inputs(5), state)
    case.states[10], case.states[4] = 1.0, 2.0
    states, expected_states = case.states.clone(), case.states.clone()
    out = triton_ops.mix_heads(case.inputs, case.weights, states, batch)
    expected = torch_ops.mix_heads(case.inputs, case.weights, expected_states, expected_batch)
    torch.testing.assert_close(out[:3], expected[:3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4, equal_nan=True)
    x = random(5, 96)
    factors = random(2 * 96)
    inputs = random(len(states), 96)
    expected_inputs = inputs.clone()
    mixed = triton_ops.shift(x, inputs, batch, factors)
    for mine, theirs in zip(mixed, torch_ops.shift(x, expected_inputs, expected_batch, factors), strict=True):
        torch.testing.assert_close(mine[:3], theirs[:3], atol=1e-5, rtol=1e-5)
    assert torch.equal(inputs, expected_inputs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("lengths", "width", "num_factors"), [(DECODES, 128, 6), (MIXED, 96, 6), ([7], 1200, 1)])
@pytest.mark.parametrize("block_size", [WHOLE, 5])
def test_shift(lengths: list[int], width: int, num_factors: int, block_size: int, dtype: str) -> None:
    block_size = block_size if max(lengths) < 100 else WHOLE
    case = make_case(lengths, device=DEVICE, num_filling=2, block_size=block_size)
    x, factors = random(sum(lengths) + 2, width, dtype=dtype), random(num_factors * width)
    inputs = random(len(case.states), 3, width, dtype=dtype)[:, 1]
    expected_inputs = inputs.clone()
    mixed = TritonRecurrentOps(TorchOps(DEVICE, dtype)).shift(x, inputs, case.batch, factors)
    expected = TorchRecurrentOps(TorchOps(DEVICE, dtype)).shift(x, expected_inputs, case.batch, factors)
    assert len(mixed) == num_factors
    for mine, theirs in zip(mixed, expected, strict=True):
        assert_near(mine[: sum(lengths)], theirs[: sum(lengths)], dtype)
    assert torch.equal(inputs, expected_inputs)


class RecordingOps(TritonOps):
    """On the CPU, in the interpreter, over a backend that only claims to record."""

    def __init__(self, device: str = DEVICE, dtype: str = "float32") -> None:
        super().__init__(DEVICE, dtype)
        self.is_async = self.can_record = True


@pytest.mark.skipif(HAS_CUDA, reason="kernels over the CPU's memory need the interpreter")
def test_an_engine_gives_the_tokens_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a recorded step: staged inputs, shifts and mixes, with filled rows and kept states."""
    monkeypatch.setattr(
        ModelRunner, "warm_up", lambda *_: None
    )  # of all kinds of steps, which takes the interpreter long
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    model = str(save_tiny_rwkv(tmp_path, num_hidden_layers=1, vocab_size=32))
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "max_cache_tokens": 64, "block_size": 4}
    found = []
    for ops in (TorchOps, RecordingOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(model, **options, max_num_seqs=5, num_threads=1) as engine:
            outputs = engine.generate([[3, 4, 5, 6, 7], [8], [9, 10]], params)
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
