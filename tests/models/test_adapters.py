"""Logits with LoRA adapters against PEFT, on tiny random models: red if a formula, a part of a stacked product, a scale, a slot
or the place of an activation differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from archerfish.kernels.formats import choose_format
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.native_support import LEVELS, native_ops
from tests.models.decoding import Driver, make, random_tokens, their_logits
from tests.models.peft_adapters import FUSED, add_adapter, fill_slots, with_slots
from tests.models.test_decoders import STEPS

Backend = Callable[..., Any]
BACKENDS = [TorchOps, native_ops]
MORE: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 8, "use_rslora": True}
KINDS: dict[str, list[dict[str, Any]]] = {  # of each model, the adapters of its sequences
    "llama": [{}, MORE, {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"down_proj": 3}}],
    "llama-tied": [{"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, {"layers_to_transform": [1]}],
    "qwen2": [{}, {"target_modules": "all-linear"}],
    "qwen3": [{"target_modules": ".*(q_proj|up_proj)"}, MORE],
    "phi3": [{"target_modules": list(FUSED)}, {"target_modules": ["qkv_proj"], "r": 2}],
    "gemma2": [{"target_modules": ["embed_tokens", "lm_head", "down_proj"]}, {}],
    "gemma3": [{}, {"target_modules": ["embed_tokens", "o_proj"]}],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_peft(kind: str, backend: Backend, tmp_path: Path) -> None:
    """Four sequences together, of several adapters and of none: prefills, chunks and decodes."""
    model, config = make(kind)
    adapted = [add_adapter(model, tmp_path / str(i), seed=i, **options) for i, options in enumerate(KINDS[kind])]
    driver = Driver(with_slots(backend()), model.state_dict(), config, random_tokens(4))
    fill_slots(driver.ops, [tmp_path / str(i) for i in range(len(adapted))])
    driver.slots = [1, 0, 2, len(adapted)]
    models = [model, *adapted]
    expected = [their_logits(models[slot], tokens) for slot, tokens in zip(driver.slots, driver.tokens, strict=True)]
    assert (expected[0] - their_logits(model, driver.tokens[0])).abs().max() > 0.1, "the adapter changes too little"
    driver.check(STEPS, expected, tolerance=1e-4)
