"""LLMEngine from each kind of file, against transformers on the same tiny random weights."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from archerfish import ArrowEngine, EngineConfig, HubConfig, LLMEngine
from archerfish.engine import llm_loading
from archerfish.engine.llm_loading import read_facts
from archerfish.errors import ArcherfishError, InvalidOptionError, OutOfMemoryError, UnsupportedModelError
from archerfish.kernels import room
from archerfish.kernels.machine import Memory
from archerfish.types import no_progress
from tests.engine.tiny_llama import greedy, tiny_config
from tests.store.gguf_models import make_tensors, write_gguf

PROMPT = [5, 9, 33, 7, 60, 12]
GREEDY = greedy(10)
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4},
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    shape = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{request.param}Config")(**(shape | CONFIGS[request.param]))
    return getattr(transformers, f"{request.param}ForCausalLM")(config).eval()


def their_tokens(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            min_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
        )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_tokens_are_those_of_transformers(model: Any, kind: str, tmp_path: Path, hub: HubConfig) -> None:
    model.save_pretrained(tmp_path)
    if kind == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    with LLMEngine(str(tmp_path), dtype="float32", max_cache_tokens=512, num_threads=1, hub=hub) as engine:
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == their_tokens(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_byte_types_run(model: Any, dtype: str, tmp_path: Path, hub: HubConfig) -> None:
    model.save_pretrained(tmp_path)
    with LLMEngine(str(tmp_path), dtype=dtype, max_cache_tokens=512, num_threads=1, hub=hub) as engine:
        assert engine.facts.dtype == dtype
        assert len(engine.generate([PROMPT], GREEDY)[0].token_ids) == 10


def test_an_encoder_is_refused_with_what_there_is(tiny_model: Any, hub: HubConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="bert"):
        LLMEngine(str(tiny_model("Bert")), hub=hub)


def test_model_that_does_not_fit_is_refused_before_it_is_converted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    hub, refusal = (
        HubConfig(cache_dir=str(tmp_path / "cache")),
        "weights, .* for KV and .* for buffers; 0.1 MiB of 16.0 GiB",
    )
    config = EngineConfig(model=str(tmp_path / "model"))
    for num_free, num_converted in ((100_000, 0), (1 << 34, 1), (100_000, 1)):
        monkeypatch.setattr(room, "memory", partial(Memory, 1 << 34, num_free))
        if num_free == 100_000:
            with pytest.raises(OutOfMemoryError, match=refusal):
                LLMEngine(config, hub=hub)
        else:
            read_facts(config, hub, no_progress)
        assert len(list(hub.cache_path().glob("converted/*/metadata.json"))) == num_converted


def test_memory_for_a_gguf_file_is_counted_in_its_blocks_before_it_is_converted(
    tmp_path: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, checked = write_gguf(tmp_path / "m.gguf", "llama", make_tensors("llama"), "Q8_0"), list[int]()
    monkeypatch.setattr(llm_loading, "check_memory", lambda facts, config: checked.append(facts.weight_bytes))
    for _ in range(2):  # it is converted by now
        facts = read_facts(EngineConfig(model=str(file), device="cpu"), hub, no_progress)
        llm_loading.check_memory(facts, EngineConfig())
    assert checked[0] == checked[1] == checked[2] == facts.stored_bytes > 0


def test_encoder_that_does_not_fit_is_refused(tiny_model: Any, hub: HubConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda: Memory(1 << 34, 1000))
    with pytest.raises(OutOfMemoryError, match=r"needs .* MiB for weights; .* Choose weights=int8 or a smaller model"):
        ArrowEngine(tiny_model("Bert"), hub=hub)


def test_loading_logs_the_device_and_why(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "archerfish"), LLMEngine(tiny_config(llama)):
        assert f"{llama.name} computes on cpu: " in caplog.text


def test_a_step_without_room_for_prompts_is_refused_before_weights_are_read(llama: Path) -> None:
    config = tiny_config(llama, max_num_batched_tokens=16, max_num_seqs=32)
    with pytest.raises(InvalidOptionError, match=r"it must be at least 33.* Raise it to 33, or lower .* to 15\."):
        read_facts(config, HubConfig(), no_progress)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "has 256 positions"),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 2}, r"at least 3.* Raise it to 3\.$"),
        ({"eviction_policy": "lur"}, "lru"),
        ({"scheduling_policy": "fcsf"}, "fcfs"),
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3, but 4 heads that share 2 KV heads .* one of: 1, 2, 4",
        ),
        ({"pipeline_parallel_size": 3}, "this model has 2 layers"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArcherfishError, match=message):
        LLMEngine(tiny_config(llama), **options)
