"""Every decoder and encoder in bfloat16 on the card, computed and recorded: as close to float32 as PyTorch's own
bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from archerfish import LLMEngine, SamplingParams
from archerfish.bench.gpu import SHAPES
from archerfish.engine import inference_core
from archerfish.engine.inference_core import InferenceCore
from archerfish.kernels.torch.reference import TorchOps
from tests.gpu.given_tokens import DEVICE, DTYPE, GivenTokens, needs_card, rms
from tests.models import decoding
from tests.models.adapter_files import fill_slots, random_adapter, with_slots
from tests.models.test_encoders import KINDS as ENCODERS
from tests.models.test_encoders import batch_of, make

pytestmark = needs_card
Tensor = torch.Tensor
pairs = partial(zip, strict=True)
FILLED = (50, 5, 33, 17)
NUM_DECODES = 6
ROWS = 8
MOST = 1.3  # times PyTorch's error, which is a matter of chance on matrices as small as these
SLACK = 0.004  # of the logits' size
EXPERTS_MOST = 2.0  # where roundings choose another expert, errors differ more
ADAPTED = {"q_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "down_proj": "mlp"}


def halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that bfloat16 holds, so that errors are those of the arithmetic."""
    return {name: each.to(DEVICE, torch.bfloat16) for name, each in weights.items()}


def logits_of(
    ops: TorchOps, weights: Mapping[str, Tensor], config: Mapping[str, Any], folders: list[Path], *, records: bool
) -> Tensor:
    """Of prompts in chunks, and of decodes behind them. folders: of adapters, which every second sequence has."""
    tokens = [tokens[: num + NUM_DECODES] for tokens, num in zip(decoding.random_tokens(4), FILLED, strict=True)]
    slots = [1 + i // 2 if i % 2 else 0 for i in range(4)] if folders else None
    model = GivenTokens(with_slots(ops) if folders else ops, weights, config, tokens, slots=slots)
    fill_slots(ops, folders)
    found = [model.compute([(0, 20), (2, 33)]), model.compute([(0, 30), (1, 5), (3, 17)])]
    every = [(i, 1) for i in range(4)]
    found += [model.decode(ROWS) if records else model.compute(every) for _ in range(NUM_DECODES)]
    return torch.cat([each.float() for each in found if each is not None])


def check(found: Callable[[TorchOps, bool], Tensor], kind: str, *, ways: tuple[bool, ...]) -> None:
    from archerfish.kernels.triton.ops import TritonOps

    expected = found(TorchOps(DEVICE, "float32"), False)
    pytorch = rms(found(TorchOps(DEVICE, DTYPE), False) - expected)
    ours = [rms(found(TritonOps(DEVICE, DTYPE), records) - expected) for records in ways]
    size = rms(expected)
    print(f"{kind}: size {size:.3g}, error of PyTorch {pytorch:.3g}, ours", [f"{each:.3g}" for each in ours])
    most = EXPERTS_MOST if has_experts(kind) else MOST
    assert all(error <= most * pytorch + SLACK * size for error in ours)


def has_experts(kind: str) -> bool:
    return any(name.startswith(("num_experts", "num_local_experts")) for name in decoding.KINDS.get(kind, ("", {}))[1])


@pytest.mark.parametrize("kind", decoding.KINDS)
def test_decoders(kind: str) -> None:
    model, config = decoding.make(kind)
    weights = halved(model.state_dict())
    check(lambda ops, records: logits_of(ops, weights, config, [], records=records), kind, ways=(False, True))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "cohere"])
def test_adapters(kind: str, tmp_path: Path) -> None:
    model, config = decoding.make(kind)
    weights, maps = halved(model.state_dict()), dict[str, tuple[int, int]]()
    for layer in range(config["num_hidden_layers"]):
        for part, scope in ADAPTED.items():
            name = f"model.layers.{layer}.{scope}.{part}"
            outputs, inputs = weights[f"{name}.weight"].shape
            maps[name] = outputs, inputs
    folders = [random_adapter(tmp_path / str(i), maps, seed=i, std=0.15, r=4 + 4 * i) for i in range(2)]
    plain = logits_of(TorchOps(DEVICE, DTYPE), weights, config, [], records=False)
    changed = logits_of(TorchOps(DEVICE, DTYPE), weights, config, folders, records=False)
    assert rms(changed - plain) > 0.1 * rms(plain), "the adapters change too little"
    check(lambda ops, records: logits_of(ops, weights, config, folders, records=records), kind, ways=(False, True))


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_engine(shape: str, tmp_path: Path) -> None:
    """Two layers of the real width: recorded steps of prompts that come one by one give what passes over whole texts
    give; with adapters, rows of several adapters together give what each gives alone."""
    config = {**SHAPES[shape], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [[5 + 31 * i + j for j in range(3 + 40 * i)] for i in range(6)]
    adapters: dict[str, Any] = {"lora_experts": "a3b" in shape, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    options: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "load_format": "dummy", "max_cache_tokens": 8192}
    with LLMEngine(str(tmp_path), enable_prefix_caching=False, max_num_seqs=16, **adapters, **options) as engine:
        assert engine.adapters is not None
        maps = {
            f"model.layers.{i}.mlp.gate_proj": (config["intermediate_size"], config["hidden_size"]) for i in range(2)
        }
        if "a3b" in shape:
            size = config["moe_intermediate_size"], config["hidden_size"]
            maps = {
                f"model.layers.{i}.mlp.experts.{e}.gate_proj": size
                for i in range(2)
                for e in range(config["num_experts"])
            }
        for i in range(2):
            engine.adapters.load(f"a{i}", random_adapter(tmp_path / str(i), maps, seed=i, std=0.1, r=8))
        names = [None, "a0", "a1", "a0", None, "a1"]
        together = tokens_of(engine.generate(prompts, params, lora_request=names))
        alone = [
            tokens_of(engine.generate([prompt], params, lora_request=[name]))[0]
            for prompt, name in pairs(prompts, names)
        ]
        whole = [[*prompt, *tokens[:-1]] for prompt, tokens in pairs(prompts, together)]
        last = tokens_of(engine.generate(whole, replace(params, max_tokens=1), lora_request=names))
        plain = tokens_of(engine.generate(prompts, params))
    shared = [agreement(one, other) for one, other in pairs(together, alone)]
    print(shape, shared, [one[-1] == other[0] for one, other in pairs(together, last)])
    assert sum(shared) > 6 * 24 / 2  # two tokens may be nearly equal
    assert sum(one[-1] == other[0] for one, other in pairs(together, last)) >= 5
    assert all(together[i] != plain[i] for i, name in enumerate(names) if name)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def agreement(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common, from the first on."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    if not hasattr(transformers, f"{ENCODERS[kind][0]}Model"):
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    model, config = make(kind, "Model")
    weights = {name: each.bfloat16().float() for name, each in model.state_dict().items()}
    batch = batch_of(config["vocab_size"], types=kind.startswith("bert"))

    def found(ops: TorchOps, _: bool) -> Tensor:
        monkeypatch.setattr(inference_core, "choose_ops", lambda *_: ops)
        core = InferenceCore(weights, config, dtype=ops.dtype, pooling="lasttoken", device=DEVICE)
        rows = torch.from_numpy(np.asarray(core.ops.to_numpy(core.encoder.forward(batch)), np.float32))
        return torch.cat((rows, torch.from_numpy(np.asarray(core.run(batch), np.float32))))  # as it is replayed

    check(found, kind, ways=(False,))
