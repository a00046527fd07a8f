"""Logits in bfloat16 on the card, as far from float32 as PyTorch's own bfloat16 is, and no further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.bench.gpu import SHAPES
from archerfish.kernels.torch.reference import TorchOps
from tests.gpu.given_tokens import DEVICE, DTYPE, GivenTokens, needs_card, random_weights, rms

pytestmark = needs_card
Tensor = torch.Tensor
LLAMA, QWEN = SHAPES["llama-3.1-8b"], SHAPES["qwen3-0.6b"]
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        **LLAMA,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 999,
    },
    "qwen3-0.6b": {**QWEN, "num_hidden_layers": 4},
    "llama-3.1-8b": {**LLAMA, "num_hidden_layers": 2},
}
MOST = 1.1  # times PyTorch's error
SLACK = 1e-4  # of the logits' size, for errors that are next to nothing


@dataclass(frozen=True)
class Work:
    """Passes over (sequence, tokens); before them the sequences' lengths are filled, if decodes follow."""

    lengths: tuple[int, ...]
    passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    num_decodes: int = 0  # steps of one token for all
    size: int = 0  # rows of the recorded step
    num_shared: int = 0


WORKS = {
    "prefill": Work((512, 300, 77, 45, 1), ((((4, 1), (0, 512), (1, 300), (2, 77), (3, 45)),))),
    "chunked prefill": Work(
        (400, 260, 90),
        (((0, 150), (1, 100)), ((2, 89), (0, 200)), ((2, 1), (0, 17), (1, 33)), ((0, 33), (1, 127))),
    ),
    "decode 1": Work((2500,), num_decodes=24, size=1),
    "decode 7": Work((1300, 5, 64, 300, 17, 900, 33), num_decodes=8, size=8),
    "decode 64": Work(tuple(20 + 37 * i % 400 for i in range(64)), num_decodes=3, size=64),
    "decode 64, shared": Work(tuple(520 + 3 * i for i in range(64)), num_decodes=3, size=64, num_shared=512),
}


@lru_cache(maxsize=1)
def weights_of(name: str) -> Mapping[str, Tensor]:
    return random_weights(CONFIGS[name])


def logits_of(ops: TorchOps, name: str, work: Work, *, is_recorded: bool) -> Tensor:
    rng = np.random.default_rng(2)
    vocab_size, shared = (
        CONFIGS[name]["vocab_size"],
        rng.integers(0, CONFIGS[name]["vocab_size"], work.num_shared).tolist(),
    )
    tokens = [
        shared + rng.integers(0, vocab_size, length + work.num_decodes - work.num_shared).tolist()
        for length in work.lengths
    ]
    model = GivenTokens(ops, weights_of(name), CONFIGS[name], tokens, num_shared=work.num_shared)
    found = [model.compute(one) for one in work.passes]
    if work.num_decodes:
        model.fill(work.lengths)
        every = [(i, 1) for i in range(len(tokens))]
        found = [model.decode(work.size) if is_recorded else model.compute(every) for _ in range(work.num_decodes)]
    return torch.cat([logits for logits in found if logits is not None])


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_errors_are_those_of_bfloat16(name: str, work: str, record_property: Any) -> None:
    from archerfish.kernels.triton.ops import TritonOps

    expected = logits_of(TorchOps(DEVICE, "float32"), name, WORKS[work], is_recorded=False)
    pytorch = rms(logits_of(TorchOps(DEVICE, DTYPE), name, WORKS[work], is_recorded=False) - expected)
    ways = {"computed": False, **({"recorded": True} if WORKS[work].num_decodes else {})}
    ours = {
        way: rms(logits_of(TritonOps(DEVICE, DTYPE), name, WORKS[work], is_recorded=is_recorded) - expected)
        for way, is_recorded in ways.items()
    }
    size = rms(expected)
    record_property("errors", {"logits": size, "PyTorch": pytorch, **ours})
    print(
        f"{name}, {work}: logits {size:.3g}, error of PyTorch {pytorch:.3g},", {k: f"{v:.3g}" for k, v in ours.items()}
    )
    assert all(error <= MOST * pytorch + SLACK * size for error in ours.values())
