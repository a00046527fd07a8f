"""What quantised weights, keys and values cost trained models: perplexities of stories, and cosines of texts.

The stories are those of test_story_model.py. Bounds are what the documentation promises; what was measured is less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.config import EngineConfig, HubConfig
from archerfish.engine import llm_loading
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.llm import LLM
from archerfish.kernels import select
from archerfish.kernels.torch.reference import TorchOps
from archerfish.params import SamplingParams
from archerfish.runtime import kv_pool
from archerfish.store.names import STORY_MODEL
from scripts.story_data import END
from tests.engine.stories15m import find_stories15m, save_stories15m, tokens_of
from tests.engine.test_story_model import HELD_OUT

Prompts = list[str | list[int]]


def perplexity(config: EngineConfig, hub: HubConfig, prompts: Prompts) -> float:
    with LLM(config.replace(dtype="float32", max_cache_tokens=4096), hub=hub) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    losses = [-each.logprob for output in outputs for each in output.prompt_logprobs or ()]
    return float(np.exp(np.mean(losses)))


def changes(config: EngineConfig, hub: HubConfig, prompts: Prompts, options: Sequence[dict[str, Any]]) -> list[float]:
    """The perplexity in float32, and how much higher it is, relative to that, with each of some options."""
    before = perplexity(config, hub, prompts)
    return [before, *(perplexity(config.replace(**each), hub, prompts) / before - 1 for each in options)]


@pytest.mark.slow  # 112 MB are downloaded when it runs for the first time
def test_perplexity_of_stories15m(tmp_path: Path, hub: HubConfig) -> None:
    """Measured: int8 +0.05 %, int4 +4.4 %, int8 keys and values -0.06 %."""
    teacher = save_stories15m(find_stories15m(tmp_path), tmp_path)
    prompts: Prompts = [tokens_of(teacher, story)[:256] for story in HELD_OUT]
    config = EngineConfig(model=str(tmp_path))
    options = [{"weights": "int8"}, {"weights": "int4"}, {"kv_dtype": "int8"}]
    before, int8, int4, kv = changes(config, hub, prompts, options)
    assert 2.0 < before < 2.5
    assert abs(int8) < 0.01
    assert 0.0 < int4 < 0.06
    assert abs(kv) < 0.005


def test_perplexity_of_the_model_that_is_shipped(hub: HubConfig) -> None:
    """Measured: int8 +0.02 %, int4 +0.67 %."""
    config = EngineConfig(model=STORY_MODEL, block_size=1024)
    with LLM(config, hub=hub) as engine:
        tokenizer = engine.get_tokenizer()
        prompts: Prompts = [[*tokenizer.encode(story), END] for story in HELD_OUT[:6]]
    _, int8, int4 = changes(config, hub, prompts, [{"weights": "int8"}, {"weights": "int4"}])
    assert abs(int8) < 0.003
    assert 0.001 < int4 < 0.015


def test_perplexity_with_int8_keys_and_values() -> None:
    """Of SmolLM2; measured: +0.1 %, as of float16."""
    _, change = changes(EngineConfig(), HubConfig(), [HELD_OUT[0]], [{"kv_dtype": "int8"}])
    assert 0.0 < abs(change) < 0.01


@pytest.mark.slow
def test_perplexity_with_fp8_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SmolLM2, by torch, which means what a GPU computes; measured: +0.3 %."""
    reference = next(each for each in select.BACKENDS if each.name == "torch reference")
    for module in (llm_loading, kv_pool):
        monkeypatch.setattr(module, "choose_backend", lambda device, dtype: reference)
    monkeypatch.setattr(llm_loading, "choose_ops", TorchOps)
    _, change = changes(EngineConfig(device="cpu"), HubConfig(), list(HELD_OUT), [{"kv_dtype": "fp8"}])
    assert 0.0 < abs(change) < 0.01


def test_cosines_of_int8_and_int4_embeddings(minilm_source: Path, hub: HubConfig) -> None:
    """Measured: int8 0.9993 and a rank correlation of 0.9998 over all pairs, int4 0.978 and 0.994."""
    texts = [sentence for story in HELD_OUT[:4] for sentence in story.split(". ")]
    texts += ["The archerfish shoots water at insects.", "How do I file my taxes?", "Stock markets fell today."]
    plain, int8, int4 = (
        ArrowEngine(minilm_source, hub=hub, dtype="float32", weights=each).encode(texts)
        for each in ("auto", "int8", "int4")
    )
    pairs = np.array(list(itertools.combinations(range(len(texts)), 2)))

    def ranks(vectors: Any) -> Any:
        return np.argsort(np.argsort((vectors[pairs[:, 0]] * vectors[pairs[:, 1]]).sum(1)))

    for vectors, least, least_rank in ((int8, 0.99, 0.99), (int4, 0.96, 0.98)):
        assert least < float((plain * vectors).sum(1).min()) < 1.0 - 1e-7
        assert float(np.corrcoef(ranks(plain), ranks(vectors))[0, 1]) > least_rank
