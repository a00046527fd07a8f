"""The trained RWKV-7 that archerfish brings along: red if it tells no stories, or not those that the package rwkv would
tell.

held_out_stories.txt has the first stories that were drawn, none of which it was trained on (`scripts/train_rwkv7.py`
holds out the first hundredth).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from archerfish.config import HubConfig
from archerfish.engine.llm import LLM
from archerfish.engine.llm_engine import LLMEngine
from archerfish.params import SamplingParams
from archerfish.store.names import STORY_MODEL, resolve_model
from scripts.draw_stories import read_stories
from scripts.story_data import ANSWER, END, REQUEST
from tests.engine.test_rwkv_engine import note_logits
from tests.engine.tiny_rwkv import rwkv_config
from tests.models.recurring import Size, blink_weights
from tests.models.test_rwkv7 import load_rwkv, needs_rwkv, their_logits
from tests.store.test_rwkv_source import to_hub

HELD_OUT = read_stories(Path(__file__).with_name("held_out_stories.txt"))
REQUESTED = [{"role": "user", "content": "Tell me a story about a dog and a ball."}]


@pytest.fixture(scope="module")
def story(hub: HubConfig) -> Iterator[LLM]:
    with LLM(rwkv_config(Path(STORY_MODEL)), hub=hub) as made:
        yield made


def greedy(num_tokens: int = 300) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0)


def to_blink(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As BlinkDL names and turns them, in float32."""
    (vocab_size, width), ffn = weights["model.embeddings.weight"].shape, weights["model.layers.0.ffn.key.weight"]
    num_layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    ranks = {letter: len(weights[f"model.layers.1.attn.{letter}_lora.lora.0.weight"]) for letter in "wavg"}
    alike = blink_weights(Size(num_layers, width, len(ffn), vocab_size, ranks))
    alike = {name: tensor for name, tensor in alike.items() if not re.match(r"blocks\.0\.att\.v\d", name)}
    made: dict[str, torch.Tensor] = {}
    for (name, tensor), hub_name in zip(alike.items(), to_hub(alike), strict=True):
        value = weights[hub_name].float()
        made[name] = value.t().contiguous() if re.search(r"\.[wavg][12]$", name) else value.reshape(tensor.shape)
    return made


def test_it_is_there_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = resolve_model("Story-RWKV7", HubConfig(cache_dir=str(tmp_path)))
    assert path.name == STORY_MODEL
    assert sum(file.stat().st_size for file in path.iterdir()) < 20_000_000
    notice = (path / "NOTICE").read_text(encoding="utf-8")
    assert all(words in notice for words in ("stories15M", "MIT License", "Copyright (c) 2023 Andrej", "Apache-2.0"))
    assert not list(tmp_path.iterdir())


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
    output = story.chat(REQUESTED, greedy())[0]
    tokenizer = story.get_tokenizer()
    content = REQUESTED[0]["content"]
    assert output.prompt_token_ids == [END, 1, *tokenizer.encode(content, add_special_tokens=False), 2]
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == f"<|end|>{REQUEST}{content}{ANSWER}"
    assert output.finish_reason == "stop"
    assert "dog" in output.text and "ball" in output.text and "<|" not in output.text


def test_its_own_files_say_how_to_draw(story: LLM) -> None:
    assert story.facts.generation_config["temperature"] == 0.8
    assert story.facts.end_token_ids == (END,)


@needs_rwkv
def test_logits_equal_the_package_rwkv(tmp_path: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prefill and of every decode after it, and of both from a state that was kept."""
    torch.save(to_blink(load_file(resolve_model(STORY_MODEL) / "model.safetensors")), tmp_path / "story.pth")
    theirs = load_rwkv(tmp_path / "story.pth")
    with LLMEngine(rwkv_config(Path(STORY_MODEL)), hub=hub) as engine:
        noted = note_logits(engine, monkeypatch)
        for length, is_cached in ((300, False), (400, True)):
            noted.clear()
            output = engine.generate([HELD_OUT[1][:length]], greedy(24))[0]
            assert (output.num_cached_tokens > 0) == is_cached
            prompt = output.prompt_token_ids
            expected = their_logits(theirs, prompt + output.token_ids[:-1])[len(prompt) - 1 :]
            torch.testing.assert_close(torch.stack(noted), expected, atol=1e-4, rtol=1e-4)
            assert output.token_ids == expected.argmax(-1).tolist()
