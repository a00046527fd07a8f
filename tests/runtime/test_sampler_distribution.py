"""FastSampler against the plain reference: each draw, for all combinations of options, and their distribution."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.kernels.sampling import stream_key, uniform
from archerfish.params import SamplingParams
from archerfish.sequence import Sequence
from tests.runtime.sampling_reference import (
    check_draws,
    chi_square,
    penalised,
    probabilities,
    sample,
    sequence_of,
    token_at,
)

FEATURES: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.8,
    "min_p": 0.06,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": {2: 1.5, 11: -2.0, 30: 0.75},
    "min_tokens": 4,
}
PROMPT = [1, 5, 5, 7]
OUTPUT = [5, 20, 20]
STOPS = frozenset({3, 12})
SUBSETS = list(chain.from_iterable(combinations(FEATURES, size) for size in range(len(FEATURES) + 1)))


def sequence_for(params: SamplingParams, row: int, *, seed: int = 0, index: int = 0) -> Sequence:
    return sequence_of(row, PROMPT, seed=seed, index=index, output=OUTPUT, stops=STOPS, params=params)


def draw_all(logits: np.ndarray[Any, Any], sequences: list[Sequence]) -> list[int]:
    sampled = sample(torch.from_numpy(logits), sequences)
    assert sampled.errors == {}
    return sampled.tokens


def assert_draws_are_the_references(
    logits: np.ndarray[Any, Any], all_params: list[SamplingParams], num_draws: int
) -> None:
    places = [(i, j) for i in range(len(all_params)) for j in range(num_draws)]
    sequences = [sequence_for(all_params[i], i * num_draws + j, seed=i, index=j) for i, j in places]
    tokens = draw_all(np.repeat(logits, num_draws, axis=0), sequences)
    num_unclear = 0
    for i, params in enumerate(all_params):
        p = probabilities(penalised(logits[i], params, PROMPT, OUTPUT, STOPS), params)
        for j in range(num_draws):
            expected, is_unclear = token_at(p, uniform(stream_key(i, j), len(PROMPT) + len(OUTPUT)))
            num_unclear += is_unclear
            assert is_unclear or tokens[i * num_draws + j] == expected, params
    assert num_unclear <= len(sequences) * 0.02 + 1


def test_draws_equal_the_reference_for_all_options() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(len(SUBSETS), 40)) * 2).round(1).astype(np.float32)  # rounded: many are equal
    params = [SamplingParams(max_tokens=16, **{name: FEATURES[name] for name in subset}) for subset in SUBSETS]
    assert_draws_are_the_references(logits, params, 24)


@pytest.mark.no_cover
@pytest.mark.parametrize("subset", [s for s in SUBSETS if len(s) in (0, 1, len(FEATURES))], ids="+".join)
def test_distribution_passes_chi_square(subset: tuple[str, ...]) -> None:
    num_draws, vocab_size = 2000, 33
    params = SamplingParams(max_tokens=16, **{name: FEATURES[name] for name in subset})
    logits = (np.random.default_rng(3).normal(size=vocab_size) * 1.5).astype(np.float32)
    sequences = [sequence_for(params, row, seed=99, index=row) for row in range(num_draws)]
    counts = np.bincount(draw_all(np.tile(logits, (num_draws, 1)), sequences), minlength=vocab_size)
    p = probabilities(penalised(logits, params, PROMPT, OUTPUT, STOPS), params)
    check_draws(counts, p)


def test_chi_square_can_fail() -> None:
    p = np.asarray([0.5, 0.3, 0.2])
    statistic, most = chi_square(np.asarray([900, 720, 380]), p)
    assert statistic > most


@pytest.mark.no_cover
def test_draws_at_other_positions_are_independent() -> None:
    num_draws = 20_000
    sequences = [sequence_of(row, [0], seed=7) for row in range(num_draws)]
    drawn = np.asarray(sample(torch.zeros(num_draws, 4), sequences, positions=range(num_draws)).tokens)
    pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)
    check_draws(pairs, np.full(16, 1 / 16))
