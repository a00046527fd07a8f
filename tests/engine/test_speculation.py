"""Speculation changes when tokens come, and not which."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archerfish import LLMEngine, SamplingParams
from archerfish.engine import llm_loading
from archerfish.engine.vllm_options import read_options
from archerfish.errors import InvalidOptionError
from archerfish.runtime.graphs import PassKind
from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.runtime.conftest import RecordingOps

USUAL: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_threads": 1, "max_cache_tokens": 1024}
PROMPTS = [[3, 5, 7, 11], [20, 21], [9] * 30]
EACH = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=3, max_tokens=30, min_tokens=20, logit_bias={7: 1.0}),
    SamplingParams(temperature=1.0, seed=4, max_tokens=25, n=2, repetition_penalty=1.3, frequency_penalty=0.9, ignore_eos=True),
]


class KnowingDrafter:
    """Proposes what is known to come, with mistakes."""

    def __init__(self, known: list[list[int]]) -> None:
        self.known = known

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        for whole in self.known:
            if whole[: len(tokens)] == tokens.tolist():
                found = whole[len(tokens) : len(tokens) + count]
                return [token if (len(tokens) + place) % 7 else token ^ 1 for place, token in enumerate(found)]
        return []


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_tokens_and_logprobs_are_the_same(
    records: bool, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if records:
        monkeypatch.setattr(llm_loading, "choose_ops", lambda device, dtype: RecordingOps(device, dtype))
    model = str(save_tiny_llama(tmp_path))
    calls = [list(zip(PROMPTS, EACH, strict=True))] if together else [[one] for one in zip(PROMPTS, EACH, strict=True)]

    def generated(engine: LLMEngine) -> list[Any]:
        return [output for call in calls for output in engine.generate([a for a, _ in call], [b for _, b in call])]

    with LLMEngine(model, **USUAL) as engine:
        plain = generated(engine)
        num_steps = engine.scheduler.stats().num_steps
    with LLMEngine(model, **USUAL, speculation="ngram", num_draft_tokens=6, enable_prefix_caching=False) as engine:
        assert engine.scheduler.speculation is not None
        known = [prompt + list(one.token_ids) for prompt, output in zip(PROMPTS, plain, strict=True) for one in output.outputs]
        engine.scheduler.speculation.drafter = KnowingDrafter(known)
        monkeypatch.setattr(engine.scheduler.speculation, "choose", lambda others, drafted, room: min(6, room // len(drafted)))
        found, stats = generated(engine), engine.scheduler.stats()
        if records:
            assert engine.runner._passes is not None
            assert PassKind(0, 8, is_draft=True) in engine.runner._passes._recorded
            assert not together or any(kind.num_tokens > 8 for kind in engine.runner._passes._recorded if kind.is_draft)
    for ours, theirs in zip(found, plain, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    assert [one.token_id for one in found[0].logprobs] == found[0].token_ids
    assert [one.logprob for one in found[0].logprobs] == pytest.approx([one.logprob for one in plain[0].logprobs], abs=1e-4)
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
    for name in ("rwkv", "llama"):
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidOptionError, match="recurrent"):
        LLMEngine(str(save_tiny_rwkv(tmp_path / "rwkv")), **USUAL, speculation="ngram")
    with pytest.raises(InvalidOptionError, match="deterministic"):
        LLMEngine(str(save_tiny_llama(tmp_path / "llama")), **USUAL, speculation="ngram", deterministic=True)


def test_vllms_option() -> None:
    found, _ = read_options({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, None)
    assert found == {"speculation": "ngram", "num_draft_tokens": 3}
    for other in ({"method": "eagle"}, "eagle"):
        with pytest.raises(InvalidOptionError, match="eagle"):
            read_options({"speculative_config": other}, None)
