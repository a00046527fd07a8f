"""Opening a model as it was published: safetensors, torch or GGUF files, of RWKV-7 or of another model.

Every reader checks the whole structure of its files (headers, offsets, shards) before it reads a tensor, so that a
truncated or inconsistent source is refused before anything is written.
"""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.background import Lazy
from archerfish.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from archerfish.kernels.stored import numpy_type
from archerfish.store.format import TensorInfo, first_line
from archerfish.store.gguf_source import open_gguf, read_gguf
from archerfish.store.loader import map_any
from archerfish.store.metadata import is_converted
from archerfish.store.quantised_source import read_quantised, read_settings
from archerfish.store.rwkv_source import read_rwkv_gguf, read_rwkv_tensors
from archerfish.store.source import (
    LINEAR_FILES,
    ModelSource,
    SourceTensor,
    cross_encoder_settings,
    optional_json,
    read_embedding,
    read_modules,
    reading,
    source_info,
    transformer_directory,
)
from archerfish.store.text_parts import text_model
from archerfish.store.tokenizer_files import write_tokenizer_files

# In order of preference: a directory often has the same weights in several formats.
WEIGHT_PATTERNS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "*.safetensors",
    "*.gguf",
    "*.pth",
    "*.pt",
    "*.bin",
)
LFS_POINTER = b"version https://git-lfs"
NOT_WEIGHT_FILES = (
    "training_args.bin",
    "optimizer.bin",
    "scheduler.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
)
# Names of RWKV tensors in the files of BlinkDL and of Hugging Face. The last two belong to versions before 7, which the
# reader of RWKV refuses.
RWKV_TENSOR = re.compile(
    r"^blocks\.\d+\.att\.|^model\.layers\.\d+\.attn\.r_k$|^rwkv\.blocks\.\d+\.attention\.|^model\.layers\.\d+\.attn\.bonus$"
)
# Constants that old versions of transformers saved with the weights. Models compute them again.
BUFFERS = re.compile(r"(^|\.)(position_ids|embeddings\.token_type_ids|rotary_emb\.inv_freq|attn\.masked_bias)$")


@reading()
def open_source(path: Path) -> ModelSource:
    """Open a directory or a single file of weights, checking its structure."""
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist.")
    if is_converted(path):
        raise UnsupportedModelError(
            f"{path} is already converted.", hint="Open it with WeightLoader, or give its source."
        )
    root = path if path.is_dir() else path.parent
    directory = transformer_directory(root) if path.is_dir() else root
    refuse_adapter(directory)
    weights = find_weights(directory) if path.is_dir() else path
    if weights.suffix == ".gguf":
        fields, arrays = read_gguf(weights)
        is_rwkv = "rwkv" in str(fields.get("general.architecture"))
        return read_rwkv_gguf(weights, fields, arrays) if is_rwkv else open_gguf(weights, fields, arrays)
    config = optional_json(directory / "config.json")
    settings = read_settings(path, config or {})
    kind, files, found = read_tensors(weights)
    for prefix, file in added_files(root if path.is_dir() else None):
        added = read_tensors(file)[2]
        files, found = (*files, file), [*found, *(tensor.renamed(f"{prefix}.{tensor.info.name}") for tensor in added)]
    tensors = read_quantised(path, settings, found)
    if any(RWKV_TENSOR.match(tensor.info.name) for tensor in tensors):
        return read_rwkv_tensors(path, weights, kind, files, tensors)
    kept = tuple(tensor for tensor in tensors if not BUFFERS.search(tensor.info.name))
    if not kept:
        raise CorruptFileError(f"{path} has no tensors.")
    values, parts = text_model(config or {}, kept)
    if config is None and weights.suffix != ".pth":
        raise CorruptFileError(
            f"{directory} has no config.json.", hint="Give the directory that holds the whole model."
        )
    return ModelSource(
        kind=kind,
        path=path,
        files=files,
        config={**cross_encoder_settings(root), **values},
        tensors=tuple(parts),
        write_tokenizer=functools.partial(write_tokenizer_files, directory),
        embedding=with_sizes(path, read_embedding(root), kept),
        generation_config=optional_json(directory / "generation_config.json"),
        skipped=tuple(tensor.info.name for tensor in tensors if BUFFERS.search(tensor.info.name)),
    )


def refuse_adapter(directory: Path) -> None:
    """Say what to do with the directory of a LoRA adapter, which many take for a model."""
    stated = None if (directory / "config.json").is_file() else optional_json(directory / "adapter_config.json")
    if stated is not None:
        hint = f"Give the model that it was made for ({stated.get('base_model_name_or_path')}), and this with --adapter or "
        raise UnsupportedModelError(f"{directory} is an adapter, not a model.", hint=f"{hint}--lora-modules NAME=PATH.")


def with_sizes(path: Path, embedding: dict[str, Any] | None, tensors: Iterable[SourceTensor]) -> dict[str, Any] | None:
    """With the size of a layer without a name, whose matrix lies among the transformer's."""
    for layer in (embedding or {}).get("layers") or ():
        if not layer["name"]:
            shape = next((tensor.info.shape for tensor in tensors if tensor.info.name == "linear.weight"), ())
            if len(shape) != 2:
                raise CorruptFileError(f"{path} has no matrix linear.weight, the last layer of a ColBERT.")
            layer["sizes"] = shape[::-1]
    return embedding


def added_files(root: Path | None) -> Iterator[tuple[str, Path]]:
    """Files of weights behind the transformer's, and what their tensors' names begin with."""
    if root is not None:
        yield from ((module.path.name, find_weights(module.path)) for module in read_modules(root).of("Dense"))
        yield from ((Path(name).stem, root / name) for name in LINEAR_FILES if (root / name).is_file())


def find_weights(directory: Path) -> Path:
    """The file with the weights of a directory, or the index of its shards."""
    for pattern in WEIGHT_PATTERNS:
        found = sorted(path for path in directory.glob(pattern) if path.is_file() and path.name not in NOT_WEIGHT_FILES)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:4])
            raise UnsupportedModelError(f"{directory} has several weight files: {names}.", hint="Name the one to use.")
    raise ModelNotFoundError(f"{directory} has no weights: no safetensors, torch or GGUF file.")


def read_tensors(weights: Path) -> tuple[str, tuple[Path, ...], list[SourceTensor]]:
    """Kind, files and tensors of a safetensors or torch source; `weights` may be the index of a sharded one."""
    suffix = Path(weights.name.removesuffix(".index.json")).suffix
    if suffix not in OPENERS:
        hint = "Supported: .safetensors, .pth, .pt, .bin, .gguf."
        raise UnsupportedModelError(f"{weights} is not a supported kind of weight file.", hint=hint)
    kind, opener = OPENERS[suffix]
    if weights.suffix != ".json":
        return kind, (weights,), opener(weights)
    return kind, *read_shards(weights, opener)


def read_shards(
    index: Path, opener: Callable[[Path], list[SourceTensor]]
) -> tuple[tuple[Path, ...], list[SourceTensor]]:
    """Files and tensors of a sharded source. Every shard and tensor that the index names must exist exactly once."""
    weight_map = (optional_json(index) or {}).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
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
                raise CorruptFileError(
                    f"The tensor {tensor.info.name!r} is in both {other} and {name} of {index.parent}."
                )
            tensors.append(tensor)
    for tensor_name, name in weight_map.items() - found.items():
        raise CorruptFileError(f"{index.parent / name} has no tensor {tensor_name!r}, which {index.name} names.")
    return tuple(index.parent / name for name in names), tensors


def open_safetensors(path: Path) -> list[SourceTensor]:
    """The tensors of one file, in the order of their bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="np")  # checks the header; its arrays would not have bfloat16
        names = file.offset_keys()
    except SafetensorError as error:
        if path.open("rb").read(len(LFS_POINTER)) == LFS_POINTER:
            hint = "Run `git lfs pull` where it was cloned, or download the file."
            raise CorruptFileError(f"{path} is a pointer of Git LFS to the file, not the file.", hint=hint) from None
        raise CorruptFileError(f"{path} is not a sound safetensors file: {first_line(error)}.") from error
    with path.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        start = opened.tell()
    mapped = Lazy(lambda: np.frombuffer(map_any(path), np.uint8)[start:])

    def load(info: TensorInfo, first: int, last: int) -> npt.NDArray[Any]:
        return mapped.get()[first:last].view(numpy_type(info.dtype)).reshape(info.shape)

    tensors = []
    for name in names:
        info = source_info(path, name, header[name]["dtype"], header[name]["shape"])
        tensors.append(SourceTensor(info, functools.partial(load, info, *header[name]["data_offsets"])))
    return tensors


# Finds the class that `weights_only` refuses in torch's long message.
FOREIGN_OBJECT = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")
NESTED_KEYS = ("state_dict", "model_state_dict", "model", "module")


def open_torch(path: Path) -> list[SourceTensor]:
    """The tensors of one checkpoint. Objects other than tensors are refused."""
    try:
        import torch
    except ImportError as error:
        hint = "Install it: pip install 'archerfish[torch]'. Or take the model's safetensors files."
        raise UnsupportedModelError(f"{path} was saved by torch, which is not installed.", hint=hint) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises errors of many kinds for a damaged file
        found = FOREIGN_OBJECT.search(str(error))
        if found:
            hint = "Save its state_dict again as safetensors: objects other than tensors are never unpickled."
            raise UnsupportedModelError(f"{path} holds more than tensors: {found.group(1)}.", hint=hint) from error
        # torch advises to load a damaged file without its safeguard, so its words are not passed on.
        raise CorruptFileError(f"{path} is not a sound torch checkpoint ({type(error).__name__}).") from error
    if isinstance(state, dict):
        state = next((state[key] for key in NESTED_KEYS if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not state:
        raise UnsupportedModelError(f"{path} holds no dictionary of tensors.")
    tensors = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModelError(f"{path}: {name!r} is not a tensor but {type(value).__name__}.")
        if value.layout != torch.strided or value.is_quantized:
            raise UnsupportedModelError(f"{path}: {name!r} is a sparse or quantised tensor.")
        info = source_info(path, name, str(value.dtype).removeprefix("torch."), list(value.shape))
        plain = value.detach().view(torch.uint16) if value.dtype == torch.bfloat16 else value.detach()
        tensors.append(SourceTensor(info, plain.numpy))
    return tensors


OPENERS: dict[str, tuple[str, Callable[[Path], list[SourceTensor]]]] = {
    ".safetensors": ("safetensors", open_safetensors),
    ".pth": ("torch", open_torch),
    ".pt": ("torch", open_torch),
    ".bin": ("torch", open_torch),
}
