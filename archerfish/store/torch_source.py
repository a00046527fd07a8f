"""Reader of torch checkpoints: tensors only (weights_only), mapped where the file's format allows it."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.format import first_line
from archerfish.store.source import SourceTensor, source_info

if TYPE_CHECKING:
    import torch

# How torch names, inside a long message, an object that weights_only does not let through.
FOREIGN_OBJECT = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")
NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module")


def open_torch(path: Path) -> list[SourceTensor]:
    """The tensors of one checkpoint; one that holds other objects is refused."""
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
    mapped = zipfile.is_zipfile(path)
    if not mapped and looks_like_zip(path):
        raise CorruptFileError(f"{path} is cut off: the directory at its end is missing.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = FOREIGN_OBJECT.search(str(error))
        if found:
            hint = "Save its state_dict again as safetensors: objects other than tensors are never unpickled."
            raise UnsupportedModelError(f"{path} holds more than tensors: {found.group(1)}.", hint=hint) from error
        raise CorruptFileError(f"{path} is not a sound torch checkpoint: its pickled part cannot be read.") from error
    except (EOFError, KeyError, AttributeError, IndexError, TypeError) as error:  # whose words say nothing
        raise CorruptFileError(f"{path} is not a sound torch checkpoint: its pickled part cannot be read.") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise CorruptFileError(f"{path} is not a sound torch checkpoint: {first_line(error)}") from error


def looks_like_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def as_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in C order, sharing its memory when it is contiguous."""
    import torch

    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
