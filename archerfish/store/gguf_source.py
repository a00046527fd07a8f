"""Reader of GGUF files: which architecture one has, its configuration, tensors and tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archerfish.errors import UnsupportedModelError
from archerfish.store.files import write_file
from archerfish.store.gguf_names import CONFIG_TENSORS, GGUFFacts, find_architecture, make_config, make_embedding
from archerfish.store.gguf_reader import field_value, make_tensor, open_reader
from archerfish.store.gguf_tokenizer import make_tokenizer_files
from archerfish.store.rwkv_source import read_rwkv_gguf
from archerfish.store.source import ModelSource


def open_gguf(path: Path) -> ModelSource:
    """Open a GGUF file; its tensors are mapped, and dequantised one at a time when they are read."""
    reader = open_reader(path)
    fields = {name: field_value(path, field) for name, field in reader.fields.items()}
    kind = fields.get("general.architecture")
    if "rwkv" in str(kind):
        return read_rwkv_gguf(path, reader)
    architecture = find_architecture(str(path), kind)
    by_name = {str(tensor.name): tensor for tensor in reader.tensors}
    if fields.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{path} is one part of several.", hint="Merge them first with llama-gguf-split.")
    facts = GGUFFacts(
        name=str(path),
        fields={name.removeprefix(f"{kind}."): value for name, value in fields.items()},
        shapes={name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in by_name.items()},
        constants={name: load_constant(path, by_name[name]) for name in CONFIG_TENSORS if name in by_name},
    )
    config = make_config(architecture, facts)
    tensors = [
        make_tensor(path, architecture, config, tensor, facts.shapes[name])
        for name, tensor in by_name.items()
        if name not in CONFIG_TENSORS
    ]
    tokenizer_files = make_tokenizer_files(str(path), facts.fields, config)
    return ModelSource(
        kind="gguf",
        path=path,
        files=(path,),
        config=config,
        tensors=tuple(tensors),
        write_tokenizer=functools.partial(write_files, tokenizer_files),
        embedding=make_embedding(architecture, facts),
    )


def load_constant(path: Path, tensor: Any) -> list[float]:
    if tensor.tensor_type.name != "F32":
        raise UnsupportedModelError(f"{path}: {tensor.name!r} is not of type F32.")
    return [float(value) for value in tensor.data]


def write_files(files: Mapping[str, bytes], target: Path) -> None:
    if files:
        target.mkdir()
    for name, data in files.items():
        write_file(target / name, data)
