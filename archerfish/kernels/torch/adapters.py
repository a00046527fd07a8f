"""What adapters mean, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from archerfish.errors import OutOfMemoryError
from archerfish.kernels.adapters import Adapters, AdapterTable, LowRank
from archerfish.kernels.decoding import NUM_INPUTS, Input, PassSize
from archerfish.kernels.ops import Activation
from archerfish.kernels.torch.activations import ACTIVATIONS

if TYPE_CHECKING:
    from archerfish.kernels.torch.reference import TorchOps

Tensor = torch.Tensor


class TorchAdapters(Adapters[Tensor]):
    """Adapters one by one, over the rows that each of them has."""

    def __init__(self, ops: TorchOps, num_slots: int, max_rank: int) -> None:
        super().__init__(num_slots, max_rank)
        self.device, self.dtype = ops.device, ops.torch_dtype

    def new_table(self, sizes: tuple[int, ...], inputs: int, is_lookup: bool, num_experts: int) -> AdapterTable[Tensor]:
        num, most = self.num_slots * num_experts, self.max_rank
        shape = (num, inputs, most) if is_lookup else (num, most * len(sizes), inputs)
        try:
            down, up = (self._zeros(each, self.dtype) for each in (shape, (num, sum(sizes), most)))
        except torch.OutOfMemoryError as error:
            hint = "Lower max_loras or max_lora_rank."
            message = f"The device has no memory for {self.num_slots} adapters of rank {most}."
            raise OutOfMemoryError(message, hint=hint) from error
        return AdapterTable(down, up, self._zeros((num,), torch.int32), sizes, is_lookup, num_experts)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def read_rows(self, inputs: Tensor, size: PassSize | None) -> None:
        if size is None:
            self.rows = inputs[Input.ADAPTER]
            return
        num = size.num_columns
        columns = inputs[: NUM_INPUTS * num].view(NUM_INPUTS, num)
        ends, counting = columns[Input.COUNT].cumsum(0), torch.arange(size.num_rows, device=inputs.device)
        owner = torch.searchsorted(ends, counting, right=True).clamp_max_(num - 1)
        self.rows = torch.where(counting < ends[-1], columns[Input.ADAPTER][owner], 0)

    def places(self, ids: Tensor, num_experts: int) -> Tensor:
        """Of the experts that rows chose, (rows, chosen): where their matrices lie, from 1 on; 0: rows without
        adapter."""
        assert self.rows is not None
        slots = self.rows[: len(ids)].unsqueeze(1)
        return torch.where(slots > 0, (slots - 1) * num_experts + ids + 1, 0).flatten()

    def clear(self, table: AdapterTable[Tensor], places: slice) -> None:
        table.ranks[places] = 0
        table.up[places] = 0

    def write(self, table: AdapterTable[Tensor], part: int, place: int, matrices: LowRank) -> None:
        rank, first = len(matrices.down), part * self.max_rank
        down = torch.from_numpy(matrices.down).to(self.device)
        if table.is_lookup:
            table.down[place, :, :rank] = down.t()
        else:
            table.down[place, first : first + rank] = down
        table.up[place, slice(*table.bounds[part]), :rank] = torch.from_numpy(matrices.up).to(self.device)
        table.ranks[place] = torch.clamp(table.ranks[place], min=rank)

    def add(
        self,
        y: Tensor,
        x: Tensor,
        table: AdapterTable[Tensor],
        *,
        activation: Activation = "none",
        softcap: float = 0.0,
        scale: float = 1.0,
        places: Tensor | None = None,
    ) -> Tensor:
        """places: of each row, with a table of experts."""
        given = self.rows if places is None else places
        assert given is not None
        slots, ranks = given[: len(y)].cpu(), table.ranks.tolist()
        for slot in sorted(set(slots.tolist())):
            if slot == 0 or not ranks[slot - 1]:
                continue
            rank, rows = ranks[slot - 1], torch.nonzero(slots == slot)[:, 0].to(y.device)
            for part, (first, end) in enumerate(table.bounds):
                down = table.down[slot - 1]
                if table.is_lookup:
                    inner = down[x[rows], :rank]
                else:
                    inner = x[rows].to(self.dtype) @ down[part * self.max_rank : part * self.max_rank + rank].t()
                added = (inner @ table.up[slot - 1, first:end, :rank].t()) * scale
                y[rows, first:end] += added.to(y.dtype)
        y = ACTIVATIONS[activation](y)
        return softcap * torch.tanh(y / softcap) if softcap else y
