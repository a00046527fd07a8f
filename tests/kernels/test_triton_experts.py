"""Mixtures of experts in Triton: red if a row has another expert, weight, order or place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from archerfish.kernels.adapters import LowRank
from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import choose_format
from archerfish.kernels.stored import random_stored
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.expert_cases import LOGITS, ROUTINGS, as_matrices, check_biases, expected, make, packed, rounded, run
from tests.kernels.triton_support import DEVICE, TYPES, assert_near, untraced

from archerfish.kernels.triton.experts import route  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip

KINDS = [
    ("Q4_0", 128),
    ("Q4_1", 32),
    ("MXFP4", 32),
    ("INT8", 16),
    ("INT8", 128),
    ("FP8", 128),
    ("int8", 0),
    ("int4", 0),
]


@untraced
@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [
        ("softmax", 1),
        ("softmax", 23),
        ("normed", 70),
        ("one", 9),
        ("every", 2),
        ("sigmoid", 40),
        ("sigmoid", 1),
    ],
)
def test_triton(kind: str, num_rows: int, dtype: str) -> None:
    routing, ops = ROUTINGS[kind], TritonOps(DEVICE, dtype)
    change = list(LOGITS.values())[num_rows % len(LOGITS)]
    x, logits, gate_up, down, shared = make(routing, num_rows, has_gate=num_rows in (1, 9))
    x, gate_up, down, shared = (each.to(getattr(torch, dtype)) for each in (x, gate_up, down, shared))
    right = expected(x.float(), change(logits), routing, gate_up.float(), down.float(), shared.float())
    here = routing._replace(bias=None if routing.bias is None else routing.bias.to(DEVICE))
    found = run(ops, here, x.to(DEVICE), change(logits).to(DEVICE), gate_up, down, shared=shared.to(DEVICE))
    assert_near(found.cpu(), right, dtype, factor=4)


@untraced
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_formats_on_triton(kind: tuple[str, int], num_rows: int) -> None:
    """Codes of 4 and 8 bits in groups, with and without minima, and rows with a scale."""
    routing = ROUTINGS["softmax"]
    (name, group_size) = kind
    hidden = 64
    x, logits, gate_up, down, _ = make(routing, num_rows, width=128, hidden=hidden)
    if group_size:
        shapes = [each.shape[1:] for each in (gate_up, down)]
        stored = [[random_stored(tuple(shape), name, min(group_size, shape[1])) for _ in range(8)] for shape in shapes]
        wide = [torch.stack([torch.from_numpy(each.as_floats()) for each in half]) for half in stored]
        first, second = (as_matrices(TritonOps(DEVICE, "float32"), half) for half in stored)
    else:
        made = choose_format(name)
        wide = [rounded(made, each) for each in (gate_up, down)]
        first, second = (packed(TritonOps(DEVICE, "float32"), each, made) for each in (gate_up, down))
    found = TritonOps(DEVICE, "float32").experts(x.to(DEVICE), logits.to(DEVICE), routing, first, second, "silu")
    assert_near(found.cpu(), expected(x, logits, routing, *wide), factor=8)


@untraced
@pytest.mark.parametrize("num_rows", [1, 20])
def test_biases_on_triton(num_rows: int) -> None:
    check_biases(TritonOps(DEVICE, "float32"), num_rows)


@untraced
@pytest.mark.parametrize("num_rows", [1, 40])
def test_adapters_of_experts(num_rows: int) -> None:
    """Against the reference, for rows of several adapters and of none. The second adapter lacks some experts."""
    routing = ROUTINGS["normed"]
    found = []
    random = np.random.default_rng(num_rows)
    x, logits, gate_up, down, shared = (each.to(DEVICE) for each in make(routing, num_rows))
    rows = torch.from_numpy(random.integers(0, 4, num_rows)).to(DEVICE)
    rows[0] = 1
    pairs = [
        (len(each) * part, outputs, inputs) for each, part, outputs, inputs in ((gate_up, 2, 48, 96), (down, 1, 96, 48))
    ]
    matrices: list[dict[str, LowRank]] = [{}, {}]
    for number, (num, outputs, inputs) in enumerate(pairs):
        for i in range(num):
            for slot, rank in enumerate((7, 3)):
                if not (slot and i % 3 == 0):
                    shapes = ((rank, inputs), (outputs, rank))
                    made = [0.3 * random.standard_normal(shape).astype(np.float32) for shape in shapes]
                    matrices[slot][f"{number}.{i}"] = LowRank(*made)
    for ops in (TorchOps(DEVICE, "float32"), TritonOps(DEVICE, "float32")):
        first, second = weights = [packed(ops, each) for each in (gate_up, down)]
        adapters = ops.adapters = ops.new_adapters(3, 8)
        for number, (weight, (num, outputs, inputs)) in enumerate(zip(weights, pairs, strict=True)):
            sizes = [outputs] * (2 - number)
            weight.adapter = adapters.add_product([f"{number}.{i}" for i in range(num)], sizes, inputs)
        for slot, each in enumerate(matrices, 1):
            adapters.fill(slot, each)
        plain = ops.experts(x, logits, routing, first, second, "silu", shared=shared)
        adapters.rows = rows
        found.append(ops.experts(x, logits, routing, first, second, "silu", shared=shared).cpu())
        has_adapter = (rows % 3 > 0).cpu()
        assert (found[-1][has_adapter] - plain.cpu()[has_adapter]).abs().amax(1).min() > 0.01
    assert_near(found[1], found[0], factor=8)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(2, 3, 3), (33, 200, 5), (700, 6, 2)])
def test_order_of_places(num_rows: int, num_experts: int, num_chosen: int, tile_rows: int) -> None:
    """Each place is once in a tile of its expert; what a tile has beyond them is no place, and tiles beyond are no
    expert's."""
    routing, num_places = Routing[torch.Tensor](num_experts, num_chosen), num_rows * num_chosen
    logits = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(num_rows))
    logits[:, 0] += 3  # one expert has most rows
    _, _, tiles, order = (each.cpu() for each in route(logits.to(DEVICE), routing, tile_rows))
    chosen = logits.topk(num_chosen).indices.flatten()
    is_used = tiles >= 0
    rows = order.view(-1, tile_rows)[is_used]
    owners = tiles[is_used][:, None].expand_as(rows)[rows < num_places]
    places = rows[rows < num_places].long()
    assert sorted(places.tolist()) == list(range(num_places)) and (rows <= num_places).all()
    assert torch.equal(chosen[places], owners.long()), "a place lies with another expert"
    assert is_used.sum() == (-(-chosen.bincount(minlength=num_experts) // tile_rows)).sum()
