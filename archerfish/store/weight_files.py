"""Safetensors and torch files: which file of a directory holds the weights, and its tensors, in one file or in shards.

The structure of a file (header, offsets, shards) is checked before a tensor is read.
"""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.store.format import first_line
from archerfish.store.source import SourceTensor, read_json, source_info

if TYPE_CHECKING:
    import torch

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
# In order of preference: a directory often has the same weights in several formats.
WEIGHT_NAMES = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", TORCH_INDEX)
WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "*.pth", "*.pt", "*.bin")
NOT_WEIGHT_FILES = ("training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def find_weights(directory: Path) -> Path:
    """The file with the weights of a directory, or the index of its shards."""
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
        f"{weights} is not a supported kind of weight file.", hint="Supported: .safetensors, .pth, .pt, .bin, .gguf."
    )


def read_shards(index: Path, opener: Callable[[Path], list[SourceTensor]]) -> tuple[tuple[Path, ...], list[SourceTensor]]:
    """Files and tensors of a sharded source. Every shard and tensor that the index names must exist exactly once."""
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
            raise CorruptFileError(f"{index.parent / name} has no tensor {tensor_name!r}, which {index.name} names.")
    return tuple(index.parent / name for name in names), tensors


SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def open_safetensors(path: Path) -> list[SourceTensor]:
    """The tensors of one file, in the order of their bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="np")  # the header does not need torch
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise CorruptFileError(f"{path} is not a sound safetensors file: {first_line(error)}.") from error
    tensors = []
    for name, found in slices.items():
        code = found.get_dtype()
        info = source_info(path, name, SAFETENSORS_DTYPES.get(code, code), found.get_shape())
        tensors.append(SourceTensor(info, functools.partial(load_safetensor, path, name)))
    return tensors


def load_safetensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


# Finds the class that `weights_only` refuses in torch's long message.
FOREIGN_OBJECT = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")
NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module")


def open_torch(path: Path) -> list[SourceTensor]:
    """The tensors of one checkpoint. Objects other than tensors are refused."""
    import torch

    state = load_checkpoint(path)
    for key in NESTED_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not state:
        raise UnsupportedModelError(f"{path} holds no dictionary of tensors.")
    tensors = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModelError(f"{path}: {name!r} is not a tensor but {type(value).__name__}.")
        if value.layout != torch.strided or value.is_quantized:
            raise UnsupportedModelError(f"{path}: {name!r} is a sparse or quantised tensor.")
        info = source_info(path, name, str(value.dtype).removeprefix("torch."), list(value.shape))
        tensors.append(SourceTensor(info, value.detach))
    return tensors


def load_checkpoint(path: Path) -> Any:
    import torch

    if not path.stat().st_size:
        raise CorruptFileError(f"{path} is empty.")
    with path.open("rb") as file:
        has_zip_mark = file.read(2) == b"PK"
    mapped = zipfile.is_zipfile(path)
    if has_zip_mark and not mapped:
        raise CorruptFileError(f"{path} is cut off: the directory at its end is missing.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, IndexError, TypeError) as error:
        found = FOREIGN_OBJECT.search(str(error))
        if found:
            hint = "Save its state_dict again as safetensors: objects other than tensors are never unpickled."
            raise UnsupportedModelError(f"{path} holds more than tensors: {found.group(1)}.", hint=hint) from error
        raise CorruptFileError(f"{path} is not a sound torch checkpoint: its pickled part cannot be read.") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound torch checkpoint: {first_line(error)}") from error
