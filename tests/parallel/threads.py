"""Ranks that are threads of one process, which exchange arrays and tensors by lists and queues."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from archerfish.kernels.ranks import Part, Ranks

R = TypeVar("R")
TIMEOUT_S = 60.0


class Turn:
    """Only one thread computes at a time: Triton's interpreter knows one program."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


class Meeting:
    """Where some threads give one thing each, and each gets the things of all."""

    def __init__(self, size: int, turn: Turn) -> None:
        self._barrier = threading.Barrier(size)
        self._given = [None] * size
        self._turn = turn

    def exchange(self, index: int, mine: Any) -> list[Any]:
        self._given[index] = mine
        with self._turn.given_up():
            self._barrier.wait(TIMEOUT_S)
            found = list(self._given)
            self._barrier.wait(TIMEOUT_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class World:
    """What the threads share."""

    def __init__(self, size: int, num_stages: int) -> None:
        self.size, self.num_stages = size, num_stages
        self.turn = Turn()
        self.all = Meeting(size * num_stages, self.turn)
        self.stages = [Meeting(size, self.turn) for _ in range(num_stages)]
        self.links: dict[tuple[int, int], SimpleQueue[Any]] = defaultdict(
            SimpleQueue
        )  # by the stage and index that receives

    def run(self, work: Callable[[Ranks], R]) -> list[R]:
        """What the work of each rank gives; an error in one ends the others."""

        def begin(rank: int) -> R:
            try:
                with self.turn.lock:
                    return work(ThreadRanks(self, rank))
            except BaseException:
                for meeting in (self.all, *self.stages):
                    meeting.abort()
                raise

        with ThreadPoolExecutor(self.size * self.num_stages) as pool:
            running = [pool.submit(begin, rank) for rank in range(self.size * self.num_stages)]
        errors = [error for each in running if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in running]


class ThreadRanks(Ranks):
    def __init__(self, world: World, rank: int) -> None:
        super().__init__(*self.place(rank, world.size, world.num_stages))
        self.world, self.rank = world, rank

    def add_up(self, x: Any, residual: Any = None) -> Any:
        parts = self.world.stages[self.stage].exchange(self.index, x)
        return self.add_residual(sum(parts[1:], start=parts[0]), residual)

    def join(self, x: Any, part: Part) -> Any:
        parts = self.world.stages[self.stage].exchange(self.index, x)
        return torch.cat(parts, 1) if isinstance(x, torch.Tensor) else np.concatenate(parts, 1)

    def send(self, *tensors: Any) -> None:
        for each in tensors:
            self.world.links[self.stage + 1, self.index].put(each)

    def receive(self, num_rows: int, width: int, dtype: str) -> Any:
        with self.world.turn.given_up():
            found = self.world.links[self.stage, self.index].get(timeout=TIMEOUT_S)
        assert tuple(found.shape) == (num_rows, width) and str(found.dtype).removeprefix("torch.") == dtype
        return found

    def share(self, tokens: Any) -> Any:
        tokens[:] = self.world.all.exchange(self.rank, tokens)[0]
        return tokens

    def empty_report(self, num_rows: int) -> Any:
        return np.zeros((2, num_rows), dtype=np.int64)

    def min_over_ranks(self, number: int) -> int:
        return int(min(self.world.all.exchange(self.rank, number)))
