"""Weight files of a model as it came: which one counts, and its tensors, safetensors or torch, whole or in shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.store.safetensors_source import open_safetensors
from archerfish.store.sidecars import read_json
from archerfish.store.source import SourceTensor
from archerfish.store.torch_source import open_torch

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
# Looked for in this order: a directory often has the same weights in several formats.
WEIGHT_NAMES = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", TORCH_INDEX)
WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "*.pth", "*.pt", "*.bin")
NOT_WEIGHT_FILES = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


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
