"""Speculation with grammars: a mask for each proposed token, and the same tokens as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.engine.llm_engine import LLMEngine
from archerfish.params import SamplingParams
from archerfish.sched.masks import MaskFinder
from archerfish.sequence import Request, Sequence
from archerfish.text.grammar import GrammarCompiler
from archerfish.text.text_tokenizer import TextTokenizer
from tests.engine.test_speculation import KnowingDrafter
from tests.engine.tiny_llama import tiny_config
from tests.text.test_grammar import PATTERN, SCHEMA
from tests.text.tiny_tokenizers import END, ROWS

PROMPTS = [[5, 6, 7], [40, 41], [9] * 20, [77]]
EACH: list[dict[str, Any]] = [
    {"grammar": {"kind": "json_schema", "value": SCHEMA}, "seed": 1},
    {"grammar": {"kind": "regex", "value": f"({PATTERN} ){{20}}"}, "seed": 2, "n": 2, "repetition_penalty": 1.2},
    {"grammar": {"kind": "json"}, "seed": 3, "logprobs": 1, "temperature": 0.0, "bad_words": ["ab"]},
    {"seed": 4, "top_p": 0.8},
]


@pytest.mark.parametrize("kind", ["known", "draft", "forced"])
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_the_same(directory: Path, kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=60, **one) for one in EACH]
    with LLMEngine(tiny_config(directory)) as engine:
        plain = engine.generate(PROMPTS, params)
    options = {"speculation": "draft", "draft_model": str(directory)} if kind == "draft" else {"speculation": "ngram"}
    config = tiny_config(directory).replace(**options, num_draft_tokens=6, pipeline_depth=depth)
    with LLMEngine(config) as engine:
        speculation = engine.scheduler.speculation
        assert speculation is not None
        known = [
            prompt + one.token_ids for prompt, output in zip(PROMPTS, plain, strict=True) for one in output.outputs
        ]
        drafter = KnowingDrafter(
            known if kind == "known" else [], 5, lambda token: 255 - token % 200
        )  # may be forbidden
        monkeypatch.setattr(speculation, "drafter", drafter)
        monkeypatch.setattr(
            speculation, "choose", lambda others, drafted, room, longest=0: min(6, room // len(drafted))
        )
        found = engine.generate(PROMPTS, params)
    for ours, theirs in zip(found, plain, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
        assert [one.finish_reason for one in ours.outputs] == [one.finish_reason for one in theirs.outputs]
    assert found[0].metrics.num_accepted_tokens > 5
    if kind == "known":
        assert all(one.metrics.num_accepted_tokens > 10 for one in found[1:])
    elif kind == "forced":  # what else could be proposed is not known to the drafter
        assert found[0].metrics.num_accepted_tokens == found[0].metrics.num_draft_tokens
        assert not found[2].metrics.num_draft_tokens and not found[3].metrics.num_draft_tokens


def test_proposals_end_at_the_first_forbidden_token(directory: Path) -> None:
    """The matcher itself stays where it was, and each mask is that of a matcher that got the tokens one by one."""
    tokenizer = TextTokenizer(directory)
    grammar = GrammarCompiler(tokenizer, ROWS).compile({"kind": "regex", "value": "[ab]{3}c*"})
    request = Request("r", [1, 2], SamplingParams(), 20, grammar=grammar, needs_host_token=True)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    finder = MaskFinder(ROWS)
    for proposed, num_allowed in (([a, b, a, c, a], 4), ([c, a], 0), ([a, 10**6], 1), ([a, b, a, END, a], 4)):
        seq = Sequence(request)
        finder.begin(seq, proposed)
        mask = seq.mask
        assert mask is not None
        while not mask.done():
            finder.wait()
        assert mask.error is None and not mask.is_forced
        assert mask.proposed == proposed[:num_allowed] and len(mask.bits) == num_allowed + 1
        for num in range(num_allowed + 1):
            bits = np.zeros(ROWS // 32, np.int32)
            grammar.start().fill(proposed[:num], bits)
            assert (mask.bits[num].view(np.int32) == bits).all()
