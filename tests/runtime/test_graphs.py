"""Recorded steps of decodes, over keys or states, against steps that are not recorded.

On the CPU they run over a backend that only claims to record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import llm_loading
from archerfish.kernels.batches import Ids
from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, Input
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.graphs import NUM_BUFFERS, DecodeGraphs, Kind, PassGraphs, list_sizes
from archerfish.runtime.runner import RunningStep
from archerfish.runtime.sampler import CUT, MANY_SCORES, PENALTY, SCORES, SPECIAL, Mode, needs_of
from archerfish.step import RowEntry, StepInput
from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.models.adapter_files import random_adapter
from tests.runtime.conftest import RecordingOps

USUAL: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_threads": 1}
PROMPTS = [[3 + (i * 7 + j * j) % 90 for j in range(1 + 5 * i % 23)] for i in range(12)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path)


@pytest.fixture
def rwkv(tmp_path: Path) -> Path:
    return save_tiny_rwkv(tmp_path)


def graphs_of(engine: LLMEngine) -> DecodeGraphs[torch.Tensor]:
    found = engine.runner._graphs
    assert found is not None
    return found


def generate(
    model: Path,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
    *,
    records: bool,
    max_cache_tokens: int = 1024,
    has_cache: bool = True,
    num_prompts: int = len(PROMPTS),
) -> list[list[int]]:
    """Tokens of the first prompts, of different numbers; twice, the second time out of the cache."""
    ops = RecordingOps if records else TorchOps
    monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: ops(device, dtype))
    prompts, each = PROMPTS[:num_prompts], [replace(params, max_tokens=6 + 2 * i) for i in range(num_prompts)]
    with LLMEngine(
        str(model),
        **USUAL,
        max_cache_tokens=max_cache_tokens,
        block_size=4,
        max_num_seqs=10,
        enable_prefix_caching=has_cache,
    ) as engine:
        found = [output.token_ids for output in engine.generate(prompts, each)]
        again = [output.token_ids for output in engine.generate(prompts, each)]
        assert again == found
        graphs = engine.runner._graphs
        assert (graphs is not None and len(graphs._recorded) > 3) if records else graphs is None
    return found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, ignore_eos=True),
        SamplingParams(seed=5, top_k=7, top_p=0.8, min_p=0.01, temperature=0.7),
        SamplingParams(
            seed=5, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={5: 2.0}, min_tokens=4, logprobs=2
        ),
    ],
)
def test_tokens_are_the_same(model: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(model, params, monkeypatch, records=False)
    assert generate(model, params, monkeypatch, records=True) == plain
    assert generate(model, params, monkeypatch, records=True, has_cache=False) == plain
    assert len({tuple(tokens) for tokens in plain}) > 3


@pytest.mark.parametrize("kind", ["model", "rwkv"])
def test_adapters_in_recorded_passes(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sequences of two adapters and of none, in steps of decodes, of prompts, and of drafts; then some that have
    none."""
    model, found = request.getfixturevalue(kind), []
    for records in (False, True):
        ops = RecordingOps if records else TorchOps
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(
            str(model),
            **USUAL,
            max_cache_tokens=1024,
            max_num_seqs=10,
            enable_lora=True,
            max_loras=2,
            speculation="ngram",
        ) as engine:
            assert engine.adapters is not None
            linear = {name: one for name, [one] in maps_of(engine).items() if not one.table.is_lookup}
            shapes = {name: (one.outputs.size, one.inputs.size) for name, one in linear.items()}
            for name in ("a", "b"):
                engine.adapters.load(
                    name, random_adapter(tmp_path / name, shapes, ord(name), target_modules=list(shapes))
                )
            work = [PROMPTS[i] * 2 for i in range(9)]
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
            mixed = [[None, "a", "b"][i % 3] for i in range(9)]
            rounds = [engine.generate(work, params, lora_request=each) for each in (mixed, [None] * 9)]
            found.append([output.token_ids for outputs in rounds for output in outputs])
            graphs = engine.runner._graphs
            if graphs is not None:
                assert {kind.has_adapters for kind in graphs._recorded} == {True, False}
    assert found[0] == found[1]
    assert found[0][1] != found[0][10], "the adapter changes nothing"


def maps_of(engine: LLMEngine) -> Any:
    assert engine.runner.ops.adapters is not None
    return engine.runner.ops.adapters.maps


@pytest.mark.parametrize(("kind", "max_cache_tokens"), [("model", 160), ("rwkv", 80)])
def test_tokens_are_the_same_under_memory_pressure(
    kind: str, max_cache_tokens: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = request.getfixturevalue(kind), SamplingParams(seed=6, top_k=9)
    plain = generate(model, params, monkeypatch, records=False, num_prompts=6)
    assert generate(model, params, monkeypatch, records=True, num_prompts=6, max_cache_tokens=max_cache_tokens) == plain
    assert len({tuple(tokens) for tokens in plain}) > 3


@pytest.mark.usefixtures("records")
def test_inputs_hold_how_much_all_sequences_share(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.runtime.batch.MIN_SHARED_SEQUENCES", 2)
    monkeypatch.setattr("archerfish.runtime.batch.MIN_SHARED_TOKENS", 4)
    sent: list[tuple[int, int]] = []  # sequences, and the tokens that they share

    def noted(self: RecordingOps, values: Ids, target: torch.Tensor) -> Callable[[], None]:
        if values.ndim == 2:  # not of a prompt
            sent.append((int((values[Input.POSITION] >= 0).sum()), int(values[Input.NUM_SHARED, 0])))
        return TorchOps.send(self, values, target)

    monkeypatch.setattr(RecordingOps, "send", noted)
    with LLMEngine(str(model), **USUAL, max_cache_tokens=1024, block_size=4) as engine:
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.generate([[7] * 22], greedy)
        sent.clear()
        engine.generate([[7] * 22 + [5], [7] * 22 + [6]], greedy)
        assert (2, 20) in sent
        sent.clear()
        engine.generate([[7] * 22 + [5], [8] * 22 + [6]], greedy)
        assert {shared for num, shared in sent if num == 2} == {0}


@pytest.mark.usefixtures("records")
def test_many_penalised_tokens_leave_the_next_request_alone(tmp_path: Path) -> None:
    """More than the room that counts begin with."""
    save_tiny_llama(tmp_path, max_position_embeddings=512, vocab_size=400)
    params = SamplingParams(max_tokens=300, repetition_penalty=1.1, seed=1, ignore_eos=True)
    with LLMEngine(str(tmp_path), **USUAL, max_cache_tokens=1024) as engine:
        for _ in range(2):
            assert engine.generate([[5, 6, 7]], params)[0].finish_reason == "length"


@pytest.mark.usefixtures("records")
def test_a_model_of_few_positions_starts(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256, max_model_len=10) as engine:
        assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.usefixtures("records")
def test_engine_works_after_an_interrupted_launch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256) as engine:
        expected = engine.generate([PROMPTS[3]], params)[0].token_ids
        launch = engine.runner.launch
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPTS[4]], params)
        assert engine.runner.launch == launch
        assert engine.generate([PROMPTS[3]], params)[0].token_ids == expected
        assert not engine.has_work


def interrupted(step: StepInput) -> RunningStep:
    raise KeyboardInterrupt


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("model", {"max_cache_tokens": 640, "block_size": 4}),
        ("rwkv", {"max_cache_tokens": 640, "block_size": 16}),
        ("rwkv", {"enable_prefix_caching": False}),
    ],
)
def test_recorded_steps_on_a_card_give_the_tokens_of_single_ones(
    kind: str, memory: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and eager against together and recorded, with a shared prefix, pressure, n and penalties."""
    shared = [5 + i % 80 for i in range(40)]
    prompts = [shared + prompt for prompt in PROMPTS]
    each = [SamplingParams(max_tokens=20 + i, seed=i, n=1 + i % 2, ignore_eos=True) for i in range(len(prompts))]
    each[3] = replace(each[3], repetition_penalty=1.2)
    model = str(request.getfixturevalue(kind))
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 12}
    monkeypatch.setattr("archerfish.runtime.batch.MIN_SHARED_SEQUENCES", 2)
    monkeypatch.setattr("archerfish.runtime.batch.MIN_SHARED_TOKENS", 4)
    with LLMEngine(model, **options, **memory) as engine:
        together = [[one.token_ids for one in output.outputs] for output in engine.generate(prompts, each)]
    monkeypatch.setattr(StepInput, "is_decode_only", False)
    monkeypatch.setattr(PassGraphs, "prepare", lambda self, step, tables: None)
    with LLMEngine(model, **options, **(memory if kind == "model" else {"enable_prefix_caching": False})) as engine:
        alone = [
            [one.token_ids for one in engine.generate([prompt], params)[0].outputs]
            for prompt, params in zip(prompts, each, strict=True)
        ]
    assert together == alone


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "top_k": 30}
HOWS: list[tuple[int, Mode, dict[str, Any]]] = [  # what a row needs, and how steps with it and a plain one choose
    (SCORES, Mode.SCORED, {"logprobs": 5, "top_p": 0.9}),
    (MANY_SCORES, Mode.MANY_SCORED, {"logprobs": 20, "temperature": 0.0}),
    (SPECIAL, Mode.DRAWN, {"logprobs": 21}),
    (SPECIAL, Mode.DRAWN, {"logprobs": 0, "presence_penalty": 0.5}),
    (PENALTY, Mode.PENALISED, PENALTIES),
    (SPECIAL, Mode.DRAWN, {"logit_bias": {5: 1.0}, **PENALTIES}),
    (SPECIAL, Mode.DRAWN, {"min_tokens": 4}),
    (SPECIAL, Mode.DRAWN, {"grammar": {"kind": "choice", "value": ["a"]}}),
]


@pytest.mark.parametrize(("needs", "mode", "options"), HOWS[:-1])
def test_requests_that_ask_for_more_are_recorded_too(
    needs: int, mode: Mode, options: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one that does not, whose tokens stay the same; then a second time, in rows that others had."""
    monkeypatch.setattr(DecodeGraphs, "warm_up", lambda self: None)
    plain = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    params = [replace(plain, seed=2, **options), plain, replace(plain, seed=3, **options)]
    found = []
    for ops in (TorchOps, RecordingOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(str(model), **USUAL, max_cache_tokens=1024) as engine:
            found.append([one for _ in range(2) for one in engine.generate(PROMPTS[2:5], params)])
            if ops is RecordingOps:
                assert {kind.mode for kind in graphs_of(engine)._recorded} == {mode}
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for own, other in zip(ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert (own.token_id, own.rank) == (other.token_id, other.rank)
            assert [one for one, _ in own.top] == [one for one, _ in other.top] and len(own.top) == options["logprobs"]
            assert [one for _, one in own.top] == pytest.approx([one for _, one in other.top], abs=1e-4)
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.usefixtures("records")
def test_all_ways_to_choose_in_one_step(model: Path) -> None:
    """Requests that must be chosen from logits, or for which the recorded step has no room, leave the others alone."""
    plain = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    params = [replace(plain, seed=i, **options) for i, (_, _, options) in enumerate(HOWS[:-1])] + [plain]
    prompts = PROMPTS[: len(params)]
    with LLMEngine(str(model), **USUAL, max_cache_tokens=1024, enable_prefix_caching=False) as engine:
        together = engine.generate(prompts, params)
        assert Kind(8, mode=Mode.PENALISED) in graphs_of(engine)._recorded
        for one, prompt, own in zip(together, prompts, params, strict=True):
            (alone,) = engine.generate([prompt], own)
            assert one.token_ids == alone.token_ids
            assert [x.rank for x in one.outputs[0].logprobs or []] == [x.rank for x in alone.outputs[0].logprobs or []]


def test_what_rows_need_of_a_recorded_step() -> None:
    for needs, _, options in HOWS:
        entry = RowEntry(0, "", SamplingParams(**options), 3, has_grammar="grammar" in options)
        assert needs_of(entry) == needs
    rows = np.array([0, CUT, PENALTY | CUT, SCORES, MANY_SCORES | CUT, SPECIAL])
    for most, mode, is_behind in (
        (1, Mode.DRAWN, [0]),
        (2, Mode.CUT, [0, 0]),
        (3, Mode.PENALISED, [0, 0, 0]),
        (6, Mode.PENALISED, [0, 0, 0, 1, 1, 1]),
    ):
        assert Mode.of(rows[:most]) == mode and (rows[:most] & mode.lacks != 0).tolist() == is_behind
    assert Mode.of(rows[3:4]) == Mode.SCORED and Mode.of(rows[3:]) == Mode.MANY_SCORED
    assert (rows[3:] & Mode.MANY_SCORED.lacks != 0).tolist() == [False, False, True]


@pytest.mark.usefixtures("records")
def test_logits_that_are_not_finite_end_their_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLMEngine(str(model), **USUAL, max_cache_tokens=1024) as engine:
        expected = engine.generate([PROMPTS[4]], SamplingParams(max_tokens=8, temperature=0.0))[0].token_ids
        original = engine.runner.model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = original(hidden)
            if len(found) > 1:
                found[1] = float("nan")
            return found

        monkeypatch.setattr(engine.runner.model, "logits", logits)
        good, bad = engine.generate([PROMPTS[4], PROMPTS[3]], SamplingParams(max_tokens=8, temperature=0.0))
        assert good.token_ids == expected
        assert bad.finish_reason == "error"


@pytest.mark.usefixtures("records")
def test_idle_time_is_used_to_record_every_size(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256, max_num_seqs=5) as engine:
        expected = engine.generate(PROMPTS[:3], SamplingParams(max_tokens=8, temperature=0.0))
        graphs = graphs_of(engine)
        plain, *others = ([Kind(size, mode=mode) for size in (1, 2, 4, 5)] for mode in (Mode.DRAWN, Mode.CUT))
        others += [[Kind(5, mode=mode)] for mode in (Mode.PENALISED, Mode.SCORED, Mode.MANY_SCORED)]
        assert set(graphs._recorded) == {*plain, *(kinds[-1] for kinds in others)}  # by the start
        for _ in range(3):
            assert engine.use_idle_time()
        assert set(graphs._recorded) == {*plain, *chain(*others)}
        while engine.use_idle_time():  # prompts
            pass
        assert set(graphs._recorded) == {*plain, *chain(*others)}
        again = engine.generate(PROMPTS[:3], SamplingParams(max_tokens=8, temperature=0.0))
        assert [one.token_ids for one in again] == [one.token_ids for one in expected]


@pytest.mark.usefixtures("records")
def test_start_records_powers_of_two_and_the_largest_size(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256, max_num_seqs=40) as engine:
        found = {kind.size for kind in graphs_of(engine)._recorded if kind == Kind(kind.size)}
    assert found == {1, 2, 4, 8, 16, 32, 40}


@pytest.mark.usefixtures("records")
def test_steps_with_cut_rows_are_recorded_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row gives is the same beside one that is cut and alone, where kernels for cuts are left out."""
    monkeypatch.setattr(DecodeGraphs, "warm_up", lambda self: None)
    plain = SamplingParams(max_tokens=6, temperature=0.9, seed=1, ignore_eos=True)
    cuts = [replace(plain, top_p=0.5), replace(plain, top_k=2), replace(plain, min_p=0.3)]
    for other, is_cut in [*((cut, True) for cut in cuts), (replace(cuts[0], temperature=0.0), False)]:
        with LLMEngine(
            str(model), **USUAL, max_cache_tokens=256, max_num_seqs=5, enable_prefix_caching=False
        ) as engine:
            graphs = graphs_of(engine)
            (alone,) = engine.generate([PROMPTS[0]], plain)
            assert set(graphs._recorded) == {Kind(1)}
            beside, _ = engine.generate(PROMPTS[:2], [plain, other])
            assert {kind.mode for kind in graphs._recorded if kind.size == 2} == {Mode.CUT if is_cut else Mode.DRAWN}
            assert beside.token_ids == alone.token_ids


@pytest.mark.usefixtures("records")
def test_a_buffer_that_held_another_size_is_filled_anew(model: Path) -> None:
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256, max_num_seqs=5) as engine:
        graphs = graphs_of(engine)
        expected = graphs.empty_inputs(Kind(4)).copy()
        for _ in range(NUM_BUFFERS):
            next(graphs._buffers)[:] = 123
        assert (graphs.empty_inputs(Kind(4)) == expected).all()
        assert (expected[Input.POSITION] == FILLING_POSITION).all()
        assert not expected[Input.NUM_SHARED].any()


@pytest.mark.usefixtures("records")
def test_a_buffer_is_waited_for_before_it_is_written_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft model needs it, which waits for no step but its last."""
    with LLMEngine(str(model), **USUAL, max_cache_tokens=256, max_num_seqs=5) as engine:
        graphs, waits = graphs_of(engine), list[int]()
        monkeypatch.setattr(engine.runner.ops, "send", lambda values, target: lambda: waits.append(values.ctypes.data))
        used = []
        for _ in range(NUM_BUFFERS + 2):
            words = graphs.empty_inputs(Kind(1))
            used.append(words.ctypes.data)
            graphs._repeat(Kind(1), words)
        assert waits == used[:2] == used[-2:]


def test_sizes_reach_every_number_of_sequences() -> None:
    assert list_sizes(1) == [1]
    assert list_sizes(10) == [1, 2, 4, 8, 10]
    assert list_sizes(512)[-5:] == [256, 320, 384, 448, 512]


# Models with states


def test_tokens_are_the_same_with_one_state_a_sequence(rwkv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=6, max_tokens=12, ignore_eos=True)
    found = []
    for ops in (TorchOps, RecordingOps):
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype, ops=ops: ops(device, dtype))
        with LLMEngine(str(rwkv), **USUAL, enable_prefix_caching=False, max_num_seqs=6) as engine:
            found.append([output.token_ids for output in engine.generate(PROMPTS, params)])
            assert engine.facts.memory.num_blocks == 6
    assert found[0] == found[1]


@pytest.mark.usefixtures("records")
def test_inputs_hold_both_blocks_of_a_step(rwkv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token, then six decodes over blocks of two tokens: each goes on from where the one before it
    went."""
    sent: list[tuple[int, int, int]] = []  # position, source, target

    def noted(self: RecordingOps, values: Ids, target: torch.Tensor) -> Callable[[], None]:
        sent.append((int(values[Input.POSITION, 0]), int(values[Input.SOURCE, 0]), int(values[Input.BLOCK, 0])))
        return TorchOps.send(self, values, target)

    monkeypatch.setattr(RecordingOps, "send", noted)
    with LLMEngine(str(rwkv), **USUAL, max_cache_tokens=64, block_size=2, logits_cache_mib=0) as engine:
        engine.generate([[7]], SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True))
    assert [position for position, _, _ in sent] == list(range(7))
    targets = [target for _, _, target in sent]
    assert [source for _, source, _ in sent] == [NO_BLOCK, *targets[:-1]]
    assert targets[0] == targets[1] != targets[2] == targets[3] != targets[4] == targets[5]


@pytest.mark.usefixtures("records")
def test_only_sizes_are_recorded(rwkv: Path) -> None:
    with LLMEngine(str(rwkv), **USUAL, max_cache_tokens=4096, max_num_seqs=9) as engine:
        while engine.use_idle_time():
            pass
        graphs = graphs_of(engine)
        kinds = {Kind(size, mode=mode) for size in (1, 2, 4, 8, 9) for mode in (Mode.DRAWN, Mode.CUT)}
        assert set(graphs._recorded) == kinds | {Kind(9, mode=mode) for mode in Mode}
