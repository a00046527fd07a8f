"""LLMEngine on the real SmolLM2-135M-Instruct: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.errors import InvalidInputError
from archerfish.store.loader import WeightLoader
from tests.cache.invariants import check_cache

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(MODEL, dtype="float32", max_cache_tokens=8192, max_num_seqs=32, num_threads=1) as made:
        yield made


def greedy(num_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, **options)


def test_a_chat_is_answered(engine: LLMEngine) -> None:
    output = engine.chat(QUESTION, greedy(40))
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text
    assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids)


def test_streamed_text_is_the_whole_text(engine: LLMEngine) -> None:
    prompt = "Write about 北京 and 🎉:"
    deltas = list(engine.stream(prompt, greedy(8)))
    output = deltas[-1].output
    assert output is not None and "".join(delta.text for delta in deltas) == output.text
    assert engine.generate(prompt, greedy(8))[0].text == output.text
    assert "\ufffd" not in output.text[:-1]


def test_a_stop_string_ends_the_text_before_it(engine: LLMEngine) -> None:
    free = engine.generate("Once upon a time", greedy(6))[0].text
    stop = free[7:13]
    output = engine.generate("Once upon a time", greedy(6, stop=[stop, "never there"]))[0]
    assert output.text == free[: free.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    kept = engine.generate("Once upon a time", greedy(6, stop=stop, include_stop_str_in_output=True))[0]
    assert kept.text == free[: free.index(stop)] + stop
    assert not engine.has_work
    check_cache(engine.scheduler.cache, [])


def test_the_second_turn_of_a_chat_hits_the_first(engine: LLMEngine) -> None:
    first = engine.chat(QUESTION, greedy(2))
    turns = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    second = engine.chat(turns, greedy(1))
    assert second.num_cached_tokens >= len(first.prompt_token_ids)
    assert "tokens came from the cache" in second.hit.explain()


def test_an_empty_text_is_refused(engine: LLMEngine) -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        engine.generate("")


@pytest.mark.slow
def test_twenty_prompts_give_what_transformers_gives(engine: LLMEngine) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    values = dict(engine.facts.config.values)
    model: Any = LlamaForCausalLM(LlamaConfig(**values)).eval()  # type: ignore[no-untyped-call]
    weights = {
        name: tensor.clone() for name, tensor in WeightLoader(Path(engine.facts.directory)).load_weights().items()
    }
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    subjects = [
        "The sea",
        "A fish",
        "My dog",
        "Paris",
        "In winter",
        "The old king",
        "def main():",
        "Water boils",
        "2 + 2 =",
        "Music",
    ]
    prompts = [f"{subject}{ending}" for subject in subjects for ending in ("", " was found to be")]
    ours = engine.generate(prompts, greedy(64, ignore_eos=True))
    with torch.inference_mode():
        for output in ours:
            ids = torch.tensor([output.prompt_token_ids])
            theirs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                min_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert output.token_ids == theirs[0, ids.shape[1] :].tolist(), output.prompt
