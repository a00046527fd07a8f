"""Logits with LoRA adapters against PEFT, on tiny random models: red if a formula, a part of a stacked product, a
scale, a slot or the place of an activation differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish.kernels.formats import choose_format
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.native_support import LEVELS, native_ops
from tests.models import recurring
from tests.models.adapter_files import fill_slots, save_adapter, with_slots
from tests.models.decoding import Driver, make, random_tokens, their_logits
from tests.models.peft_adapters import FUSED, add_adapter
from tests.models.recurring import RecurrentDriver
from tests.models.test_decoders import STEPS

Backend = Callable[..., Any]
BACKENDS = [TorchOps, native_ops]
MORE: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 8, "use_rslora": True}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, list[dict[str, Any]]] = {  # of each model, the adapters of its sequences
    "llama": [{}, MORE, {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"down_proj": 3}}],
    "llama-tied": [{"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, {"layers_to_transform": [1]}],
    "qwen2": [{}, {"target_modules": "all-linear"}],
    "qwen3": [{"target_modules": ".*(q_proj|up_proj)"}, MORE],
    "phi3": [{"target_modules": list(FUSED)}, {"target_modules": ["qkv_proj"], "r": 2}],
    "gemma2": [{"target_modules": ["embed_tokens", "lm_head", "down_proj"]}, {}],
    "gemma3": [{}, {"target_modules": ["embed_tokens", "o_proj"]}],
    "qwen3-moe": [
        {"target_parameters": STACKS},
        {"target_parameters": ["0.mlp.experts.down_proj", "mlp.gate.weight"], "r": 2},
    ],
    "mixtral": [{"target_parameters": STACKS, "target_modules": ["q_proj"], "use_rslora": True}, {}],
    "gpt-oss": [
        {"target_parameters": STACKS, "target_modules": "all-linear"},
        {"target_parameters": STACKS[:1], "r": 3},
    ],
    "cohere": [{}, {"target_modules": ["o_proj", "up_proj", "down_proj"], "r": 2}],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_peft(kind: str, backend: Backend, tmp_path: Path) -> None:
    """Four sequences together, of several adapters and of none: prefills, chunks and decodes."""
    model, config = make(kind)
    adapted = [add_adapter(model, tmp_path / str(i), seed=i, **options) for i, options in enumerate(KINDS[kind])]
    driver = Driver(with_slots(backend()), model.state_dict(), config, random_tokens(4))
    fill_slots(driver.ops, [tmp_path / str(i) for i in range(len(adapted))], config["model_type"])
    driver.slots = [1, 0, 2, len(adapted)]
    models = [model, *adapted]
    expected = [their_logits(models[slot], tokens) for slot, tokens in zip(driver.slots, driver.tokens, strict=True)]
    assert (expected[0] - their_logits(model, driver.tokens[0])).abs().max() > 0.1, "the adapter changes too little"
    driver.check(STEPS, expected, tolerance=1e-4)


LEVEL_CASES = [(kind, partial(native_ops, level=level)) for kind in ("gemma2", "cohere", "gpt-oss") for level in LEVELS]


@pytest.mark.parametrize(("kind", "backend"), [*LEVEL_CASES, *((kind, TorchOps) for kind in ("gemma2", "cohere"))])
def test_levels_and_kept_rows(kind: str, backend: Backend, tmp_path: Path) -> None:
    """At each level of instructions, of rows that are kept in the last layer as well, and where all rows are kept."""
    model, config = make(kind)
    for i, options in enumerate(KINDS[kind]):
        add_adapter(model, tmp_path / str(i), seed=i, **options)
    plain, kept = (Driver(with_slots(backend()), model.state_dict(), config, random_tokens(3)) for _ in range(2))
    for driver in (plain, kept):
        fill_slots(driver.ops, [tmp_path / "0", tmp_path / "1"], config["model_type"])
        driver.slots = [1, 0, 2]
    for work in ([(0, 37), (1, 20), (2, 3)], [(0, 1), (2, 1), (1, 9)]):
        expected = torch.cat([logits[-1:] for logits in plain.step(work)])
        torch.testing.assert_close(torch.cat(kept.step(work, keeps_last=True)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_bases(weights: str, backend: Backend, tmp_path: Path) -> None:
    """What an adapter adds is as much as it adds to the plain model: quantising touches the model's own matrices
    alone."""
    model, config = make("llama")
    adapted, tokens = add_adapter(model, tmp_path, lora_alpha=40), random_tokens(2)
    changes = []
    for weight_format in (choose_format(weights), choose_format("auto")):
        found = []
        for slots in ([1, 1], [0, 0]):
            driver = Driver(with_slots(backend()), model.state_dict(), config, tokens, weight_format=weight_format)
            fill_slots(driver.ops, [tmp_path])
            driver.slots = slots
            found.append(torch.cat(driver.step([(0, 40), (1, 9)])))
        changes.append(found)
    quantised, plain = changes
    torch.testing.assert_close(plain[0][:40], their_logits(adapted, tokens[0])[:40], atol=2e-4, rtol=1e-4)
    for one, other in zip(quantised, plain, strict=True):
        error = (one - other).norm() / other.norm()
        assert error < (0.2 if weights == "int4" else 0.06), error


@pytest.mark.parametrize("backend", BACKENDS)
def test_rwkv7_equals_a_merged_checkpoint(backend: Backend, tmp_path: Path) -> None:
    """Adapters of all linear maps of RWKV-7, those inside of activations too, against the model with them merged in."""
    size = recurring.SIZES["tiny"]
    config, weights = recurring.read_rwkv7(recurring.write_checkpoint(size, tmp_path / "model.pth"))
    tokens = recurring.random_tokens(size, 3, 100)
    names = [
        name.removesuffix(".weight")
        for name, tensor in weights.items()
        if tensor.dim() == 2 and "embeddings" not in name
    ]
    random = torch.Generator().manual_seed(0)
    merged, tensors = dict(weights), dict[str, torch.Tensor]()
    for name in names:
        down = torch.randn(3, weights[f"{name}.weight"].shape[1], generator=random) * 0.1
        up = torch.randn(weights[f"{name}.weight"].shape[0], 3, generator=random) * 0.1
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        merged[f"{name}.weight"] = weights[f"{name}.weight"] + 2.0 * up @ down
    save_adapter(tmp_path / "adapter", tensors, r=3, lora_alpha=6, target_modules=names)
    ours = RecurrentDriver(with_slots(backend()), weights, config, tokens)
    fill_slots(ours.ops, [tmp_path / "adapter"])
    ours.slots = [1, 0, 1]
    alone = [RecurrentDriver(backend(), w, config, tokens) for w in (weights, merged)]
    expected = [torch.cat(alone[slot].step([(i, 100)])) for i, slot in enumerate(ours.slots)]
    ours.check(recurring.STEPS, expected, tolerance=2e-4)
