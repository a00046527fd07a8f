"""Seed 000, ArrowEngine: its snippets in our words. Imports come from `archerfish`; a BatchProcessor gets its
engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from archerfish import (
    ArrowEngine,
    BatchProcessor,
    ConversionConfig,
    FastTokenizer,
    InferenceCore,
    ModelConverter,
    WeightLoader,
)
from archerfish.errors import InvalidOptionError
from tests.conftest import TinyModel

TEXTS = ["the cat sat on a mat", "a fish spits water", "red"]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snippet "integration with ModelConverter": a converted directory with weights.parquet."""
    converter = ModelConverter(ConversionConfig(use_float16=True, compression="lz4"))
    target = tmp_path_factory.mktemp("models") / "tiny"
    result = converter.convert(
        model_name_or_path=str(tiny_model()), output_dir=str(target), model_type="sentence-transformers"
    )
    assert Path(result.output_dir) == target and (target / "weights.parquet").is_file()
    return target


def test_basic_use(minilm: ArrowEngine) -> None:
    engine = minilm  # ArrowEngine("all-minilm-l6-v2")
    assert engine.encode("Hello, world!").shape == (384,)
    assert engine.encode(["Text 1", "Text 2", "Text 3"], batch_size=32).shape == (3, 384)
    assert engine.get_embedding_dimension() == 384 and engine.get_max_seq_length() == 256


def test_many_texts_with_progress(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ArrowEngine(str(model), device="cpu", max_batch_size=32, use_fast_tokenizer=True)
    texts = [f"the cat {number}" for number in range(500)]
    assert engine.encode(texts, batch_size=32, show_progress=True).shape == (500, 32)
    assert "Encoding" in capsys.readouterr().err
    assert np.allclose(np.linalg.norm(engine.encode_batch(TEXTS, normalize=True), axis=1), 1, atol=1e-3)
    with pytest.raises(InvalidOptionError, match="the Rust tokenizer is the only one"):
        ArrowEngine(str(model), use_fast_tokenizer=False)


def test_weight_loader(model: Path) -> None:
    loader = WeightLoader(str(model / "weights.parquet"))
    weights = loader.load_weights()
    name = next(iter(weights))
    assert torch.equal(loader.get_layer(name), weights[name])


def test_parquet_is_read_without_our_code(model: Path) -> None:
    table = pq.read_table(model / "weights.parquet", memory_map=True)
    row = table.slice(0, 1).to_pylist()[0]
    data = torch.from_numpy(np.frombuffer(row["data"], dtype=row["dtype"]).copy()).reshape(row["shape"])
    assert torch.equal(data, WeightLoader(model).get_layer(row["layer_name"]))


def test_fast_tokenizer(model: Path) -> None:
    tokenizer = FastTokenizer(str(model / "tokenizer"))
    encoded = tokenizer.encode(TEXTS, max_length=512)
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape == (3, 8)
    assert tokenizer.decode(encoded["input_ids"][1].tolist()) == TEXTS[1]
    rust = Tokenizer.from_file(str(model / "tokenizer" / "tokenizer.json"))
    assert rust.encode(TEXTS[0]).ids == encoded["input_ids"][0].tolist()


def test_inference_core_takes_the_metadata_of_the_loader(model: Path) -> None:
    loader = WeightLoader(model)
    core = InferenceCore(loader.load_weights(), loader.get_metadata(), device="cpu")
    inputs = FastTokenizer(model / "tokenizer").encode(TEXTS)
    vectors = core.forward(inputs["input_ids"], inputs["attention_mask"])
    engine = ArrowEngine(model)
    assert np.allclose(vectors.numpy(), engine.encode(TEXTS, normalize=False), atol=1e-3)
    hidden = torch.ones(3, 8, 32)
    assert torch.equal(core.mean_pooling(hidden, inputs["attention_mask"]), torch.ones(3, 32))


def test_batch_processor(model: Path) -> None:
    engine = ArrowEngine(model)
    processor = BatchProcessor(engine, max_batch_size=2)  # the seed's has no way to give it an engine
    assert processor.add(TEXTS[0]) is None
    full = processor.add(TEXTS[1])
    assert full is not None and len(full) == 2
    processor.add(TEXTS[2])
    assert np.allclose(processor.flush()[0], engine.encode_batch(TEXTS)[2], atol=1e-6)


def test_weights_are_stored_as_float16(model: Path) -> None:
    matrices = [tensor for tensor in WeightLoader(model).load_weights().values() if tensor.dim() == 2]
    assert {tensor.dtype for tensor in matrices} == {torch.float16}
