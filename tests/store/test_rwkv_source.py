"""RWKV-7 in each layout: the same tensors, whichever file they come from; and clear words for files that are not it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import safetensors.torch
import torch

from archerfish.errors import ArcherfishError, CorruptFileError, UnsupportedModelError
from archerfish.store.sources import open_source
from tests.models.recurring import SIZES, Size, blink_weights, read_rwkv7
from tests.store.gguf_models import finish
from tests.store.models import convert

Tensors = dict[str, torch.Tensor]
TINY = SIZES["tiny"]
HUB_CONFIG = {
    "model_type": "rwkv7",
    "head_dim": 64,
    "num_hidden_layers": 2,
    "norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
HUB_PROJECTIONS = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}


def to_hub(weights: Tensors) -> Tensors:
    """As fla's own converter names and turns them."""
    made: Tensors = {}
    top = {
        "emb.weight": "model.embeddings.weight",
        "head.weight": "lm_head.weight",
        "ln_out.weight": "model.norm.weight",
    }
    top["ln_out.bias"] = "model.norm.bias"
    for name, tensor in weights.items():
        if name in top:
            made[top[name]] = tensor
            continue
        if name.startswith("blocks.0.att.v") and "value" not in name:
            continue
        _, layer, part, *rest = name.split(".")
        part = {"att": "attn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}.get(part, part)
        if re.fullmatch("[wavg][012]", rest[0]):
            letter, number = rest[0][0], rest[0][1]
            tensor = tensor.flatten() if number == "0" else tensor.t().contiguous()
            rest = [f"{letter}_lora.lora.{ {'0': '2.bias', '1': '0.weight', '2': '2.weight'}[number] }"]
        elif part == "attn" and rest[0] in HUB_PROJECTIONS:
            rest = [HUB_PROJECTIONS[rest[0]], *rest[1:]]
        elif rest[0] in ("k_k", "k_a") or (part == "ffn" and rest[0] == "x_k"):
            tensor = tensor.flatten()
        made[".".join(["model.layers", layer, part, *rest])] = tensor
    return made


GGUF_NAMES = {
    "ln1": "attn_norm",
    "ln2": "attn_norm_2",
    "att.ln_x": "time_mix_ln",
    "att.receptance": "time_mix_receptance",
    "att.key": "time_mix_key",
    "att.value": "time_mix_value",
    "att.output": "time_mix_output",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
    "ffn.x_k": "channel_mix_lerp_k",
}
GGUF_TOP = {"emb": "token_embd", "blocks.0.ln0": "token_embd_norm", "ln_out": "output_norm", "head": "output"}


def to_gguf(weights: Tensors) -> Tensors:
    """As llama.cpp's converter names and turns them, with its stand-ins for what the first layer does not have."""
    made: Tensors = {}
    for name, tensor in weights.items():
        stem, _, suffix = name.rpartition(".")
        if stem in GGUF_TOP:
            made[f"{GGUF_TOP[stem]}.{suffix}"] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        block = f"blk.{layer}."
        part, _, end = rest.rpartition(".")
        if re.fullmatch(r"att\.x_.", rest):
            stacked = torch.stack([weights[f"blocks.{layer}.att.x_{mix}"] for mix in "rwkvag"])
            made[f"{block}time_mix_lerp_fused.weight"] = stacked
        elif re.fullmatch(r"att\.[wavg][012]", rest):
            if layer == "0" and end[0] == "v":
                continue
            made[f"{block}time_mix_{end}.weight"] = tensor.flatten() if end[1] == "0" else tensor.t().contiguous()
            if layer == "0" and end[0] == "a":
                made[f"{block}time_mix_v{end[1]}.weight"] = made[f"{block}time_mix_{end}.weight"]
        elif rest in GGUF_NAMES:
            made[f"{block}{GGUF_NAMES[rest]}.weight"] = tensor.flatten()
        elif part in GGUF_NAMES:
            made[f"{block}{GGUF_NAMES[part]}.{end}"] = tensor
        else:
            made[f"{block}time_mix_{end}.weight"] = tensor.flatten()
    return made


def write_gguf(
    path: Path, weights: Tensors, *, architecture: str = "rwkv7", num_layers: int = 2, q8: bool = False
) -> Path:
    """A GGUF file, with large matrices in Q8_0 if asked for."""
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(1 << 20)
    writer.add_layer_norm_eps(1e-5)
    writer.add_wkv_head_size(64)
    for name, tensor in weights.items():
        if q8 and re.search(r"(key|value|receptance|output|embd)\.weight$", name):
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    return finish(writer, path)


def write_pth(path: Path, weights: Tensors) -> Path:
    torch.save(weights, path)
    return path


def write_safetensors(path: Path, weights: Tensors) -> Path:
    safetensors.torch.save_file(weights, path)
    return path


def write_hub(path: Path, weights: Tensors) -> Path:
    path.mkdir()
    write_safetensors(path / "model.safetensors", to_hub(weights))
    (path / "config.json").write_text(json.dumps(HUB_CONFIG))
    return path


LAYOUTS: dict[str, Callable[[Path, Tensors], Path]] = {
    "model.pth": write_pth,
    "model.safetensors": write_safetensors,
    "hub": write_hub,
    "model.gguf": lambda path, weights: write_gguf(path, to_gguf(weights)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first_values", [True, False])
def test_every_layout_gives_the_same_model(layout: str, first_values: bool, tmp_path: Path) -> None:
    made = blink_weights(TINY)
    if not first_values:
        made = {name: tensor for name, tensor in made.items() if not re.fullmatch(r"blocks\.0\.att\.v.", name)}
    config, weights = read_rwkv7(LAYOUTS[layout](tmp_path / layout, made))
    expected_config, expected = read_rwkv7(write_pth(tmp_path / "expected.pth", blink_weights(TINY)))
    longest = config.pop("max_position_embeddings", None)
    assert config == expected_config
    assert longest == {"hub": 2048, "model.gguf": 1 << 20}.get(layout)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
    assert open_source(tmp_path / layout).path == tmp_path / layout


def test_generation_config_is_kept(tmp_path: Path) -> None:
    path = write_hub(tmp_path / "hub", blink_weights(TINY))
    assert open_source(path).generation_config is None
    stated = {"eos_token_id": [5, 7], "temperature": 0.8}
    (path / "generation_config.json").write_text(json.dumps(stated))
    assert convert(path, tmp_path / "out", dtype="float32").metadata.generation_config == stated


def test_keep_quantized_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", to_gguf(blink_weights(TINY)), q8=True)
    loader = convert(path, tmp_path / "out", dtype="float32", keep_quantized=True)
    _, weights = read_rwkv7(path)
    assert loader.get_buffers("model.layers.1.attn.r_proj.weight")[1] is not None
    assert set(loader.get_layer_names()) == set(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(loader.get_layer(name), tensor)


def test_blink_checkpoint_layout(tmp_path: Path) -> None:
    made = blink_weights(TINY)
    config, weights = read_rwkv7(write_pth(tmp_path / "a.pth", made))
    assert config == {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "vocab_size": 67,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "decay_low_rank_dim": 8,
        "a_low_rank_dim": 6,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 12,
    }
    assert torch.equal(weights["model.layers.1.attn.w_lora.lora.0.weight"], made["blocks.1.att.w1"].t())
    assert torch.equal(weights["model.layers.0.attn.r_k"], made["blocks.0.att.r_k"].flatten())
    scale, offset = made["blocks.0.ln0.weight"], made["blocks.0.ln0.bias"]
    normed = torch.nn.functional.layer_norm(made["emb.weight"], (128,), scale, offset)
    torch.testing.assert_close(weights["model.embeddings.weight"], normed, rtol=1e-6, atol=1e-6)
    assert not [name for name in weights if "pre_norm" in name or "layers.0.attn.v_lora" in name]


def test_world_vocabulary_and_single_layer(tmp_path: Path) -> None:
    size = Size(1, 64, 64, 65536, TINY.ranks)
    config, weights = read_rwkv7(write_pth(tmp_path / "a.pth", blink_weights(size, dtype=torch.bfloat16)))
    assert config["eos_token_id"] == 0 and config["v_low_rank_dim"] == 0
    assert not [name for name in weights if "v_lora" in name]
    assert weights["model.embeddings.weight"].dtype == torch.float32  # its norm is applied
    assert weights["model.layers.0.attn.r_proj.weight"].dtype == torch.bfloat16


OLDER = {
    "BlinkDL, 4": ["emb.weight", "blocks.0.att.time_decay", "blocks.0.att.time_first", "blocks.0.att.time_mix_k"],
    "BlinkDL, 6": ["emb.weight", "blocks.0.att.time_maa_x", "blocks.0.att.time_decay", "blocks.0.att.ln_x.weight"],
    "Hugging Face, 4": [
        "rwkv.embeddings.weight",
        "rwkv.blocks.0.attention.time_decay",
        "rwkv.blocks.0.attention.key.weight",
    ],
    "Hugging Face, 6": [
        "model.embeddings.weight",
        "model.layers.0.attn.bonus",
        "model.layers.0.attn.w_proj.lora.0.weight",
    ],
}


@pytest.mark.parametrize("layout", OLDER)
def test_older_versions_are_refused(layout: str, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {name: torch.zeros(2, 2) for name in OLDER[layout]})
    with pytest.raises(UnsupportedModelError, match=r"version before 7.*only RWKV-7"):
        open_source(path)


BREAKS: dict[str, tuple[Callable[[Tensors], Any], type[ArcherfishError], str]] = {
    "a missing table": (lambda made: made.pop("emb.weight"), CorruptFileError, "embeddings"),
    "a missing way down": (lambda made: made.pop("blocks.0.att.w1"), CorruptFileError, "w_lora"),
    "a foreign tensor": (
        lambda made: made.update({"extra.weight": torch.zeros(1)}),
        UnsupportedModelError,
        "extra.weight",
    ),
    "a foreign part": (lambda made: made.update({"blocks.0.att.z": torch.zeros(1)}), UnsupportedModelError, "att.z"),
    "DeepEmbed": (
        lambda made: made.update({"blocks.0.ffn.s_emb.weight": torch.zeros(1)}),
        UnsupportedModelError,
        "DeepEmbed",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_incomplete_and_foreign_files_are_refused(what: str, tmp_path: Path) -> None:
    change, error, words = BREAKS[what]
    made = blink_weights(TINY)
    change(made)
    with pytest.raises(error, match=words):
        open_source(write_pth(tmp_path / "a.pth", made))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"architecture": "rwkv6"}, UnsupportedModelError, "rwkv6.*only RWKV-7"),
        ({"architecture": "arwkv7"}, UnsupportedModelError, "arwkv7.*only RWKV-7"),
        ({"num_layers": 3}, CorruptFileError, "2 layers, but its configuration says 3"),
    ],
    ids=str,
)
def test_other_gguf_files_are_refused(
    options: dict[str, Any], error: type[ArcherfishError], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "a.gguf", to_gguf(blink_weights(TINY)), **options)
    with pytest.raises(error, match=message):
        open_source(path)


def test_old_hub_layout_is_refused(tmp_path: Path) -> None:
    made = to_hub(blink_weights(TINY))
    made["model.layers.0.attn.x_x"] = torch.zeros(6, 128)
    with pytest.raises(UnsupportedModelError, match="x_x"):
        open_source(write_safetensors(tmp_path / "a.safetensors", made))
