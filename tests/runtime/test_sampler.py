from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.errors import ModelError
from archerfish.kernels.sampling import stream_key, uniform
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.sampling import uniforms
from archerfish.runtime.sampler import FastSampler, prompt_logprobs
from archerfish.sched.plan import entry_of
from archerfish.sequence import Sequence
from tests.kernels.sampling_cases import MIXED
from tests.runtime.sampling_reference import sample, sample_sequences, sequence_of

Sampler = FastSampler[torch.Tensor]
VOCAB = 640


def test_uniform_numbers_are_those_of_the_definition() -> None:
    keys = [stream_key(seed, index) for seed in (0, 1, 2**63, 2**64 - 1) for index in (0, 1, 127)]
    positions = [0, 1, 5, 2**31, 2**40, 7, 8, 9, 10, 11, 12, 13]
    found = uniforms(torch.tensor(keys), torch.tensor(positions)).tolist()
    assert found == [uniform(key, position) for key, position in zip(keys, positions, strict=True)]
    assert len(set(keys)) == len(keys) and all(0 <= number < 1 for number in found)


def test_greedy_takes_the_lowest_of_the_likeliest() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [50, 400, 639]] = 2.0
    logits[1, [33, 34]] = 1.0
    assert sample(logits, [sequence_of(row, temperature=0) for row in range(3)]).tokens == [50, 33, 0]


def test_a_draw_is_the_same_alone_and_in_a_batch_of_32() -> None:
    logits = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    sequences = [sequence_of(row, seed=row % 3, index=row, stops=[9], **MIXED[row % len(MIXED)]) for row in range(32)]
    together = sample(logits, sequences).tokens
    for row, sequence in enumerate(sequences):
        sequence.row = 0
        assert sample(logits[row : row + 1], [sequence]).tokens == [together[row]]


def test_seed_index_and_position_choose_the_draw() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int, index: int, num_prompt: int) -> int:
        return sample(logits, [sequence_of(0, [1] * num_prompt, seed=seed, index=index)]).tokens[0]

    assert draw(5, 0, 3) == draw(5, 0, 3)
    assert len({draw(5, 0, 3), draw(6, 0, 3), draw(5, 1, 3), draw(5, 0, 4)}) == 4


@pytest.mark.parametrize(
    "options", [*MIXED, {"top_p": 0.3, "top_k": 500}, {"temperature": 1e-40}, {"temperature": 100.0}]
)
def test_extreme_logits_give_the_only_sensible_token(options: dict[str, Any]) -> None:
    logits = torch.full((2, VOCAB), -1e4)
    logits[0, 77] = 1e4
    logits[1] = -math.inf
    logits[1, 78] = -3e38
    assert sample(logits, [sequence_of(row, **options) for row in range(2)]).tokens == [77, 78]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("vocab_size", [50, VOCAB, 20_000])
def test_a_bad_row_fails_alone(bad: float, vocab_size: int) -> None:
    rows = len(MIXED) * 2
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(4))
    alone = sample(logits.clone(), [sequence_of(row, seed=row, **MIXED[row // 2]) for row in range(rows)])
    spoilt = logits.clone()
    if math.isinf(bad) and bad < 0:
        spoilt[1::2] = bad
    else:
        spoilt[1::2, 17] = bad
    sampled = sample(spoilt, [sequence_of(row, seed=row, **MIXED[row // 2]) for row in range(rows)])
    assert set(sampled.errors) == set(range(1, rows, 2))
    assert all(isinstance(error, ModelError) for error in sampled.errors.values())
    assert sampled.tokens[::2] == alone.tokens[::2]
    assert all(0 <= token < vocab_size for token in sampled.tokens)
    assert set(sampled.logprobs) == {14}


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 100.0
    sampler: Sampler = FastSampler(TorchOps(), VOCAB, 1)
    sequence = sequence_of(0, temperature=0, min_tokens=2, stops=[9, 10**6])
    sampler.add(entry_of(sequence))
    assert [sample_sequences(sampler, logits, [sequence], [3 + i]).tokens[0] for i in range(4)] == [0, 0, 9, 9]
    nothing_left = sample(torch.zeros(1, 4), [sequence_of(0, min_tokens=1, stops=range(4))])
    assert isinstance(nothing_left.errors[0], ModelError)


def test_penalties_count_sampled_tokens() -> None:
    logits = torch.zeros(2, 8)
    logits[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    sampler: Sampler = FastSampler(TorchOps(), 8, 2)
    sequences = [sequence_of(0, [7], temperature=0, presence_penalty=1.0), sequence_of(1, [7], temperature=0)]
    for sequence in sequences:
        sampler.add(entry_of(sequence))
    steps = [sample_sequences(sampler, logits, sequences, [1 + i, 1 + i]).tokens for i in range(4)]
    assert steps == [[0, 0], [1, 0], [2, 0], [3, 0]]


def test_counts_start_from_prompt_and_output_after_a_preemption() -> None:
    def run(num_steps: int, sequence: Sequence) -> list[int]:
        sampler: Sampler = FastSampler(TorchOps(), VOCAB, 1)
        sampler.add(entry_of(sequence))
        for _ in range(num_steps):
            sequence.tokens.extend(sample_sequences(sampler, logits, [sequence], [len(sequence.tokens)]).tokens)
        return sequence.tokens.tolist()

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "temperature": 0.3,
    }
    whole = run(300, sequence_of(0, **options))
    broken = sequence_of(0, **options)
    run(120, broken)
    assert run(180, broken) == whole


def test_a_row_forgets_its_previous_sequence() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler: Sampler = FastSampler(TorchOps(), VOCAB, 1)
    heavy = sequence_of(0, temperature=0, repetition_penalty=2.0, logit_bias={5: 9.0}, min_tokens=50, stops=[0])
    assert sample(logits, [heavy], sampler).tokens == [5]
    assert sample(logits, [sequence_of(0, temperature=0)], sampler).tokens == [0]


def test_logits_are_left_as_they_came() -> None:
    logits = torch.randn(len(MIXED), VOCAB)
    before = logits.clone()
    sample(logits, [sequence_of(row, stops=[1], **options) for row, options in enumerate(MIXED)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [101, 20_000])
def test_logprobs_are_of_the_unmodified_logits(vocab_size: int) -> None:
    logits = (torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(6)) * 3).bfloat16().float()
    exact = torch.log_softmax(logits.double(), -1).numpy()
    biased: dict[str, Any] = {"logprobs": 7, "temperature": 0.1, "logit_bias": {4: 100.0}}
    options: list[dict[str, Any]] = [{"logprobs": 0}, {}, biased, {"logprobs": 3}]
    sampled = sample(logits, [sequence_of(row, **kw) for row, kw in enumerate(options)])
    tokens, found = sampled.tokens, sampled.logprobs
    assert set(found) == {0, 2, 3} and tokens[2] == 4
    for row, one in found.items():
        assert one.token_id == tokens[row]
        assert one.logprob == pytest.approx(exact[row, tokens[row]], abs=1e-5)
        assert one.rank == 1 + (exact[row] > exact[row, tokens[row]]).sum()
        likeliest = np.lexsort((np.arange(vocab_size), -exact[row]))[: options[row]["logprobs"]]
        assert [token for token, _ in one.top] == likeliest.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(exact[row, likeliest].tolist(), abs=1e-5)


def test_prompt_logprobs_are_of_the_tokens_that_followed() -> None:
    logits = torch.randn(3, VOCAB)
    found = prompt_logprobs(TorchOps(), logits, [4, 5, 6], 1)()
    exact = torch.log_softmax(logits.double(), -1)
    assert [one.logprob for one in found] == pytest.approx([exact[i, 4 + i].item() for i in range(3)], abs=1e-5)
    assert [one.top[0][0] for one in found] == logits.argmax(-1).tolist()
    assert [one.token_id for one in found] == [4, 5, 6]


def test_large_arrays_of_changed_logits_and_logprobs_are_made_once() -> None:
    ops = TorchOps()
    logits = torch.randn(8, 20_001) * 4
    sequences = [sequence_of(row, stops=[1], **{**options, "temperature": 0}) for row, options in enumerate(MIXED)]
    sampler: Sampler = FastSampler(ops, 20_001, 8)
    sample(logits, sequences, sampler)
    before = ops.pool_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sample_sequences(sampler, logits, sequences, [3] * 8)
    assert ops.pool_stats().cache_misses == before.cache_misses
    one_row_bytes = 20_001 * 4
    largest = max(event.cpu_memory_usage for event in profile.events() or [])
    assert 0 < largest < 8 * one_row_bytes


def test_batches_of_other_parameters_are_told_apart() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    sampler: Sampler = FastSampler(TorchOps(), VOCAB, 3)
    sequences = [sequence_of(row, seed=row, temperature=row * 0.5) for row in range(3)]
    for sequence in sequences:
        sampler.add(entry_of(sequence))
    for pair in ([0, 1], [1, 2], [2, 0], [0, 1]):
        chosen = [sequences[i] for i in pair]
        alone = [sample_sequences(sampler, logits[i : i + 1], [chosen[i]], [3]).tokens[0] for i in range(2)]
        assert sample_sequences(sampler, logits, chosen, [3, 3]).tokens == alone


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(Exception, match="shape"):
        sample(torch.zeros(2, VOCAB), [sequence_of(0)])
