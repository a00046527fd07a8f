"""Divided models over Triton kernels, in its interpreter or on a card, which the threads share."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import triton_support  # isort: skip  (before triton is imported)
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.triton.ops import TritonOps
from tests.models.decoding import Driver, make, random_tokens
from tests.parallel.test_shards import Rwkv, check, logits_of, rwkv, rwkv_driver  # noqa: F401 (rwkv is a fixture)

DEVICE = "cuda" if triton_support.HAS_CUDA else "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("llama", (2, 1)), ("phi3", (2, 2)), ("gemma2", (1, 2))])
def test_decoders_over_triton(kind: str, layout: tuple[int, int]) -> None:
    model, config = make(kind)
    weights = model.state_dict()
    check(lambda: TritonOps(DEVICE, "float32"), layout, lambda ops: Driver(ops, weights, config, random_tokens(2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo3", "cohere2", "glm4", "starcoder2", "gpt2", "gpt-oss"])
def test_families_over_triton(kind: str) -> None:
    """Norms of all heads, neighbours that are rotated together, layer norms and positions: none of them divided."""
    model, config = make(kind)
    backends = TorchOps(), TritonOps(DEVICE, "float32")
    expected, found = (logits_of(Driver(ops, model.state_dict(), config, random_tokens(2))) for ops in backends)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_rwkv7_over_triton(rwkv: Rwkv, layout: tuple[int, int]) -> None:  # noqa: F811
    check(lambda: TritonOps(DEVICE, "float32"), layout, rwkv_driver(rwkv))
