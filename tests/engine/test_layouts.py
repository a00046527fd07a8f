"""Quantised checkpoints that other engines load: read back by our reader, by compressed-tensors and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from archerfish import ConversionConfig, LLMEngine, ModelConverter, SamplingParams
from archerfish.errors import InvalidOptionError
from archerfish.store.quantiser import find_grid, make_row
from archerfish.store.sources import open_source
from tests.engine.test_converter import logprobs, write_llama
from tests.store.quantised_models import MATRICES, Floats

pytestmark = pytest.mark.usefixtures("own_cache")

MATRIX = "model.layers.1.mlp.down_proj"
MODULES = {f"model.layers.{layer}.{name}" for layer in range(2) for name in MATRICES}
LAYOUTS = [
    ("gptq", "int4", "Q4_0"),
    ("compressed-tensors", "int4", "Q4_0"),
    ("compressed-tensors", "int8", "INT8"),
    ("compressed-tensors", "fp8", "FP8"),
]


def write(tmp_path: Path, layout: str, weights: str) -> Path:
    options: dict[str, Any] = {"layout": layout, "weights": weights, "dtype": "float32", "report": False}
    ModelConverter(ConversionConfig(**options)).convert(write_llama(tmp_path / "source"), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(("layout", "weights", "kind"), LAYOUTS)
def test_our_reader_finds_the_same_numbers(layout: str, weights: str, kind: str, tmp_path: Path) -> None:
    found = {tensor.info.name: tensor for tensor in open_source(write(tmp_path, layout, weights)).tensors}
    for tensor in open_source(tmp_path / "source").tensors:
        before, after = tensor.load(), found.pop(tensor.info.name)
        if after.info.quantization is None:
            assert np.array_equal(after.load(), before) and tensor.info.name.rpartition(".")[0] not in MODULES
            continue
        assert after.info.quantization.quant_type == kind and tensor.info.name.rpartition(".")[0] in MODULES
        row, expected = after.load_quantized(), make_row(after.info, before, find_grid(before, after.info.quantization))  # type: ignore[misc]
        assert np.array_equal(row.data.ravel(), expected.data.ravel()) and np.array_equal(row.scales, expected.scales)
    assert not found


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_compressed_tensors_and_transformers_read_them(weights: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    out = write(tmp_path, "compressed-tensors", weights)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    tensors = load_file(out / "model.safetensors")
    own = {name.removeprefix(f"{MATRIX}."): tensor for name, tensor in tensors.items() if name.startswith(MATRIX)}
    theirs = BaseCompressor.load_from_registry(settings["format"]).decompress(own, scheme)["weight"].float().numpy()
    ours: Floats = next(tensor.load() for tensor in open_source(out).tensors if tensor.info.name == f"{MATRIX}.weight")
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=0)  # scales and products in float16
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with LLMEngine(str(out), device="cpu", dtype="float32", max_cache_tokens=256) as engine:
        found = engine.generate([[5, 6, 7, 8, 9]], params)[0].prompt_logprobs or []
    expected = [float(scores[place, token]) for place, token in enumerate((6, 7, 8, 9))]
    np.testing.assert_allclose([each.logprob for each in found], expected, rtol=0, atol=0.15)


def test_engines_run_both_layouts_alike(tmp_path: Path) -> None:
    found = [logprobs(write(tmp_path / layout, layout, "int4")) for layout in ("gptq", "compressed-tensors")]
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "gptq", "weights": "fp8"}, r"layout gptq holds int4, not fp8\. Take --layout compressed-tensors"),
        ({"layout": "gptq"}, "layout is gptq, but nothing is quantised"),
        ({"layout": "gptq", "weights": "int4", "keep_quantized": True}, "cannot hold other quantised matrices"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        ModelConverter(ConversionConfig(**options)).convert(write_llama(tmp_path / "source"), tmp_path / "out")
