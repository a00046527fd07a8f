"""The sampling parameters of a model's files, for requests that state none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from archerfish import LLM, AsyncLLMEngine, HubConfig, SamplingParams
from archerfish.engine.llm_loading import read_facts
from archerfish.params import read_default_sampling, with_defaults
from archerfish.store.names import BUILTIN_MODELS, builtin_at
from archerfish.types import no_progress
from tests.engine.tiny_llama import tiny_config
from tests.text.tiny_tokenizers import save_text_llama

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]
STATED = {"temperature": 0.0, "top_k": 5, "top_p": None, "min_p": 7, "max_new_tokens": 9, "eos_token_id": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_text_llama(tmp_path_factory.mktemp("stated-llama"), 256, chat_template=TEMPLATE)
    (made / "generation_config.json").write_text(json.dumps(STATED))
    return made


def test_calls_without_parameters_use_those_of_the_model(directory: Path) -> None:
    with LLM(tiny_config(directory)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=5)
        greedy, prompt = SamplingParams(temperature=0.0), llm.render_chat(HELLO)
        expected = llm.generate([prompt], greedy)[0].token_ids
        assert llm.chat(HELLO)[0].token_ids == llm.generate([prompt])[0].token_ids == expected
        for stream in (llm.stream(prompt), llm.stream_chat(HELLO)):
            assert [token for delta in stream for token in delta.token_ids] == expected
        assert (
            llm.requests.make(prompt, SamplingParams()).params.temperature == 1.0
        )  # stated parameters stay as they are

        async def ask() -> list[int]:
            engine = AsyncLLMEngine(llm)
            try:
                return (await engine.chat(HELLO)).token_ids
            finally:
                await engine.close()

        assert asyncio.run(ask()) == expected


def test_generation_config_none_turns_them_off(directory: Path, hub: HubConfig) -> None:
    facts = read_facts(tiny_config(directory).replace(generation_config="none"), hub, no_progress)
    assert facts.default_sampling == {} and facts.end_token_ids == (2,)


def test_invalid_defaults_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_default_sampling(STATED, "lab/tiny") == {"temperature": 0.0, "top_k": 5}
    [warning] = caplog.messages
    assert "lab/tiny: min_p must be a number from 0 to 1, not 7" in warning


def test_a_default_temperature_of_0_does_not_forbid_several_sequences() -> None:
    assert with_defaults({"n": 2}, {"temperature": 0, "top_k": 5}) == {"n": 2, "top_k": 5}
    assert with_defaults({"n": 2}, {"temperature": 0.1}) == {"n": 2, "temperature": 0.1}
    assert with_defaults({"temperature": 0.5}, {"temperature": 0}) == {"temperature": 0.5}


def test_built_in_models_are_known_by_their_files(hub: HubConfig) -> None:
    story = BUILTIN_MODELS["story-rwkv7"]
    path = story.find(hub)
    assert path is not None and builtin_at(path, hub) is story
    assert builtin_at(path.parent, hub) is None
    assert read_default_sampling(BUILTIN_MODELS["smollm2-135m-instruct"].sampling, "smollm2")["temperature"] < 0.1
