"""The processes that compute one model together, as one of them sees it.

Tensor parallel ranks share every layer: each has some of the heads and of the hidden units, and a product whose inputs
are split gives sums that are added up over the ranks. Pipeline stages have some of the layers each. The engine's
process is rank 0. It is in the last stage, where tokens are sampled, and stages are numbered from the embedding on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from archerfish.errors import InvalidOptionError


@dataclass(frozen=True)
class Part:
    """Of `total` numbers, such as the outputs of a matrix, those from `first` to `end`."""

    first: int
    end: int
    total: int

    @classmethod
    def of(cls, size: int | Part) -> Part:
        return size if isinstance(size, Part) else cls(0, size, size)

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def times(self, factor: int) -> Part:
        """Of parts that have so many numbers each, such as heads."""
        return Part(self.first * factor, self.end * factor, self.total * factor)

    def within(self, before: int, total: int) -> Part:
        """In a longer row of numbers, behind some others."""
        return Part(before + self.first, before + self.end, total)


@dataclass(eq=False)
class Ranks:
    """One process, and what it exchanges with the others. This class is for a process alone, and for planning."""

    index: int = 0  # among the ranks that share its layers
    size: int = 1  # how many these are
    stage: int = 0
    num_stages: int = 1
    records: bool = True  # whether recorded passes can hold what is exchanged

    @classmethod
    def place(cls, rank: int, size: int, num_stages: int) -> tuple[int, int, int, int]:
        """The first four fields of process `rank` of an engine."""
        return rank % size, size, num_stages - 1 - rank // size, num_stages

    @property
    def is_alone(self) -> bool:
        return self.size * self.num_stages == 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    # What each rank has

    def part(self, total: int, unit: int = 1, what: str = "numbers") -> Part:
        """This rank's part, which begins and ends with a unit; the last unit may be smaller."""
        num_units = -(-total // unit)
        if num_units < self.size:
            units = f"{what} in groups of {unit}" if unit > 1 else what
            raise InvalidOptionError(
                f"[engine] tensor_parallel_size is {self.size}, but this model has only {num_units} {units} to divide.",
                hint=f"It takes at most {num_units}.",
            )
        first, end = (min(total, index * num_units // self.size * unit) for index in (self.index, self.index + 1))
        return Part(first, end, total)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Part, Part]:
        """Query heads and KV heads. Ranks have whole KV heads, or several ranks have the same one and share its query
        heads."""
        size, group = self.size, num_heads // num_kv_heads
        if size <= num_kv_heads:
            keys = self.part(num_kv_heads)
            return keys.times(group), keys
        copies = size // num_kv_heads
        if size % num_kv_heads or copies > group:
            sizes = [*range(1, num_kv_heads + 1), *(num_kv_heads * many for many in range(2, group + 1))]
            raise InvalidOptionError(
                f"[engine] tensor_parallel_size is {size}, but {num_heads} heads that share {num_kv_heads} KV heads cannot be "
                "divided so.",
                hint=f"It takes one of: {', '.join(map(str, sizes))}.",
            )
        head = self.index // copies
        own = Ranks(self.index % copies, copies).part(group)
        return own.within(head * group, num_heads), Part(head, head + 1, num_kv_heads)

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        if num_layers < self.num_stages:
            message = f"[engine] pipeline_parallel_size is {self.num_stages}, but this model has {num_layers} layers."
            raise InvalidOptionError(message, hint=f"It takes at most {num_layers}.")
        return range(*(stage * num_layers // self.num_stages for stage in (self.stage, self.stage + 1)))

    # What is exchanged: tensors of a backend. Alone, a rank has it already.

    def add_up(self, x: Any, residual: Any = None) -> Any:
        """The sum of x over the ranks of a stage, in x's memory, plus the residual, which all of them have."""
        return self.add_residual(x, residual)

    def add_residual(self, x: Any, residual: Any) -> Any:
        return x if residual is None else x + residual

    def join(self, x: Any, part: Part) -> Any:
        """Rows whose columns lie on the ranks of a stage, each with its part of them."""
        return x

    def send(self, *tensors: Any) -> None:
        """Pass rows on to the next stage."""

    def receive(self, num_rows: int, width: int, dtype: str) -> Any:
        """Rows of the stage before, in the order in which it sends them."""
        raise TypeError("This rank has no stage before it.")

    def share(self, tokens: Any) -> Any:
        """The tokens that rank 0 has chosen, on all ranks, in the memory of those given."""
        return tokens

    def empty_report(self, num_rows: int) -> Any:
        """(2, rows) int64 zeros: the report of a stage that samples nothing."""
        raise TypeError("This rank samples.")

    def min_over_ranks(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return number

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The context in which nothing is exchanged, and results mean nothing."""
        yield

    def abort(self) -> None:
        """End exchanges that wait for a rank which has ended; from any thread."""


ALONE = Ranks()
