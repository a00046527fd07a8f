"""Models as they come: which files a source has, its configuration, and its tensors one at a time.

Every reader checks the whole structure of its files (headers, offsets, shards) before the first tensor is read, so that a
truncated or inconsistent source is refused before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.store.metadata import is_converted
from archerfish.store.sidecars import (
    add_cross_encoder_settings,
    optional_json,
    read_embedding,
    read_json,
    transformer_directory,
)
from archerfish.store.source import ModelSource, SourceTensor
from archerfish.store.tokenizer_files import write_tokenizer_files

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
# Looked for in this order: a directory often has the same weights in several formats.
WEIGHT_NAMES = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", TORCH_INDEX)
WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "*.pth", "*.pt", "*.bin")
NOT_WEIGHT_FILES = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
RWKV_TENSOR = re.compile(r"^blocks\.\d+\.att\.|^model\.layers\.\d+\.attn\.r_k$")  # as BlinkDL and Hugging Face name them
# Constants that old versions of transformers saved beside the weights; every model rebuilds them.
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
        from archerfish.store.gguf_source import open_gguf

        return open_gguf(weights)
    kind, files, tensors = read_tensors(weights)
    if any(RWKV_TENSOR.match(tensor.info.name) for tensor in tensors):
        from archerfish.store.rwkv_source import read_rwkv_tensors

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
    """config.json; only a bare torch checkpoint (RWKV is published so) may come without."""
    config = optional_json(directory / "config.json")
    if config is None:
        if weights.suffix == ".pth":
            return {}
        raise CorruptFileError(f"{directory} has no config.json.", hint="Give the directory that holds the whole model.")
    return config


def find_weights(directory: Path) -> Path:
    for name in WEIGHT_NAMES:
        if (directory / name).is_file():
            return directory / name
    for pattern in WEIGHT_PATTERNS:
        found = sorted(path for path in directory.glob(pattern) if path.name not in NOT_WEIGHT_FILES)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:4])
            raise UnsupportedModelError(f"{directory} has several weight files: {names}.", hint="Name the one to use.")
    raise ModelNotFoundError(f"{directory} has no weights: no safetensors, torch or GGUF file.")


def read_tensors(weights: Path) -> tuple[str, tuple[Path, ...], list[SourceTensor]]:
    """Kind, files and tensors of a safetensors or torch source; `weights` may be the index of a sharded one."""
    from archerfish.store.safetensors_source import open_safetensors
    from archerfish.store.torch_source import open_torch

    name = weights.name
    if name.endswith(".index.json"):
        kind, opener = ("safetensors", open_safetensors) if name.endswith(".safetensors.index.json") else ("torch", open_torch)
        files, tensors = read_shards(weights, opener)
        return kind, files, tensors
    if weights.suffix == ".safetensors":
        return "safetensors", (weights,), open_safetensors(weights)
    if weights.suffix in TORCH_SUFFIXES:
        return "torch", (weights,), open_torch(weights)
    raise UnsupportedModelError(
        f"{weights} is not a kind of weight file that is supported.", hint="Supported: .safetensors, .pth, .pt, .bin, .gguf."
    )


def read_shards(index: Path, opener: Callable[[Path], list[SourceTensor]]) -> tuple[tuple[Path, ...], list[SourceTensor]]:
    """All tensors of a sharded source; every shard and tensor that the index names must be there, once."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptFileError(f"{index} has no weight_map.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or name in (".", ".."):
            raise CorruptFileError(f"{index} names the shard {name!r}, which is not a plain file name.")
        if not (index.parent / name).is_file():
            raise CorruptFileError(f"{index.parent / name} is missing; {index.name} names it.")
    found: dict[str, str] = {}
    tensors: list[SourceTensor] = []
    for name in names:
        for tensor in opener(index.parent / name):
            other = found.setdefault(tensor.info.name, name)
            if other != name:
                raise CorruptFileError(f"The tensor {tensor.info.name!r} is in both {other} and {name} of {index.parent}.")
            tensors.append(tensor)
    for tensor_name, name in weight_map.items():
        if found.get(tensor_name) != name:
            raise CorruptFileError(f"{index.parent / name} has no tensor {tensor_name!r}; {index.name} says so.")
    return tuple(index.parent / name for name in names), tensors


def without_buffers(tensors: Iterable[SourceTensor]) -> tuple[tuple[SourceTensor, ...], tuple[str, ...]]:
    kept = tuple(tensor for tensor in tensors if not BUFFERS.search(tensor.info.name))
    skipped = tuple(tensor.info.name for tensor in tensors if BUFFERS.search(tensor.info.name))
    if not kept:
        raise CorruptFileError("The source has no tensors.")
    return kept, skipped
