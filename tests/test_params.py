"""SamplingParams refuses what it cannot mean, and says why."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from archerfish.errors import InvalidInputError, UnknownOptionError
from archerfish.params import MAX_N, MAX_SEED, MAX_STOP_STRINGS, MIN_SEED, SamplingParams

NAN = math.nan
FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
WHOLE = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]


def shortened(value: object) -> str:
    return str(value)[:8]


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_k, params.top_p) == (1, 16, 1.0, 0, 1.0)
    assert params.stop == () and params.stop_token_ids == () and not params.has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert params.replace(**{name: 1.5}).has_penalties


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [NAN, math.inf, -math.inf, "1", None, True, [1.0], 1j, 10**400, -1000, 1000], ids=shortened
)
def test_numbers_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [1.0, "1", True, MIN_SEED - 1, NAN, [1]])
def test_whole_numbers_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be a whole number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) is above max_tokens \(4\)"),
        ({"n": 2, "temperature": 0}, "all sequences would be equal"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1, not 0. None stands for as many as"),
        ({"n": 0}, "n must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"n": MAX_N + 1}, f"from 1 to {MAX_N}"),
        ({"seed": MAX_SEED}, "seed"),
        ({"logprobs": 65}, "from 0 to 64"),
        ({"stop": [f"s{i}" for i in range(10_000)]}, f"10,000 strings; the limit is {MAX_STOP_STRINGS}"),
        ({"stop": [""]}, "not empty"),
        ({"stop": ""}, "not empty"),
        ({"stop": ["a", 5]}, "not 5"),
        ({"stop": 5}, "stop must be"),
        ({"stop": {"a": 1}}, "stop must be"),
        ({"stop": b"ab"}, "stop must be"),
        ({"stop": "x" * 2000}, "more than 1024 bytes"),
        ({"stop_token_ids": list(range(10_000))}, "10,000 ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be"),
        ({"logit_bias": {1: NAN}}, "logit_bias of token 1"),
        ({"logit_bias": {1: 101}}, "from -100 to 100"),
        ({"logit_bias": {"1": 1.0}}, "'1' is no token id"),
        ({"logit_bias": {-1: 1.0}}, "-1 is no token id"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must map"),
        ({"logit_bias": dict.fromkeys(range(10_000), 1.0)}, "logit_bias has 10,000 tokens"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be true or false"),
    ],
)
def test_values_that_cannot_be_meant(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k"), ("stops", "stop")],
)
def test_an_unknown_name_is_refused_with_the_nearest(given: str, nearest: str) -> None:
    options: dict[str, Any] = {given: 1}
    with pytest.raises(UnknownOptionError) as caught:
        SamplingParams(**options)
    assert given in caught.value.message and repr(nearest) in caught.value.hint
    with pytest.raises(UnknownOptionError):
        SamplingParams().replace(**options)


def test_best_of_and_positional_arguments_are_refused() -> None:
    make: Any = SamplingParams
    with pytest.raises(UnknownOptionError, match=r"Unknown sampling parameter: 'best_of'\. Use n"):
        make(best_of=3)
    with pytest.raises((TypeError, InvalidInputError)):
        make(0.5)


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[7, 8], top_k=-1, logit_bias={3: -100}, max_tokens=None)
    assert (
        params.stop == ("END",) and params.stop_token_ids == (7, 8) and params.top_k == 0 and params.max_tokens is None
    )
    assert SamplingParams(stop=["a", "b"], max_tokens=1).stop == ("a", "b")
    absent: Any = None  # as JSON has it
    assert SamplingParams(stop=absent, stop_token_ids=absent) == SamplingParams()
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = NAN
    assert dict(params.logit_bias or {}) == {3: 1.0}


def test_seeds_of_other_engines() -> None:
    assert SamplingParams(seed=-1).seed is None, "what others write for none"
    assert SamplingParams(seed=-2).seed == MAX_SEED - 2
    assert SamplingParams(seed=MIN_SEED).seed == MAX_SEED // 2
    assert SamplingParams(seed=MAX_SEED - 1).seed == MAX_SEED - 1


def test_numbers_of_arrays_are_numbers() -> None:
    given: dict[str, Any] = {
        "n": np.int64(2),
        "max_tokens": np.int32(7),
        "seed": np.uint64(MAX_SEED - 1),
        "top_k": np.int8(-1),
        "min_p": np.float16(0.5),
        "temperature": np.float32(0.5),
        "logprobs": np.int16(3),
        "stop_token_ids": np.arange(2),
        "top_p": np.float64(0.5),
        "presence_penalty": Fraction(1, 2),
        "logit_bias": {np.int64(3): np.float32(2.0)},
    }
    plain = SamplingParams(
        n=2,
        max_tokens=7,
        seed=MAX_SEED - 1,
        top_k=-1,
        min_p=0.5,
        temperature=0.5,
        logprobs=3,
        stop_token_ids=[0, 1],
        logit_bias={3: 2.0},
        top_p=0.5,
        presence_penalty=0.5,
    )
    params = SamplingParams(**given)
    assert params == plain
    for value in dataclasses.asdict(params).values():
        assert not isinstance(value, np.generic)
    assert {type(value) for value in params.stop_token_ids} == {int}
    wrong: dict[str, Any] = {"max_tokens": np.float32(2), "n": np.True_}
    for name, value in wrong.items():
        with pytest.raises(InvalidInputError, match=f"{name} must be a whole number"):
            SamplingParams(**{name: value})
    too_large: dict[str, Any] = {"temperature": Fraction(10**400)}  # for a float
    with pytest.raises(InvalidInputError, match="temperature must be a number"):
        SamplingParams(**too_large)


def test_replace_checks_again() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.replace(top_p=0.5) == SamplingParams(temperature=0.5, top_p=0.5)
    assert params == SamplingParams(temperature=0.5)
    with pytest.raises(InvalidInputError):
        params.replace(temperature=NAN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


def test_parameters_of_the_same_values_are_made_once() -> None:
    values: dict[str, Any] = {"temperature": 0.5, "max_tokens": 7, "seed": None}
    assert SamplingParams.of(values) is SamplingParams.of(dict(values))
    assert SamplingParams.of(values) == SamplingParams(**values)
    assert SamplingParams.of({"max_tokens": 1}).max_tokens == 1
    wrong: Any
    for wrong in (True, 1.0, []):  # two are equal to 1, and none is a number of tokens
        with pytest.raises(InvalidInputError, match="max_tokens must be a whole number"):
            SamplingParams.of({"max_tokens": wrong})
    stops = ["a"]
    first = SamplingParams.of({"stop": stops})
    stops.append("b")
    assert first.stop == ("a",) and SamplingParams.of({"stop": stops}).stop == ("a", "b")
    assert SamplingParams.of({"stop": []}) is SamplingParams.of({"stop": []})
