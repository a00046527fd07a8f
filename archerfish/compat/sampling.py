"""Sampling of single rows under the names of the seeds: SamplingConfig, LogitsView, sample_optimized,
sample_with_cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from archerfish.errors import refuse_unknown
from archerfish.params import SamplingParams
from archerfish.runtime.host_sampling import check_masked, check_range, host_row, sample_row

REFUSED = {
    "fast_path_threshold": "To stop at a dominant logit changes the distribution. Leave it out.",
    "use_simd": "NumPy and torch use the vector instructions of the processor in any case. Leave it out.",
}
K = TypeVar("K", bound=Hashable, contravariant=True)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of one draw, by the names of SamplingParams."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    def __new__(cls, **values: Any) -> Self:
        refuse_unknown(values, cls.__dataclass_fields__, "sampling option", REFUSED)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class LogitsView:
    """A range of one row of logits without some of its tokens. It shares the memory of a float32 row on the host."""

    def __init__(self, logits: Any, start: int = 0, stop: int | None = None, *, masked: Iterable[int] = ()) -> None:
        """`masked` holds token ids of the whole vocabulary, not of the range."""
        self.logits = host_row(logits)
        self.start, self.stop = check_range(start, stop, len(self.logits))
        self.masked = frozenset(check_masked(masked))

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The logits of the range, masked ones included: the same memory, not a copy."""
        return self.logits[self.start : self.stop]

    def effective_logit(self, token_id: int) -> float:
        """The logit of a token; -inf if it is masked or not in the range."""
        if token_id in self.masked or not self.start <= token_id < self.stop:
            return float("-inf")
        return float(self.logits[token_id])

    def iter_valid(self) -> Iterator[tuple[int, float]]:
        """Ids and logits of the tokens in the range that are not masked, in order."""
        for token_id, value in enumerate(self.values.tolist(), self.start):
            if token_id not in self.masked:
                yield token_id, value


class LogitsStore(Protocol[K]):
    """A cache of rows of logits: LogitsCache, or an object of the caller's with these two methods."""

    def get(self, key: K, /) -> Any: ...

    def insert(self, key: K, value: Any, /) -> object: ...


def sample_optimized(logits: Any, config: SamplingConfig, *, seed: int = 0, position: int = 0) -> int:
    """Draw a token from a row of logits or a LogitsView, as the engine does for this seed and position."""
    view = logits if isinstance(logits, LogitsView) else LogitsView(logits)
    return sample_row(
        view.logits,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        first=view.start,
        end=view.stop,
        masked=view.masked,
        seed=seed,
        position=position,
    )


def sample_with_cache(
    logits: Callable[[], Any],
    config: SamplingConfig,
    *,
    cache: LogitsStore[K],
    cache_key: K,
    seed: int = 0,
    position: int = 0,
) -> int:
    """`sample_optimized` of the row that the cache has under a key. `logits` computes a missing row, which is then
    cached."""
    row = cache.get(cache_key)
    if row is None:
        row = logits()
        cache.insert(cache_key, row)
    return sample_optimized(row, config, seed=seed, position=position)
