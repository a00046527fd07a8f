"""Files of adapters: what they may hold, and what is refused with its reason before anything changes; merging into a
store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import LLMEngine, ModelConverter
from archerfish.config import ConversionConfig
from archerfish.errors import ArcherfishError
from archerfish.store import adapters
from archerfish.store.adapters import MapShape, read_adapter
from tests.engine.tiny_llama import greedy, prompts, tokens
from tests.models.adapter_files import random_adapter, save_adapter
from tests.models.decoding import make

MAPS = {f"layers.{i}.self_attn.{name}": MapShape(12, 8) for i in range(2) for name in ("q_proj", "v_proj")}
MAPS |= {"lm_head": MapShape(30, 8), "embed_tokens": MapShape(8, 30, is_lookup=True)}
FRONT = "base_model.model.model."


def tensors_of(*names: str, rank: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name in names:
        found[f"{FRONT}{name}.lora_A.weight"] = torch.randn(rank, MAPS[name].inputs)
        found[f"{FRONT}{name}.lora_B.weight"] = torch.randn(MAPS[name].outputs, rank)
    return found


def every(name: str = "q_proj") -> dict[str, torch.Tensor]:
    return tensors_of(*(each for each in MAPS if each.endswith(name)))


Q = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 2}, 0.5),
        ({"alpha_pattern": {"q_proj": 4}}, 1.0),
        ({"target_modules": ".*q_proj"}, 2.0),
        ({"target_modules": [f"layers.{i}.self_attn.q_proj" for i in (0, 1)]}, 2.0),
        ({"r": 7, "rank_pattern": {r"layers\.\d\.self_attn\.q_proj": 4}}, 2.0),
        ({"fan_in_fan_out": True}, 2.0),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "bin", "file"])
def test_scales_and_files(tmp_path: Path, config: dict[str, Any], scale: float, kind: str) -> None:
    path = save_adapter(tmp_path / "x", every(), **{**Q, **config})
    if kind == "bin":
        (path / "adapter_model.safetensors").unlink()
        torch.save(every(), path / "adapter_model.bin")
    found = read_adapter(path / "adapter_model.safetensors" if kind == "file" else path, MAPS)
    assert set(found.matrices) == {name for name in MAPS if "q_proj" in name} and found.rank == 4
    name = "layers.1.self_attn.q_proj"
    np.testing.assert_allclose(found.matrices[name].down, every()[f"{FRONT}{name}.lora_A.weight"].numpy())
    np.testing.assert_allclose(
        found.matrices[name].up, scale * every()[f"{FRONT}{name}.lora_B.weight"].numpy(), rtol=1e-6
    )


def test_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    """The same content in another type of file is the same; another scale is not."""
    first = read_adapter(save_adapter(tmp_path / "a", every(), **Q), MAPS)
    renamed = {name.replace("base_model.model.model.", "base_model.model."): each for name, each in every().items()}
    assert read_adapter(save_adapter(tmp_path / "b", renamed, **Q), MAPS).digest == first.digest
    assert read_adapter(save_adapter(tmp_path / "c", every(), lora_alpha=9, **Q), MAPS).digest != first.digest


def test_content_is_no_longer_in_the_file(tmp_path: Path) -> None:
    """A copy over the file changes what is mapped."""
    path = save_adapter(tmp_path / "x", every(), **Q)
    found = read_adapter(path, MAPS)
    before = {name: pair.down.copy() for name, pair in found.matrices.items()}
    file = path / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, pair in found.matrices.items():
        np.testing.assert_array_equal(pair.down, before[name])


def test_a_head_that_is_tied_to_the_embedding(tmp_path: Path) -> None:
    """ensure_weight_tying of PEFT adapts the head, which its configuration does not name."""
    tensors = tensors_of("lm_head")
    for side, shape in (("A", (4, 30)), ("B", (8, 4))):
        tensors[f"{FRONT}embed_tokens.lora_embedding_{side}"] = torch.randn(shape)
    config = {"target_modules": ["embed_tokens", "model.embed_tokens"], "ensure_weight_tying": True}
    assert set(read_adapter(save_adapter(tmp_path / "x", tensors, **config), MAPS).matrices) == {
        "lm_head",
        "embed_tokens",
    }


def test_patterns_that_are_names_need_no_matching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "matching", None)
    ranks = {f"{front}{name}": 4 for name in MAPS for front in ("", "model.", "base_model.model.model.")}
    path = save_adapter(tmp_path / "x", every(), **Q, r=7, rank_pattern=ranks, alpha_pattern=ranks)
    assert read_adapter(path, MAPS).rank == 4


def test_copies_of_the_models_matrices_are_left_out(tmp_path: Path) -> None:
    """As PEFT saves them beside adapters of heads and embeddings."""
    tensors = {**tensors_of("lm_head"), f"{FRONT}lm_head.base_layer.weight": torch.zeros(30, 8)}
    found = [
        read_adapter(save_adapter(tmp_path / str(i), each, target_modules=["lm_head"]), MAPS)
        for i, each in enumerate((tensors, tensors_of("lm_head")))
    ]
    assert found[0].digest == found[1].digest


def changed(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    found = {**every(), **({} if tensor is None else {f"{FRONT}{name}": tensor})}
    if tensor is None:
        del found[f"{FRONT}{name}"]
    return found


NAME = "layers.0.self_attn.q_proj"
REFUSED: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
    ({"use_dora": True}, every(), "use_dora"),
    ({"bias": "all"}, every(), "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, every(), "modules_to_save"),
    ({"lora_bias": True}, every(), "lora_bias"),
    ({"alora_invocation_tokens": [5]}, every(), "alora_invocation"),
    ({"target_parameters": ["x"]}, every(), "says that x was adapted"),
    ({"layer_replication": [[0, 1]]}, every(), "layer_replication"),
    ({"trainable_token_indices": [3]}, every(), "trainable_token_indices"),
    ({"peft_type": "LOHA"}, every(), "type LOHA"),
    ({"init_lora_weights": "pissa_niter_4"}, every(), "changes the base model"),
    ({"r": 0}, every(), "r=0"),
    ({"r": None}, every(), "has no r"),
    ({"use_bdlora": True}, every(), "use_bdlora"),
    ({"lora_alpha": float("nan")}, every(), "lora_alpha=nan"),
    ({"lora_alpha": 1e308}, every(), "not finite when multiplied"),
    ({"alpha_pattern": {"q_proj": float("inf")}}, every(), "alpha_pattern of q_proj=inf"),
    ({"rank_pattern": [4]}, every(), "maps no names"),
    ({"rank_pattern": {"q_proj": 0}}, every(), "rank_pattern of q_proj=0"),
    ({"rank_pattern": {"q_proj": "4"}}, every(), "q_proj='4'"),
    ({"target_modules": 5}, every(), "target_modules=5"),
    ({"target_modules": [1, "q_proj"]}, every(), "target_modules=.1"),
    ({"exclude_modules": 3}, every(), "exclude_modules=3"),
    ({"layers_to_transform": "x"}, every(), "transform='x'"),
    ({"target_modules": "(q_proj"}, every(), "no regular expr"),
    ({"alpha_pattern": {"(.*.*.*.*.*.*.*.*)*X": 2}}, every(), "cannot be matched in 0.3 s"),
    ({"init_lora_weights": "lora_ga"}, every(), "changes the base model"),
    ({}, changed("lm_head.base_layer.weight", torch.zeros(31, 8)), "is no part of a LoRA"),
    ({"r": 5}, every(), r"has shape \(4, 8\); this model needs \(5, 8\)"),
    ({}, {}, "has no tensors"),
    ({"r": 9}, every(), "has rank 9, and the highest is 8"),
    ({}, changed(f"{NAME}.lora_B.weight", None), "has no matrix B"),
    ({}, changed(f"{NAME}.lora_A.weight", torch.full((4, 8), float("nan"))), "not finite"),
    ({}, changed(f"{NAME}.lora_A.weight", torch.zeros(4, 9)), r"\(4, 9\)"),
    ({}, changed(f"{NAME}.lora_A.weight", torch.zeros(4, 8, dtype=torch.int64)), "type int64"),
    ({}, {**every(), **tensors_of(f"{NAME[:-6]}v_proj")}, "which adapter_config.json does not name"),
    ({}, tensors_of(NAME), "says that layers.1.self_attn.q_proj was adapted"),
    (
        {},
        changed("layers.7.self_attn.q_proj.lora_A.weight", torch.zeros(4, 8)),
        "'layers.7.self_attn.q_proj'.*has 2 layers",
    ),
    ({}, changed(f"{NAME}.lora_magnitude_vector", torch.zeros(12)), "is no part of a LoRA"),
    ({}, changed("lm_head.weight", torch.zeros(30, 8)), "is no part of a LoRA"),
    ({}, changed("embed_tokens.lora_A.weight", torch.zeros(4, 30)), "no linear map 'embed_tokens'"),
]


@pytest.mark.parametrize(("config", "tensors", "message"), REFUSED, ids=[entry[2][:30] for entry in REFUSED])
def test_what_is_refused(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MATCH_S", 0.3)
    path = save_adapter(tmp_path / "x", tensors, base_model_name_or_path="org/base", **{**Q, **config})
    with pytest.raises(ArcherfishError, match=message):
        read_adapter(path, MAPS, max_rank=8)


EXPERTS = {f"layers.0.mlp.experts.{e}.{name}": MapShape(6, 4) for e in range(3) for name in ("gate_proj", "up_proj")}
EXPERTS |= {f"layers.0.mlp.experts.{e}.down_proj": MapShape(4, 6) for e in range(3)}
STACKS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2}


def stacks() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    front = f"{FRONT}layers.0.mlp.experts"
    return {
        f"{front}.base_layer.lora_A.weight": torch.randn(6, 6),
        f"{front}.base_layer.lora_B.weight": torch.randn(4, 6),
        f"{front}.lora_A.weight": torch.randn(6, 4),
        f"{front}.lora_B.weight": torch.randn(12, 6),
    }


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_stacks_of_experts(tmp_path: Path, kind: str) -> None:
    """As PEFT computes the change of a parameter; and matrices of each expert, as older versions of models have
    them."""
    given = stacks()
    found = read_adapter(save_adapter(tmp_path / "x", given, **STACKS), EXPERTS, kind=kind)
    assert set(found.matrices) == set(EXPERTS) and found.rank == 2
    for inner in (".base_layer", ""):
        a, b = (given[f"{FRONT}layers.0.mlp.experts{inner}.lora_{side}.weight"] for side in "AB")
        changes = 4 * torch.einsum("ore,eri->eoi", b.reshape(len(b), 2, 3), a.reshape(3, 2, -1))
        halves = (
            {"down_proj": changes} if inner else dict(zip(("gate_proj", "up_proj"), changes.chunk(2, 1), strict=True))
        )
        if kind == "gpt_oss" and not inner:
            halves = {"gate_proj": changes[:, ::2], "up_proj": changes[:, 1::2]}
        for part, each in halves.items():
            for expert in range(3):
                one = found.matrices[f"layers.0.mlp.experts.{expert}.{part}"]
                np.testing.assert_allclose(one.up @ one.down, each[expert].numpy(), rtol=1e-5, atol=1e-5)
    if kind != "gpt_oss":
        alone = {f"{FRONT}{name}.lora_A.weight": torch.tensor(one.down) for name, one in found.matrices.items()}
        alone |= {f"{FRONT}{name}.lora_B.weight": torch.from_numpy(one.up / 4) for name, one in found.matrices.items()}
        path = save_adapter(tmp_path / "y", alone, r=2, target_modules="all-linear")
        assert read_adapter(path, EXPERTS).digest == found.digest
        del alone[f"{FRONT}layers.0.mlp.experts.2.up_proj.lora_A.weight"]
        with pytest.raises(ArcherfishError, match=r"experts\.2\.up_proj has no matrix A"):
            read_adapter(save_adapter(tmp_path / "z", alone, r=2, target_modules="all-linear"), EXPERTS)


@pytest.mark.parametrize(
    ("config", "without", "options", "message"),
    [
        ({}, "", {"takes_experts": False}, "for which slots have no room"),
        ({"r": 3}, "", {}, r"\(2, 6\); this model needs \(3, 6\)"),
        ({}, ".base_layer", {}, "down_proj was adapted, but"),
        ({"target_parameters": ["down_proj"]}, "", {}, "does not name"),
        ({}, "lora_B", {}, "no linear map 'layers.0.mlp.experts"),
    ],
)
def test_stacks_that_are_refused(
    tmp_path: Path, config: dict[str, Any], without: str, options: dict[str, Any], message: str
) -> None:
    given = {name: tensor for name, tensor in stacks().items() if not without or without not in name}
    with pytest.raises(ArcherfishError, match=message):
        read_adapter(save_adapter(tmp_path / "x", given, **{**STACKS, **config}), EXPERTS, **options)


def test_stacks_of_another_model(tmp_path: Path) -> None:
    name = f"{FRONT}layers.0.mlp.experts.lora_A.weight"
    path = save_adapter(tmp_path / "x", {**stacks(), name: torch.zeros(6, 5)}, **STACKS)
    with pytest.raises(ArcherfishError, match=r"have shapes \(6, 5\) and \(12, 6\)"):
        read_adapter(path, EXPERTS)
    with pytest.raises(ArcherfishError, match=r"no linear map 'layers\.0\.mlp\.experts'"):
        read_adapter(save_adapter(tmp_path / "y", {**stacks(), name: torch.zeros(30)}, **STACKS), EXPERTS)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_files_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_adapter(tmp_path / "x", every(), **Q)
    (path / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(ArcherfishError, match="not a sound safetensors file"):
        read_adapter(path, MAPS)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ArcherfishError, match=r"has no adapter_model.safetensors"):
        read_adapter(path, MAPS)
    torch.save({"x": Evil()}, path / "adapter_model.bin")
    with pytest.raises(ArcherfishError, match=r"holds more than tensors|not a sound torch"):
        read_adapter(path, MAPS)
    assert "unpickled" not in capsys.readouterr().out
    (path / "adapter_config.json").unlink()
    with pytest.raises(ArcherfishError, match=r"has no adapter_config\.json"):
        read_adapter(path, MAPS)
    with pytest.raises(ArcherfishError, match="no adapter at"):
        read_adapter(tmp_path / "nowhere", MAPS)


@pytest.mark.parametrize(("kind", "weights"), [("llama", "auto"), ("llama", "int8"), ("mixtral", "auto")])
def test_a_merged_store_answers_as_the_adapter_does(tmp_path: Path, kind: str, weights: str) -> None:
    model, _ = make(kind)
    model.save_pretrained(tmp_path / "model")
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64)}
    names = [f"block_sparse_moe.experts.{i}.w2" for i in range(5)] if kind == "mixtral" else ["mlp.down_proj"]
    shapes |= dict.fromkeys(names, (64, 96))
    path = random_adapter(
        tmp_path / "lora", {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in shapes.items()}, r=3
    )
    convert = ModelConverter(ConversionConfig(dtype="float32", merge=str(path), weights=weights, report=False))
    assert convert.convert(tmp_path / "model", tmp_path / "merged").validation_passed
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_cache_tokens": 1024, "num_threads": 1}
    many = prompts(4, most=12)
    with LLMEngine(str(tmp_path / "merged"), **options) as engine:
        merged = tokens(engine.generate(many, greedy(8)))
    with LLMEngine(str(tmp_path / "model"), **options, lora_experts=True, lora_modules=f"x={path}") as engine:
        assert tokens(engine.generate(many, greedy(8))) != tokens(engine.generate(many, greedy(8), adapter="x"))
        if weights == "auto":
            assert tokens(engine.generate(many, greedy(8), adapter="x")) == merged
    metadata = json.loads((tmp_path / "merged" / "metadata.json").read_text())
    assert metadata["model_name"]


def test_a_tied_head_cannot_be_merged(tmp_path: Path) -> None:
    model, _ = make("llama-tied")
    model.save_pretrained(tmp_path / "model")
    path = random_adapter(tmp_path / "lora", {"lm_head": (97, 64)})
    with pytest.raises(ArcherfishError, match="lm_head cannot be merged"):
        ModelConverter(ConversionConfig(merge=str(path))).convert(tmp_path / "model", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
