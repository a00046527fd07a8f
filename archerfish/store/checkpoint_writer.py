"""Quantised checkpoints as vLLM and transformers read them: model.safetensors, config.json and the files of the
tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.errors import ValidationError
from archerfish.store.converter import FLOAT_DTYPES, SPARE_BYTES, cast
from archerfish.store.files import check_free_space, sync, write_file
from archerfish.store.format import GROUP_SIZE, ITEM_BYTES, Row, TensorInfo
from archerfish.store.metadata import TOKENIZER_NAME
from archerfish.store.source import DTYPE_CODES, ModelSource, SourceTensor
from archerfish.store.sources import open_source
from archerfish.types import Progress

CODES_OF_DTYPES = {dtype: code for code, dtype in DTYPE_CODES.items()}
WEIGHTS_NAME = "model.safetensors"
GPTQ_ZEROS = 0x77777777  # of symmetric weights: the middle code less one


class Part(NamedTuple):
    """A tensor of the file: what a matrix's row makes it of."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Row], npt.NDArray[Any]]


def write_checkpoint(directory: Path, source: ModelSource, layout: str, dtype: str, progress: Progress) -> None:
    """Fill a new directory from a source with quantised matrices, and read it back."""
    tensors = source.tensors
    plan = [(tensor, parts_of(tensor.info, layout, dtype)) for tensor in tensors]
    write_tensors(directory / WEIGHTS_NAME, plan, progress)
    plain = sorted(
        {t.info.name.removesuffix(".weight") for t in tensors if len(t.info.shape) > 1 and not t.info.quantization}
    )
    settings = SETTINGS[layout](next(t.info for t in tensors if t.info.quantization), sorted({*plain, "lm_head"}))
    config = {**source.config, "torch_dtype": dtype, "quantization_config": settings}
    for name, values in (("config.json", config), ("generation_config.json", source.generation_config)):
        if values:
            write_file(directory / name, (json.dumps(values, indent=1) + "\n").encode())
    source.write_tokenizer(directory / TOKENIZER_NAME)
    for path in (directory / TOKENIZER_NAME).glob("*"):
        path.rename(directory / path.name)
    if (directory / TOKENIZER_NAME).is_dir():
        (directory / TOKENIZER_NAME).rmdir()
    check_checkpoint(directory, source, progress)


def check_checkpoint(directory: Path, source: ModelSource, progress: Progress) -> None:
    """Compare the matrices that our own reader finds with those that were to be written."""
    found = {tensor.info.name: tensor for tensor in open_source(directory).tensors}
    quantised = [tensor for tensor in source.tensors if tensor.info.quantization]
    for index, tensor in enumerate(quantised):
        progress(index, len(quantised), f"validating {tensor.info.name}")
        name = tensor.info.name
        if name not in found or not np.array_equal(found[name].load(), tensor.load()):
            raise ValidationError(f"The tensor {name!r} was written with other values than were found.")


def write_tensors(path: Path, plan: list[tuple[SourceTensor, list[Part]]], progress: Progress) -> None:
    """A safetensors file, one matrix in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor, parts in plan:
        for part in parts:
            end = position + math.prod(part.shape) * ITEM_BYTES[part.dtype]
            name = f"{tensor.info.name.removesuffix('.weight')}.{part.suffix}" if part.suffix else tensor.info.name
            header[name] = {"dtype": CODES_OF_DTYPES[part.dtype], "shape": part.shape, "data_offsets": (position, end)}
            position = end
    check_free_space(path.parent, position + SPARE_BYTES)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, (tensor, parts) in enumerate(plan):
            progress(index, len(plan), f"writing {tensor.info.name}")
            row = Row(tensor.info, tensor.load()) if tensor.load_quantized is None else tensor.load_quantized()
            for part in parts:
                file.write(np.ascontiguousarray(part.make(row)).tobytes())
        sync(file)


def parts_of(info: TensorInfo, layout: str, dtype: str) -> list[Part]:
    """The tensors that a layout has for one of a source."""
    if info.quantization is None:
        stored = dtype if info.dtype in FLOAT_DTYPES else info.dtype
        return [Part("", stored, info.shape, lambda row: cast(info.name, row.data, stored))]
    num_outputs, num_inputs = info.shape
    bits, num_groups = (4 if info.quantization.quant_type == "Q4_0" else 8), num_inputs // info.quantization.group_size
    num_words, scale_type = num_inputs * bits // 32, "float16" if bits == 4 else "float32"

    def scales(row: Row) -> npt.NDArray[Any]:
        return np.asarray(row.scales).reshape(num_outputs, num_groups)

    if layout == "gptq":
        zeros = np.full((num_groups, num_outputs // 8), GPTQ_ZEROS, np.int32)
        groups = (np.arange(num_inputs) * num_groups // num_inputs).astype(np.int32)
        return [
            Part("qweight", "int32", (num_words, num_outputs), lambda row: pack(codes_of(row), bits).T),
            Part("qzeros", "int32", zeros.shape, lambda row: zeros),
            Part("g_idx", "int32", groups.shape, lambda row: groups),
            Part("scales", "float16", (num_groups, num_outputs), lambda row: scales(row).T),
        ]
    scale = Part("weight_scale", scale_type, (num_outputs, num_groups), scales)
    if info.quantization.quant_type == "FP8":
        return [Part("weight", "float8_e4m3fn", info.shape, lambda row: row.data.reshape(info.shape)), scale]
    return [
        Part("weight_packed", "int32", (num_outputs, num_words), lambda row: pack(codes_of(row), bits)),
        scale,
        Part("weight_shape", "int64", (2,), lambda row: np.array(info.shape, np.int64)),
    ]


def codes_of(row: Row) -> npt.NDArray[np.uint8]:
    """Codes from 0 on, (outputs, inputs)."""
    data: npt.NDArray[np.uint8] = row.data
    if row.info.quantization is not None and row.info.quantization.quant_type == "INT8":
        return data.reshape(row.info.shape) ^ np.uint8(128)
    blocks = data.reshape(-1, GROUP_SIZE // 2)
    return np.concatenate((blocks & 15, blocks >> 4), 1).reshape(row.info.shape)


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Words along the inputs, the lowest bits first."""
    words = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    found: npt.NDArray[np.int32] = np.ascontiguousarray(words).view(np.int32)
    return found


def gptq_settings(info: TensorInfo, plain: list[str]) -> dict[str, Any]:
    assert info.quantization is not None
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": info.quantization.group_size,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "modules_to_not_convert": plain,
    }


def compressed_settings(info: TensorInfo, plain: list[str]) -> dict[str, Any]:
    kind = info.quantization
    assert kind is not None
    is_int4, is_float = kind.quant_type == "Q4_0", kind.quant_type == "FP8"
    form = "float-quantized" if is_float else "pack-quantized"
    weights = {
        "num_bits": 4 if is_int4 else 8,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if is_int4 else "channel",
        "group_size": kind.group_size if is_int4 else None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
    }


SETTINGS: Mapping[str, Callable[[TensorInfo, list[str]], dict[str, Any]]] = {
    "gptq": gptq_settings,
    "compressed-tensors": compressed_settings,
}
