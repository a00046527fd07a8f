"""Masks of tokens in FastSampler, with grammars that are lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from archerfish.errors import InvalidInputError
from archerfish.kernels.sampling import stream_key, uniform
from archerfish.runtime.sampler import SPECIAL, Chosen, needs_of
from archerfish.sched.masks import MaskFinder
from archerfish.sched.plan import entry_of
from archerfish.sequence import Sequence
from tests.runtime.sampling_reference import chi_square, penalised, probabilities, sample, sequence_of, token_at

PROMPT, OUTPUT = [1, 5, 5, 7], [5, 20]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 3},
    {"top_k": 300},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 1.7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {20: 3.0, 2: -4.0}},
]


class Listed:
    """A grammar that allows the same tokens at every place; without any it is at a dead end."""

    def __init__(self, allowed: SequenceOf[int], problem: Exception | None = None) -> None:
        self.allowed, self.problem = list(allowed), problem
        self.seen: list[list[int]] = []

    def start(self) -> Listed:
        return self

    def copy(self) -> Listed:
        return self

    def forced(self) -> list[int]:
        return []

    def fill(self, output: SequenceOf[int], bits: npt.NDArray[np.int32]) -> None:
        self.seen.append(list(output))
        if self.problem is not None:
            raise self.problem
        flags = np.zeros(len(bits) * 32, dtype=np.uint8)
        flags[self.allowed] = 1
        bits[:] = np.packbits(flags, bitorder="little").view(np.int32)


def sequence_with(row: int, grammar: Listed | None = None, **options: Any) -> Sequence:
    return sequence_of(row, PROMPT, output=OUTPUT, grammar=grammar, **options)


def find_masks(sequences: list[Sequence], vocab_size: int) -> None:
    finder = MaskFinder(vocab_size)
    for sequence in sequences:
        if sequence.request.grammar is not None:
            finder.begin(sequence)
    while any(sequence.mask is not None and not sequence.mask.done() for sequence in sequences):
        finder.wait()


def draw(logits: torch.Tensor, sequences: list[Sequence]) -> Chosen:
    find_masks(sequences, logits.shape[1])
    return sample(logits, sequences)


@pytest.mark.parametrize("vocab_size", [33, 64, 640, 1001])
@pytest.mark.parametrize("options", OPTIONS)
def test_draws_are_those_of_the_reference_over_allowed_tokens(vocab_size: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(vocab_size)
    num = 40
    logits = (rng.standard_normal((num, vocab_size)) * 3).astype(np.float32)
    lists = [sorted(rng.choice(vocab_size, rng.integers(1, vocab_size), replace=False).tolist()) for _ in range(num)]
    sequences = [sequence_with(row, Listed(lists[row]) if row % 4 else None, seed=row, **options) for row in range(num)]
    sampled = draw(torch.from_numpy(logits), sequences)
    assert sampled.errors == {}
    for row, token in enumerate(sampled.tokens):
        params = sequences[row].request.params
        x = penalised(logits[row], params, PROMPT, OUTPUT, ())
        if row % 4:
            assert token in lists[row]
            x[np.setdiff1d(np.arange(vocab_size), lists[row])] = -np.inf
        number = uniform(stream_key(row, 0), len(PROMPT) + len(OUTPUT))
        expected, is_unclear = token_at(probabilities(x, params), number)
        assert token == expected or is_unclear


@pytest.mark.no_cover
def test_the_distribution_is_the_masked_softmax() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(5)) * 2
    allowed = list(range(3, 200, 7))
    sequences = [sequence_with(row, Listed(allowed), seed=1, index=row) for row in range(5000)]
    tokens = draw(logits.repeat(5000, 1), sequences).tokens
    p = np.zeros(200)
    p[allowed] = torch.softmax(logits[0, allowed].double(), -1).numpy()
    counts = np.bincount(tokens, minlength=200)
    statistic, limit = chi_square(counts, p)
    assert statistic < limit and counts[p == 0].sum() == 0


def test_neighbours_draw_what_they_would_without_a_grammar() -> None:
    logits = torch.randn(8, 640, generator=torch.Generator().manual_seed(6))
    mixed = [sequence_with(row, seed=row, **options) for row, options in enumerate(OPTIONS)]
    alone = draw(logits, mixed).tokens
    beside = [
        sequence_with(row, Listed([9, 10]) if row in (2, 5) else None, seed=row, **o) for row, o in enumerate(OPTIONS)
    ]
    together = draw(logits, beside).tokens
    assert [token for row, token in enumerate(together) if row not in (2, 5)] == [
        token for row, token in enumerate(alone) if row not in (2, 5)
    ]
    assert {together[2], together[5]} <= {9, 10}


def test_a_failing_grammar_is_the_error_of_its_own_mask() -> None:
    problems = [InvalidInputError("a dead end"), RuntimeError("anything else"), None]
    sequences = [sequence_with(row, Listed([row], problem)) for row, problem in enumerate(problems)]
    find_masks(sequences, 100)
    assert [sequence.mask and sequence.mask.error for sequence in sequences] == problems


def test_a_matcher_sees_all_output_of_its_sequence() -> None:
    grammar = Listed([7])
    first = sequence_with(0, grammar)
    assert draw(torch.randn(1, 100), [first]).tokens == [7]
    first.tokens.append(7)
    first.row = 0  # as after a preemption
    draw(torch.randn(1, 100), [first])
    assert grammar.seen == [OUTPUT, [*OUTPUT, 7]] and first.matcher is grammar
    assert needs_of(entry_of(first)) == SPECIAL and not needs_of(entry_of(sequence_with(0)))


def test_many_masks_are_found_side_by_side() -> None:
    sequences = [sequence_with(row, Listed([row, 129])) for row in range(40)]
    find_masks(sequences, 130)
    for row, sequence in enumerate(sequences):
        assert sequence.mask is not None and sequence.mask.bits.shape == (1, 3)
        flags = np.unpackbits(sequence.mask.bits.view(np.uint8), bitorder="little")
        assert np.flatnonzero(flags).tolist() == [row, 129]
