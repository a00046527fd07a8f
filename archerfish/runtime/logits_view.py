"""One row of logits seen through a range and a mask, and the sampling options that go with it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, Self, cast

from archerfish.errors import InvalidInputError, InvalidOptionError, UnknownOptionError, did_you_mean
from archerfish.kernels.ops import T
from archerfish.params import SamplingParams, items_of


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling options of single calls of FastSampler, by the names of SamplingParams."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    use_simd: bool = True  # there is no other way

    def __new__(cls, **values: Any) -> Self:
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name == "fast_path_threshold":
                raise UnknownOptionError(
                    "fast_path_threshold does not exist.", hint="To stop at a dominant logit changes the distribution."
                )
            if name not in known:
                raise UnknownOptionError(f"Unknown sampling option: {name!r}.", hint=did_you_mean(name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.use_simd is not True:
            raise InvalidOptionError(f"use_simd must be True, not {self.use_simd!r}: the kernels know no other way.")
        _ = self.params

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class LogitsView(Generic[T]):
    """The tokens start to stop of one row of logits, without some of them. Shares the memory of the logits."""

    def __init__(self, logits: T, start: int = 0, stop: int | None = None, *, masked: Collection[int] = ()) -> None:
        """`logits`: (vocabulary,) or (1, vocabulary) float32; `masked`: token ids of the whole vocabulary, not of the range."""
        shape = getattr(logits, "shape", None)
        if shape is None:
            raise InvalidInputError(f"A LogitsView needs a tensor or an array, not {type(logits).__name__}.")
        if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
            raise InvalidInputError(f"A LogitsView needs one row of logits, not the shape {tuple(shape)}.")
        size = shape[-1]
        self.start = whole_number("The start of the range", start)
        self.stop = size if stop is None else whole_number("The end of the range", stop)
        if not 0 <= self.start < self.stop <= size:
            raise InvalidInputError(f"The range {self.start} to {self.stop} does not lie within {size:,} logits.")
        self.logits = logits
        self.masked = frozenset(
            whole_number("A masked token", token_id) for token_id in items_of("masked", masked, "a list of token ids")
        )

    @property
    def values(self) -> T:
        """The range as (1, tokens), masked ones included: the same memory, not a copy."""
        rows: Any = self.logits
        if len(self.logits.shape) == 1:
            rows = rows[None]
        return cast(T, rows[:, self.start : self.stop])

    @cached_property
    def masked_in_range(self) -> list[int]:
        return sorted(i for i in self.masked if self.start <= i < self.stop)

    def effective_logit(self, token_id: int) -> float:
        """The logit of a token; -inf if it is masked or not in the range."""
        if token_id in self.masked or not self.start <= token_id < self.stop:
            return float("-inf")
        rows: Any = self.values
        return float(rows[0, token_id - self.start])

    def iter_valid(self) -> Iterator[tuple[int, float]]:
        """Token ids and logits of what is not masked, in order."""
        rows: Any = self.values
        for token_id, value in enumerate(rows[0].tolist(), self.start):
            if token_id not in self.masked:
                yield token_id, value


def whole_number(what: str, value: Any) -> int:
    """One of Python, or one of an array."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidInputError(f"{what} must be a whole number, not {value!r}.") from None
