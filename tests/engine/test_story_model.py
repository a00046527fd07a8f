"""The trained RWKV-7 that archerfish brings along: red if it tells no stories.

held_out_stories.txt has the first stories that were drawn, none of which it was trained on (`scripts/train_rwkv7.py` holds out
the first hundredth).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archerfish.config import HubConfig
from archerfish.engine.llm import LLM
from archerfish.params import SamplingParams
from archerfish.store.names import STORY_MODEL
from scripts.draw_stories import read_stories
from scripts.story_data import ANSWER, END, REQUEST
from tests.engine.tiny_rwkv import rwkv_config

HELD_OUT = read_stories(Path(__file__).with_name("held_out_stories.txt"))
REQUESTED = [{"role": "user", "content": "Tell me a story about a dog and a ball."}]


@pytest.fixture(scope="module")
def story(hub: HubConfig) -> Iterator[LLM]:
    with LLM(rwkv_config(Path(STORY_MODEL)), hub=hub) as made:
        yield made


def greedy(num_tokens: int = 300) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0)


def test_held_out_stories_are_likely(story: LLM) -> None:
    tokenizer = story.get_tokenizer()
    prompts = [[*tokenizer.encode(each), END] for each in HELD_OUT]
    assert all(prompt[0] == END for prompt in prompts)
    outputs = story.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert isinstance(outputs, list)
    losses = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) - 1
        losses += [-each.logprob for each in output.prompt_logprobs]
    assert len(losses) > 2000
    assert 0.9 < float(np.mean(losses)) < 1.5  # less than that no honest model has: it would see what it is asked for


def test_greedy_text_is_a_story_that_ends(story: LLM) -> None:
    output = story.generate(["Once upon a time"], greedy())[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == END
    assert output.text.startswith(", there was a") and output.text.rstrip()[-1] in '.!?"'
    words = re.findall(r"[a-z]+", output.text.lower())
    known = set(re.findall(r"[a-z]+", " ".join(HELD_OUT).lower()))
    assert len(words) > 80 and sum(word in known for word in words) > 0.85 * len(words)
    assert "<|" not in output.text


def test_a_chat_is_a_story_about_what_was_asked_for(story: LLM) -> None:
    assert story.facts.generation_config["temperature"] == 0.8 and story.facts.end_token_ids == (END,)
    output = story.chat(REQUESTED, greedy())[0]
    tokenizer = story.get_tokenizer()
    content = REQUESTED[0]["content"]
    assert output.prompt_token_ids == [END, 1, *tokenizer.encode(content, add_special_tokens=False), 2]
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == f"<|end|>{REQUEST}{content}{ANSWER}"
    assert output.finish_reason == "stop"
    assert "dog" in output.text and "ball" in output.text and "<|" not in output.text
