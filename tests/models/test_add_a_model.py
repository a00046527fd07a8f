"""The code of docs/add-a-model.md, run as it stands there on tiny random checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from archerfish.models import adapter
from archerfish.models.config import Config
from tests.kernels.native_support import native_ops
from tests.models.decoding import LENGTH, SIZES, Driver, make_model, random_tokens, their_logits

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's Python defines; the registry is as before afterwards."""
    monkeypatch.setattr(adapter, "MODELS", dict(adapter.MODELS))
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(SIZES["hidden_size"], SIZES["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(SIZES["intermediate_size"], SIZES["hidden_size"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.gelu(self.up_proj(x)))
        return out


def run(driver: Driver) -> torch.Tensor:
    return torch.cat([driver.step([(0, count)])[0] for count in (20, 21, 1, LENGTH - 42)])


def test_the_llama_variant(page: dict[str, Any]) -> None:
    model, config = make_model("Llama", SIZES)
    for layer in model.model.layers:
        layer.mlp = PlainMLP()
    config = {**config, "model_type": "otter"}
    driver = Driver(native_ops(), model.state_dict(), config, random_tokens(1))
    assert type(driver.model) is page["OtterModel"]
    torch.testing.assert_close(run(driver), their_logits(model, driver.tokens[0]), atol=1e-4, rtol=1e-4)
    assert set(page["OtterModel"].noted(Config(config)).shapes) == set(model.state_dict())


def test_the_mixture_of_experts(page: dict[str, Any]) -> None:
    """A Mixtral is one that says so in its configuration."""
    model, config = make_model("Mixtral", {**SIZES, "num_local_experts": 4})
    config = {**config, "model_type": "otter_moe", "norm_topk_prob": True}
    driver = Driver(native_ops(), model.state_dict(), config, random_tokens(1))
    assert type(driver.model) is page["OtterMoeModel"]
    torch.testing.assert_close(run(driver), their_logits(model, driver.tokens[0]), atol=1e-4, rtol=1e-4)


def test_the_decoder_from_nothing(page: dict[str, Any]) -> None:
    """Against the parts of a Llama: one norm in all blocks, and angles of 0 where there is no rotary embedding."""
    model, config = make_model("Llama", SIZES)
    weights = {heron_name(name): tensor for name, tensor in model.state_dict().items() if "layernorm" not in name}
    norm = model.model.layers[0].input_layernorm
    weights["block_norm.weight"] = norm.weight
    driver = Driver(native_ops(), weights, {**config, "model_type": "heron"}, random_tokens(1))
    assert type(driver.model) is page["HeronModel"]
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    with torch.inference_mode():
        x = model.model.embed_tokens(torch.tensor([driver.tokens[0]]))
        turned = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
        unturned = model.model.rotary_emb(x, torch.zeros(1, LENGTH, dtype=torch.int64))
        for i, layer in enumerate(model.model.layers):
            x = x + layer.self_attn(norm(x), position_embeddings=turned if i % 2 else unturned, attention_mask=mask)[0]
            x = x + layer.mlp(norm(x))
        expected = model.lm_head(model.model.norm(x))[0]
    torch.testing.assert_close(run(driver), expected, atol=1e-4, rtol=1e-4)


def heron_name(name: str) -> str:
    renamed = {"model.embed_tokens": "embedding", "model.layers": "block", "self_attn": "attn", "lm_head": "head"}
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name.removeprefix("model.")
