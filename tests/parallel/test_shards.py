"""Every architecture and weight format divided over ranks that are threads: logits are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.kernels.formats import PLAIN, WeightFormat, choose_format
from archerfish.kernels.native.weights import as_stored
from archerfish.kernels.ranks import Ranks
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.native_support import native_ops
from tests.kernels.test_from_store import random_stored
from tests.models import recurring
from tests.models.adapter_files import fill_slots, with_slots
from tests.models.decoding import SIZES, Driver, make, make_model, random_tokens
from tests.models.peft_adapters import add_adapter
from tests.models.recurring import RecurrentDriver, StepDriver
from tests.models.test_adapters import KINDS as ADAPTERS
from tests.parallel.threads import World

LAYOUTS = [(2, 1), (4, 1), (1, 2), (2, 2)]  # ranks of a stage, stages
STEPS = [[(0, 37)], [(0, 1), (1, 16)], [(0, 1), (1, 1)]]
Backend = Callable[[], Any]
BACKENDS: list[Backend] = [TorchOps, native_ops]
MakeDriver = Callable[[Any], StepDriver]


def on_rank(backend: Backend, ranks: Ranks) -> Any:
    ops = backend()
    inner: Any = getattr(ops, "inner", ops)
    inner.ranks = ranks
    return ops


def logits_of(driver: StepDriver) -> list[torch.Tensor]:
    return [torch.cat(driver.step(work)) for work in STEPS]


def check(backend: Backend, layout: tuple[int, int], make_driver: MakeDriver, tolerance: float = 1e-4) -> None:
    expected = logits_of(make_driver(backend()))
    found = World(*layout).run(lambda ranks: logits_of(make_driver(on_rank(backend, ranks))))
    for own in found[: layout[0]]:  # the ranks of the last stage
        for mine, one in zip(own, expected, strict=True):
            torch.testing.assert_close(mine, one, atol=tolerance, rtol=tolerance)


def some_slow(kinds: list[str], layouts: list[tuple[int, int]], quick: set[tuple[str, tuple[int, int]]]) -> list[Any]:
    """Every kind in every layout; all but the quick ones are marked slow."""
    return [
        pytest.param(kind, layout, marks=() if (kind, layout) in quick else pytest.mark.slow, id=f"{kind}-{layout}")
        for kind in kinds
        for layout in layouts
    ]


FAMILIES = [
    "llama",
    "llama-tied",
    "llama-biases",
    "llama-multi-head",
    "llama-one-kv-head",
    "qwen2",
    "qwen3",
    "mistral-window",
    "gemma2",
    "gemma3",
    "phi3",
    "granite-tied",
    "glm4",
    "exaone4",
    "cohere2",
    "starcoder2",
    "gpt2",
    "qwen2-moe",
    "mixtral",
    "gpt-oss",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "layout"),
    some_slow(
        FAMILIES,
        LAYOUTS,
        {
            ("llama-biases", (4, 1)),
            ("phi3", (2, 2)),
            ("gemma2", (1, 2)),
            ("cohere2", (2, 2)),
            ("gpt2", (2, 2)),
            ("qwen2-moe", (2, 1)),
            ("gpt-oss", (2, 1)),
        },
    ),
)
def test_decoders(kind: str, layout: tuple[int, int], backend: Backend) -> None:
    model, config = make(kind)
    check(backend, layout, lambda ops: Driver(ops, model.state_dict(), config, random_tokens(2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["phi3", "gemma2", "llama-tied", "mixtral"])
def test_adapters(kind: str, backend: Backend, tmp_path: Path) -> None:
    """Parts of stacked, of fused and of partial products, of embeddings, heads and experts."""
    model, config = make(kind)
    for i, options in enumerate(ADAPTERS[kind]):
        add_adapter(model, tmp_path / str(i), seed=i, **options)

    def driver(ops: Any) -> Driver:
        made = Driver(with_slots(ops), model.state_dict(), config, random_tokens(2))
        fill_slots(ops, [tmp_path / str(i) for i in range(len(ADAPTERS[kind]))])
        made.slots = [1, 2]
        return made

    check(backend, (2, 1), driver)


Rwkv = tuple[dict[str, Any], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def rwkv(tmp_path_factory: pytest.TempPathFactory) -> Rwkv:
    path = tmp_path_factory.mktemp("rwkv") / "model.pth"
    return recurring.read_rwkv7(recurring.write_checkpoint(recurring.SIZES["small"], path))


def rwkv_driver(rwkv: Rwkv, weight_format: WeightFormat = PLAIN) -> MakeDriver:
    tokens = recurring.random_tokens(recurring.SIZES["small"], 2, 60)
    return lambda ops: RecurrentDriver(ops, rwkv[1], rwkv[0], tokens, weight_format=weight_format)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "layout"), some_slow(["rwkv7"], LAYOUTS, {("rwkv7", (2, 2))}))
def test_rwkv7(rwkv: Rwkv, kind: str, layout: tuple[int, int], backend: Backend) -> None:
    check(backend, layout, rwkv_driver(rwkv))


WIDE = {
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# Products of integers round their inputs to 15 bits for each 32 of them, and so differently where sums are a little
# different.
ROUNDED = 5e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "layout"), some_slow(["int8", "int4"], LAYOUTS, {("int8", (2, 1))}))
@pytest.mark.parametrize(
    "family", ["Phi3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Gemma2"))]
)
def test_formats_made_at_load(family: str, kind: str, layout: tuple[int, int], backend: Backend) -> None:
    model, config = make_model(family, WIDE)
    weights: dict[str, Any] = model.state_dict()
    if backend is native_ops:  # its engine gives it tensors of the store
        weights = {name: as_stored(each) for name, each in weights.items()}
    options: dict[str, Any] = {"weight_format": choose_format(kind)}
    tolerance = 1e-4 if backend is TorchOps else ROUNDED
    check(backend, layout, lambda ops: Driver(ops, weights, config, random_tokens(2), **options), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("layout", [(2, 1), (2, 2)])
def test_formats_of_rwkv7(rwkv: Rwkv, kind: str, layout: tuple[int, int]) -> None:
    check(TorchOps, layout, rwkv_driver(rwkv, choose_format(kind)))


STORED = ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "Q4_K", "Q6_K", "FP8", "INT8"]


def stored_weights(weights: Mapping[str, torch.Tensor], kind: str, group_size: int) -> dict[str, Any]:
    """Matrices in a type of the store."""
    made: dict[str, Any] = {}
    for name, tensor in weights.items():
        made[name] = tensor
        if tensor.dim() == 2 and "embed" not in name:
            stored = random_stored(kind, len(tensor), tensor.shape[1], group_size or tensor.shape[1])
            small = None if stored.scales is None else (stored.scales * np.float32(0.2)).astype(stored.scales.dtype)
            made[name] = replace(stored, scales=small)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "layout"),
    some_slow(
        STORED,
        [(2, 1), (4, 1), (2, 2)],
        {
            ("Q4_K", (2, 1)),
        },
    ),
)
@pytest.mark.parametrize("group_size", [32, *(pytest.param(size, marks=pytest.mark.slow) for size in (128, 0))])
def test_formats_of_the_store(kind: str, group_size: int, layout: tuple[int, int], backend: Backend) -> None:
    """A part that does not end with a group becomes plain: o_proj of Q4_K, whose blocks have 256 inputs."""
    model, config = make_model("Llama", {**WIDE, "intermediate_size": 1024})
    weights = stored_weights(model.state_dict(), kind, group_size)

    def logits(ops: Any) -> torch.Tensor:
        return torch.cat(logits_of(Driver(ops, weights, config, random_tokens(2))))

    expected = logits(backend())
    found = World(*layout).run(lambda ranks: logits(on_rank(backend, ranks)))
    # On a GPU the scales of K types are rounded to 16 bits, and those of what becomes plain are not.
    tolerance = ROUNDED if backend is native_ops else 1e-3 if kind.endswith("_K") else 1e-4
    for own in found[: layout[0]]:
        assert float((own - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_stacks_of_the_store(backend: Backend) -> None:
    """Three blocks of hidden units between two ranks: a part that did not end with a block would become plain."""
    model, config = make("gpt-oss")
    weights: dict[str, Any] = dict(model.state_dict())
    for name in [name for name in weights if name.endswith("_proj")]:
        stored = random_stored("MXFP4", math.prod(weights[name].shape[:2]), weights[name].shape[2])
        weights[name] = replace(stored, shape=tuple(weights[name].shape))

    def logits(ops: Any) -> torch.Tensor:
        driver = Driver(ops, weights, config, random_tokens(2))
        if backend is TorchOps:
            assert driver.model.blocks[0].mlp.down.get().weight_format.name == "groups"
        return torch.cat(logits_of(driver))

    expected = logits(backend())
    for own in World(2, 1).run(lambda ranks: logits(on_rank(backend, ranks))):
        assert float((own - expected).norm() / expected.norm()) < (ROUNDED if backend is native_ops else 1e-4)
