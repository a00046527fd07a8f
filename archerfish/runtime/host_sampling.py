"""Sampling one row of logits that lies in the host's memory: the rule of `Ops.sample`, by the native kernel or in
NumPy.

Both use the random number of `Ops.sample` and keep the same tokens; the sums of probabilities may differ in their last
digits.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError, ModelError
from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, NOT_FINITE, stream_key, uniform
from archerfish.params import MAX_SEED, check_number, check_whole, items_of, plain_number

native_sampler: Any = None
with contextlib.suppress(ImportError):  # installed without compiled code
    from archerfish.kernels.native._native import Level, Sampler

    native_sampler = Sampler(Level())

Row = npt.NDArray[np.float32]
MAX_POSITION = np.iinfo(np.int64).max - 1


def sample_row(
    logits: Any,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    first: int = 0,
    end: int | None = None,
    masked: Iterable[int] = (),
    seed: int = 0,
    position: int = 0,
) -> int:
    """Draw a token from `first` to `end` of one row of logits (a list, an array or a tensor), as the engine draws.

    The seed and the position determine the draw: count the position up to draw again.
    """
    temperature = plain_number(temperature)
    top_p = plain_number(top_p)
    top_k = plain_number(top_k)
    check_number("temperature", temperature)
    check_number("top_p", top_p)
    top_k = 0 if top_k == -1 else top_k
    check_whole("top_k", top_k, 0)
    seed, position = whole_number("seed", seed), whole_number("position", position)
    check_whole("seed", seed, 0, MAX_SEED - 1)
    check_whole("position", position, 0, MAX_POSITION)
    row = host_row(logits)
    first, end = check_range(first, end, len(row))
    row, hidden = row[first:end], [token_id - first for token_id in check_masked(masked) if first <= token_id < end]
    if hidden:
        row = row.copy()
        row[hidden] = -math.inf
    number = uniform(stream_key(seed, 0), position)
    if native_sampler is not None:
        token_id, outcome = native_sampler.draw(np.ascontiguousarray(row), temperature, top_k, top_p, number)
    else:
        token_id, outcome = choose(row, temperature, top_k, top_p, number)
    if outcome != CHOSEN:
        raise failure(outcome, "These logits")
    return first + int(token_id)


def choose(row: Row, temperature: float, top_k: int, top_p: float, number: float) -> tuple[int, int]:
    """A token, at `number` of the cumulative probabilities that top_k and top_p keep, and the outcome; in NumPy."""
    highest = row.max()
    if not math.isfinite(highest):
        return 0, NONE_LEFT if highest == -math.inf else NOT_FINITE
    if temperature == 0:
        return int(row.argmax()), CHOSEN
    weights = np.exp((row - highest) / np.float32(max(temperature, 1e-30)))
    order = np.argsort(-row, kind="stable")[: top_k or len(row)]  # of equal logits the lowest id first
    if top_p < 1:
        sums = weights[order].cumsum(dtype=np.float64)
        order = order[: sums.searchsorted(top_p * sums[-1]) + 1]
    kept = np.sort(order)
    sums = weights[kept].cumsum(dtype=np.float64)
    return int(kept[min(sums.searchsorted(number * sums[-1], "right"), sums.searchsorted(sums[-1]))]), CHOSEN


def host_row(logits: Any) -> Row:
    """One row of logits as float32 in the host's memory: a copy only where type or device ask for one."""
    if hasattr(logits, "detach"):  # a tensor, perhaps of a device or of a type that NumPy does not have
        logits = logits.detach().float().cpu().numpy()
    try:
        row: Row = np.asarray(logits, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"logits must be a row of numbers: {error}.") from None
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1 or not len(row):
        raise InvalidInputError(f"logits must be one row of numbers, not of the shape {row.shape}.")
    return row


def check_range(first: Any, end: Any, size: int) -> tuple[int, int]:
    first = whole_number("The start of the range", first)
    end = size if end is None else whole_number("The end of the range", end)
    if not 0 <= first < end <= size:
        raise InvalidInputError(f"The range {first} to {end} does not lie within {size:,} logits.")
    return first, end


def check_masked(masked: Iterable[int]) -> list[int]:
    return [whole_number("A masked token", token_id) for token_id in items_of("masked", masked, "a list of token ids")]


def whole_number(what: str, value: Any) -> int:
    """A whole number of Python or of an array, as one of Python."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidInputError(f"{what} must be a whole number, not {value!r}.") from None


def failure(outcome: int, what: str) -> ModelError:
    """The error of a row that gave no token. what: the subject of the message."""
    assert outcome != CHOSEN
    if outcome == NONE_LEFT:
        return ModelError(f"{what} rule out every token: all are -inf.", hint="Check min_tokens and the stop tokens.")
    return ModelError(
        f"{what} are not finite.", hint="Compute in a wider type (float32), or check the model's weights."
    )
