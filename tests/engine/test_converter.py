"""Quantising conversions: what is quantised, what engines make of it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from archerfish import (
    ConversionConfig,
    ConversionResult,
    HubConfig,
    LLMEngine,
    ModelConverter,
    SamplingParams,
    WeightLoader,
)
from archerfish.engine.converter import choose_matrices
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.runner import ModelRunner
from archerfish.store import converter
from archerfish.store.sources import open_source
from tests.calls import spy_on
from tests.kernels.native_support import native_ops
from tests.models.decoding import Driver, make, random_tokens
from tests.models.recurring import SIZES, blink_weights
from tests.store import quantised_models as made
from tests.store.models import write_model

PROMPTS: list[Any] = [[5, 6, 7, 8, 9], [40, 3] * 20]


def write_llama(folder: Path) -> Path:
    """Two layers of random weights, with no tokenizer."""
    draw = np.random.default_rng(5)
    names = [(f"model.layers.{i}.{name}.weight", shape) for i in range(2) for name, shape in made.MATRICES.items()]
    made.write_plain(folder, {name: draw.normal(0, 0.08, shape).astype(np.float32) for name, shape in names})
    return folder


def convert(source: Path, target: Path, **options: Any) -> ConversionResult:
    config = ConversionConfig(dtype="float32", write_parquet=False, **options)
    return ModelConverter(config).convert(source, target)


def logprobs(model: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with LLMEngine(str(model), device="cpu", dtype="float32", num_threads=1, max_cache_tokens=256) as engine:
        outputs = engine.generate(PROMPTS, params)
    return np.array([one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:]])


# Relative errors of normal numbers.
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("weights", "kind", "most"), [("int8", "INT8", 0.01), ("int4", "Q4_1", 0.1), ("fp8", "FP8", 0.03)]
)
def test_an_engine_runs_what_was_quantised(weights: str, kind: str, most: float, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    convert(source, tmp_path / "out", weights=weights)
    with WeightLoader(tmp_path / "out") as loader:
        kinds = {info.name: info.quantization for info in loader.metadata.tensors}
        loader.verify()
        meant = {name: loader.get_layer(name).numpy() for name, found in kinds.items() if found}
    sizes = {name: found.group_size for name, found in kinds.items() if found and found.quant_type == kind}
    assert sizes["model.layers.1.mlp.down_proj.weight"] == (128 if weights == "int4" else 256)
    assert kinds["model.embed_tokens.weight"] is None and kinds["model.norm.weight"] is None
    assert (found := kinds["lm_head.weight"]) and found.quant_type == ("INT8" if weights == "int4" else kind)
    for tensor in open_source(source).tensors:
        before = tensor.load()
        error = np.linalg.norm(meant.get(tensor.info.name, before) - before) / np.linalg.norm(before)
        assert (most / 20 < error < most) if tensor.info.name in meant else error == 0
    made.write_plain(tmp_path / "plain", meant)
    np.testing.assert_allclose(logprobs(tmp_path / "out"), logprobs(tmp_path / "plain"), rtol=0, atol=0.15)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_quantised(is_stacked: bool, tmp_path: Path) -> None:
    """As tensors of their own, which is how transformers writes them, and in stacks; routers are not."""
    model, config = make("qwen3-moe")
    source = tmp_path / "source"
    model.save_pretrained(source)
    if is_stacked:
        save_file(model.state_dict(), source / "model.safetensors")
    convert(source, tmp_path / "out", weights="int4", report=False)
    with WeightLoader(tmp_path / "out") as loader:
        kinds = {info.name: info.quantization for info in loader.metadata.tensors if ".mlp." in info.name}
        meant = {name: loader.get_layer(name) for name in loader.get_layer_names()}
        experts = [name for name in kinds if ".experts." in name]
        assert len(experts) == (4 if is_stacked else 48)
        assert {name for name, kind in kinds.items() if kind is None} == {
            f"model.layers.{i}.mlp.gate.weight" for i in (0, 2)
        }
        backends: list[tuple[Any, Any]] = [(TorchOps(), meant), (native_ops(), loader.load_stored())]
        expected, found = (
            torch.cat(Driver(ops, weights, config, random_tokens(1)).step([(0, 20)])) for ops, weights in backends
        )
    assert (found - expected).norm() < 1e-3 * expected.norm()
    with pytest.raises(InvalidOptionError, match="reaches only some experts"):
        convert(source, tmp_path / "other", weights="int4", method="gptq")
    if is_stacked:
        with pytest.raises(UnsupportedModelError, match="stacks of experts"):
            convert(source, tmp_path / "other", weights="int4", layout="gptq", report=False)


@pytest.mark.usefixtures("own_cache")
def test_files_of_one_model_have_lists_of_kernels_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, warm_up = write_llama(tmp_path / "source"), spy_on(monkeypatch, ModelRunner, "warm_up")
    for weights in ("int8", "fp8", "int4"):
        convert(source, tmp_path / weights, weights=weights, report=False)
        LLMEngine(str(tmp_path / weights), device="cpu", dtype="float32", max_cache_tokens=256).close()
    assert len({call.args[1] for call in warm_up.call_args_list}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_real_model_still_knows_capitals(weights: str, tmp_path: Path) -> None:
    config = ConversionConfig(weights=weights, write_parquet=False, report=False)
    result = ModelConverter(config).convert("smollm2-135m-instruct", tmp_path / "out")
    assert 100 < result.file_size_mb < 170
    with LLMEngine(str(tmp_path / "out"), device="cpu", max_cache_tokens=256) as engine:
        found = engine.generate("The capital of France is", SamplingParams(max_tokens=4, temperature=0.0))[0].text
    assert "Paris" in found


def test_groups_divide_the_inputs_of_all_matrices(tmp_path: Path) -> None:
    source = open_source(write_llama(tmp_path))
    sizes = {
        size: {each.group_size for each in choose_matrices(source, "int4", size).values()} for size in (32, 96, 256)
    }
    assert sizes == {32: {32, 128}, 96: {32, 128}, 256: {128}}  # the head, in int8, has 128 inputs


def test_encoders_and_rwkv_have_linear_maps_too(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    shapes = {"intermediate.dense": (64, 32), "output.dense": (32, 64), "attention.self.query": (32, 32)}
    weights = {f"encoder.layer.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights["embeddings.word_embeddings.weight"] = torch.randn(12, 32)
    bert = write_model(tmp_path / "bert", weights, hidden_size=32, intermediate_size=64, max_position_embeddings=8)
    assert set(choose_matrices(open_source(bert), "int8", 128)) == {f"encoder.layer.0.{name}.weight" for name in shapes}
    save_file(blink_weights(SIZES["small"]), tmp_path / "rwkv.safetensors")
    names = set(choose_matrices(open_source(tmp_path / "rwkv.safetensors"), "int4", 128))
    assert {"lm_head.weight", "model.layers.0.attn.r_proj.weight", "model.layers.2.ffn.value.weight"} <= names
    assert "model.layers.0.attn.w_lora.lora.0.weight" in names and not any("lora.2" in name for name in names)


def test_what_cannot_be_quantised_is_refused(source_of_width_8: Path, tmp_path: Path, hub: HubConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="no linear map with a multiple of 32 inputs"):
        convert(source_of_width_8, tmp_path / "out", weights="int8")
    with pytest.raises(InvalidOptionError, match="group_size is 100, not a multiple of 32"):
        convert(source_of_width_8, tmp_path / "out", weights="int4", group_size=100)
    with pytest.raises(InvalidOptionError, match=r"does not quantise\. Use archerfish.ModelConverter"):
        converter.ModelConverter(ConversionConfig(weights="int8")).convert(source_of_width_8, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def source_of_width_8(tmp_path: Path) -> Path:
    return write_model(tmp_path / "narrow", max_position_embeddings=8)
