"""Adapters in the native backend (csrc/lora.cpp), in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archerfish.kernels.adapters import Adapters, AdapterTable, LowRank
from archerfish.kernels.native.recorder import Handle, Input, Recorder, Value
from archerfish.kernels.native.weights import ACTIVATIONS
from archerfish.kernels.ops import Activation

if TYPE_CHECKING:
    from collections.abc import Callable

    from archerfish.kernels.native.ops import NativeOps


class NativeAdapters(Adapters[Handle]):
    """A step of a tape for each product. Memory is taken from the system when an adapter is written into it."""

    def __init__(self, ops: NativeOps, num_slots: int, max_rank: int) -> None:
        super().__init__(num_slots, max_rank)
        self.runner = ops.runner

    def new_table(self, sizes: tuple[int, ...], inputs: int, is_lookup: bool, num_experts: int) -> AdapterTable[Handle]:
        num, most = self.num_slots * num_experts, self.max_rank
        down = (num, inputs, most) if is_lookup else (num, most * len(sizes), inputs)
        up, ranks = np.zeros((num, most, sum(sizes)), np.float32), np.zeros(num, np.int64)
        return AdapterTable(np.zeros(down, np.float32), up, ranks, sizes, is_lookup, num_experts)

    def clear(self, table: AdapterTable[Handle], places: slice) -> None:
        if table.ranks[places].any():
            table.ranks[places], table.up[places] = 0, 0

    def write(self, table: AdapterTable[Handle], part: int, place: int, matrices: LowRank) -> None:
        rank, first = len(matrices.down), part * self.max_rank
        if table.is_lookup:
            table.down[place, :, :rank] = matrices.down.T
        else:
            table.down[place, first : first + rank] = matrices.down
        table.up[place, :rank, slice(*table.bounds[part])] = matrices.up.T
        table.ranks[place] = max(table.ranks[place], rank)

    def keep(self, take: Callable[..., Handle], indices: Handle) -> None:
        if not isinstance(self.rows, Value):  # a recorded step finds the kept rows itself
            super().keep(take, indices)

    def add(
        self,
        y: Handle,
        x: Handle,
        table: AdapterTable[Handle],
        *,
        activation: Activation = "none",
        softcap: float = 0.0,
        scale: float = 1.0,
    ) -> Handle:
        recorder = self.runner.current()
        self._set_rows(recorder)
        if recorder.is_eager:
            recorder.step.set(Input.TOKEN_IDS, np.ascontiguousarray(x) if table.is_lookup else None)
        width = 1 if table.is_lookup else len(table.sizes) * self.max_rank
        inner = recorder.like(y, width)
        values = recorder(y), -1 if table.is_lookup else recorder(x), recorder(inner)
        after = ACTIVATIONS[activation], softcap, scale
        recorder.tape.lora(*values, table.down, table.up, table.ranks, table.sizes, table.is_lookup, *after)
        self.runner.finish(recorder)
        return y

    def of_experts(self, recorder: Recorder, x: Handle, table: AdapterTable[Handle], num_chosen: int) -> dict[str, Any]:
        """What a step of experts is given for the additions to its product."""
        self._set_rows(recorder)
        inner = recorder(recorder.like(x, num_chosen * len(table.sizes) * self.max_rank))
        return {"down": table.down, "up": table.up, "ranks": table.ranks, "parts": table.sizes, "inner": inner}

    def _set_rows(self, recorder: Recorder) -> None:
        if recorder.is_eager:
            recorder.step.set(Input.ADAPTERS, np.ascontiguousarray(self.rows))
