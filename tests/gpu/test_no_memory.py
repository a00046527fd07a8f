"""A card that is full: a smaller pool or a clean error, and an engine that goes on."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import ArrowEngine, HubConfig, LLMEngine, SamplingParams
from archerfish.bench.gpu import SHAPES
from archerfish.engine.outputs import RequestOutput
from archerfish.errors import OutOfMemoryError
from archerfish.kernels.torch.reference import TorchOps
from archerfish.layers.weights import NotedWeights
from archerfish.models.bert import BertEncoder
from archerfish.models.config import Config
from archerfish.runtime.graphs import DecodeGraphs
from tests.gpu.given_tokens import DTYPE, MIB, card_filled, needs_card

pytestmark = needs_card
CONFIG: dict[str, Any] = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 4}
KV_BYTES = 2 * 4 * 8 * 128 * 2  # of a token: keys and values of 4 layers of 8 heads of 128 in 2 bytes
TABLE_BYTES = 2 * 151_936 * 1024
WEIGHT_BYTES = TABLE_BYTES + 2 * 4 * (4096 * 1024 + 1024 * 2048 + 3 * 1024 * 3072)
LOAD_BYTES = (
    WEIGHT_BYTES + 5 * TABLE_BYTES
)  # random numbers are made in float32, and scaled before they become bfloat16
LONG, SHORT = [7 + i % 900 for i in range(16_000)], [5, 6, 7, 8]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": DTYPE,
    "load_format": "dummy",
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LEFT = (
    160 * MIB
)  # enough for a short prompt, too little for LONG in one step, whose queries, keys and values take 131 MB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    """What tests before this one have left in torch's hands would be room that the card does not show."""
    free_unused()
    yield
    free_unused()


def free_unused() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def is_good(output: RequestOutput, num_tokens: int = 8) -> bool:
    return output.finish_reason == "length" and len(output.token_ids) == num_tokens


def test_a_pool_that_does_not_fit_is_refused(model: Path) -> None:
    room = 4096 * MIB
    with card_filled(room + WEIGHT_BYTES), pytest.raises(OutOfMemoryError, match="a max_cache_tokens of at most"):
        LLMEngine(str(model), max_cache_tokens=int(1.05 * room / KV_BYTES), max_num_batched_tokens=2048, **OPTIONS)


def test_a_pool_is_planned_for_what_is_free(model: Path) -> None:
    with card_filled(8192 * MIB), LLMEngine(str(model), **OPTIONS) as engine:
        assert 0 < engine.facts.memory.num_bytes < 8192 * MIB
        assert is_good(engine.generate([LONG], GREEDY)[0])


def test_no_room_for_a_pool_or_the_weights_is_an_error(model: Path) -> None:
    before = torch.cuda.memory_allocated()
    for room, max_cache_tokens in ((LOAD_BYTES, 10_000_000), (WEIGHT_BYTES, 0), (WEIGHT_BYTES // 2, 4096)):
        with card_filled(room), pytest.raises(OutOfMemoryError, match="free on the card"):
            LLMEngine(str(model), max_cache_tokens=max_cache_tokens, **OPTIONS)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 64 * MIB
    with LLMEngine(str(model), max_cache_tokens=4096, **OPTIONS) as engine:
        assert is_good(engine.generate([SHORT], GREEDY)[0])


def test_a_step_without_memory_ends_its_own_requests(model: Path) -> None:
    with LLMEngine(str(model), max_cache_tokens=40_000, **OPTIONS) as engine:
        expected = engine.generate([SHORT], GREEDY)[0].token_ids
        with card_filled(LEFT):
            taken, failed = torch.cuda.memory_allocated(), []
            for _ in range(3):
                failed.append(engine.generate([LONG], GREEDY)[0])
                assert failed[-1].finish_reason == "error" and isinstance(failed[-1].outputs[0].error, OutOfMemoryError)
                assert engine.generate([SHORT], GREEDY)[0].token_ids == expected
            assert (
                torch.cuda.memory_allocated() - taken < 16 * MIB
            )  # an error that is kept keeps no tensors of its step
            waiting = [engine.add_request(prompt, GREEDY) for prompt in (LONG, LONG)]
            for _ in range(3):
                engine.step()
            waiting.append(engine.add_request(SHORT, GREEDY))  # comes when the step has failed
            while engine.has_work:
                engine.step()
            found = [engine.get_output(request_id) for request_id in waiting]
            assert [one.finish_reason for one in found if one is not None] == ["error", "error", "length"]
        assert is_good(engine.generate([LONG], GREEDY)[0])
        assert engine.scheduler.blocks.num_free == engine.facts.memory.num_blocks


def test_penalties_need_no_more_memory(model: Path) -> None:
    options = {**OPTIONS, "max_num_seqs": 512}
    with LLMEngine(str(model), max_cache_tokens=4096, **options) as engine:
        penalised = SamplingParams(max_tokens=8, repetition_penalty=1.2, seed=1, ignore_eos=True)
        with card_filled(96 * MIB):  # counts of 512 rows, which take 311 MB, were made at the start
            assert is_good(engine.generate([SHORT], penalised)[0])


def test_a_batch_that_cannot_be_recorded_is_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends between the first run of a step and its recording."""
    monkeypatch.setattr(DecodeGraphs, "warm_up", lambda self: None)
    prompts = [[5 + i, 9, 11] for i in range(3)]
    with LLMEngine(str(model), max_cache_tokens=4096, **OPTIONS) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    with LLMEngine(str(model), max_cache_tokens=4096, **OPTIONS) as engine, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", GraphOnAFullCard)
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
        assert GraphOnAFullCard.num_made > 0


class GraphOnAFullCard(torch.cuda.CUDAGraph):
    """Nothing is left when recording begins."""

    num_made = 0

    def capture_begin(self, *args: Any, **options: Any) -> None:
        type(self).num_made += 1
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self.taken = torch.empty(free - MIB, dtype=torch.uint8, device="cuda")
        try:
            super().capture_begin(*args, **options)
        except RuntimeError:
            del self.taken
            raise

    def capture_end(self) -> None:
        try:
            super().capture_end()
        finally:
            del self.taken


# Encoders

WIDE = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 16_384,
    "num_hidden_layers": 1,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
TEXTS = [
    "w1 " * (100 + i % 50) + f"w{i % 190}" for i in range(600)
]  # passes of 32,768 tokens, whose middle takes 1 GiB


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HubConfig]:
    """A BERT whose middle is wide, as sentence-transformers would save it."""
    pytest.importorskip("pyarrow")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    where = tmp_path_factory.mktemp("bert")
    (where / "config.json").write_text(json.dumps(WIDE))
    weights = NotedWeights()
    BertEncoder(weights, Config(WIDE))
    save_file(dict(TorchOps().random_weights(weights.shapes)), where / "model.safetensors")
    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 200)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    return where, HubConfig(cache_dir=str(tmp_path_factory.mktemp("cache")), offline=True)


def new_encoder(where: Path, hub: HubConfig) -> ArrowEngine:
    return ArrowEngine(str(where), device="cuda", dtype=DTYPE, hub=hub)


def test_encoder_pass_without_memory_is_an_error(encoder: tuple[Path, HubConfig]) -> None:
    with new_encoder(*encoder) as engine:
        expected, few = engine.encode(TEXTS), engine.encode(TEXTS[:2])
        torch.cuda.synchronize()
        with card_filled(128 * MIB):
            for _ in range(2):
                with pytest.raises(OutOfMemoryError):
                    engine.encode(TEXTS)
                assert np.allclose(engine.encode(TEXTS[:2]), few, atol=1e-3)
                assert engine.encode(["w3 w4 w5"]).shape == (1, 256)  # a pass that is recorded now
        assert np.allclose(engine.encode(TEXTS), expected, atol=1e-3)


def test_an_encoder_that_does_not_fit_is_an_error(encoder: tuple[Path, HubConfig]) -> None:
    with card_filled(8 * MIB), pytest.raises(OutOfMemoryError):
        new_encoder(*encoder).encode(TEXTS[:2])
    with new_encoder(*encoder) as engine:
        assert engine.encode(TEXTS[:2]).shape == (2, 256)


def test_a_pass_that_cannot_be_recorded_is_a_clean_error(
    encoder: tuple[Path, HubConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_encoder(*encoder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "CUDAGraph", GraphOnAFullCard)
            with pytest.raises(OutOfMemoryError):
                engine.encode(TEXTS[:2])
        assert engine.encode(TEXTS[:2]).shape == (2, 256)
