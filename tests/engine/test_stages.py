"""Outputs in stages through a whole engine: each token is what plain numpy draws from the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from archerfish import LLMEngine, SamplingParams, Stage
from archerfish.errors import InvalidInputError
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.runtime.test_stages import expected_token

VOCAB = 60
PROMPT = [5, 6, 7]
STAGES = (
    Stage(first=10, end=30, num_tokens=3, offset=20, temperature=0.7, top_k=9, top_p=0.95),
    Stage(first=55, end=56, num_tokens=1),
    Stage(first=0, end=11, num_tokens=6, stop_id=10),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_config(save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB))) as made:
        yield made


def logits_after(engine: LLMEngine, tokens: list[int]) -> Any:
    (output,) = engine.generate([tokens], SamplingParams(max_tokens=1, temperature=0), wants_logits=True)
    return np.asarray(output.logits[0])


@pytest.mark.parametrize("seed", range(4))
def test_every_token_follows_from_seed_position_and_logits(engine: LLMEngine, seed: int) -> None:
    (output,) = engine.generate([PROMPT], SamplingParams(stages=STAGES, seed=seed))
    kinds = [stage for stage in STAGES for _ in range(stage.num_tokens)]
    tokens = list(PROMPT)
    for stage, token in zip(kinds, output.token_ids, strict=False):
        expected, is_unclear = expected_token(logits_after(engine, tokens), stage, seed, len(tokens))
        assert is_unclear or token == expected
        tokens.append(token)
    ended = output.token_ids[-1] == 10
    assert output.finish_reason == ("stop" if ended else "length") and (ended or len(output.token_ids) == 10)
    assert output.outputs[0].stop_reason == (10 if ended else None)


def test_some_end_and_some_do_not(engine: LLMEngine) -> None:
    outputs = engine.generate([PROMPT], SamplingParams(stages=STAGES, seed=3, n=40))[0].outputs
    assert len({tuple(output.token_ids[:3]) for output in outputs}) > 20
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output in outputs:
        assert all(30 <= token < 50 for token in output.token_ids[:3]) and output.token_ids[3] == 55
        assert all(token < 10 for token in output.token_ids[4:-1]) and output.text == ""
    assert any(2 in output.token_ids[4:-1] for output in outputs)  # the model's end token is one like others


def test_staged_requests_beside_others(engine: LLMEngine) -> None:
    plain = [SamplingParams(max_tokens=12, seed=1), SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3)]
    params = [SamplingParams(stages=STAGES, seed=2), plain[0], SamplingParams(stages=STAGES[:1], seed=3), plain[1]]
    together = engine.generate([PROMPT] * 4, params)
    assert [output.token_ids for output in together] == [engine.generate([PROMPT], one)[0].token_ids for one in params]


@pytest.mark.parametrize("stage", [Stage(first=0, end=61, num_tokens=1), Stage(first=0, end=50, num_tokens=1, offset=11)])
def test_stages_outside_of_the_vocabulary_are_refused(engine: LLMEngine, stage: Stage) -> None:
    with pytest.raises(InvalidInputError, match=r"stages\[1\] reaches to token 60"):
        engine.generate([PROMPT], SamplingParams(stages=[STAGES[0], stage]))
