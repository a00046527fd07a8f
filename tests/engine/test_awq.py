"""AWQ on tiny models: the scaled model is the same model, and its matrices lose less to rounding."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pytest
import torch

from archerfish import ConversionConfig, ModelConverter
from archerfish.engine import awq, calibration
from archerfish.engine.converter import choose_matrices
from archerfish.engine.streamed_model import StreamedModel
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.store.format import Quantization
from archerfish.store.sources import open_source
from tests.engine.test_converter import write_llama
from tests.models.decoding import KINDS, make

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("quant_type", ["Q4_1", "Q4_0"])
def test_products_change_less_where_some_inputs_are_large(quant_type: str) -> None:
    torch.manual_seed(2)
    kind, matrix = Quantization(quant_type, 1, 64), torch.randn(96, 256) * 0.05
    x = torch.randn(1000, 256)
    x[:, ::37] *= 40
    factors = torch.from_numpy(awq.find_factors(matrix, x, kind))
    plain, scaled = awq.rounded(matrix, kind), awq.rounded(matrix * factors, kind) / factors
    errors = [float((x @ (each - matrix).T).norm()) for each in (scaled, plain)]
    assert errors[0] < 0.7 * errors[1]


IS_OTHER = ("phi3", "glm4", "starcoder2")  # whose up_proj is half of a matrix, or has another name


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3", "phi3", "granite", "glm4", "starcoder2"])
def test_the_scaled_model_is_the_same_model(kind: str, tmp_path: Path) -> None:
    make(kind)[0].save_pretrained(tmp_path)
    source = open_source(tmp_path)
    texts = [np.random.default_rng(i).integers(3, KINDS[kind][1]["vocab_size"], 40) for i in range(3)]
    model = StreamedModel(source, "cpu", 60)
    wanted = choose_matrices(source, "int4", 32)
    found, importances = awq.scale_source(source, model, texts, wanted, tmp_path, lambda *_: None)
    assert set(importances) == {name for name in wanted if "layers" in name}
    changed = {own.info.name for own, other in zip(found.tensors, source.tensors, strict=True) if own is not other}
    assert any(name.endswith("input_layernorm.weight") for name in changed)
    assert any(name.endswith("down_proj.weight") for name in changed) == (kind not in IS_OTHER)
    hidden = [each.hidden(texts, lambda parts, x, matrix: matrix) for each in (model, StreamedModel(found, "cpu", 60))]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "cohere"])
def test_models_whose_norms_it_does_not_know_are_refused(kind: str, tmp_path: Path) -> None:
    make(kind)[0].save_pretrained(tmp_path)
    source = open_source(tmp_path)
    wanted = choose_matrices(source, "int4", 32)
    with pytest.raises(UnsupportedModelError, match=kind) as raised:
        awq.scale_source(source, StreamedModel(source, "cpu", 60), [], wanted, tmp_path, lambda *_: None)
    assert "gptq" in str(raised.value.hint)


def test_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_TEXTS", 20)
    monkeypatch.setattr(calibration, "TEXT_TOKENS", 48)
    source = write_llama(tmp_path / "source")
    config = ConversionConfig(dtype="float32", write_parquet=False, group_size=32, method="awq", weights="int4")
    with pytest.raises(InvalidOptionError, match="awq is for int4"):
        ModelConverter(config.replace(weights="int8")).convert(source, tmp_path / "out")
    counted = MagicMock(wraps=awq.find_factors, side_effect=[DEFAULT, DEFAULT, KeyboardInterrupt, *[DEFAULT] * 99])
    monkeypatch.setattr(awq, "find_factors", counted)
    with pytest.raises(KeyboardInterrupt):
        ModelConverter(config).convert(source, tmp_path / "out")
    result = ModelConverter(config).convert(source, tmp_path / "out")
    first_run = counted.call_count
    ModelConverter(config).convert(source, tmp_path / "again")
    assert first_run == 1 + counted.call_count - first_run  # only the third was begun twice
    assert (tmp_path / "out" / "weights.arrow").read_bytes() == (tmp_path / "again" / "weights.arrow").read_bytes()
    assert result.quality is not None
    errors = [error for layer in result.quality["layers"].values() for error in layer.values()]
    assert max(errors) < 0.1  # of what was written, against the model that it was made of
    assert not list(tmp_path.glob(".out*"))  # nothing of the work is left
