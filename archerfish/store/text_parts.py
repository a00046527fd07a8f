"""Checkpoints under other names: models that also take images, of which the text part is kept, GPT-2 and gpt-oss.

Settings and tensors get the names that models of text alone have, so that nothing else needs to know of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.store.format import GROUP_SIZE, Row, TensorInfo, dequantize, make_quantization, mxfp4_scales
from archerfish.store.source import SourceTensor

# The model_type of the text part, empty: as text_config says; and what text_config may leave out.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2", {}),
    "qwen2_5_vl": ("qwen2", {}),
    "qwen3_vl": ("qwen3", {}),
    "mistral3": ("", {}),
    "gemma3": (
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
}
TEXT_PREFIX = re.compile(r"^(language_model\.model|model\.language_model|language_model)\.")
TEXT_TENSOR = re.compile(r"^(model\.(embed_tokens|layers|norm)|lm_head|score)\.")
QUANTIZATION = ("quantization_config", "compression_config")
Arrange = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "norm_epsilon",
}
GPT2_TENSORS = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.c_fc",
    "mlp.c_proj": "mlp.c_proj",
}
GPT2_TENSOR = re.compile(r"^(?:transformer\.)?(?:h\.(\d+)\.)?(\w+(?:\.\w+)?)\.(weight|bias)$")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the settings of the text part at its top, under the usual names."""
    kind, values = config.get("model_type"), dict(config)
    if kind == "gpt2":
        values |= {name: config[own] for own, name in GPT2_KEYS.items() if own in config}
        return values | {"intermediate_size": config.get("n_inner") or 4 * values.get("hidden_size", 0)}
    if kind not in TEXT_PARTS:
        return values
    nested, (text_type, defaults) = config.get("text_config") or {}, TEXT_PARTS[kind]
    values = {name: value for name, value in values.items() if not name.endswith("_config") or name in QUANTIZATION}
    values = defaults | values | {name: value for name, value in nested.items() if value is not None}
    text_type = text_type or str(nested.get("model_type", "mistral"))
    is_classifier = any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ())
    task = "SequenceClassification" if is_classifier else "CausalLM"
    values |= {"model_type": text_type, "architectures": [f"{text_type.removesuffix('_text').capitalize()}For{task}"]}
    for name in ("rope_scaling", "rope_parameters"):  # positions of text are the same in all three parts of a head
        if isinstance(values.get(name), Mapping):
            values[name] = {key: "default" if each == "mrope" else each for key, each in values[name].items()}
    return values


def text_model(config: Mapping[str, Any], tensors: Iterable[SourceTensor]) -> tuple[dict[str, Any], list[SourceTensor]]:
    """Settings and tensors of the text part."""
    values, kind = text_config(config), config.get("model_type")
    if kind == "gpt_oss":
        return values, gpt_oss_tensors(tensors)
    rename = gpt2_tensor if kind == "gpt2" else text_tensor if kind in TEXT_PARTS else None
    if rename is None:
        return values, list(tensors)
    if kind == "gpt2" and any(config.get(name) for name in QUANTIZATION):
        raise UnsupportedModelError(
            "Quantised checkpoints of GPT-2 are not supported.", hint="Take the original model."
        )
    found = [tensor for tensor in map(rename, tensors) if tensor is not None]
    if kind in TEXT_PARTS:
        values["tie_word_embeddings"] = all(tensor.info.name != "lm_head.weight" for tensor in found)
    return values, found


def text_tensor(tensor: SourceTensor) -> SourceTensor | None:
    """A tensor without its prefix; None for those of the other parts."""
    name = TEXT_PREFIX.sub("model.", tensor.info.name).replace("model.lm_head.", "lm_head.")
    return tensor._replace(info=tensor.info._replace(name=name)) if TEXT_TENSOR.match(name) else None


def gpt2_tensor(tensor: SourceTensor) -> SourceTensor | None:
    """A tensor of GPT-2, whose matrices have (inputs, outputs); None for its constants and the head, which is the
    embedding."""
    info, found = tensor.info, GPT2_TENSOR.match(tensor.info.name)
    target = GPT2_TENSORS.get(found[2]) if found else None
    if info.name == "score.weight":  # of a classifier
        return tensor
    if found is None or target is None:
        return None
    name = f"model.{f'layers.{found[1]}.' if found[1] else ''}{target}.{found[3]}"
    if len(info.shape) < 2 or not found[1]:
        return tensor._replace(info=info._replace(name=name))
    return SourceTensor(info._replace(name=name, shape=info.shape[::-1]), transposed(tensor.load))


def transposed(load: Callable[[], npt.NDArray[Any]]) -> Callable[[], npt.NDArray[Any]]:
    return lambda: np.ascontiguousarray(load().T)


def gpt_oss_tensors(tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """Those of gpt-oss with stacks of (outputs, inputs), where all gates of an expert come first. They may be in
    MXFP4."""
    given, found = {tensor.info.name: tensor for tensor in tensors}, list[SourceTensor]()
    for name, tensor in given.items():
        stem, _, kind = name.rpartition("_")
        is_expert = ".mlp.experts." in name
        num_axes = {"proj": 3, "bias": 2}.get(kind) if is_expert else None
        if num_axes and len(tensor.info.shape) != num_axes:
            raise CorruptFileError(f"{name} has the shape {tensor.info.shape}: expected {num_axes} axes.")
        if is_expert and kind == "proj" and f"{name}_blocks" in given:
            raise CorruptFileError(f"There are both {name} and {name}_blocks.")
        arrange: Arrange = gates_first if "gate_up_proj" in name else np.ascontiguousarray
        if is_expert and kind == "blocks":
            found.append(mxfp4_tensor(stem, tensor, given.get(f"{stem}_scales"), arrange))
        elif is_expert and kind == "bias":
            found.append(tensor._replace(load=partial(arranged, tensor, arrange)))
        elif is_expert and kind == "proj":
            shape = (tensor.info.shape[0], *tensor.info.shape[:0:-1])
            load = partial(arranged, tensor, arrange, is_transposed=True)
            found.append(SourceTensor(tensor.info._replace(shape=shape), load))
        elif not is_expert or kind != "scales":
            found.append(tensor)
    return found


def arranged(tensor: SourceTensor, arrange: Arrange, *, is_transposed: bool = False) -> npt.NDArray[Any]:
    array = tensor.load()
    return arrange(array.swapaxes(1, 2) if is_transposed else array)


def gates_first(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The outputs of each expert, which are gates and others by turns."""
    return np.concatenate((array[:, ::2], array[:, 1::2]), axis=1)


def mxfp4_tensor(name: str, blocks: SourceTensor, scales: SourceTensor | None, arrange: Arrange) -> SourceTensor:
    """A stack of matrices. blocks: (experts, outputs, blocks of inputs, 16 bytes of two codes, the lower one first);
    scales:
    an exponent for each block."""
    shape = blocks.info.shape
    types = [tensor.info.dtype for tensor in (blocks, scales) if tensor is not None]
    if set(types) != {"uint8"}:
        raise CorruptFileError(f"{name}_blocks and {name}_scales must be of type uint8, not {' and '.join(types)}.")
    if scales is None or len(shape) != 4 or shape[3] != GROUP_SIZE // 2 or scales.info.shape != shape[:3]:
        found = f"{name}_blocks has the shape {shape} and {name}_scales {scales and scales.info.shape}"
        raise CorruptFileError(f"{found}: expected one scale for each block of {GROUP_SIZE // 2} bytes.")
    info = TensorInfo(name, "float32", (*shape[:2], shape[2] * GROUP_SIZE), make_quantization("MXFP4", 2))

    def load() -> Row:
        packed = arrange(blocks.load())
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1, 2, GROUP_SIZE // 2)
        return Row(info, codes[:, 0] | codes[:, 1] << 4, mxfp4_scales(name, arrange(scales.load())).reshape(-1))

    return SourceTensor(info, lambda: dequantize(load()), load)
