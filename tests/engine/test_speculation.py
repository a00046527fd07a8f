"""Speculation changes when tokens come, and not which."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archerfish import LLM, EngineConfig, LLMEngine, SamplingParams
from archerfish.config import HubConfig
from archerfish.engine import drafting, llm_loading
from archerfish.engine.vllm_options import read_options
from archerfish.errors import InvalidOptionError
from archerfish.runtime.graphs import PassKind
from archerfish.sequence import Request, Sequence
from archerfish.serve.compute import ComputeThread
from archerfish.types import no_progress
from tests.cache.invariants import check_cache
from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.runtime.conftest import RecordingOps

USUAL: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "max_cache_tokens": 1024}
PROMPTS = [[3, 5, 7, 11], [20, 21], [9] * 30, [4, 30, 8], [31] * 9]
EACH = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=3, max_tokens=30, min_tokens=20, logit_bias={7: 1.0}),
    SamplingParams(
        temperature=1.0, seed=4, max_tokens=25, n=2, repetition_penalty=1.3, frequency_penalty=0.9, ignore_eos=True
    ),
    SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
]


class KnowingDrafter:
    """Proposes what is known to come, with a mistake at every place that `every` divides."""

    def __init__(
        self, known: list[list[int]], every: int = 7, wrong: Callable[[int], int] = lambda token: token ^ 1
    ) -> None:
        self.known = known
        self.every = every
        self.wrong = wrong

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        for whole in self.known:
            if whole[: len(tokens)] == tokens.tolist():
                found = whole[len(tokens) : len(tokens) + count]
                return [token if i % self.every else self.wrong(token) for i, token in enumerate(found, len(tokens))]
        return []


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_tokens_and_logprobs_are_the_same(
    records: bool, together: bool, has_states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if records:
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: RecordingOps(device, dtype))
    model = str((save_tiny_rwkv if has_states else save_tiny_llama)(tmp_path))
    options = {**USUAL, "block_size": 8} if has_states else USUAL
    calls = [list(zip(PROMPTS, EACH, strict=True))] if together else [[one] for one in zip(PROMPTS, EACH, strict=True)]

    def generated(engine: LLMEngine) -> list[Any]:
        return [output for call in calls for output in engine.generate([a for a, _ in call], [b for _, b in call])]

    with LLMEngine(model, **options) as engine:
        plain = generated(engine)
        num_steps = engine.scheduler.stats().num_steps
    options = {**options, "enable_prefix_caching": has_states, "max_num_seqs": 4}  # prompts join drafts
    with LLMEngine(model, **options, speculation="ngram", num_draft_tokens=6) as engine:
        assert engine.scheduler.speculation is not None
        known = [
            prompt + list(one.token_ids)
            for prompt, output in zip(PROMPTS, plain, strict=True)
            for one in output.outputs
        ]
        engine.scheduler.speculation.drafter = KnowingDrafter(known)
        always_draft(engine, monkeypatch, 6)
        found, stats = generated(engine), engine.scheduler.stats()
        if has_states:
            check_cache(engine.scheduler.cache, [])
            again = generated(engine)  # from states that verified steps have left
            assert engine.cache_stats().hits > 0
            assert [one.token_ids for one in again[0].outputs] == [one.token_ids for one in plain[0].outputs]
        elif records:
            assert engine.runner._passes is not None
            assert PassKind(0, 8, is_draft=True) in engine.runner._passes._recorded
            assert not together or any(kind.num_tokens > 8 for kind in engine.runner._passes._recorded if kind.is_draft)
    for ours, theirs in zip(found, plain, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    assert [one.token_id for one in found[0].logprobs] == found[0].token_ids
    assert [one.logprob for one in found[0].logprobs] == pytest.approx(
        [one.logprob for one in plain[0].logprobs], abs=1e-4
    )
    metrics = [output.metrics for output in found]
    assert metrics[0].num_accepted_tokens > 15 and metrics[2].num_accepted_tokens > 15
    assert stats.num_accepted_tokens == sum(one.num_accepted_tokens for one in metrics) < stats.num_draft_tokens
    assert stats.num_steps < num_steps


def test_repeated_text_is_proposed(tmp_path: Path) -> None:
    """A model that repeats one token for ever."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={5: 100.0})
    with LLMEngine(str(save_tiny_llama(tmp_path)), **USUAL, speculation="ngram") as engine:
        (output,) = engine.generate([[1, 2, 3]], params)
        (alone,) = engine.generate([[1, 2, 3]], replace(params, speculate=False))
    assert output.token_ids == alone.token_ids == [5] * 60
    assert output.metrics.num_accepted_tokens > 0 and alone.metrics.num_draft_tokens == 0


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="deterministic"):
        LLMEngine(str(save_tiny_llama(tmp_path)), **USUAL, speculation="ngram", deterministic=True)


def test_vllms_option() -> None:
    found, _ = read_options({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, None)
    assert found == {"speculation": "ngram", "num_draft_tokens": 3}
    found, _ = read_options({"speculative_config": {"model": "a/b", "num_speculative_tokens": 4}}, None)
    assert found == {"speculation": "draft", "draft_model": "a/b", "num_draft_tokens": 4}
    with pytest.raises(InvalidOptionError, match="Unknown option of speculative_config: 'foo'"):
        read_options({"speculative_config": {"method": "ngram", "foo": 1}}, None)
    for other in ({"method": "eagle"}, {"method": "eagle", "model": "a/b"}, "eagle"):
        with pytest.raises(InvalidOptionError, match="eagle"):
            read_options({"speculative_config": other}, None)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    "kind", ["same", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("smaller", "rwkv"))]
)
def test_a_draft_model_changes_no_tokens(
    kind: str, records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights as the model's accept nearly all of greedy proposals; others show that rejected ones leave no
    trace."""
    if records:
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: RecordingOps(device, dtype))
    model, draft = two_llamas(tmp_path, **({} if kind == "same" else {"num_hidden_layers": 1, "hidden_size": 16}))
    if kind == "rwkv":
        draft = str(save_tiny_rwkv(tmp_path / "draft"))
    prompts, each = (
        [*PROMPTS, list(range(3, 90)) * 2],
        [*EACH, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)],
    )
    with LLMEngine(model, **USUAL) as engine:
        plain = engine.generate(prompts, each)
    for module in (drafting, llm_loading):
        monkeypatch.setattr(module, "MAX_CHUNK", 50)
    with LLMEngine(model, **USUAL, speculation="draft", draft_model=draft, num_draft_tokens=5) as engine:
        assert engine.scheduler.speculation is not None
        always_draft(engine, monkeypatch)
        for _ in range(2):  # together, then from the cache
            found = engine.generate(prompts, each)
            for ours, theirs in zip(found, plain, strict=True):
                assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
        (alone,) = engine.generate(prompts[:1], each[0])
        assert alone.token_ids == plain[0].token_ids
        stats, model_drafter = engine.scheduler.stats(), engine.scheduler.speculation.model
        assert isinstance(model_drafter, drafting.ModelDrafter)
        assert alone.metrics.num_draft_tokens > 0 and stats.num_draft_tokens > stats.num_accepted_tokens
        share = alone.metrics.num_accepted_tokens / alone.metrics.num_draft_tokens
        assert share > 0.9 if kind == "same" else share < 0.9
        if records:
            assert model_drafter.runner._graphs is not None and model_drafter.runner._graphs._recorded
        held = [len(known.blocks) for known in model_drafter._known.values()]
        assert model_drafter._blocks.num_free + sum(held) == model_drafter._blocks.num_total


def test_sequences_beyond_the_draft_models_rows_and_memory_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = two_llamas(tmp_path)
    monkeypatch.setattr(llm_loading, "MAX_DRAFTED", 3)
    monkeypatch.setattr(llm_loading, "DRAFT_CACHE_TOKENS", 96)
    options = {**USUAL, "max_cache_tokens": 4096}
    prompts = [[5 + i] * (1 + 9 * i) for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLMEngine(model, **options) as engine:
        plain = engine.generate(prompts, params)
    with LLMEngine(model, **options, speculation="draft", draft_model=draft) as engine:
        assert engine.scheduler.speculation is not None
        engine.scheduler.speculation.max_sequences = 64
        always_draft(engine, monkeypatch)
        found = engine.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    num_proposed = [one.metrics.num_draft_tokens for one in found]
    assert 0 in num_proposed and sum(num > 0 for num in num_proposed) >= 2


def test_a_draft_model_that_fails_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = two_llamas(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLMEngine(model, **USUAL, speculation="draft", draft_model=draft) as engine:
        assert engine.scheduler.speculation is not None
        model_drafter = engine.scheduler.speculation.model
        assert isinstance(model_drafter, drafting.ModelDrafter)
        always_draft(engine, monkeypatch)
        plain = engine.generate([[7, 8]], replace(params, speculate=False))[0].token_ids
        for name in ("_start", "launch"):
            monkeypatch.setattr(model_drafter.runner, name, lambda *_: 1 / 0)
            (output,) = engine.generate([[7, 8]], params)
            assert output.token_ids == plain and not output.metrics.num_draft_tokens
            assert not model_drafter._known
        assert model_drafter._num_failures == drafting.MOST_FAILURES  # and then it was left out


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model, draft = two_llamas(tmp_path, vocab_size=97)
    with pytest.raises(InvalidOptionError, match="another vocabulary"):
        LLMEngine(model, **USUAL, speculation="draft", draft_model=draft)
    for speculation, name in (("draft", ""), ("off", draft), ("ngram", draft)):
        with pytest.raises(InvalidOptionError, match="draft_model"):
            LLMEngine(model, **USUAL, speculation=speculation, draft_model=name)


def test_the_draft_models_memory_is_counted(tmp_path: Path) -> None:
    model, draft = two_llamas(tmp_path)
    config = EngineConfig(model=model, **USUAL, speculation="draft", draft_model=draft)
    facts = llm_loading.read_facts(config, HubConfig(), no_progress)
    alone = llm_loading.read_facts(EngineConfig(model=model, **USUAL), HubConfig(), no_progress)
    assert facts.draft is not None
    own = facts.draft.memory
    assert facts.memory.work_bytes - alone.memory.work_bytes == own.num_bytes + own.weight_bytes + own.work_bytes > 0


def test_an_engine_with_a_draft_model_sleeps_and_wakes(tmp_path: Path) -> None:
    model, draft = two_llamas(tmp_path)
    llm = LLM(model, **USUAL, speculation="draft", draft_model=draft)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    before = llm.generate([[7, 8]], params)[0].outputs[0].token_ids
    llm.sleep()
    llm.wake_up()
    assert llm.generate([[7, 8]], params)[0].outputs[0].token_ids == before
    llm.close()


def two_llamas(folder: Path, **changes: Any) -> tuple[str, str]:
    for name in ("model", "draft"):
        (folder / name).mkdir()
    return str(save_tiny_llama(folder / "model")), str(save_tiny_llama(folder / "draft", **changes))


def always_draft(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, most: int = 5) -> None:
    """As many tokens as there is room for, whatever they cost."""
    speculation = engine.scheduler.speculation
    monkeypatch.setattr(speculation, "choose", lambda others, drafted, room, longest=0: min(most, room // len(drafted)))


def test_a_recurrent_draft_model_goes_back_to_the_state_behind_the_last_accepted_token(tmp_path: Path) -> None:
    """What it proposes depends on the tokens alone, and not on what it proposed before."""
    model, draft = two_llamas(tmp_path)
    draft = str(save_tiny_rwkv(tmp_path / "draft"))
    expected = LLMEngine(draft, **USUAL)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options: dict[str, Any] = {"draft_model": draft, "num_draft_tokens": 5, "enable_prefix_caching": False}
    with LLMEngine(model, **USUAL, **options) as engine, expected:
        assert engine.scheduler.speculation is not None and engine.scheduler.speculation.model is not None
        drafter = engine.scheduler.speculation.model
        request = Request("r", [5, 6, 7, 8], SamplingParams(), 100)
        seq = Sequence(request)
        for new in ([], [1], [9, 10], [11], 2, 5, 0, [3], 4, [12]):
            proposed = drafter.begin([seq], 5).tokens(seq)
            assert proposed == expected.generate([seq.tokens.tolist()], params)[0].token_ids
            seq.tokens.extend(new if isinstance(new, list) else [*proposed[:new], 50])


def test_a_service_does_not_wait_for_the_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop goes on when the compute thread has done a job, and every call of `advance` returns at once."""
    model, draft = two_llamas(tmp_path, num_hidden_layers=1)
    params, woken = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), threading.Event()
    compute = ComputeThread(woken.set)
    with LLMEngine(model, **USUAL, speculation="draft", draft_model=draft, executor=compute.lane("model")) as engine:
        always_draft(engine, monkeypatch)
        request_id = engine.add_request([7, 8], params)
        while (output := engine.get_output(request_id)) is None:
            if not engine.advance():
                assert woken.wait(60)
                woken.clear()
        plain = engine.generate([[7, 8]], replace(params, speculate=False))[0]
    compute.close()
    assert output.token_ids == plain.token_ids and output.metrics.num_draft_tokens > 0
