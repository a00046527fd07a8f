"""Stages of an output: each token drawn from its own range of the vocabulary, as its position says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from archerfish.errors import InvalidInputError
from archerfish.kernels.decoding import NUM_INPUTS, Input
from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, Entries, Ranges, SamplingBatch, stream_key, uniform
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.sampling import sampling_batch
from archerfish.params import SamplingParams, Stage
from archerfish.runtime.sampler import FastSampler, Mode
from archerfish.sched.plan import entry_of
from tests.runtime.sampling_reference import probabilities, sample, sample_sequences, sequence_of, token_at

VOCAB = 700
PROMPT = [1, 2, 3]  # of sequence_of
Logits = npt.NDArray[np.float32]
STAGES = (
    Stage(first=0, end=100, num_tokens=3, offset=200, temperature=0.8, top_k=9, top_p=0.9),
    Stage(first=150, end=151, num_tokens=1),
    Stage(first=0, end=129, num_tokens=20, stop_id=128, top_k=40, top_p=0.95),
)


def random_logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> Logits:
    return (np.random.default_rng(seed).normal(size=(num_rows, VOCAB)) * scale).astype(np.float32)


def expected_token(logits: Logits, stage: Stage, seed: int, position: int) -> tuple[int, bool]:
    """Of plain numpy, and whether float32 cannot tell."""
    params = SamplingParams(temperature=stage.temperature, top_k=stage.top_k, top_p=stage.top_p)
    p = probabilities(logits[stage.first : stage.end], params)
    token, is_unclear = token_at(p, uniform(stream_key(seed, 0), position)) if len(p) > 1 else (0, False)
    return token + stage.first + stage.offset, is_unclear


# What may be asked for


def test_stages_say_how_long_an_output_is_and_on_what_it_ends() -> None:
    params = SamplingParams(stages=STAGES, seed=3)
    assert (params.max_tokens, params.stop_token_ids, params.ignore_eos) == (24, (128,), True)
    assert params.replace(seed=4).stages == STAGES
    sent: dict[str, Any] = {
        "stages": [dict(vars(stage)) for stage in STAGES],
        "max_tokens": 24,
        "stop_token_ids": [128],
    }
    assert SamplingParams(**sent, ignore_eos=True) == params.replace(seed=None)
    assert SamplingParams(stages=None).stages == SamplingParams().stages == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first": -1}, "first must be"),
        ({"end": 0}, "end must be a whole number at least 1"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"offset": -1}, "offset must be"),
        ({"stop_id": 9}, "stop_id must be a whole number from 0 to 8"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -3}, "top_k"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"num_tokens": True}, "num_tokens"),
        ({"end": 1.5}, "end must be"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Stage(**{"first": 0, "end": 9, "num_tokens": 2, **changes})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.5}, "temperature and stages exclude"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"logprobs": 0}, "logprobs"),
        ({"stop": ["a"]}, "stop and stages"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"grammar": {"kind": "json"}}, "grammar"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stages": [STAGES[2], STAGES[0]]}, "Only the last stage"),
        ({"stages": [{"first": 1}]}, "cannot be read"),
        ({"stages": ["a"]}, "must hold stages"),
        ({"stages": 5}, "must be a list of stages"),
        ({"stages": [STAGES[1]] * 17}, "limit"),
        (
            {"stages": [Stage(first=0, end=9, num_tokens=1), Stage(first=3, end=5, num_tokens=1, stop_id=4)]},
            "can give token 4",
        ),
    ],
)
def test_what_stages_leave_no_room_for_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SamplingParams(**{"stages": STAGES, **options})


numbers = st.integers(-3, 40) | st.just(2**70) | st.floats() | st.none() | st.booleans() | st.text(max_size=2)
names = st.sampled_from([*Stage.__dataclass_fields__, "ends"]) | st.integers(0, 1)


@given(st.lists(st.dictionaries(names, numbers) | numbers, max_size=3) | numbers)
def test_any_value_is_stages_or_refused(sent: Any) -> None:
    try:
        params = SamplingParams(stages=sent)
    except InvalidInputError as error:
        assert error.message
        return
    assert params.stages == () or params.max_tokens == sum(stage.num_tokens for stage in params.stages)


# What is drawn


def test_every_token_is_the_references_for_its_stage() -> None:
    num = 64
    sampler = FastSampler(TorchOps(), VOCAB, num)
    sequences = [sequence_of(row, params=SamplingParams(stages=STAGES), seed=row) for row in range(num)]
    for sequence in sequences:
        sampler.add(entry_of(sequence))
    kinds = [stage for stage in STAGES for _ in range(stage.num_tokens)]
    num_unclear = 0
    for step in range(12):
        logits = random_logits(num, step)
        logits[:, 200:] += 50.0  # what lies outside of the ranges has no share, however likely it is
        # Each row is a little further than the one before, so that all stages meet in one batch.
        positions = [len(PROMPT) + step + row % 12 for row in range(num)]
        sampled = sample_sequences(sampler, torch.from_numpy(logits), sequences, positions)
        assert sampled.errors == {}
        for row, token in enumerate(sampled.tokens):
            stage = kinds[positions[row] - len(PROMPT)]
            expected, is_unclear = expected_token(logits[row], stage, row, positions[row])
            assert is_unclear or token == expected, (step, row)
            assert stage.first + stage.offset <= token < stage.end + stage.offset
            num_unclear += is_unclear
    assert num_unclear <= 10


def test_a_row_does_not_depend_on_the_ranges_of_others() -> None:
    options = [
        SamplingParams(stages=STAGES),
        SamplingParams(stages=STAGES[2:]),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0),
        SamplingParams(stages=[Stage(first=301, end=450, num_tokens=9, top_p=0.9)]),
        SamplingParams(logit_bias={7: 3.0}),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(stages=[Stage(first=0, end=33, num_tokens=9, temperature=0)]),
    ]
    logits = torch.from_numpy(random_logits(len(options), 5))

    def draw(places: list[int]) -> list[int]:
        sampler = FastSampler(TorchOps(), VOCAB, len(options))
        sequences = [sequence_of(place, params=options[place], seed=place) for place in places]
        return sample(logits[places], sequences, sampler).tokens

    together = draw(list(range(len(options))))
    assert [draw([place])[0] for place in range(len(options))] == together
    staged = [0, 1, 4, 7]
    assert draw(staged) == [together[place] for place in staged]  # over a part of the vocabulary


def test_a_row_that_is_given_to_another_forgets_its_stages() -> None:
    sampler = FastSampler(TorchOps(), VOCAB, 1)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 650] = 9.0
    for _ in range(2):
        staged, plain = sequence_of(0, params=SamplingParams(stages=STAGES[2:])), sequence_of(0, temperature=0)
        assert sample(torch.from_numpy(logits), [staged], sampler).tokens[0] < 129
        assert sample(torch.from_numpy(logits), [plain], sampler).tokens == [650]


def test_a_resumed_sequence_continues_in_its_stage() -> None:
    """After a preemption a sequence is added again, with some of its output."""
    logits = torch.from_numpy(random_logits(1, 8))
    whole, late = FastSampler(TorchOps(), VOCAB, 1), FastSampler(TorchOps(), VOCAB, 1)
    sequence = sequence_of(0, params=SamplingParams(stages=STAGES), seed=5)
    whole.add(entry_of(sequence))
    for position in range(3, 20):
        found = sample_sequences(whole, logits, [sequence], [position]).tokens
        assert sample(logits, [sequence], late, [position]).tokens == found


def test_logits_beside_a_range_are_not_looked_at() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 500:] = float("nan")
    logits[1, 500:] = float("inf")
    logits[2, :20] = -float("inf")
    first = torch.tensor([0, 0, 0])
    end = torch.tensor([20, 20, 20])
    offset = torch.tensor([7, 8, 9])
    for temperature in (None, torch.ones(3, dtype=torch.float64)):
        batch = SamplingBatch(temperature=temperature, keys=first, positions=first, ranges=Ranges(first, end, offset))
        report = TorchOps().sample(logits, batch).report.tolist()
        assert report[1] == [CHOSEN, CHOSEN, NONE_LEFT] and report[0][2] == 0 and 7 <= report[0][0] < 27


def test_ranges_beside_a_ban() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    one = torch.tensor([0])
    ranges = Ranges(one, torch.tensor([20]), torch.tensor([100]))
    assert TorchOps().sample(logits, SamplingBatch(ranges=ranges)).tokens.tolist() == [105]
    banned = Entries(one, torch.tensor([5]))
    assert TorchOps().sample(logits, SamplingBatch(ranges=ranges, banned=banned)).tokens.tolist() == [100]


def test_inputs_of_recorded_steps_say_the_same() -> None:
    num = 5
    size = 8
    ops = TorchOps()
    ops.can_record = True
    sampler = FastSampler(ops, VOCAB, num)
    options = [SamplingParams(stages=STAGES)] * 3 + [SamplingParams(top_k=9), SamplingParams(temperature=0)]
    sequences = [sequence_of(row, params=params, seed=row) for row, params in enumerate(options)]
    for sequence in sequences:
        sampler.add(entry_of(sequence))
    for step in range(8):
        logits = torch.from_numpy(random_logits(size, step))
        positions = np.asarray([3 + step + row for row in range(num)])
        words = np.zeros((NUM_INPUTS, size), dtype=np.int64)
        words[Input.POSITION, :num], words[Input.KEY :] = positions - 1, sampler.filling
        assert Mode.of(sampler.write_inputs(words, np.arange(num))) == Mode.CUT
        inputs = torch.from_numpy(words)
        batch = sampling_batch(inputs, inputs[Input.POSITION] + 1, torch.arange(size), ops.new_decode_state(num, 1))
        drawn = TorchOps().sample(logits, batch)
        assert not drawn.report[1].any()  # nor in rows that only fill
        expected = sample_sequences(sampler, logits[:num], sequences, positions.tolist())
        assert drawn.tokens.tolist()[:num] == expected.tokens
