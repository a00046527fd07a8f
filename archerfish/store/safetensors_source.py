"""Reader of safetensors files: the header is checked against the file, tensors are views of a mapping."""

from __future__ import annotations

import functools
import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError
from archerfish.store.format import ITEM_BYTES, TensorInfo
from archerfish.store.source import SourceTensor, source_info

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def open_safetensors(path: Path) -> list[SourceTensor]:
    """The tensors of one file, in the order of their bytes."""
    header, data_offset, data_bytes = read_header(path)
    placed: list[tuple[int, int, TensorInfo]] = []
    for name, entry in header.items():
        if name != "__metadata__":
            placed.append(read_entry(path, name, entry))
    placed.sort(key=lambda item: item[:2])
    end_of_last = 0
    for begin, end, info in placed:
        if begin != end_of_last:
            raise CorruptFileError(f"{path}: the bytes of {info.name!r} do not follow those of the tensor before it.")
        end_of_last = end
    if end_of_last != data_bytes:
        raise CorruptFileError(f"{path} is cut off or altered: its header describes {end_of_last} bytes, it has {data_bytes}.")
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [
        SourceTensor(info, functools.partial(load_tensor, memory, data_offset + begin, info)) for begin, _, info in placed
    ]


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors begin, and how many bytes the file has from there."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
            sizes = f"its header would have {header_bytes} bytes, the file has {file_bytes}"
            raise CorruptFileError(f"{path} is cut off or not a safetensors file: {sizes}.")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: the header is not valid JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CorruptFileError(f"{path}: the header is not an object.")
    return header, 8 + header_bytes, file_bytes - 8 - header_bytes


def read_entry(path: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    fields = entry if isinstance(entry, dict) else {}
    code, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(code, str) or not isinstance(offsets, list) or len(offsets) != 2:
        raise CorruptFileError(f"{path}: the header's entry of {name!r} is not complete.")
    info = source_info(path, name, DTYPES.get(code, code), shape)
    begin, end = offsets
    if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
        raise CorruptFileError(f"{path}: {name!r} has impossible offsets.")
    if end - begin != info.num_params * ITEM_BYTES[info.dtype]:
        raise CorruptFileError(f"{path}: {name!r} has {end - begin} bytes, not what its shape and type say.")
    return begin, end, info


def load_tensor(memory: mmap.mmap, offset: int, info: TensorInfo) -> torch.Tensor:
    import torch


    dtype: torch.dtype = getattr(torch, info.dtype)
    if info.num_params == 0:
        return torch.empty(info.shape, dtype=dtype)
    num_bytes = info.num_params * ITEM_BYTES[info.dtype]
    if offset % ITEM_BYTES[info.dtype]:
        return torch.frombuffer(bytearray(memory[offset : offset + num_bytes]), dtype=dtype).view(info.shape)
    return torch.frombuffer(memory, dtype=dtype, count=info.num_params, offset=offset).view(info.shape)
