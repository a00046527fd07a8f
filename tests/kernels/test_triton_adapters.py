"""The kernels of adapters against the reference: stacked parts, rows of many adapters and of none, lookups, recorded
inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from archerfish.kernels.adapters import Adapters, LowRank
from archerfish.kernels.decoding import NUM_INPUTS, Input, PassSize
from archerfish.kernels.ops import Activation
from archerfish.kernels.torch.reference import TorchOps
from tests.kernels.triton_support import DEVICE

from archerfish.kernels.triton.adapters import TritonAdapters  # isort: skip


def both(
    dtype: str, *products: tuple[tuple[int, ...], int], max_rank: int = 20, num_slots: int = 4, **more: Any
) -> list[Any]:
    """Slots of both backends with the same adapters; the second slot is empty, the third lacks the second part."""
    from archerfish.kernels.triton.ops import TritonOps

    made: list[Any] = []
    for ops in (TorchOps(DEVICE, dtype), TritonOps(DEVICE, dtype)):
        adapters: Adapters[Any] = ops.new_adapters(num_slots, max_rank)
        for i, (sizes, inputs) in enumerate(products):
            adapters.add_product([f"p{i}.{part}" for part in range(len(sizes))], sizes, inputs, **more)
        random = np.random.default_rng(0)
        for slot, rank in ((1, max_rank), (3, 3), (4, 17)):
            matrices: dict[str, LowRank] = {}
            for name, [one] in adapters.maps.items():
                shapes = (rank, one.inputs.size), (one.outputs.size, rank)
                if slot != 3 or not name.endswith(".1"):
                    down, up = (np.float32(0.25) * random.standard_normal(shape, np.float32) for shape in shapes)
                    matrices[name] = LowRank(down, up)
            adapters.fill(slot, matrices)
        made.append(adapters)
    return made


def table_of(adapters: Any, name: str = "p0.0") -> Any:
    return adapters.maps[name][0].table


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("sizes", "inputs"), [((130,), 40), ((64, 24, 24), 300), ((200, 200), 2500)])
@pytest.mark.parametrize("num_rows", [1, 17, 600])
def test_additions(dtype: str, sizes: tuple[int, ...], inputs: int, num_rows: int) -> None:
    if num_rows > 17 and (inputs > 300 or dtype == "float32"):
        pytest.skip("the interpreter is slow")
    check_additions(dtype, sizes, inputs, num_rows)


def check_additions(dtype: str, sizes: tuple[int, ...], inputs: int, num_rows: int) -> None:
    """Several adapters and rows without one, against the reference."""
    found, random = [], torch.Generator(DEVICE).manual_seed(1)
    dtype_of = getattr(torch, dtype)
    x = torch.randn(num_rows, inputs, generator=random, device=DEVICE).to(dtype_of)
    y = torch.randn(num_rows, sum(sizes), generator=random, device=DEVICE)
    rows = torch.randint(0, 5, (num_rows,), generator=random, device=DEVICE)
    rows[0] = 4
    for adapters in both(dtype, (sizes, inputs)):
        adapters.rows = rows
        found.append(adapters.add(y.clone(), x, table_of(adapters), activation="relu_squared", softcap=9.0))
    assert not torch.equal(found[0][rows > 2], torch.relu(y).square()[rows > 2])
    atol, rtol = (1e-4, 1e-4) if dtype == "float32" else (0.05, 0.02)
    torch.testing.assert_close(found[1], found[0], atol=atol, rtol=rtol)


@pytest.mark.parametrize("enough", [1, 12])
def test_programs_with_several_tiles_of_outputs(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from archerfish.kernels.triton import adapters as triton_adapters

    monkeypatch.setattr(triton_adapters, "ENOUGH_PROGRAMS", enough)
    check_additions("float32", (500, 200, 130), 40, 17)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "gate"),
    [
        ("float32", 17, "silu"),
        ("float16", 40, "gelu_tanh"),
        ("float32", 1, "silu"),
    ],
)
def test_gated_additions(dtype: str, num_rows: int, gate: Activation) -> None:
    """Two parts and the gate behind them in one kernel, of rows with an adapter and without one."""
    found, random = [], torch.Generator(DEVICE).manual_seed(1)
    x, y = (
        torch.randn(num_rows, width, generator=random, device=DEVICE).to(getattr(torch, dtype)) for width in (300, 340)
    )
    rows = torch.randint(0, 5, (num_rows,), generator=random, device=DEVICE)
    for adapters in both(dtype, ((170, 170), 300)):
        adapters.rows, table = rows, table_of(adapters)
        if isinstance(adapters, TritonAdapters):
            found.append(adapters.add_gated(y, x, table, gate))
        else:
            found.append(TorchOps(DEVICE, dtype).gated(adapters.add(y.clone(), x, table), gate))
    tolerance = 1e-4 if dtype == "float32" else 0.05
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance)


def test_lookups() -> None:
    found, ids = [], torch.tensor([5, 0, 9, 5], device=DEVICE)
    for adapters in both("float32", ((70,), 10), is_lookup=True):
        adapters.rows = torch.tensor([1, 0, 3, 4], device=DEVICE)
        found.append(adapters.add(torch.ones(4, 70, device=DEVICE), ids, table_of(adapters), scale=1.5))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert (found[0][1] == 1).all() and not (found[0][0] == 1).all()


def test_rows_of_a_recorded_pass() -> None:
    """Fillings between decodes and prompts, and behind them, have no adapter."""
    [adapters, _] = both("float32", ((16,), 16))
    size = PassSize(num_decodes=3, num_prompts=2, num_tokens=8)
    columns = torch.zeros(NUM_INPUTS, 5, dtype=torch.int64, device=DEVICE)
    columns[Input.COUNT] = torch.tensor([1, 1, 1, 4, 2])
    columns[Input.ADAPTER] = torch.tensor([2, 0, 0, 1, 3])
    adapters.read_rows(torch.cat((columns.flatten(), columns.new_zeros(11))), size)
    assert adapters.rows.tolist() == [2, 0, 0, 1, 1, 1, 1, 3, 3, 0, 0]
    adapters.read_rows(columns, None)
    assert adapters.rows.tolist() == [2, 0, 0, 1, 3]
