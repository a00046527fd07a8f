"""GPTQ, calibration texts and the quality report, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pytest
import torch

from archerfish import ArcherfishError, ConversionConfig, ConversionResult, HubConfig, ModelConverter
from archerfish.engine import calibration, gptq
from archerfish.engine.converter import choose_matrices
from archerfish.engine.streamed_model import StreamedModel, Unread
from archerfish.errors import CorruptFileError, InvalidOptionError
from archerfish.store.format import Quantization, TensorInfo, dequantize
from archerfish.store.quantiser import find_grid, make_row
from archerfish.store.sources import open_source
from tests.engine.test_converter import write_llama
from tests.models.decoding import KINDS, make, their_logits
from tests.text.tiny_tokenizers import byte_fallback

pytestmark = pytest.mark.usefixtures("own_cache")

GRIDS = [
    Quantization("Q4_1", 1, 64),
    Quantization("Q4_0", 1, 128),
    Quantization("INT8", 1, 256),
    Quantization("FP8", 1, 256),
]


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.quant_type)
def test_products_change_less_than_by_rounding(kind: Quantization) -> None:
    torch.manual_seed(2)
    matrix, mixing = torch.randn(96, 256) * 0.05, torch.randn(256, 256) / 8
    x = torch.randn(2000, 256) @ mixing * torch.linspace(0.1, 3, 256)
    x[:, 9] = 0.0  # an input that no text uses
    info = TensorInfo("x", "float32", (96, 256), kind)
    values, grid = gptq.gptq(matrix, x, kind)
    row = make_row(info, values, grid)
    assert np.allclose(
        dequantize(row), values, rtol=0, atol=1e-3 * np.abs(values).max()
    )  # its numbers are points of the grid
    rounded = dequantize(make_row(info, matrix.numpy(), find_grid(matrix.numpy(), kind)))
    errors = [float((x @ (torch.from_numpy(each) - matrix).T).norm()) for each in (dequantize(row), rounded)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3", "gemma2", "phi3"])
def test_streamed_models_compute_what_transformers_does(kind: str, tmp_path: Path) -> None:
    theirs = make(kind)[0]
    theirs.save_pretrained(tmp_path)
    model = StreamedModel(open_source(tmp_path), "cpu", 60)
    texts = [
        np.random.default_rng(i).integers(3, KINDS[kind][1]["vocab_size"], length) for i, length in enumerate((20, 60))
    ]
    seen: list[str] = []

    def note(parts: Sequence[Unread], x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        seen.extend(part.name for part in parts)
        return matrix

    hidden = model.hidden(texts, note)
    expected = torch.cat([their_logits(theirs, text.tolist()) for text in texts])
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-3, atol=1e-3)
    assert set(seen) >= {name for name in choose_matrices(open_source(tmp_path), "int8", 32) if "layers" in name}


def convert(source: Path, target: Path, **options: Any) -> ConversionResult:
    config = ConversionConfig(dtype="float32", write_parquet=False, weights="int4", group_size=32, **options)
    return ModelConverter(config).convert(source, target)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_TEXTS", 20)
    monkeypatch.setattr(calibration, "TEXT_TOKENS", 48)


def test_a_stopped_conversion_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_llama(tmp_path / "source")
    counted = MagicMock(wraps=gptq.gptq, side_effect=[*[DEFAULT] * 4, KeyboardInterrupt, *[DEFAULT] * 4])
    monkeypatch.setattr(gptq, "gptq", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", method="gptq")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:  # nor is text written anew
        patch.setattr(calibration, "write_tokens", None)
        found = convert(source, tmp_path / "out", method="gptq")
    assert counted.call_count == 1 + 8  # two layers of four products; the fifth was begun twice
    rounded = convert(source, tmp_path / "rounded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rounded", "source"]
    assert found.quality and rounded.quality and found.quality["text"] == "that the model wrote itself"
    assert json.loads((tmp_path / "out" / "quality.json").read_text()) == found.quality
    assert (
        0.1 * rounded.quality["kl_divergence"] < found.quality["kl_divergence"] < 0.9 * rounded.quality["kl_divergence"]
    )
    assert found.quality["num_tokens"] == 4 * 48
    assert 0.3 < found.quality["top1_agreement"] < 1.0
    assert set(found.quality["layers"]) == {"model.layers.0", "model.layers.1"}
    assert 0.01 < found.quality["layers"]["model.layers.1"]["mlp.down_proj"] < 0.15


def test_encoders_are_measured_by_cosines(minilm_source: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"Text {i} is about {i * 7}."}) for i in range(20))
    )
    options: dict[str, Any] = {"weights": "int8", "calibration": str(tmp_path / "texts.jsonl"), "write_parquet": False}
    found = ModelConverter(ConversionConfig(**options)).convert(minilm_source, tmp_path / "out").quality
    assert found and found["num_texts"] == 4
    assert 0.999 < found["cosine_least"] <= found["cosine_mean"] < 1 and found["rank_correlation"] > 0.9
    with pytest.raises(InvalidOptionError, match="an encoder cannot write its own text"):
        ModelConverter(ConversionConfig(weights="int4", method="gptq")).convert(minilm_source, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.jsonl"]


@pytest.mark.parametrize(
    ("content", "name", "kind", "said"),
    [
        (None, "a.txt", ArcherfishError, "is not a file"),
        ("{}\n", "a.jsonl", CorruptFileError, 'lines are objects with a "text"'),
        ("few words", "a.txt", InvalidOptionError, "only 0 texts of a.txt. Give at least 5 texts"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    content: str | None, name: str, kind: type[ArcherfishError], said: str, hub: HubConfig, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    byte_fallback(write_llama(tmp_path / "model"))
    with pytest.raises(kind, match=said):
        calibration.find_texts(
            open_source(tmp_path / "model"), str(tmp_path / name), hub, tmp_path / "kept", lambda *_: None
        )
