"""Opening a model as it was published: safetensors, torch or GGUF files, of RWKV-7 or of another model.

Every reader checks the whole structure of its files (headers, offsets, shards) before it reads a tensor, so that a truncated or
inconsistent source is refused before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.store.gguf_source import is_rwkv, open_gguf, open_reader
from archerfish.store.metadata import is_converted
from archerfish.store.rwkv_source import read_rwkv_gguf, read_rwkv_tensors
from archerfish.store.source import (
    ModelSource,
    SourceTensor,
    add_cross_encoder_settings,
    optional_json,
    read_embedding,
    transformer_directory,
)  # fmt: skip
from archerfish.store.tokenizer_files import write_tokenizer_files
from archerfish.store.weight_files import find_weights, read_tensors

# Names of RWKV tensors in the files of BlinkDL and of Hugging Face. The last two belong to versions before 7, which the reader
# of RWKV refuses.
RWKV_TENSOR = re.compile(
    r"^blocks\.\d+\.att\.|^model\.layers\.\d+\.attn\.r_k$|^rwkv\.blocks\.\d+\.attention\.|^model\.layers\.\d+\.attn\.bonus$"
)
# Constants that old versions of transformers saved with the weights. Models compute them again.
BUFFERS = re.compile(r"(^|\.)(position_ids|embeddings\.token_type_ids|rotary_emb\.inv_freq|attn\.masked_bias)$")


def open_source(path: Path) -> ModelSource:
    """Open a directory or a single file of weights, checking its structure."""
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist.")
    if is_converted(path):
        raise UnsupportedModelError(f"{path} is already converted.", hint="Open it with WeightLoader, or give its source.")
    directory = transformer_directory(path) if path.is_dir() else path.parent
    weights = find_weights(directory) if path.is_dir() else path
    if weights.suffix == ".gguf":
        reader = open_reader(weights)
        return read_rwkv_gguf(weights, reader) if is_rwkv(reader) else open_gguf(weights, reader)
    kind, files, tensors = read_tensors(weights)
    if any(RWKV_TENSOR.match(tensor.info.name) for tensor in tensors):
        return read_rwkv_tensors(path, weights, kind, files, tensors)
    kept, skipped = without_buffers(tensors)
    root = path if path.is_dir() else directory
    return ModelSource(
        kind=kind,
        path=path,
        files=files,
        config=add_cross_encoder_settings(read_config(directory, weights), root),
        tensors=kept,
        write_tokenizer=lambda target: write_tokenizer_files(directory, target),
        embedding=read_embedding(root),
        generation_config=optional_json(directory / "generation_config.json"),
        skipped=skipped,
    )


def read_config(directory: Path, weights: Path) -> dict[str, Any]:
    """config.json. Only a single .pth file may come without one."""
    config = optional_json(directory / "config.json")
    if config is None:
        if weights.suffix == ".pth":
            return {}
        raise CorruptFileError(f"{directory} has no config.json.", hint="Give the directory that holds the whole model.")
    return config


def without_buffers(tensors: Iterable[SourceTensor]) -> tuple[tuple[SourceTensor, ...], tuple[str, ...]]:
    kept = tuple(tensor for tensor in tensors if not BUFFERS.search(tensor.info.name))
    skipped = tuple(tensor.info.name for tensor in tensors if BUFFERS.search(tensor.info.name))
    if not kept:
        raise CorruptFileError("The source has no tensors.")
    return kept, skipped
