"""Sampling written as plainly as it can be, in numpy: what FastSampler must agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from archerfish.kernels.torch.reference import TorchOps
from archerfish.params import SamplingParams
from archerfish.runtime.sampler import Chosen, FastSampler
from archerfish.sched.plan import entry_of
from archerfish.sequence import Request, Sequence

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


def penalised(
    logits: Logits, params: SamplingParams, prompt: SequenceOf[int], output: SequenceOf[int], stops: Collection[int]
) -> Logits:
    x = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token in stops:
            x[token] = -np.inf
    for token in {*prompt, *output}:
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(output).items():
        x[token] -= np.float32(params.presence_penalty)
        x[token] -= np.float32(params.frequency_penalty) * np.float32(count)
    return x


def probabilities(x: Logits, params: SamplingParams) -> Floats:
    """Of every token, after temperature and filters."""
    order = np.lexsort((np.arange(len(x)), -x))  # likeliest first, then the lower id
    if params.temperature == 0:
        return np.asarray(np.arange(len(x)) == order[0], dtype=np.float64)
    scaled = x.astype(np.float64) / params.temperature
    p: Floats = np.exp(scaled - scaled.max())
    p[p < params.min_p * p.max()] = 0.0
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if params.top_p < 1 and mass >= params.top_p:
            p[token] = 0.0
        mass += p[token]
    p /= p.sum()
    return p


def token_at(p: Floats, number: float) -> tuple[int, bool]:
    """The token at a number in [0, 1), in the order of ids; and whether the number is too near a border to tell in
    float32."""
    edges = np.cumsum(p)
    token = int(np.searchsorted(edges, number, side="right"))
    return token, bool(np.abs(edges - number).min() < 2e-6)


def chi_square(counts: npt.NDArray[np.int64], p: Floats) -> tuple[float, float]:
    """The statistic, with tokens expected under 5 times thrown together, and what chance exceeds once in a million."""
    expected = p * counts.sum()
    is_rare = expected < 5
    groups = [(int(counts[i]), float(expected[i])) for i in np.flatnonzero(~is_rare)]
    if expected[is_rare].sum() > 0:
        groups.append((int(counts[is_rare].sum()), float(expected[is_rare].sum())))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    freedom = max(len(groups) - 1, 1)
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 4.7534 * spread**0.5) ** 3  # Wilson and Hilferty's approximation


def check_draws(counts: npt.NDArray[np.int64], p: Floats) -> None:
    """Red where counts of tokens are not those of draws from these probabilities."""
    assert not counts[p == 0].any()
    statistic, most = chi_square(counts, p)
    assert statistic < most


def sample_sequences(
    sampler: FastSampler[torch.Tensor],
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    positions: SequenceOf[int],
) -> Chosen:
    """`FastSampler.sample` of sequences that were added to it, with the masks of those that have one."""
    masked = [(place, sequence.mask.bits[0]) for place, sequence in enumerate(sequences) if sequence.mask is not None]
    masks = (np.array([place for place, _ in masked]), np.stack([bits for _, bits in masked])) if masked else None
    rows = np.array([sequence.row for sequence in sequences])
    return sampler.sample(logits, rows, np.asarray(positions), masks)[1]()


def sequence_of(
    row: int,
    prompt: SequenceOf[int] = (1, 2, 3),
    *,
    seed: int = 0,
    index: int = 0,
    output: SequenceOf[int] = (),
    stops: Collection[int] = (),
    grammar: Any = None,
    params: SamplingParams | None = None,
    **options: Any,
) -> Sequence:
    """A sequence that runs in a row of the sampler; options are those of its SamplingParams."""
    params = params or SamplingParams(max_tokens=100, **options)
    request = Request(f"r{row}", prompt, params, 100, stop_token_ids=frozenset(stops), seed=seed, grammar=grammar)
    sequence = Sequence(request, index)
    sequence.tokens.extend(output)
    sequence.row = row
    return sequence


def sample(
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    sampler: FastSampler[torch.Tensor] | None = None,
    positions: SequenceOf[int] | None = None,
) -> Chosen:
    """Add sequences to a sampler and draw a token for each, by default behind their last ones."""
    sampler = sampler or FastSampler(TorchOps(), logits.shape[1], len(sequences))
    for sequence in sequences:
        sampler.add(entry_of(sequence))
    return sample_sequences(sampler, logits, sequences, positions or [len(sequence.tokens) for sequence in sequences])
