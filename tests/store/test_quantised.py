"""Quantised checkpoints: what is read, stored and computed is what their numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from archerfish import HubConfig, LLMEngine, SamplingParams, remarks
from archerfish.engine import llm_loading
from archerfish.errors import ArcherfishError, CorruptFileError, UnsupportedModelError, ValidationError
from archerfish.kernels.select import OpsBackend
from archerfish.kernels.stored import FP8_VALUES
from archerfish.kernels.torch.reference import TorchOps
from archerfish.store.converter import ensure_converted
from archerfish.store.loader import WeightLoader
from archerfish.store.sources import open_source
from tests.store import quantised_models as made
from tests.store.quantised_models import Packer, awq, compressed, fp8, gptq, write_plain, write_quantised

Case = tuple[Packer, dict[str, Any], str]  # the settings, and how matrices are stored ("": widened)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INTS = {"num_bits": 4, "type": "int"}
CASES: dict[str, Case] = {
    "gptq": (gptq(), GPTQ, "Q4_0"),
    "gptq-32": (gptq(group_size=32), GPTQ | {"group_size": 32}, "Q4_0"),
    "gptq-rows": (gptq(group_size=-1), GPTQ | {"group_size": -1}, "Q4_0"),
    "gptq-asymmetric": (gptq(is_symmetric=False), GPTQ | {"sym": False}, "Q4_1"),
    "gptq-v2": (gptq(is_symmetric=False, version=2), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "Q4_1"),
    "gptq-8": (gptq(8, 64), GPTQ | {"bits": 8, "group_size": 64}, "INT8"),
    "gptq-8-asymmetric": (gptq(8, 64, is_symmetric=False), GPTQ | {"bits": 8, "group_size": 64, "sym": False}, ""),
    "gptq-order": (gptq(group_size=64, has_order=True), GPTQ | {"group_size": 64, "desc_act": True}, ""),
    "gptq-dynamic": (gptq(group_size=32), GPTQ | {"dynamic": {r"+:.*_proj": {"group_size": 32}}}, "Q4_0"),
    "awq": (awq(), AWQ, "Q4_1"),
    "awq-symmetric": (awq(32, is_symmetric=True), AWQ | {"group_size": 32, "zero_point": False}, "Q4_0"),
    "w4a16": (*compressed("pack-quantized", **INTS, strategy="group", group_size=64), "Q4_0"),
    "w4a16-asymmetric": (
        *compressed("pack-quantized", **INTS, strategy="group", group_size=32, symmetric=False),
        "Q4_1",
    ),
    "w4a16-rows": (*compressed("pack-quantized", **INTS, strategy="channel"), "Q4_0"),
    "w8a16": (*compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=128), "INT8"),
    "w8a8": (*compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "INT8"),
    "ct-fp8": (*compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "FP8"),
    "ct-fp8-blocks": (
        *compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 32]),
        "FP8",
    ),
    "fp8-tensor": (fp8("tensor"), FP8, "FP8"),
    "fp8-rows": (fp8("channel", dtype=torch.bfloat16), FP8, "FP8"),
    "fp8-blocks": (fp8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}, "FP8"),
}
# Of the largest number: scales and minima of 4 bits are float16. GPTQ and AWQ have such scales.
ERRORS = {"Q4_0": 5e-4, "INT8": 1e-7, "FP8": 1e-7, "": 1e-7, "Q4_1": 2e-3}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# Engines over both backends; where formats differ only in how they are read, one will do.
READ_ALIKE = ("gptq-32", "gptq-v2", "gptq-dynamic", "w4a16", "fp8-rows")
ENGINES = [(name, "native") for name in CASES if name not in READ_ALIKE]
ENGINES += [(name, "torch") for name in ("gptq", "awq", "w8a8", "ct-fp8", "fp8-blocks")]


def check_values(found: made.Floats, meant: made.Floats, case: Case) -> None:
    _, settings, stored = case
    error = 0.0 if stored == "Q4_0" and settings["quant_method"] in ("gptq", "awq") else ERRORS[stored]
    np.testing.assert_allclose(found, meant, rtol=0, atol=error * np.abs(meant).max())


def test_matrices_mean_what_the_checkpoint_says(case: Case, tmp_path: Path) -> None:
    packer, settings, stored = case
    meant = write_quantised(tmp_path / "model", packer, settings)
    source = open_source(tmp_path / "model")
    found = {tensor.info.name: tensor for tensor in source.tensors}
    assert set(found) == set(meant) | set(made.plain_tensors(np.random.default_rng(3)))
    for name, matrix in meant.items():
        kind = found[name].info.quantization
        assert (kind.quant_type if kind else "") == stored
        assert found[name].info.shape == matrix.shape
        check_values(found[name].load(), matrix, case)


@pytest.mark.parametrize("name", ["gptq", "gptq-8", "gptq-order", "awq", "w8a8", "fp8-blocks"])
def test_the_store_keeps_them(name: str, hub: HubConfig, tmp_path: Path) -> None:
    packer, settings, stored = case = CASES[name]
    meant = write_quantised(tmp_path / "model", packer, settings)
    kept = ensure_converted(tmp_path / "model", dtype="float32", hub=hub, keep_quantized=True)
    wide = ensure_converted(tmp_path / "model", dtype="float32", hub=hub)
    assert kept != wide
    with WeightLoader(kept) as loader, WeightLoader(wide) as widened:
        assert loader.metadata.quant_types == ({stored} if stored else set()) and not widened.metadata.quant_types
        for name, matrix in meant.items():
            found = loader.get_layer(name).numpy()
            assert np.array_equal(found, widened.get_layer(name).numpy())
            check_values(found, matrix, case)


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = OpsBackend("torch", lambda device, dtype: "", TorchOps, "", keeps_quantised=True)
    monkeypatch.setattr(llm_loading, "choose_backend", lambda device, dtype: kept)
    monkeypatch.setattr(llm_loading, "choose_ops", TorchOps)


@pytest.mark.parametrize(("name", "backend"), ENGINES)
def test_an_engine_computes_with_them(
    name: str, backend: str, hub: HubConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model with plain numbers; the native backend rounds activations in products of 4 and 8 bits."""
    packer, settings, stored = CASES[name]
    if backend == "torch":
        use_torch(monkeypatch)
    write_plain(tmp_path / "plain", write_quantised(tmp_path / "model", packer, settings))
    prompts = [[5, 6, 7, 8, 9], [40, 3] * 20]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=1)
    found = []
    for folder in ("plain", "model"):
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_cache_tokens": 256}
        with LLMEngine(str(tmp_path / folder), hub=hub, **options) as engine:
            outputs = engine.generate(prompts, params)
            ops = engine.runner.model.ops
            assert ops.rounds_rows == (name == "w8a8" and folder == "model")
            packed: Any = ops._linear_weights[0].get()
            assert backend != "torch" or (packed.weight_format.name == "plain") == (folder == "plain" or not stored)
        found.append(np.array([one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:]]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=0.15 if backend == "native" else 0.02)


@pytest.mark.parametrize(("name", "backend"), ENGINES[-8:])
def test_made_up_weights_are_quantised_as_stated(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings, stored = CASES[name]
    if backend == "torch":
        use_torch(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({**made.CONFIG, "quantization_config": settings}))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_cache_tokens": 256}
    with LLMEngine(str(tmp_path), load_format="dummy", **options) as engine:
        assert bool(engine.facts.stored_bytes) == bool(stored or settings.get("desc_act"))
        assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize(("name", "is_widened"), [("gptq", False), ("gptq-order", True)])
def test_widened_weights_are_remarked(
    name: str, is_widened: bool, hub: HubConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remarks._said.clear()
    write_quantised(tmp_path / "model", *CASES[name][:2])
    with LLMEngine(str(tmp_path / "model"), hub=hub, device="cpu", max_cache_tokens=256):
        assert ("take the memory of plain ones" in caplog.text) == is_widened


def test_numbers_of_fp8() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8_VALUES, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ weights packed for marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights packed for gemv"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "the format nvfp4-pack-quantized"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "the format sparse-bitmask",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights in bitsandbytes"),
        ({"quant_method": "mxfp4"}, "weights in mxfp4"),
        ({"bits": 4}, "weights in an unnamed format"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "model", gptq(), settings)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"4-bit floats")  # not looked at
    with pytest.raises(UnsupportedModelError, match=f"has .*{said} .*does not read. Take the original model"):
        open_source(tmp_path / "model")


def damaged(folder: Path, packer: Packer, settings: dict[str, Any], part: str, change: Any) -> Path:
    """A checkpoint of which one tensor is missing or was changed."""
    write_quantised(folder, packer, settings)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{part}"
    tensors[name] = change(tensors[name])
    save_file(
        {name: each.contiguous() for name, each in tensors.items() if each is not None}, folder / "model.safetensors"
    )
    return folder


def set_item(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


BAD: dict[str, tuple[Packer, dict[str, Any], str, Any, type[ArcherfishError], str]] = {
    "no scales": (gptq(), GPTQ, "scales", lambda x: None, CorruptFileError, "the tensor 'scales' is missing"),
    "group size": (gptq(), GPTQ | {"group_size": 64}, "scales", lambda x: x, CorruptFileError, "group_size is 64, but"),
    "short zeros": (
        gptq(is_symmetric=False), GPTQ | {"sym": False}, "qzeros", lambda x: x[:1], CorruptFileError, "'qzeros' has the shape 1"
    ),
    "g_idx": (gptq(), GPTQ, "g_idx", set_item(7), CorruptFileError, "g_idx names a group outside of the 2 groups"),
    "NaN": (gptq(), GPTQ, "scales", set_item(float("nan")), ValidationError, "a scale that is not finite"),
    "words": (awq(), AWQ, "qweight", lambda x: x[:-64], CorruptFileError, "group_size is 64, but 192 inputs have 4 scales"),
    "no fp8 scale": (fp8("channel"), FP8, "weight_scale", lambda x: None, UnsupportedModelError, "FP8 numbers without a scale"),
    "fp8 scales": (fp8("block"), FP8, "weight_scale", lambda x: x[:, :0], CorruptFileError, "'weight_scale' has the shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_damage_is_named_before_anything_is_allocated(name: str, hub: HubConfig, tmp_path: Path) -> None:
    packer, settings, part, change, kind, said = BAD[name]
    path = damaged(tmp_path / "model", packer, settings, part, change)
    with pytest.raises(kind, match=said) as caught:
        LLMEngine(str(path), hub=hub, device="cpu", max_cache_tokens=256)
    assert "down_proj" in str(caught.value)


def test_settings_must_be_an_object(tmp_path: Path) -> None:
    write_quantised(tmp_path, gptq(), GPTQ)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": ["gptq"]}))
    with pytest.raises(CorruptFileError, match="quantization_config is not an object"):
        open_source(tmp_path)
