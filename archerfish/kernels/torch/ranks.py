"""Exchange between ranks by torch.distributed: NCCL between cards, gloo between processes on CPUs or on one card.

The groups belong to an engine and not to the process, so that there may be several, beside a default group of the
user's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from archerfish.kernels.ranks import Part, Ranks

TIMEOUT_S = 600.0  # of one exchange; some ranks may compile kernels while others wait
LOOPBACK = "127.0.0.1"  # the address that gloo listens on
distributed: Any = torch.distributed  # which exports less than it documents
HOST_TYPES = (torch.float32, torch.int64)  # that gloo is given


def new_group(kind: str, store: Any, rank: int, size: int) -> Any:
    """A group of processes. kind: nccl or gloo."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if kind == "nccl":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where NCCL's ranks meet, as gloo's; not tried on cards yet
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo = distributed.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._timeout, chosen._devices = timeout, [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, rank, size, chosen)


class TorchRanks(Ranks):
    """Tensors may be torch's, or arrays of NumPy, with which the native backend computes."""

    def __init__(
        self, rank: int, size: int, num_stages: int, *, kind: str, store: Path, device: str, is_numpy: bool
    ) -> None:
        """store: a file by which the ranks find each other, the same for all, which does not exist yet."""
        super().__init__(*self.place(rank, size, num_stages), records=kind == "nccl")
        self.device = device
        self.is_numpy = is_numpy
        self._is_quiet = False
        files = distributed.FileStore(str(store), size * num_stages)
        self._rank = rank
        self._world = new_group(kind, distributed.PrefixStore("world", files), rank, size * num_stages)
        prefix = distributed.PrefixStore(f"stage {self.stage}", files)
        self._stage = new_group(kind, prefix, self.index, size) if size > 1 else None

    def add_up(self, x: Any, residual: Any = None) -> Any:
        if self._stage is not None and not self._is_quiet:
            x = self._exchange(x, lambda whole: self._stage.allreduce([whole]))
        return self.add_residual(x, residual)

    def join(self, x: Any, part: Part) -> Any:
        if self._stage is None:
            return x
        ends = [Ranks(index, self.size).part(part.total) for index in range(self.size)]
        own, widest = self._as_tensor(x), max(each.size for each in ends)
        own = (
            torch.nn.functional.pad(own, (0, widest - own.shape[1]))
            .to(own.device if self.records else "cpu")
            .contiguous()
        )
        found = own.new_empty((self.size, *own.shape))
        if not self._is_quiet:
            self._stage.allgather([list(found.unbind())], [own]).wait()
        joined = torch.cat([rows[:, : each.size] for rows, each in zip(found, ends, strict=True)], 1)
        return joined.numpy() if self.is_numpy else joined.to(x.device)

    def send(self, *tensors: Any) -> None:
        for each in tensors if not self._is_quiet else ():
            self._world.send([self._on_wire(self._as_tensor(each))], self._rank - self.size, 0).wait()

    def receive(self, num_rows: int, width: int, dtype: str) -> Any:
        found = torch.zeros(num_rows, width, dtype=getattr(torch, dtype), device=self.device)
        if not self._is_quiet:
            wire = self._on_wire(found)
            self._world.recv([wire], self._rank + self.size, 0).wait()
            found = wire.to(found)
        return found.numpy() if self.is_numpy else found

    def share(self, tokens: Any) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return tokens if self._is_quiet else self._exchange(tokens, lambda all_: self._world.broadcast([all_], options))

    def empty_report(self, num_rows: int) -> Any:
        found = torch.zeros(2, num_rows, dtype=torch.int64, device=self.device)
        return found.numpy() if self.is_numpy else found

    def min_over_ranks(self, number: int) -> int:
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        found = torch.tensor([number], device=self.device if self.records else "cpu")
        self._world.allreduce([found], options).wait()
        return int(found)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def abort(self) -> None:
        for group in (self._stage, self._world) if self.records else ():  # gloo notices by itself
            if group is not None:
                group.abort()

    def _as_tensor(self, x: Any) -> torch.Tensor:
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    def _on_wire(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory and the type that the group takes: the same one where it can."""
        x = x.contiguous()
        return x if self.records else x.cpu().to(x.dtype if x.dtype in HOST_TYPES else torch.float32)

    def _exchange(self, x: Any, start: Any) -> Any:
        """Change x in place."""
        own = self._as_tensor(x)
        wire = self._on_wire(own)
        start(wire).wait()
        if wire is not own:
            own.copy_(wire)
        return x
