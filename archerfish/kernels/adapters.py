"""Low-rank adapters (LoRA) beside the linear maps of a model: y + B (A x), with matrices A and B of the row's adapter.

A device has room for some adapters at a time, in slots. A row of a pass names its slot, from 1 on; 0: it has no
adapter. So one product serves rows of many adapters and of none, whatever the format of the map's own matrix. B
includes the adapter's scale. Of a mixture, a slot has a place for each expert, and a row's choice of an expert names
that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.errors import DeviceError
from archerfish.kernels.batches import Ids, T
from archerfish.kernels.ops import Activation
from archerfish.kernels.ranks import Part

if TYPE_CHECKING:
    from archerfish.kernels.decoding import PassSize

Floats = npt.NDArray[np.float32]


class LowRank(NamedTuple):
    """An adapter's matrices for one linear map: A, (rank, inputs), and B with the scale in it, (outputs, rank)."""

    down: Floats
    up: Floats

    def cut(self, outputs: Part, inputs: Part) -> LowRank:
        return LowRank(self.down[:, inputs.first : inputs.end], self.up[outputs.first : outputs.end])


@dataclass(eq=False)
class AdapterTable(Generic[T]):
    """Memory of all slots for one product, which may be of several maps that are stacked along their outputs.

    Each of these parts has an A of its own. Of a lookup table, what A gives is looked up as well. The places of a slot
    follow one another: one for each expert of a mixture, else one.
    """

    down: T  # (places, parts * most rank, inputs); of a lookup table (places, inputs, most rank)
    up: T  # (places, outputs, most rank); native: (places, most rank, outputs)
    ranks: T  # (places,) integers: the highest rank of the slot's adapter here; 0: it leaves this product alone
    sizes: tuple[int, ...]  # outputs of each part
    is_lookup: bool = False
    num_experts: int = 1

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where the outputs of each part begin and end."""
        ends = np.cumsum(self.sizes).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


class AdaptedMap(NamedTuple):
    """Where the additions to a linear map of a checkpoint lie, or those to the part of it that a rank has."""

    table: AdapterTable[Any]
    part: int
    outputs: Part
    inputs: Part
    expert: int = 0


class Adapters(ABC, Generic[T]):
    """The slots of one backend. `rows` is set by who computes a pass: the slot of each of its rows, None where none has
    one."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.takes_experts = False  # whether there is room beside the maps of experts as well
        self.maps: dict[str, list[AdaptedMap]] = {}  # by the name of the map in checkpoints: see `plain_name`
        self.lookup: AdapterTable[T] | None = None  # of the embedding
        self.rows: T | None = None

    def add_product(
        self, names: Sequence[str], sizes: Sequence[int | Part], inputs: int | Part, *, is_lookup: bool = False
    ) -> AdapterTable[T]:
        """Room beside the maps of these names, which are stacked, or beside parts of them. More names than sizes are
        those of one expert after the other."""
        parts, columns = [Part.of(size) for size in sizes], Part.of(inputs)
        table = self.new_table(tuple(part.size for part in parts), columns.size, is_lookup, len(names) // len(parts))
        for number, name in enumerate(names):
            expert, part = divmod(number, len(parts))
            self.maps.setdefault(plain_name(name), []).append(AdaptedMap(table, part, parts[part], columns, expert))
        return table

    def fill(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Put an adapter into a slot that no row uses, whose number is from 1 on; products that it lacks stay as they
        are, and those of layers that lie elsewhere are left out.

        Steps may be computed by another thread meanwhile.
        """
        with self.filling():
            for table in {id(each.table): each.table for own in self.maps.values() for each in own}.values():
                self.clear(table, slice((slot - 1) * table.num_experts, slot * table.num_experts))
            for name, one in matrices.items():
                for each in self.maps.get(name, ()):
                    place = (slot - 1) * each.table.num_experts + each.expert
                    self.write(each.table, each.part, place, one.cut(each.outputs, each.inputs))

    def filling(self) -> AbstractContextManager[object]:
        """Around all that `fill` writes, which is there when this ends."""
        return nullcontext()

    def add_to_lookup(self, y: T, ids: T, scale: float) -> T:
        """Rows of the embedding, times a factor, with the additions of their adapters."""
        return y if self.rows is None or self.lookup is None else self.add(y, ids, self.lookup, scale=scale)

    def read_rows(self, inputs: T, size: PassSize | None) -> None:
        """Set `rows` by what the host sent for a recorded pass over prompts, or, with None, for a step of decodes."""
        raise DeviceError("This backend records no steps.")

    @abstractmethod
    def new_table(self, sizes: tuple[int, ...], inputs: int, is_lookup: bool, num_experts: int) -> AdapterTable[T]:
        """Room in all slots, with ranks of 0."""

    @abstractmethod
    def clear(self, table: AdapterTable[T], places: slice) -> None:
        """Nothing is added for rows of these places, which are counted from 0."""

    @abstractmethod
    def write(self, table: AdapterTable[T], part: int, place: int, matrices: LowRank) -> None:
        """Put matrices into a place that was cleared."""

    @abstractmethod
    def add(
        self,
        y: T,
        x: T,
        table: AdapterTable[T],
        *,
        activation: Activation = "none",
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> T:
        """activation(y + scale * B (A x)) for all rows, softcap as in `Ops.logits`; may use y's memory. x: of a lookup,
        ids."""

    def keep(self, take: Callable[[T, Ids | T], T], indices: Ids | T) -> None:
        """The pass goes on with some of its rows."""
        if self.rows is not None:
            self.rows = take(self.rows, indices)


def plain_name(name: str) -> str:
    """The name of a module without what stands in front of a text model's: checkpoints of one model differ in that."""
    parts = name.split(".")
    while parts[0] in ("model", "language_model", "base_model") and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts).replace(".block_sparse_moe.", ".mlp.")  # as checkpoints of Mixtral call it


def is_expert(name: str) -> bool:
    """Whether a linear map is one of an expert."""
    return ".experts." in name
