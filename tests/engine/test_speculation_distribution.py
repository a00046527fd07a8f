"""What comes out with speculation has the distribution of the plain sampler, whatever is proposed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish import LLMEngine, SamplingParams
from archerfish.sequence import Sequence
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.runtime.sampling_reference import check_draws, penalised, probabilities
from tests.text.tiny_tokenizers import END, ROWS, byte_level

PROMPT = [5, 9, 40, 9]
NUM_TOKENS = 4
NUM_DRAWS = 1000
NUM_ALIKE = 300
NARROW: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "ignore_eos": True, "max_tokens": NUM_TOKENS}
LETTERS = [89, 90, 91]  # the tokens of x, y and z
KINDS: dict[str, dict[str, Any]] = {
    "cut": NARROW,
    "states": NARROW,
    "penalties": {**NARROW, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "grammar": {"temperature": 1.0, "max_tokens": NUM_TOKENS, "grammar": {"kind": "regex", "value": "[xyz]{6}"}},
}


class Guesser:
    """Proposes the same tokens always, of those that may come."""

    def __init__(self, outputs: Iterable[tuple[int, ...]]) -> None:
        self.outputs = sorted(outputs)

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        output = tuple(tokens[len(PROMPT) :])
        found = [other[len(output) : len(output) + count] for other in self.outputs if other[: len(output)] == output]
        return list(found[0]) if found else [3] * count


def model_for(kind: str, folder: Path) -> Path:
    if kind == "states":
        return save_tiny_rwkv(folder)
    byte_level(folder)
    return save_tiny_llama(folder, vocab_size=ROWS, eos_token_id=END)


def exact_shares(engine: LLMEngine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """How often each output comes, from the logits behind every output that begins so."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        asked = SamplingParams(max_tokens=1, temperature=0.0)
        outputs = engine.generate([[*PROMPT, *output] for output in shares], asked, wants_logits=True)
        for (output, share), found in zip(shares.items(), outputs, strict=True):
            logits = np.asarray(engine.runner.ops.to_numpy(found.logits), dtype=np.float32).reshape(-1)
            if params.grammar is not None:
                logits = np.where(np.isin(np.arange(len(logits)), LETTERS), logits, -np.inf)
            p = probabilities(penalised(logits, params, PROMPT, list(output), frozenset()), params)
            longer |= {(*output, int(token)): share * float(p[token]) for token in np.flatnonzero(p)}
        shares = longer
    return shares


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", KINDS)
def test_distribution_passes_chi_square(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that believes its proposals is found out."""
    params = SamplingParams(**KINDS[kind])
    each = [params.replace(seed=seed) for seed in range(NUM_DRAWS)]
    config = tiny_config(model_for(kind, tmp_path)).replace(max_cache_tokens=8192, block_size=16, pipeline_depth=0)
    with LLMEngine(config) as engine:
        shares = exact_shares(engine, params)
        plain = draw(engine, each[:NUM_ALIKE])
    assert sum(shares.values()) == pytest.approx(1)
    with LLMEngine(config.replace(speculation="ngram", num_draft_tokens=3)) as engine:
        speculation = engine.scheduler.speculation
        assert speculation is not None
        monkeypatch.setattr(speculation, "drafter", Guesser(shares))
        monkeypatch.setattr(speculation, "choose", lambda others, drafted, room, longest=0: 2)
        found = draw(engine, each)
        stats = engine.scheduler.stats()
        check_draws(*counted(found, shares))
        assert stats.num_draft_tokens > 1.5 * NUM_DRAWS
        assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.7
        assert sum(a != b for a, b in zip(found, plain, strict=False)) <= 1  # seed by seed
        monkeypatch.setattr(speculation, "verify", lambda seq, drawn: believe(seq, drawn))
        with pytest.raises(AssertionError):
            check_draws(*counted(draw(engine, each), shares))


def draw(engine: LLMEngine, each: list[SamplingParams]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in engine.generate([PROMPT] * len(each), each)]


def counted(found: list[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> tuple[Any, Any]:
    """How often each output came, and how often it should."""
    counts = Counter(found)
    outputs = sorted({*shares, *counts})
    return np.array([counts[output] for output in outputs]), np.array([shares.get(output, 0.0) for output in outputs])


def believe(seq: Sequence, drawn: list[int]) -> list[int]:
    assert seq.draft is not None
    return [*seq.draft.tokens, drawn[-1]]
