"""Reader of RWKV-7 in BlinkDL's checkpoints, in Hugging Face's layout and in GGUF, in the form that `models/rwkv7.py` takes.

Tensors get their Hugging Face names. Matrices have one row per output, and vectors have one dimension. The norm of the
embedding is applied to the embedding table here, in float32, so that no step computes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.gguf_source import read_fields, read_tensor
from archerfish.store.source import ModelSource, SourceTensor, optional_json
from archerfish.store.tokenizer_files import write_tokenizer_files
from archerfish.store.weight_files import find_weights, read_tensors

if TYPE_CHECKING:
    import torch

WORLD_VOCAB_SIZE = 65536
WORLD_END = 0  # end of text in the World vocabulary
MIXES = "rwkvag"  # in the order of GGUF's fused tensor
PRE_NORM = "model.layers.0.pre_norm"
EMBEDDING = "model.embeddings.weight"
BLINK_TOP = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
BLINK_PARTS = {
    "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm", "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj", "att.value": "attn.v_proj", "att.output": "attn.o_proj",
    "ffn.key": "ffn.key", "ffn.value": "ffn.value",
}
GGUF_TOP = {"token_embd": "model.embeddings", "token_embd_norm": PRE_NORM, "output_norm": "model.norm", "output": "lm_head"}
GGUF_PARTS = {
    "attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm", "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj", "time_mix_value": "attn.v_proj", "time_mix_output": "attn.o_proj",
    "channel_mix_key": "ffn.key", "channel_mix_value": "ffn.value",
}
GGUF_VECTORS = {
    "time_mix_k_k": "attn.k_k", "time_mix_k_a": "attn.k_a", "time_mix_r_k": "attn.r_k", "channel_mix_lerp_k": "ffn.x_k",
}
LORA_PARTS = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}  # by the digit after w, a, v or g: bias, down, up
VECTOR = re.compile(r"\.(x_[rwkvag]|k_k|k_a|r_k)$")
BLOCK = re.compile(r"^(?:blocks|blk|model\.layers)\.(\d+)\.(.+)$")
FIRST_VALUES = re.compile(r"^model\.layers\.0\.attn\.v_lora\.")  # some files have these tensors; the first layer ignores them
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}
IS_SEVEN = re.compile(r"\.(att|attn)\.(r_k|k_k)$")
ONLY_SEVEN = "Of the RWKV family only RWKV-7 is supported."
GGUF_KEYS = {
    "num_hidden_layers": "rwkv7.block_count", "head_dim": "rwkv7.wkv.head_size",
    "norm_eps": "rwkv7.attention.layer_norm_epsilon", "max_position_embeddings": "rwkv7.context_length",
}


def read_rwkv7(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a safetensors or torch model."""
    weights = find_weights(path) if path.is_dir() else path
    source = read_rwkv_tensors(path, weights, *read_tensors(weights))
    return source.config, {tensor.info.name: tensor.load() for tensor in source.tensors}


def read_rwkv_tensors(
    path: Path, weights: Path, kind: str, files: tuple[Path, ...], tensors: Sequence[SourceTensor]
) -> ModelSource:
    """The source of safetensors or torch tensors; `weights` is the file or index that they are from."""
    if not any(IS_SEVEN.search(tensor.info.name) for tensor in tensors):
        raise UnsupportedModelError(f"{weights} is an RWKV model of a version before 7.", hint=ONLY_SEVEN)
    is_blink = any(tensor.info.name.startswith("blocks.") for tensor in tensors)
    named = [from_blink(weights, tensor) if is_blink else from_hub(weights, tensor) for tensor in tensors]
    head_dims = [tensor.info.shape[-1] for tensor in tensors if tensor.info.name.endswith(".r_k")]
    stated = {"head_dim": head_dims[0] if head_dims else None, **(optional_json(weights.parent / "config.json") or {})}
    source = make_source(kind, path, files, named, stated, weights)
    return replace(source, generation_config=optional_json(weights.parent / "generation_config.json"))


def read_rwkv_gguf(path: Path, reader: Any) -> ModelSource:
    """The source of an opened GGUF file."""
    fields = read_fields(path, reader)
    kind = fields.get("general.architecture")
    if kind != "rwkv7":
        raise UnsupportedModelError(f"{path} has the architecture {kind!r}.", hint=ONLY_SEVEN)
    tensors = [
        read_tensor(path, tensor, str(tensor.name), tuple(int(n) for n in reversed(tensor.shape))) for tensor in reader.tensors
    ]
    named = [each for tensor in tensors for each in from_gguf(path, tensor)]
    stated = {name: fields[key] for name, key in GGUF_KEYS.items() if key in fields}
    return make_source("gguf", path, (path,), named, stated, path)


def from_blink(path: Path, tensor: SourceTensor) -> SourceTensor:
    """A tensor of BlinkDL's layout (blocks.0.att.w1 ...)."""
    name = tensor.info.name
    block = BLOCK.match(name)
    if block is None:
        stem, _, suffix = name.rpartition(".")
        return rename(path, tensor, BLINK_TOP.get(stem), f".{suffix}")
    layer, rest = f"model.layers.{block[1]}.", block[2]
    found = re.fullmatch(r"att\.([wavg])([012])", rest)
    if found:
        name = f"{layer}attn.{found[1]}_lora.lora.{LORA_PARTS[found[2]]}"
        return adapted(tensor, name, flat if found[2] == "0" else transposed)
    if VECTOR.search(rest):
        return adapted(tensor, layer + rest.replace("att.", "attn."), flat)
    stem, _, suffix = rest.rpartition(".")
    part = BLINK_PARTS.get(stem)
    return rename(path, tensor, None if part is None else layer + part, f".{suffix}")


def from_hub(path: Path, tensor: SourceTensor) -> SourceTensor:
    """A tensor of Hugging Face's layout (model.layers.0.attn.w_lora.lora.0.weight ...)."""
    name = tensor.info.name
    if name.endswith(".attn.x_x"):
        raise UnsupportedModelError(
            f"{path}: {name!r} has the layout of an old version.", hint="Load and save it once with a newer fla package."
        )
    return adapted(tensor, name, flat) if VECTOR.search(name) else tensor


def from_gguf(path: Path, tensor: SourceTensor) -> list[SourceTensor]:
    """The tensors that one tensor of llama.cpp's layout (blk.0.time_mix_w1.weight ...) holds."""
    stem, _, suffix = tensor.info.name.rpartition(".")
    block = BLOCK.match(stem)
    if block is None:
        return [rename(path, tensor, GGUF_TOP.get(stem), f".{suffix}")]
    layer, rest = f"model.layers.{block[1]}.", block[2]
    found = re.fullmatch(r"time_mix_([wavg])([012])", rest)
    if found:
        name = f"{layer}attn.{found[1]}_lora.lora.{LORA_PARTS[found[2]]}"
        return [adapted(tensor, name, flat) if found[2] == "0" else adapted(tensor, name)]
    if rest == "time_mix_lerp_fused":
        parts = enumerate(MIXES)
        return [adapted(tensor, f"{layer}attn.x_{mix}", functools.partial(row_of, len(MIXES), i)) for i, mix in parts]
    if rest in GGUF_VECTORS:
        return [adapted(tensor, layer + GGUF_VECTORS[rest], flat)]
    part = GGUF_PARTS.get(rest)
    return [rename(path, tensor, None if part is None else layer + part, f".{suffix}")]


def rename(path: Path, tensor: SourceTensor, stem: str | None, suffix: str) -> SourceTensor:
    if stem is None:
        name = tensor.info.name
        what = "part of DeepEmbed, a variant that is not supported" if ".ffn.s" in name else "not part of RWKV-7"
        raise UnsupportedModelError(f"{path}: the tensor {name!r} is {what}.")
    return adapted(tensor, stem + suffix)


# The next three take tensors of torch and arrays of numpy.
def flat(tensor: Any) -> Any:
    return tensor.reshape(-1)


def transposed(tensor: Any) -> Any:
    return tensor.squeeze().T


def row_of(num_rows: int, row: int, tensor: Any) -> Any:
    return tensor.reshape(num_rows, -1)[row]


def adapted(tensor: SourceTensor, name: str, change: Callable[[Any], Any] | None = None) -> SourceTensor:
    """The tensor under another name and, with `change`, in another shape."""
    if change is None:
        return replace(tensor, info=tensor.info._replace(name=name))
    import numpy as np

    shape = change(np.broadcast_to(np.int8(0), tensor.info.shape)).shape  # `archerfish doctor` reads shapes without torch
    return SourceTensor(tensor.info._replace(name=name, shape=shape), functools.partial(load_changed, tensor, change))


def load_changed(tensor: SourceTensor, change: Callable[[Any], Any]) -> torch.Tensor:
    changed: torch.Tensor = change(tensor.load()).contiguous()
    return changed


def make_source(
    kind: str, path: Path, files: tuple[Path, ...], tensors: Iterable[SourceTensor], stated: Mapping[str, Any], weights: Path
) -> ModelSource:
    by_name = {tensor.info.name: tensor for tensor in tensors if not FIRST_VALUES.match(tensor.info.name)}
    config = make_config(weights, by_name, stated)
    fold_pre_norm(by_name, config["norm_eps"])
    directory = weights.parent
    return ModelSource(
        kind=kind, path=path, files=files, config=config, tensors=tuple(by_name.values()),
        write_tokenizer=lambda target: write_tokenizer_files(directory, target),
    )


def make_config(path: Path, tensors: Mapping[str, SourceTensor], stated: Mapping[str, Any]) -> dict[str, Any]:
    """config.json from the shapes of the tensors and the values that the files state."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors or len(tensors[name].info.shape) != 2:
            raise CorruptFileError(f"{path} is not complete: it has no matrix {name!r}.")
        return tensors[name].info.shape

    numbers = [int(found[1]) for name in tensors if (found := BLOCK.match(name))]
    num_layers = max(numbers, default=-1) + 1
    vocab_size, width = shape(EMBEDDING)
    config: dict[str, Any] = {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": vocab_size, "hidden_size": width,
        "intermediate_size": shape("model.layers.0.ffn.key.weight")[0], "num_hidden_layers": num_layers, "head_dim": 64,
        "norm_eps": 1e-5, "tie_word_embeddings": False,
    }
    for letter, name in RANKS.items():
        layer = 1 if letter == "v" else 0
        config[name] = shape(f"model.layers.{layer}.attn.{letter}_lora.lora.0.weight")[0] if layer < num_layers else 0
    if vocab_size == WORLD_VOCAB_SIZE:
        config["eos_token_id"] = WORLD_END
    for name in ("head_dim", "norm_eps", "max_position_embeddings", "eos_token_id", "bos_token_id"):
        if stated.get(name) is not None:
            config[name] = stated[name]
    stated_layers = stated.get("num_hidden_layers")
    if stated_layers is not None and stated_layers != num_layers:
        raise CorruptFileError(f"{path} has {num_layers} layers, but its configuration says {stated_layers}.")
    return config


def fold_pre_norm(tensors: dict[str, SourceTensor], eps: float) -> None:
    """Apply the norm of the embedding, if the model has one, to the embedding table."""
    weight, bias = (tensors.pop(f"{PRE_NORM}.{end}", None) for end in ("weight", "bias"))
    if weight is None or bias is None:
        return
    table = tensors[EMBEDDING]
    load = functools.partial(normed_table, table, weight, bias, eps)
    tensors[EMBEDDING] = SourceTensor(table.info._replace(dtype="float32"), load)


def normed_table(table: SourceTensor, weight: SourceTensor, bias: SourceTensor, eps: float) -> torch.Tensor:
    import torch

    rows, scale, offset = (each.load().float() for each in (table, weight, bias))
    return torch.nn.functional.layer_norm(rows, scale.shape, scale.reshape(-1), offset.reshape(-1), eps)
