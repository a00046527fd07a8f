"""Options, logits and expectations for the tests of sampling by kernels."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, NOT_FINITE
from archerfish.params import SamplingParams
from tests.runtime.sampling_reference import probabilities

Options = dict[str, Any]
OFF: Options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
GRID: list[Options] = [
    dict(zip(OFF, values, strict=True))
    for values in product((0.7, 1.6, 0.0), (0, 1, 9, 500), (1.0, 0.85, 1e-9), (0.0, 0.03, 1.0))
]
CUTS: list[Options] = [
    {},
    {"top_p": 0.5},
    {"top_k": 40},
    {"top_k": 2500, "top_p": 0.9001},
    {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.2},
    {"top_k": 3, "temperature": 4.0},
    {"top_k": 5003},
    {"top_k": 5002},
    {"temperature": 1e-20},
    {"top_k": 6000, "min_p": 0.01},
    {"top_k": 2600, "top_p": 0.3001, "min_p": 0.9},
    {"top_k": 40_000, "top_p": 0.9},
]
MIXED: list[Options] = [
    {"temperature": 0},
    {},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 0.6},
    {"top_k": 300, "top_p": 0.95},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "top_p": 0.9},
    {"logit_bias": {3: 4.0}, "min_tokens": 9, "logprobs": 2},
]
EQUAL = np.full((1, 2100), -4.0, np.float32)  # logits
EQUAL[0, [5, 90, 2050, 2060, 2070]] = 0.0, -0.0, 0.0, 1.0, 0.0
KEPT: list[tuple[Options, set[int]]] = [  # the tokens that options keep of these
    ({"top_k": 3}, {2060, 5, 90}),
    ({"top_k": 1}, {2060}),
    ({"temperature": 0}, {2060}),
    ({"top_p": 1e-9}, {2060}),
    ({"min_p": 1.0}, {2060}),
    ({"top_k": 5}, {2060, 5, 90, 2050, 2070}),
    ({"top_k": 9, "min_p": 0.3}, {2060, 5, 90, 2050, 2070}),
    ({"top_k": 5, "top_p": 0.6}, {2060, 5, 90}),  # of e + 4: e, e + 1, e + 2, which is the first above 0.6 * (e + 4)
]
BAD = [{0: math.nan}, {2099: math.nan}, {7: math.inf}, {7: math.inf, 9: -math.inf}, {3: math.nan, 1999: math.inf}]


def spoil(logits: Any) -> list[int]:
    """Make rows of 2,100 logits bad, leave no token in the next row and one in that after it; gives the outcomes."""
    for row, values in enumerate(BAD):
        for token, value in values.items():
            logits[row, token] = value
    logits[len(BAD)] = -math.inf
    logits[len(BAD) + 1, 1:] = -math.inf
    return [NOT_FINITE] * len(BAD) + [NONE_LEFT, CHOSEN, CHOSEN]


def assert_drawn(token: int, expected: int, x: npt.NDArray[Any], row: Options, number: float) -> None:
    """The token that plain NumPy draws, and the reference too, wherever float32 can tell. x: penalised logits."""
    p = probabilities(x, SamplingParams(**{**OFF, **row}))
    end = p[: token + 1].sum()
    slack = 2e-6 + min(
        p[p > 0].min(), 1e-5
    )  # of sums in float32, and of a top_p that ends between two tokens by a hair
    assert p[token] > 0 and end - p[token] - slack <= number <= end + slack, row
    assert token == expected or min(abs(number - end), abs(number - end + p[token])) < slack, row
