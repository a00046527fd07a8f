"""Recorded steps of decodes over states against steps that are not, as `test_graphs` does for keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import llm_loading
from archerfish.kernels.decoding import NO_BLOCK, Input
from archerfish.kernels.ops import Ids
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.graphs import DecodeGraphs, Kind
from archerfish.runtime.runner import ModelRunner
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced
from tests.runtime.conftest import RecordingOps
from tests.runtime.test_graphs import PROMPTS, generate

from archerfish.kernels.triton.ops import TritonOps  # isort: skip (triton must be told to interpret first)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_rwkv(tmp_path)


class RecordingTritonOps(TritonOps):
    """On the CPU, in the interpreter, over a backend that only claims to record."""

    def __init__(self, device: str = DEVICE, dtype: str = "float32") -> None:
        super().__init__(DEVICE, dtype)
        self.is_async = self.can_record = True


def test_tokens_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=4, top_k=9)
    plain = generate(model, params, monkeypatch, records=False, num_prompts=6)
    assert generate(model, params, monkeypatch, records=True, num_prompts=6, max_cache_tokens=80) == plain
    assert len({tuple(tokens) for tokens in plain}) > 3


def test_tokens_are_the_same_with_one_state_a_sequence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=6, max_tokens=12, ignore_eos=True)
    found = []
    for ops in (TorchOps, RecordingOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(
            str(model), dtype="float32", load_format="dummy", enable_prefix_caching=False, max_num_seqs=6
        ) as engine:
            found.append([output.token_ids for output in engine.generate(PROMPTS, params)])
            assert engine.facts.memory.num_blocks == 6
    assert found[0] == found[1]


@pytest.mark.usefixtures("records")
def test_inputs_hold_both_blocks_of_a_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token, then six decodes over blocks of two tokens: each goes on from where the one before it went."""
    sent: list[tuple[int, int, int]] = []  # position, source, target

    def noted(self: RecordingOps, values: Ids, target: torch.Tensor) -> None:
        sent.append((int(values[Input.POSITION, 0]), int(values[Input.SOURCE, 0]), int(values[Input.BLOCK, 0])))
        TorchOps.send(self, values, target)

    monkeypatch.setattr(RecordingOps, "send", noted)
    with LLMEngine(
        str(model), dtype="float32", load_format="dummy", max_cache_tokens=64, block_size=2, logits_cache_mib=0
    ) as engine:
        engine.generate([[7]], SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True))
    assert [position for position, _, _ in sent] == list(range(7))
    targets = [target for _, _, target in sent]
    assert [source for _, source, _ in sent] == [NO_BLOCK, *targets[:-1]]
    assert targets[0] == targets[1] != targets[2] == targets[3] != targets[4] == targets[5]


@untraced
@pytest.mark.skipif(HAS_CUDA, reason="kernels over the CPU's memory need the interpreter")
def test_triton_kernels_give_the_tokens_of_the_reference(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a step in the kernels: staged inputs, shifts and mixes, with filled rows and kept states."""
    monkeypatch.setattr(ModelRunner, "warm_up", lambda self: None)  # of all kinds of steps, which takes the interpreter long
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [[3, 4, 5, 6, 7], [8], [9, 10]]
    save_tiny_rwkv(model, num_hidden_layers=1, vocab_size=32)
    found = []
    for ops in (TorchOps, RecordingTritonOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(
            str(model), dtype="float32", load_format="dummy", max_cache_tokens=64, block_size=4, max_num_seqs=5
        ) as engine:
            found.append([output.token_ids for output in engine.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.usefixtures("records")
def test_only_sizes_are_recorded(model: Path) -> None:
    with LLMEngine(str(model), dtype="float32", load_format="dummy", max_cache_tokens=4096, max_num_seqs=9) as engine:
        while engine.use_idle_time():
            pass
        graphs = engine.runner._graphs
        assert graphs is not None
        assert set(graphs._recorded) == {Kind(size, is_cut=is_cut) for size in (1, 2, 4, 8, 9) for is_cut in (False, True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("has_cache", [True, False])
def test_recorded_steps_on_a_card_give_the_tokens_of_single_ones(
    has_cache: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and eager against together and recorded, with a shared prefix, pressure, n and penalties."""
    shared = [5 + i % 80 for i in range(40)]
    prompts = [shared + prompt for prompt in PROMPTS]
    each = [SamplingParams(max_tokens=20 + i, seed=i, n=1 + i % 2, ignore_eos=True) for i in range(len(prompts))]
    each[3] = replace(each[3], repetition_penalty=1.2)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 12}
    memory: dict[str, Any] = {"max_cache_tokens": 640, "block_size": 16} if has_cache else {"enable_prefix_caching": False}
    with LLMEngine(str(model), **options, **memory) as engine:
        together = [[one.token_ids for one in output.outputs] for output in engine.generate(prompts, each)]
    monkeypatch.setattr(DecodeGraphs, "takes", lambda self, plan: False)
    with LLMEngine(str(model), **options, enable_prefix_caching=False) as engine:
        alone = [
            [one.token_ids for one in engine.generate([prompt], params)[0].outputs]
            for prompt, params in zip(prompts, each, strict=True)
        ]
    assert together == alone
