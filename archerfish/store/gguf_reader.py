"""What GGUF files hold: metadata fields as plain Python, tensors under their Hugging Face names and in that layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.format import TensorInfo, first_line
from archerfish.store.gguf_names import Architecture, tensor_name
from archerfish.store.quants import LAYOUTS, QuantizedTensor, dequantize, split_blocks
from archerfish.store.source import SourceTensor, source_info

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

PLAIN_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
}  # fmt: skip


def open_reader(path: Path) -> Any:
    """A GGUFReader whose tensors all lie inside the file."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Slices plain arrays: each of the reader's hundred thousand slices of a memmap would cost several times as much."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CorruptFileError(f"{path} is not a GGUF file.")
    try:
        reader = Reader(path)
    except Exception as error:  # the reader has no checks of its own: whatever breaks in it, the file is at fault
        raise CorruptFileError(f"{path} is cut off or altered: it has {file_bytes} bytes, {first_line(error)}.") from error
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > file_bytes or tensor.data.nbytes != int(tensor.n_bytes):
            raise CorruptFileError(f"{path} is cut off: {tensor.name!r} ends at byte {end}, the file at {file_bytes}.")
    return reader


def field_value(path: Path, field: Any) -> Any:
    """The value of a metadata field as plain Python."""
    import gguf

    string, array = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
    try:
        if not field.types:
            return None
        if field.types[0] == array:
            if len(field.types) > 1 and field.types[-1] == string:
                return [bytes(field.parts[index]).decode() for index in field.data]
            return [value for index in field.data for value in field.parts[index].tolist()]
        if field.types[0] == string:
            return bytes(field.parts[-1]).decode()
        value = field.parts[-1][0]
        # The shortest decimal: 1e-05, not the 9.999999747378752e-06 that its float32 is.
        return float(str(value)) if field.types[0] == gguf.GGUFValueType.FLOAT32 else value.item()
    except (UnicodeDecodeError, IndexError) as error:
        raise CorruptFileError(f"{path}: the metadata field {field.name!r} cannot be read: {error}.") from error


def make_tensor(
    path: Path, architecture: Architecture, config: Mapping[str, Any], tensor: Any, shape: tuple[int, ...]
) -> SourceTensor:
    name = tensor_name(architecture, tensor.name)
    if name is None:
        raise UnsupportedModelError(
            f"{path}: the tensor {tensor.name!r} is not known for the architecture {architecture.model_type!r}."
        )
    quant_type = tensor.tensor_type.name
    order = row_order(path, architecture, config, name, shape)
    minus_one = architecture.norm_plus_one and name.endswith("norm.weight")
    if quant_type in PLAIN_TYPES:
        info = source_info(path, name, PLAIN_TYPES[quant_type], list(shape))
        return SourceTensor(info, functools.partial(load_plain, tensor, info, order, minus_one))
    check_dequantizable(path, tensor)
    info = source_info(path, name, "float32", list(shape))
    load = functools.partial(load_dequantized, tensor, info, order, minus_one)
    if quant_type in LAYOUTS and not minus_one:
        return SourceTensor(info, load, functools.partial(load_quantized, tensor, info, order))
    return SourceTensor(info, load)


def check_dequantizable(path: Path, tensor: Any) -> None:
    import gguf
    import numpy as np

    _, type_size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    try:
        gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UnsupportedModelError(f"{path}: {tensor.name!r} has the type {kind}, which cannot be dequantised.") from None


def row_order(
    path: Path, architecture: Architecture, config: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> npt.NDArray[np.int64] | None:
    """Which row of the GGUF tensor each row of the Hugging Face tensor is; None when they are the same.

    GGUF keeps llama's rotary pairs side by side, Hugging Face keeps all first halves before all second halves.
    """
    import numpy as np

    if not architecture.permuted or not (".q_proj." in name or ".k_proj." in name):
        return None
    num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    if shape[0] % (2 * num_heads):
        raise CorruptFileError(f"{path}: {name!r} has {shape[0]} rows for {num_heads} heads.")
    rows = np.arange(shape[0]).reshape(num_heads, shape[0] // num_heads // 2, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def load_plain(tensor: Any, info: TensorInfo, order: npt.NDArray[np.int64] | None, minus_one: bool) -> torch.Tensor:
    import numpy as np
    import torch

    data = np.ascontiguousarray(tensor.data)
    values = torch.frombuffer(bytearray(data.tobytes()), dtype=getattr(torch, info.dtype)).view(info.shape)
    if order is not None:
        values = values[torch.from_numpy(order)]
    return values - 1 if minus_one else values


def load_dequantized(tensor: Any, info: TensorInfo, order: npt.NDArray[np.int64] | None, minus_one: bool) -> torch.Tensor:
    import gguf
    import numpy as np
    import torch

    if tensor.tensor_type.name in LAYOUTS:
        values = dequantize(split_blocks(info.name, info.shape, tensor.tensor_type.name, tensor.data))
    else:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(info.shape)
    if order is not None:
        values = values[order]
    return torch.from_numpy(np.ascontiguousarray(values - 1 if minus_one else values))


def load_quantized(tensor: Any, info: TensorInfo, order: npt.NDArray[np.int64] | None) -> QuantizedTensor:
    blocks = tensor.data if order is None else tensor.data[order]
    return split_blocks(info.name, info.shape, tensor.tensor_type.name, blocks)
