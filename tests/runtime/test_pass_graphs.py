"""Recorded passes over prompts against passes that are not: on the CPU over a backend that only claims to record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import llm_loading
from archerfish.kernels.batches import Ids
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.graphs import MISSES, NUM_BUFFERS, PassGraphs, PassKind
from archerfish.sched.plan import PromptPlanner
from tests.calls import spy_on
from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.runtime.conftest import RecordingOps

USUAL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "num_threads": 1,
    "block_size": 4,
    "max_cache_tokens": 2048,
}
LENGTHS = (1, 2, 15, 16, 17, 100, 511, 512, 513)
PROMPTS = [[3 + (7 * j + j * j + length) % 90 for j in range(length)] for length in LENGTHS]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def chunks_of_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts do not depend on the speed of the machine."""
    monkeypatch.setattr(PromptPlanner, "prompt_share_s", lambda *_, **__: 1e3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path, max_position_embeddings=600)


def use_idle_time(engine: LLMEngine) -> None:
    while engine.use_idle_time():
        pass


def passes_of(engine: LLMEngine) -> PassGraphs[torch.Tensor]:
    found = engine.runner._passes
    assert found is not None
    return found


def one_by_one(
    model: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch, ops: type[TorchOps], **options: Any
) -> tuple[list[Any], set[int]]:
    """Tokens and logprobs of each prompt alone, twice, and the sizes of the recorded passes that were run."""
    monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: ops(device, dtype))
    with monkeypatch.context() as patch, LLMEngine(str(model), **USUAL, **options) as engine:
        start = spy_on(patch, PassGraphs, "start")
        outputs = [engine.generate([prompt], params)[0] for prompt in PROMPTS * 2]
    taken = {call.args[1].kind.num_tokens for call in start.call_args_list}
    return [(one.token_ids, one.outputs[0].logprobs) for one in outputs], taken


@pytest.mark.parametrize(
    ("params", "has_cache"),
    [(SamplingParams(max_tokens=4, seed=3, logprobs=2, ignore_eos=True), False), (GREEDY, True)],
)
def test_tokens_are_the_same(
    model: Path, params: SamplingParams, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"enable_prefix_caching": has_cache}
    plain, none = one_by_one(model, params, monkeypatch, TorchOps, **options)
    found, taken = one_by_one(model, params, monkeypatch, RecordingOps, **options)
    assert not none and taken == {16, 32, 128, 512}
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(found, plain, strict=True):
        assert tokens == plain_tokens
        assert (logprobs is None) == (params.logprobs is None)
        for own, other in zip(logprobs or [], plain_logprobs or [], strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4) and own.rank == other.rank


@pytest.mark.usefixtures("records")
def test_the_end_of_a_prompt_that_is_cached_goes_on_from_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = spy_on(monkeypatch, PassGraphs, "start")
    with LLMEngine(str(model), **USUAL) as engine:
        use_idle_time(engine)
        engine.generate([PROMPTS[5]], GREEDY)
        cached = engine.generate([PROMPTS[5] + [9, 8, 7]], GREEDY)[0].token_ids
    with LLMEngine(str(model), **USUAL) as engine:
        assert engine.generate([PROMPTS[5] + [9, 8, 7]], GREEDY)[0].token_ids == cached
    taken = [call.args[1] for call in start.call_args_list]
    assert [prepared.kind for prepared in taken] == [PassKind(0, 128), PassKind(0, 16), PassKind(0, 128)]


@pytest.mark.usefixtures("records")
def test_a_kind_is_recorded_when_it_was_used_often(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassGraphs, "warm_up", lambda self: None)
    with LLMEngine(str(model), **USUAL, enable_prefix_caching=False) as engine:
        found = []
        for prompt in (PROMPTS[4], *[PROMPTS[2], PROMPTS[3]] * (MISSES // 2), PROMPTS[2]):  # of sizes 32 and 16
            engine.generate([prompt], GREEDY)
            found.append([kind.num_tokens for kind in passes_of(engine)._recorded])
        assert found == [[]] * (MISSES + 1) + [[16]]


SAMPLED = [
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, ignore_eos=True),
    GREEDY,
    SamplingParams(repetition_penalty=1.3, seed=5, logprobs=2, ignore_eos=True),
    SamplingParams(n=2, seed=2, ignore_eos=True),
]


@pytest.mark.parametrize("num_kinds", [1, len(SAMPLED)])
@pytest.mark.parametrize("max_num_batched_tokens", [0, 48])
def test_prompts_that_join_decodes(
    num_kinds: int, max_num_batched_tokens: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of which four run at once, each with prompts and outputs of its own length: nearly every step is
    mixed."""
    lengths = [3, 18, 40, 9, 25, 70, 5, 16, 33, 12, 21, 8, 30, 4, 50, 11]
    prompts = [[3 + (5 * j + j * j + length) % 90 for j in range(length)] for length in lengths]
    params = [replace(SAMPLED[i % num_kinds], max_tokens=4 + i % 5) for i in range(len(prompts))]
    options: dict[str, Any] = {"max_num_seqs": 4, "enable_prefix_caching": False}
    options["max_num_batched_tokens"] = max_num_batched_tokens
    found, start = [], spy_on(monkeypatch, PassGraphs, "start")
    for ops in (TorchOps, RecordingOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(str(model), **USUAL, **options) as engine:
            use_idle_time(engine)
            outputs = engine.generate(prompts, params)
            found.append([[one.token_ids for one in output.outputs] for output in outputs])
    prepared = [call.args[1] for call in start.call_args_list]
    assert found[0] == found[1]
    assert sum(one.num_decodes > 0 for one in prepared) >= 5


@pytest.mark.usefixtures("records")
def test_prompt_logprobs_are_not_recorded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = spy_on(monkeypatch, PassGraphs, "start")
    with LLMEngine(str(model), **USUAL) as engine:
        engine.generate([PROMPTS[4]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert not start.call_args_list


def test_parts_of_a_prompt_that_is_cut_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "enable_prefix_caching": False}
    plain, _ = one_by_one(model, GREEDY, monkeypatch, TorchOps, **options)
    found, taken = one_by_one(model, GREEDY, monkeypatch, RecordingOps, **options)
    assert found == plain and taken == {16, 32, 128}


class LateOps(RecordingOps):
    """Copies of a buffer are done when something that was queued after them is waited for."""

    def __init__(self, device: str, dtype: str) -> None:
        super().__init__(device, dtype)
        self.under_way: list[tuple[Ids, Ids]] = []  # buffers, and what they held
        self.num_sent = self.num_spoilt = 0

    def send(self, values: Ids, target: torch.Tensor) -> Callable[[], None]:
        self.under_way.append((values, values.copy()))
        super().send(values, target)
        return self.end_copies

    def end_copies(self) -> None:
        """Those that were begun before something that is waited for."""
        late, self.under_way = self.under_way, []
        self.num_sent += len(late)
        self.num_spoilt += sum(not np.array_equal(values, held) for values, held in late)

    def fetch(self, x: torch.Tensor) -> Callable[[], npt.NDArray[Any]]:
        found = super().fetch(x)

        def wait() -> npt.NDArray[Any]:
            self.end_copies()
            return found()

        return wait


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, repetition_penalty=1.5), replace(GREEDY, logprobs=1)])
def test_no_buffer_is_written_while_it_is_copied(
    params: SamplingParams, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LateOps] = []

    def choose(device: str, dtype: str) -> LateOps:
        made.append(LateOps(device, dtype))
        return made[0]

    monkeypatch.setattr(llm_loading, "choose_ops", choose)
    with LLMEngine(str(model), **USUAL, max_num_batched_tokens=20, max_num_seqs=4) as engine:
        use_idle_time(engine)
        engine.generate([PROMPTS[-1]], params)  # many parts, and only the last one has a result to wait for
    assert made[0].num_sent > 3 * NUM_BUFFERS and made[0].num_spoilt == 0


@pytest.mark.usefixtures("records")
def test_fillings_leave_the_memory_of_others_alone(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, enable_prefix_caching=False) as engine:
        use_idle_time(engine)
        for layer in engine.runner.pool.layers:
            layer.keys.fill_(float("nan"))
        engine.generate([PROMPTS[4]], SamplingParams(max_tokens=1, temperature=0.0))
        written = [int((~layer.keys.isnan()).any(-1).any(-1).sum()) for layer in engine.runner.pool.layers]
        assert written == [17] * len(written)


def test_a_pass_that_cannot_be_recorded_is_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = one_by_one(model, GREEDY, monkeypatch, TorchOps)

    def capture(self: RecordingOps, call: Callable[[], torch.Tensor]) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(RecordingOps, "capture", capture)
    assert one_by_one(model, GREEDY, monkeypatch, RecordingOps)[0] == plain


@pytest.mark.usefixtures("records")
def test_sizes_are_recorded_in_idle_time(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, max_num_seqs=2, max_num_batched_tokens=60) as engine:
        kinds = [PassKind(num_decodes, size) for num_decodes in (0, 8) for size in (64, 48, 32, 16)]
        assert list(passes_of(engine)._recorded) == kinds[:4]  # at the start
        use_idle_time(engine)
        assert list(passes_of(engine)._recorded) == kinds


@pytest.mark.usefixtures("records")
def test_wide_models_record_short_prompts_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take longer to compute than the host to launch them."""
    with LLMEngine(str(model), **USUAL) as engine:
        assert passes_of(engine).token_sizes[-1] == 512  # as many as a step on a CPU
        width = engine.runner.model.config.integer("hidden_size")
    monkeypatch.setattr("archerfish.runtime.graphs.MOST_WORK", 100 * width**2)
    with LLMEngine(str(model), **USUAL) as engine:
        assert passes_of(engine).token_sizes[-1] == 128


@pytest.mark.usefixtures("records")
def test_models_with_states_have_none(tmp_path: Path) -> None:
    with LLMEngine(str(save_tiny_rwkv(tmp_path)), dtype="float32", load_format="dummy", num_threads=1) as engine:
        assert engine.runner._passes is None and engine.runner._graphs is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_recorded_prompts_on_a_card(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32, each twice, some of them recorded, and interleaved with recorded decodes over the same memory."""
    options: dict[str, Any] = {**USUAL, "device": "cuda", "max_num_seqs": 4, "enable_prefix_caching": False}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLMEngine(str(model), **options) as engine:
        recorded = [engine.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS * 2]
        assert {kind.num_tokens for kind in passes_of(engine)._recorded} >= {16, 32, 128, 512}
    monkeypatch.setattr(PassGraphs, "prepare", lambda self, step, tables: None)
    with LLMEngine(str(model), **options) as engine:
        plain = [engine.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS * 2]
    assert [one.token_ids for one in recorded] == [one.token_ids for one in plain]
