"""Small models that the tests of the store write for themselves."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from archerfish.config import ConversionConfig
from archerfish.store import ModelConverter, WeightLoader
from archerfish.types import Progress, no_progress

BERT_CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 12,
}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##ly", "caf", "##e", "你", "A"]


MATRIX = "encoder.layer.0.output.dense.weight"  # one of some_weights that is narrowed; vectors are not


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embeddings.word_embeddings.weight": torch.randn(12, 8, generator=generator),
        "encoder.layer.0.output.dense.weight": torch.randn(8, 16, generator=generator),
        "encoder.layer.0.output.dense.bias": torch.randn(8, generator=generator),
        "scale": torch.tensor(1.5),
    }


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_model(
    directory: Path, weights: dict[str, torch.Tensor] | None = None, *, vocabulary: bool = True, **config: Any
) -> Path:
    """A safetensors source with config.json and, by default, a vocab.txt."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {**BERT_CONFIG, **config})
    if vocabulary:
        (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    save_file(some_weights() if weights is None else weights, directory / "model.safetensors")
    return directory


def convert(
    source: Path, target: Path, *, model_type: str = "auto", progress: Progress = no_progress, **options: Any
) -> WeightLoader:
    """Convert a model with some options of ConversionConfig, and open the result."""
    ModelConverter(ConversionConfig(**options)).convert(source, target, model_type, progress)
    return WeightLoader(target)


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(bytes(data))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let writes to files beyond a size fail, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cut_off(path: Path, num_bytes: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:num_bytes] if num_bytes >= 0 else data[: len(data) + num_bytes])


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }
