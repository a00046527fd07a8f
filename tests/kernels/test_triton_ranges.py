"""Rows that choose from a range of the vocabulary, by the Triton kernels: against the reference in torch and plain numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.triton import sampling as triton_sampling  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, Entries, Ranges, SamplingBatch, stream_key, uniform  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.params import SamplingParams  # isort: skip
from tests.kernels.test_triton_sampling import OFF, batch_of, random_logits  # isort: skip
from tests.runtime.sampling_reference import chi_square, probabilities, token_at  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where integers wrap around
Tensor = torch.Tensor
VOCAB = 5003
ROWS: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({}, (0, VOCAB, 0)), ({}, (1020, 1030, 5)), ({"temperature": 0}, (2000, 4100, -2000)),
    ({"top_k": 20, "top_p": 0.95}, (0, 4096, 907)), ({"top_k": 80, "top_p": 0.95}, (0, 4097, 0)),
    ({}, (4998, 4999, 0)), ({"top_p": 0.8}, (1023, 1025, 0)),
    ({"min_p": 0.05}, (3000, VOCAB, 1)), ({"top_k": 5}, (1500, 1503, 0)), ({"top_k": 3000, "top_p": 0.7}, (1000, 4500, 9)),
]  # fmt: skip


def ranges_of(rows: list[tuple[int, int, int]]) -> Ranges[Tensor]:
    first, end, offset = (torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in zip(*rows, strict=True))
    return Ranges(first, end, offset)


@pytest.mark.parametrize("capacity", [16, 8192])
def test_draws_from_ranges_are_the_references(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "CAPACITY", capacity)
    batch = replace(batch_of([options for options, _ in ROWS]), ranges=ranges_of([limits for _, limits in ROWS]))
    for step in range(20 if HAS_CUDA else 1):
        logits = random_logits(len(ROWS), VOCAB, 2.0, seed=step + capacity)
        found = TritonOps(DEVICE, "float32").sample(logits, batch)
        assert found.report[0].tolist() == found.tokens.tolist() and found.report[1].tolist() == [CHOSEN] * len(ROWS)
        reference = TorchOps(DEVICE).sample(logits, batch).tokens.tolist()
        for i, (options, (first, end, offset)) in enumerate(ROWS):
            p = probabilities(logits[i, first:end].cpu().numpy(), SamplingParams(**{**OFF, **options}))
            own, is_unclear = token_at(p, uniform(stream_key(i, 0), 11)) if len(p) > 1 else (0, False)
            assert is_unclear or found.tokens[i].item() == own + first + offset == reference[i], i


def test_a_greedy_batch_stays_in_its_ranges() -> None:
    limits = [(0, 10, 100), (1024, 2048, 0), (2047, 2049, -7), (4999, VOCAB, 0)]
    logits = random_logits(len(limits), VOCAB, 2.0)
    found = TritonOps(DEVICE, "float32").sample(logits, SamplingBatch(ranges=ranges_of(limits)))
    expected = [int(logits[i, first:end].argmax()) + first + offset for i, (first, end, offset) in enumerate(limits)]
    assert found.tokens.tolist() == expected and not found.report[1].any()


def test_logits_beside_a_range_are_not_looked_at() -> None:
    logits = torch.zeros(3, VOCAB, device=DEVICE)
    logits[0, 20:], logits[1, 20:], logits[2, :20] = math.nan, math.inf, -math.inf
    ranges = ranges_of([(0, 20, 7)] * 3)
    for batch in (SamplingBatch(ranges=ranges), *(replace(batch_of([o] * 3), ranges=ranges) for o in ({}, {"top_k": 4}))):
        report = TritonOps(DEVICE, "float32").sample(logits, batch).report.tolist()
        assert report[1] == [CHOSEN, CHOSEN, NONE_LEFT] and report[0][2] == 0
        assert all(7 <= token < 27 for token in report[0][:2])


def test_ranges_beside_a_mask() -> None:
    """What a mask or a penalty has changed still has its range."""
    logits = random_logits(2, VOCAB, 2.0)
    ranges = ranges_of([(0, 50, 0), (1000, 1100, 3)])
    plain = replace(batch_of([{}, {"top_k": 9}]), ranges=ranges)
    rows, token_ids = torch.tensor([0, 1], device=DEVICE), torch.tensor([5, 1050], device=DEVICE)
    biased = replace(plain, bias=Entries(rows, token_ids), bias_values=rows.double() * 0 + 60.0)
    assert TritonOps(DEVICE, "float32").sample(logits, biased).tokens.tolist() == [5, 1053]


def test_distribution_passes_chi_square() -> None:
    num_draws, first, end = 20_000 if HAS_CUDA else 40, 40, 73
    logits = torch.from_numpy((np.random.default_rng(3).normal(size=100) * 1.5).astype(np.float32))
    options: dict[str, Any] = {"top_k": 20, "top_p": 0.95} if HAS_CUDA else {}  # cut rows are slow in the interpreter
    batch = replace(batch_of([options] * num_draws), ranges=ranges_of([(first, end, -first)] * num_draws))
    tokens = TritonOps(DEVICE, "float32").sample(logits.repeat(num_draws, 1).to(DEVICE), batch).tokens
    counts = np.bincount(tokens.cpu().numpy(), minlength=end - first)
    p = probabilities(logits[first:end].numpy(), SamplingParams(**{**OFF, **options}))
    assert not counts[p == 0].any()
    statistic, most = chi_square(counts, p)
    assert statistic < most
