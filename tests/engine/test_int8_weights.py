"""int8 weights, and keys and values of a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import SamplingParams, remarks
from archerfish.cli import doctor
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine import llm_loading
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.llm import LLM
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidOptionError
from archerfish.kernels import select
from archerfish.kernels.cards import Card
from archerfish.kernels.formats import PLAIN, Int8Rows, WeightFormat
from archerfish.kernels.machine import Memory
from archerfish.kernels.recurrent import StateShape
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.adapter import KVShape
from archerfish.models.config import Config
from archerfish.models.rwkv7 import Rwkv7Model
from archerfish.runtime import kv_pool
from archerfish.runtime.kv_pool import plan_memory
from archerfish.store.loader import WeightLoader
from tests.engine.test_rwkv_engine import note_logits
from tests.engine.tiny_llama import check_memory, greedy, prompts, tiny_config, tokens
from tests.engine.tiny_rwkv import DTYPES, rwkv_config
from tests.models.recurring import GOLDEN, SIZES, RecurrentDriver, random_tokens, read_rwkv7, write_checkpoint
from tests.store.gguf_models import make_tensors, write_gguf

INT8 = Int8Rows()
STORY = (
    "Once upon a time, in a modest little house, there lived a boy named Tim. Tim had a big red ball that he loved to play "
    "with. One day, he threw the ball very far and it went into his neighbor's house. Tim was very sad and scared to go get it."
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SIZES["tiny"], tmp_path_factory.mktemp("rwkv7") / "tiny.pth")


def make(model: Path, hub: HubConfig, **options: Any) -> LLMEngine:
    return LLMEngine(rwkv_config(model, weights="int8", **options), hub=hub)


def error_of(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_engine_logits_are_close_to_the_golden_ones(
    dtype: str, tiny: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, which in bfloat16 is another kernel than in company, and together."""
    golden, sequences = torch.from_numpy(np.load(GOLDEN)), random_tokens(SIZES["tiny"], 3, 100)
    with make(tiny, hub, dtype=dtype) as engine:
        noted = note_logits(engine, monkeypatch)
        for num in (64, 65):  # the second goes on from a kept state
            engine.generate([sequences[0][:num]], greedy(1))
        engine.generate([sequence[:70] for sequence in sequences], greedy(1))
        expected = torch.stack([golden[0, 63], golden[0, 64], *golden[:, 69]])
    assert error_of(torch.stack(noted), expected) < (0.031 if dtype == "float32" else 0.06)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_counted_as_they_are_and_stand_in_memory_once(dtype: str, tiny: Path, hub: HubConfig) -> None:
    config, stored = read_rwkv7(tiny)
    item_bytes = 4 if dtype == "float32" else 2
    wide = [t for name, t in stored.items() if t.dim() == 2 and "embeddings" not in name and "lora.2" not in name]
    num_int8, num_all = (sum(each.numel() for each in some) for some in (wide, stored.values()))
    expected = (num_all - num_int8) * item_bytes + num_int8 + sum(4 * len(each) for each in wide)
    with make(tiny, hub, dtype=dtype) as engine:
        facts = engine.facts
        assert facts.weight_bytes == expected
        packed: list[Any] = [weight.get() for weight in engine.runner.ops._linear_weights]
        int8 = [matrix.num_bytes for each in packed if each.format_name == "Q8_0" for matrix in each.matrices]
        assert num_int8 <= sum(int8) <= 1.12 * num_int8  # with a scale for each block of 32, and 16 outputs at a time
    noted = Rwkv7Model.noted(Config(config), dtype)
    assert noted.num_bytes == {name: each.numel() * item_bytes for name, each in stored.items()}


def test_a_model_that_fits_in_int8_alone_is_told_so(tiny: Path) -> None:
    config, stored = read_rwkv7(tiny)
    found = doctor.ModelSize("tiny", sum(each.numel() for each in stored.values()), 0, config=config)
    int8, half = found.weight_bytes("int8"), found.weight_bytes("bfloat16")
    assert 0.5 * half < int8 < 0.75 * half
    free, on_gpu = (
        int((int8 + more) / doctor.SPARE) + 2 for more in (doctor.CPU_OVERHEAD_BYTES, doctor.GPU_OVERHEAD_BYTES)
    )
    row = doctor.judge_model(found, Memory(10**12, free), [Card("small", 10**12, on_gpu)])
    assert row["weight_bytes"]["int8"] == int8
    assert row["cpu"] == row["gpu"] == "fits with --weights int8 alone"
    assert row["fits_gpu"] == {"bfloat16": False, "int8": True, "int4": True}
    assert doctor.ModelSize("other", 5, 0, config={"model_type": "llama"}).weight_bytes("int8") == 0


def test_llama_generates_with_int8_weights(llama: Path, hub: HubConfig) -> None:
    config = tiny_config(llama, weights="int8")
    many = [[5 + i, 6, 7, 8 + i] for i in range(5)]
    with LLMEngine(config, hub=hub) as engine, LLMEngine(config.replace(weights="auto"), hub=hub) as plain:
        alone = [engine.generate([prompt], greedy())[0].token_ids for prompt in many]
        assert [output.token_ids for output in engine.generate(many, greedy())] == alone
        assert engine.facts.weight_bytes < plain.facts.weight_bytes


def test_embeddings_with_int8_weights_are_close(minilm_source: Path, hub: HubConfig) -> None:
    texts = ["a fish that spits", "The archerfish shoots water at insects.", "tax law"]
    engines = (ArrowEngine(minilm_source, hub=hub, dtype="float32", weights=each) for each in ("auto", "int8"))
    plain, int8 = (engine.encode(texts) for engine in engines)
    assert 0.995 < float((plain * int8).sum(1).min()) < 1.0 - 1e-7


@pytest.mark.parametrize(("kind", "engine"), [("bert", ArrowEngine), ("llama", LLMEngine)])
def test_a_remark_says_that_blocks_of_a_file_stay(
    kind: str,
    engine: Any,
    tmp_path: Path,
    hub: HubConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    file = write_gguf(tmp_path / "m.gguf", kind, make_tensors(kind), "Q8_0")
    engine(str(file), device="cpu", weights="int8", hub=hub).close()
    assert "weights=int8 leaves the matrices of m that are quantised already as they are (Q8_0)." in caplog.messages


def loss_of(engine: LLM, weight_format: WeightFormat, text: str) -> tuple[float, torch.Tensor]:
    """Of a text's tokens behind its first, and the logits."""
    facts = engine.facts
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(text)
    weights = WeightLoader(facts.directory).load_weights()
    driver = RecurrentDriver(TorchOps("cpu"), weights, facts.config.values, [tokens], weight_format=weight_format)
    (logits,) = driver.step([(0, len(tokens))])
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))), logits


def test_the_loss_of_a_trained_model_hardly_changes() -> None:
    with LLM("story-rwkv7", dtype="float32", memory_budget_gib=0.05, num_threads=1) as story:
        loss, logits = loss_of(story, PLAIN, STORY)
        quantized_loss, quantized = loss_of(story, INT8, STORY)
    assert loss < 2.5  # it is trained
    assert abs(quantized_loss / loss - 1) < 0.01
    assert error_of(quantized, logits) < 0.01
    assert float((quantized.argmax(-1) == logits.argmax(-1)).float().mean()) > 0.95


# Engines with int8 keys and values: reuse and copies of blocks, memory, and refusals


SHAPE = KVShape(2, 2, 8)  # as the tiny Llama has it


@pytest.fixture(params=["int8", "fp8"])
def kv_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """FP8 by torch, which means what a GPU computes."""
    if request.param == "fp8":
        reference = next(each for each in select.BACKENDS if each.name == "torch reference")
        for module in (llm_loading, kv_pool):
            monkeypatch.setattr(module, "choose_backend", lambda device, dtype: reference)
        monkeypatch.setattr(llm_loading, "choose_ops", TorchOps)
    return str(request.param)


def make_narrow_kv(model: Path, hub: HubConfig, kv_dtype: str, **options: Any) -> LLMEngine:
    return LLMEngine(tiny_config(model, kv_dtype=kv_dtype, **options), hub=hub)


def test_tokens_do_not_depend_on_what_is_cached_or_beside(llama: Path, hub: HubConfig, kv_dtype: str) -> None:
    """Red if scales are not copied with their block: prompts end inside of blocks that others go on from."""
    long, many = prompts(1, least=60)[0], prompts(6, seed=1)
    forked = [[*long[:num], 5, 6, 7] for num in (37, 40, 51)]
    with make_narrow_kv(llama, hub, kv_dtype, enable_prefix_caching=False) as engine:
        expected = tokens(engine.generate([long, *forked, *many], greedy()))
    with make_narrow_kv(llama, hub, kv_dtype) as engine:
        found = [engine.generate([prompt], greedy())[0] for prompt in [long, *forked]]
        assert [output.num_cached_tokens for output in found] == [0, 37, 40, 51]
        assert tokens(found) + tokens(engine.generate(many, greedy())) == expected
        check_memory(engine)
    with make_narrow_kv(llama, hub, kv_dtype, max_cache_tokens=160, max_num_seqs=6) as engine:
        assert tokens(engine.generate(many, greedy())) == expected[4:]
        assert engine.scheduler.stats().num_preemptions > 0


def test_blocks_take_what_was_planned(llama: Path, hub: HubConfig, kv_dtype: str) -> None:
    with make_narrow_kv(llama, hub, kv_dtype) as engine:
        memory, layers = engine.facts.memory, engine.runner.pool.layers
        assert memory.block_bytes == 2 * 2 * 2 * (8 + (4 if kv_dtype == "int8" else 0)) * 16
        assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == memory.num_bytes


@pytest.mark.parametrize("kv_dtype", ["fp8"], indirect=True)
def test_scales_of_fp8_fit_what_comes(llama: Path, hub: HubConfig, kv_dtype: str) -> None:
    """Scores of a prompt are near those with plain keys, whose numbers are small: without scales they would lose
    digits."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with make_narrow_kv(llama, hub, "auto") as plain, make_narrow_kv(llama, hub, kv_dtype) as narrow:
        found = [
            [one.logprob for one in (engine.generate(prompts(1, least=50), params)[0].prompt_logprobs or [])[1:]]
            for engine in (plain, narrow)
        ]
        layers = narrow.runner.pool.layers
        largest = [
            float((layer[place].float().abs().amax((0, 1, 3)) / 448).max()) for layer in layers for place in range(2)
        ]
        assert all(layer.scales is not None and layer.scales.max() < 1 for layer in layers)
    assert all(0.1 < each < 0.6 for each in largest)
    assert found[1] == pytest.approx(found[0], abs=0.05) and found[1] != found[0]


def test_what_has_no_int8_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_dtype="int8")
    with pytest.raises(InvalidOptionError, match="this model has states"):
        plan_memory(config, StateShape(2, 2, 16), "cpu", "float32", 0)
    with pytest.raises(InvalidOptionError, match=r"'torch \+ Triton' does not have") as caught:
        plan_memory(config, SHAPE, "cuda", "bfloat16", 0)
    assert "this backend has fp8" in str(caught.value.hint)
    monkeypatch.setattr(select, "native_error", lambda: "it was not compiled")
    with pytest.raises(InvalidOptionError, match="'torch reference' does not have"):
        plan_memory(config, SHAPE, "cpu", "float32", 0)
