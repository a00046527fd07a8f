"""Reader of RWKV-7 in BlinkDL's checkpoints, in Hugging Face's layout and in GGUF, in the form that `models/rwkv7.py`
takes.

Tensors get their Hugging Face names. Matrices have one row per output, and vectors have one dimension. The norm of the
embedding is applied to the embedding table here, so that no step computes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.kernels.stored import widened
from archerfish.store.gguf_source import read_tensor
from archerfish.store.source import ModelSource, SourceTensor, optional_json
from archerfish.store.tokenizer_files import write_tokenizer_files

WORLD_VOCAB_SIZE = 65536
WORLD_END = 0  # end of text in the World vocabulary
MIXES = "rwkvag"  # in the order of GGUF's fused tensor
PRE_NORM = "model.layers.0.pre_norm"
EMBEDDING = "model.embeddings.weight"
# Names outside and inside of layers, in BlinkDL's and then in llama.cpp's files.
TOP_NAMES = {
    "emb": "model.embeddings",
    "ln_out": "model.norm",
    "head": "lm_head",
    "token_embd": "model.embeddings",
    "token_embd_norm": PRE_NORM,
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "ln0": "pre_norm",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "att.ln_x": "attn.g_norm",
    "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj",
    "att.value": "attn.v_proj",
    "att.output": "attn.o_proj",
    "ffn.key": "ffn.key",
    "ffn.value": "ffn.value",
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_ln": "attn.g_norm",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}
VECTOR_NAMES = {
    "time_mix_k_k": "attn.k_k",
    "time_mix_k_a": "attn.k_a",
    "time_mix_r_k": "attn.r_k",
    "channel_mix_lerp_k": "ffn.x_k",
}
LOW_RANK = re.compile(r"(att\.|time_mix_)([wavg])([012])(?:\.weight)?")
LORA_PARTS = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}  # by the digit after w, a, v or g: bias, down, up
VECTOR = re.compile(r"\.(x_[rwkvag]|k_k|k_a|r_k)$")
BLOCK = re.compile(r"^(?:blocks|blk|model\.layers)\.(\d+)\.(.+)$")
FIRST_VALUES = re.compile(
    r"^model\.layers\.0\.attn\.v_lora\."
)  # some files have these tensors; the first layer ignores them
RANKS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}
IS_SEVEN = re.compile(r"\.(att|attn)\.(r_k|k_k)$")
ONLY_SEVEN = "Of the RWKV family only RWKV-7 is supported."
PIECE_ROWS = 1024  # rows of the embedding that are normed at a time
GGUF_KEYS = {
    "num_hidden_layers": "rwkv7.block_count",
    "head_dim": "rwkv7.wkv.head_size",
    "norm_eps": "rwkv7.attention.layer_norm_epsilon",
    "max_position_embeddings": "rwkv7.context_length",
}


def read_rwkv_tensors(
    path: Path, weights: Path, kind: str, files: tuple[Path, ...], tensors: Sequence[SourceTensor]
) -> ModelSource:
    """The source of safetensors or torch tensors; `weights` is the file or index that they are from."""
    if not any(IS_SEVEN.search(tensor.info.name) for tensor in tensors):
        raise UnsupportedModelError(f"{weights} is an RWKV model of a version before 7.", hint=ONLY_SEVEN)
    head_dims = [tensor.info.shape[-1] for tensor in tensors if tensor.info.name.endswith(".r_k")]
    stated = {"head_dim": head_dims[0] if head_dims else None, **(optional_json(weights.parent / "config.json") or {})}
    return make_source(kind, path, files, tensors, stated, weights)


def read_rwkv_gguf(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelSource:
    """The source of a GGUF file that `read_gguf` has read."""
    kind = fields["general.architecture"]
    if kind != "rwkv7":
        raise UnsupportedModelError(f"{path} has the architecture {kind!r}.", hint=ONLY_SEVEN)
    stated = {name: fields[key] for name, key in GGUF_KEYS.items() if key in fields}
    return make_source(
        "gguf", path, (path,), [read_tensor(path, tensors[name], name) for name in tensors], stated, path
    )


def make_source(
    kind: str,
    path: Path,
    files: tuple[Path, ...],
    tensors: Iterable[SourceTensor],
    stated: Mapping[str, Any],
    weights: Path,
) -> ModelSource:
    named = [each for tensor in tensors for each in rename(weights, tensor)]
    by_name = {tensor.info.name: tensor for tensor in named if not FIRST_VALUES.match(tensor.info.name)}
    config = make_config(weights, by_name, stated)
    fold_pre_norm(by_name, config["norm_eps"])
    return ModelSource(
        kind=kind,
        path=path,
        files=files,
        config=config,
        tensors=tuple(by_name.values()),
        write_tokenizer=functools.partial(write_tokenizer_files, weights.parent),
        generation_config=optional_json(weights.parent / "generation_config.json"),
    )


def rename(path: Path, tensor: SourceTensor) -> list[SourceTensor]:
    """A tensor of any layout under its Hugging Face name and in that shape. One tensor of GGUF holds six."""
    name = tensor.info.name
    if name.endswith(".attn.x_x"):
        hint = "Load and save it once with a newer fla package."
        raise UnsupportedModelError(f"{path}: {name!r} has the layout of an old version.", hint=hint)
    if name.startswith(("model.", "lm_head.")):
        return [adapted(tensor, name, flat) if VECTOR.search(name) else tensor]
    block = BLOCK.match(name)
    layer, rest = (f"model.layers.{block[1]}.", block[2]) if block else ("", name)
    low_rank = LOW_RANK.fullmatch(rest)
    if low_rank:
        layout, letter, digit = low_rank.groups()
        change = flat if digit == "0" else transposed if layout == "att." else None
        return [adapted(tensor, f"{layer}attn.{letter}_lora.lora.{LORA_PARTS[digit]}", change)]
    if rest == "time_mix_lerp_fused.weight":
        parts = enumerate(MIXES)
        return [adapted(tensor, f"{layer}attn.x_{mix}", functools.partial(row_of, len(MIXES), i)) for i, mix in parts]
    if VECTOR.search(rest):
        return [adapted(tensor, layer + rest.replace("att.", "attn."), flat)]
    stem, _, suffix = rest.rpartition(".")
    if stem in VECTOR_NAMES:
        return [adapted(tensor, layer + VECTOR_NAMES[stem], flat)]
    part = (LAYER_NAMES if block else TOP_NAMES).get(stem)
    if part is None:
        what = "part of DeepEmbed, a variant that is not supported" if ".ffn.s" in name else "not part of RWKV-7"
        raise UnsupportedModelError(f"{path}: the tensor {name!r} is {what}.")
    return [adapted(tensor, f"{layer}{part}.{suffix}")]


def flat(values: Any) -> Any:
    return values.reshape(-1)


def transposed(values: Any) -> Any:
    return values.squeeze().T


def row_of(num_rows: int, row: int, values: Any) -> Any:
    return values.reshape(num_rows, -1)[row]


def adapted(tensor: SourceTensor, name: str, change: Callable[[Any], Any] | None = None) -> SourceTensor:
    """The tensor under another name and, with `change`, in another shape."""
    if change is None:
        return tensor._replace(info=tensor.info._replace(name=name))
    shape = change(np.broadcast_to(np.int8(0), tensor.info.shape)).shape
    info = tensor.info._replace(name=name, shape=shape, quantization=None)
    return SourceTensor(info, lambda: change(tensor.load()))


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
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": shape("model.layers.0.ffn.key.weight")[0],
        "num_hidden_layers": num_layers,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    for letter, name in RANKS.items():
        layer = 1 if letter == "v" else 0
        config[name] = shape(f"model.layers.{layer}.attn.{letter}_lora.lora.0.weight")[0] if layer < num_layers else 0
    if vocab_size == WORLD_VOCAB_SIZE:
        config["eos_token_id"] = WORLD_END
    for name in ("head_dim", "norm_eps", "max_position_embeddings", "eos_token_id", "bos_token_id"):
        if stated.get(name) is not None:
            config[name] = stated[name]
    if stated.get("num_hidden_layers") not in (None, num_layers):
        raise CorruptFileError(
            f"{path} has {num_layers} layers, but its configuration says {stated['num_hidden_layers']}."
        )
    return config


def fold_pre_norm(tensors: dict[str, SourceTensor], eps: float) -> None:
    """Apply the norm of the embedding, if the model has one, to the embedding table, in float64."""
    weight, bias = (tensors.pop(f"{PRE_NORM}.{end}", None) for end in ("weight", "bias"))
    if weight is None or bias is None:
        return
    table = tensors[EMBEDDING]

    def load() -> npt.NDArray[np.float32]:
        rows = table.load()
        scale = widened(weight.load()).reshape(-1)
        offset = widened(bias.load()).reshape(-1)
        normed = np.empty(rows.shape, np.float32)
        for first in range(0, len(rows), PIECE_ROWS):
            piece = widened(rows[first : first + PIECE_ROWS]).astype(np.float64)
            piece -= piece.mean(1, keepdims=True)
            piece /= np.sqrt(np.square(piece).mean(1, keepdims=True) + eps)
            normed[first : first + PIECE_ROWS] = piece * scale + offset
        return normed

    tensors[EMBEDDING] = SourceTensor(table.info._replace(dtype="float32", quantization=None), load)
