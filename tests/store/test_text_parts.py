"""Models that also take images, saved by transformers: their text part is read, and its logits are the whole
model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from archerfish.config import HubConfig
from archerfish.engine.inference_core import InferenceCore
from archerfish.engine.llm_loading import dummy_infos
from archerfish.errors import ArcherfishError, UnsupportedModelError
from archerfish.kernels.batches import Segments
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.adapter import TokenBatch
from archerfish.store import WeightLoader, ensure_converted
from archerfish.store.sources import open_source
from archerfish.store.text_parts import text_config
from tests.kernels.native_support import native_ops
from tests.models.decoding import (
    GEMMA,
    KINDS,
    LENGTH,
    SIZES,
    YARN,
    Driver,
    make,
    make_model,
    random_tokens,
    their_logits,
)
from tests.store.models import convert

TEXT = {**SIZES, "head_dim": 16}
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    },
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    },
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 16},
    "qwen3_vl": {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 16,
        "deepstack_visual_indexes": [0],
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 7}),
    "mistral3": ("Mistral3", {**TEXT, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}),
    "ministral3": (
        "Mistral3",
        {
            **TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2_vl": ("Qwen2VL", {**SIZES, "rope_parameters": MROPE}),
    "qwen2_5_vl": ("Qwen2_5_VL", {**SIZES, "rope_parameters": MROPE, "tie_word_embeddings": True}),
    "qwen3_vl": ("Qwen3VL", {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}),
}


def make_whole(kind: str) -> Any:
    family, text = MODELS[kind]
    torch.manual_seed(1)
    config_class = getattr(transformers, f"{family}Config")
    vision = VISION[config_class.model_type]
    tie = {"tie_word_embeddings": text.get("tie_word_embeddings", kind == "gemma3")}
    config = config_class(text_config=text, vision_config=vision, **tie, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if "vis" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def rename(directory: Path, old: str, new: str) -> None:
    path = directory / "model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_the_text_part(tmp_path: Path, kind: str, is_older: bool) -> None:
    """Each with names of two kinds, as files that were published have them; Qwen's older settings are not nested."""
    model = make_whole(kind)
    model.save_pretrained(tmp_path / "m")
    has_plain_names = kind.startswith("qwen2")
    if not is_older and has_plain_names:
        rename(tmp_path / "m", "model.", "model.language_model.")
    elif is_older and has_plain_names:
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        flat = {**config, **config.pop("text_config"), "model_type": config["model_type"], "rope_theta": 1e5}
        flat["rope_scaling"] = {"type": "mrope", "mrope_section": flat.pop("rope_parameters")["mrope_section"]}
        flat.pop("text_config")
        (tmp_path / "m" / "config.json").write_text(json.dumps(flat))
    elif is_older:
        rename(tmp_path / "m", "language_model.model.", "model.language_model.")
    directory = ensure_converted(tmp_path / "m", dtype="float32", hub=HubConfig(cache_dir=str(tmp_path / "cache")))
    loader = WeightLoader(directory)
    driver = Driver(TorchOps(), loader.load_weights(), loader.config, random_tokens(1))
    expected = their_logits(model, driver.tokens[0])
    torch.testing.assert_close(driver.step([(0, LENGTH)])[0], expected, atol=1e-4, rtol=1e-4)
    assert not any("vis" in name for name in loader.get_layer_names())
    stated = text_config(json.loads((tmp_path / "m" / "config.json").read_text()))
    assert {info.name for info in dummy_infos(stated)} <= set(loader.get_layer_names())


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_base_of_a_model(tmp_path: Path, kind: str) -> None:
    """As it is saved without a head, for embeddings."""
    model = make_whole(kind)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    whole, base = (
        {each.info.name: each.load() for each in open_source(tmp_path / name).tensors} for name in ("whole", "base")
    )
    assert set(whole) - set(base) <= {"lm_head.weight"} and set(base) <= set(whole)
    assert all(np.array_equal(each, whole[name]) for name, each in base.items())


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_classifiers(tmp_path: Path, kind: str) -> None:
    family, sizes = KINDS[kind] if kind == "gpt2" else MODELS[kind]
    given = (
        {"text_config": sizes, "vision_config": VISION["gemma3"]} if kind == "gemma3" else {**sizes, "pad_token_id": 0}
    )
    config = getattr(transformers, f"{family}Config")(**given, num_labels=3)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for name, parameter in model.named_parameters():
        if "vis" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(tmp_path)
    source = open_source(tmp_path)
    weights = {each.info.name: torch.from_numpy(np.array(each.load())) for each in source.tensors}
    core, ids = InferenceCore(weights, source.config, "cpu", dtype="float32"), np.arange(5, 25)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits
    found = core.run(TokenBatch(ids, Segments((len(ids),))))
    torch.testing.assert_close(torch.from_numpy(found), expected.float(), atol=1e-4, rtol=1e-4)


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names without a prefix, and constants among the tensors."""
    model, _ = make("gpt2")
    model.config.save_pretrained(tmp_path)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in type(model).state_dict(model).items()}
    del weights["lm_head.weight"]
    weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    found = {tensor.info.name: torch.from_numpy(np.array(tensor.load())) for tensor in source.tensors}
    driver = Driver(TorchOps(), found, source.config, random_tokens(1))
    expected = their_logits(model, driver.tokens[0])
    torch.testing.assert_close(driver.step([(0, LENGTH)])[0], expected, atol=1e-4, rtol=1e-4)


def write_gpt_oss(directory: Path) -> Any:
    """A model whose experts are in MXFP4, as published ones are, and the model with their numbers as transformers has
    them."""
    model, config = make_model(*KINDS["gpt-oss"])
    weights, draw = dict(type(model).state_dict(model)), np.random.default_rng(0)
    for name in [name for name in weights if name.endswith("_proj")]:
        num, inputs, outputs = weights.pop(name).shape
        codes = draw.integers(0, 256, (num, outputs, inputs // 32, 16), dtype=np.uint8)
        weights[f"{name}_blocks"] = blocks = torch.from_numpy(codes)
        weights[f"{name}_scales"] = scales = torch.from_numpy(draw.integers(121, 125, codes.shape[:3], dtype=np.uint8))
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    stated = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return model


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Numbers are transformers', whether they are widened or multiplied as they are stored."""
    model, tokens = write_gpt_oss(tmp_path / "m"), random_tokens(1)
    expected = their_logits(model, tokens[0])
    loaders = [
        convert(tmp_path / "m", tmp_path / str(keep), dtype="float32", keep_quantized=keep) for keep in (False, True)
    ]
    assert [loader.metadata.quant_types for loader in loaders] == [set(), {"MXFP4"}]
    weights = loaders[0].load_weights(), loaders[1].load_weights(keeps_quantised=True), loaders[1].load_stored()
    backends: list[Any] = [TorchOps(), TorchOps(), native_ops()]
    for given, ops, error in zip(weights, backends, (1e-5, 1e-5, 5e-3), strict=True):
        found = Driver(ops, cast(Any, given), loaders[1].config, tokens).step([(0, LENGTH)])[0]
        assert (found - expected).norm() < error * expected.norm()
    stated = {info.name: info for info in dummy_infos(json.loads((tmp_path / "m" / "config.json").read_text()))}
    kept = {info.name: info for info in loaders[1].metadata.tensors}
    assert {name: info[2:] for name, info in stated.items()} == {name: info[2:] for name, info in kept.items()}


DAMAGES: dict[str, tuple[str, Any, str]] = {
    "no scales": ("scales", None, "must be of type uint8|one scale for each block"),
    "short blocks": ("blocks", lambda x: x[..., :8], "one scale for each block"),
    "NaN": ("scales", lambda x: x.fill_(255), "NaN, or more"),
    "another type": ("blocks", lambda x: x.view(torch.int8), "must be of type uint8, not int8 and uint8"),
    "an axis too few": ("bias", lambda x: x[0], "expected 2 axes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_mxfp4_is_refused(tmp_path: Path, damage: str) -> None:
    part, change, message = DAMAGES[damage]
    write_gpt_oss(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors, name = load_file(path), f"model.layers.1.mlp.experts.down_proj_{part}"
    tensor = tensors.pop(name)
    save_file(tensors if change is None else {**tensors, name: change(tensor).contiguous()}, path)
    with pytest.raises(ArcherfishError, match=rf"layers\.1\.mlp\.experts\.down_proj.*{message}"):
        convert(tmp_path / "m", tmp_path / "out", keep_quantized=True)


def test_what_a_small_configuration_leaves_out() -> None:
    """The published Gemma 3 of 4B names four settings of its text part; the others are those of transformers."""
    small: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    ours = text_config({"model_type": "gemma3", "text_config": {**small, "model_type": "gemma3_text"}})
    theirs = transformers.Gemma3TextConfig(**small).to_dict()
    names = (
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "model_type",
    )
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'llava'"):
        dummy_infos(text_config({"model_type": "llava", "text_config": {"model_type": "llama"}}))
