"""`sample_row` against the op `sample` of the reference, for the same row, seed and position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.errors import InvalidInputError, ModelError
from archerfish.kernels.sampling import TOP_K_OFF, Cuts, SamplingBatch, stream_key
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime import host_sampling
from archerfish.runtime.host_sampling import sample_row

SIZES = (3, 300, 640, 5000)
WAYS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 280, "top_p": 0.5},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"temperature": 0.05},
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 0},
]


@pytest.fixture(params=["native", "numpy"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(host_sampling, "native_sampler", None)
    elif host_sampling.native_sampler is None:
        pytest.skip("archerfish was installed without compiled code")


def sample_by_op(
    row: torch.Tensor, seed: int, position: int, temperature: float = 1, top_k: int = 0, top_p: float = 1
) -> int:
    ops = TorchOps()
    if temperature == 0:
        return int(ops.sample(row[None], SamplingBatch()).tokens)
    limits = top_k if 0 < top_k < len(row) else TOP_K_OFF, top_p if top_p < 1 else math.inf
    cuts = Cuts(torch.tensor([0]), torch.tensor([limits[0]]), torch.tensor([limits[1]], dtype=torch.float64))
    batch = SamplingBatch(
        temperature=torch.tensor([temperature], dtype=torch.float64),
        keys=torch.tensor([stream_key(seed, 0)]),
        positions=torch.tensor([position]),
        cuts=cuts if limits != (TOP_K_OFF, math.inf) else None,
    )
    return int(ops.sample(row[None], batch).tokens)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_row_gives_the_token_of_the_op(way: dict[str, Any]) -> None:
    numbers = torch.Generator().manual_seed(0)
    for size in SIZES:
        for seed in range(20):
            row = torch.randn(size, generator=numbers) * 3
            if seed % 3 == 0:
                row = row.round()  # many equal logits
            assert sample_row(row.numpy(), seed=seed, position=seed % 4, **way) == sample_by_op(
                row, seed, seed % 4, **way
            )


def test_rows_without_a_token_are_errors() -> None:
    for row, message in (
        ([math.nan, 1.0], "finite"),
        ([math.inf, 1.0], "finite"),
        ([-math.inf, -math.inf], "rule out every"),
    ):
        with pytest.raises(ModelError, match=message):
            sample_row(row)
    with pytest.raises(InvalidInputError, match="one row"):
        sample_row(np.zeros((2, 3)))
    with pytest.raises(InvalidInputError, match="one row"):
        sample_row([])


def test_a_row_is_not_changed() -> None:
    row = np.zeros(50, np.float32)
    assert sample_row(row, masked=range(49)) == 49
    assert not row.any()
