"""Steps that are only decodes, recorded once for each batch size and repeated: embedding to sampled token, without the host.

A batch is filled up to the next recorded size. All that a step needs of the host travels in one copy (`kernels/decoding.py`);
tokens stay on the device from step to step, and so do the block lists of models with keys.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Generic, NamedTuple

import numpy as np

from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, ON_DEVICE, Input
from archerfish.kernels.ops import Ids, Ops, T
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.batch import pad_tables
from archerfish.runtime.pool import MemoryPool
from archerfish.runtime.sampler import FastSampler
from archerfish.runtime.shared import MIN_SHARED_SEQUENCES, find_shared
from archerfish.sequence import Plan, Sequence

SIZES = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
SIZE_STEP = 64  # between larger ones
COMPILING_S = 5.0  # that recording takes no less than with kernels to compile, and far less without
NUM_BUFFERS = 4  # more than the steps that are open at once


class Kind(NamedTuple):
    """What steps are told apart by when they are recorded."""

    size: int
    is_shared: bool = False  # sequences have keys in common
    is_cut: bool = False  # some draw from fewer than all tokens: by top_k, top_p or min_p


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """The step of one kind: send its inputs, repeat it, fetch its report."""

    inputs: T
    repeat: Callable[[], T]

    @classmethod
    def of(cls, ops: Ops[T], inputs: T, step: Callable[[], T]) -> Recorded[T]:
        """A step that reads its inputs where they lie."""
        try:
            return cls(inputs, ops.capture(step) or step)
        except Exception:  # as for want of memory: the step can still be run
            return cls(inputs, step)


class DecodeGraphs(Generic[T]):
    """Runs plans that are only decodes of plainly sampled sequences, on a backend that can record work."""

    def __init__(
        self, model: ModelAdapter[T], pool: MemoryPool[T], sampler: FastSampler[T], *, num_rows: int, max_len: int
    ) -> None:
        self.ops: Ops[T] = model.ops
        self.model, self.pool, self.sampler = model, pool, sampler
        self.sizes = list_sizes(num_rows)
        self.state = pool.new_decode_state(num_rows, max_len)
        self._spare_row = num_rows
        self._num_known = np.zeros(num_rows, dtype=np.int64)  # blocks of each row that the device knows
        self._recorded: dict[Kind, Recorded[T]] = {}
        self._buffers = cycle([self.ops.host_buffer(NUM_INPUTS * self.sizes[-1]) for _ in range(NUM_BUFFERS)])
        self._members: bytes = b""
        self._num_shared = 0

    def forget(self, row: int) -> None:
        """Another sequence has taken a row."""
        self._num_known[row] = 0
        self._members = b""

    def warm_up(self) -> bool:
        """Record batches that share nothing and draw from all tokens, the largest first, whose memory the others use after it,
        and one of each other kind. The sizes between powers of two follow at once where kernels had to be compiled, which
        nobody should wait for later, and else when they are used or in idle time. Gives whether kernels had to be compiled."""
        began = time.perf_counter()
        plain, *others = self._wanted()
        early = [kind for kind in plain if kind.size & (kind.size - 1) == 0 or kind is plain[0]]
        for kind in early + [kinds[0] for kinds in others if kinds]:
            self._record(kind)
        has_compiled = time.perf_counter() - began > COMPILING_S
        if has_compiled:
            for kind in plain:
                if kind not in self._recorded:
                    self._record(kind)
        return has_compiled

    def record_next(self) -> bool:
        """Record one more batch, in time that nobody needs; False: all are recorded."""
        found = next((kind for kinds in self._wanted() for kind in kinds if kind not in self._recorded), None)
        if found is not None:
            self._record(found)
        return found is not None

    def _wanted(self) -> list[list[Kind]]:
        """All that can be recorded, in the order of their use, those first that share nothing and draw from all tokens."""
        sizes = self.sizes[::-1]
        shared = [size for size in sizes if size >= MIN_SHARED_SEQUENCES and self.pool.has_keys]
        return [
            [Kind(size, is_shared, is_cut) for size in (shared if is_shared else sizes)]
            for is_shared in (False, True) for is_cut in (False, True)
        ]

    def takes(self, plan: Plan) -> bool:
        """Whether a plan can be run here."""
        if plan.num_decodes != len(plan.sequences) or plan.keeps_logits or not all(plan.samples):
            return False
        return plan.num_decodes <= self.sizes[-1] and self.sampler.is_plain(plan.sequences)

    def start(self, plan: Plan) -> tuple[T, Ids]:
        """Queue a plan's work; gives the (2, rows) report of `Drawn`, and which of its columns are the plan's sequences.

        The longest sequences stand first: the device begins with them, and has small pieces of work left for the end.
        """
        starts = np.asarray(plan.starts, dtype=np.int64)
        order = np.argsort(-starts, kind="stable")
        positions = starts[order]
        sequences = [plan.sequences[i] for i in order.tolist()]
        rows = np.fromiter((sequence.row for sequence in sequences), np.int64, len(sequences))
        num_shared = 0
        if self.pool.has_keys:
            self._teach_blocks(sequences, rows, positions)
            num_shared = self._find_shared(sequences, rows)
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        words = self._words(size)
        num, block_size = len(rows), self.pool.block_size
        words[Input.TOKEN, :num] = [
            sequence.tokens[at] if at < len(sequence.tokens) else ON_DEVICE
            for sequence, at in zip(sequences, positions.tolist(), strict=True)
        ]
        words[Input.BLOCK, :num] = [
            sequence.blocks[own] for sequence, own in zip(sequences, (positions // block_size).tolist(), strict=True)
        ]
        words[Input.ROW, :num], words[Input.POSITION, :num] = rows, positions
        if self.pool.has_keys:
            words[Input.NUM_SHARED, 0] = num_shared
        else:
            words[Input.SOURCE, :num] = [
                sequence.blocks[(at - 1) // block_size] if at else NO_BLOCK
                for sequence, at in zip(sequences, positions.tolist(), strict=True)
            ]
        kind = Kind(size, num_shared > 0, self.sampler.write_inputs(words, rows))
        recorded = self._recorded.get(kind) or self._record(kind)
        self.ops.send(words, recorded.inputs)
        return recorded.repeat(), np.argsort(order)

    def _words(self, size: int) -> Ids:
        """A host buffer of inputs that are all filling."""
        words = next(self._buffers)[: NUM_INPUTS * size].reshape(NUM_INPUTS, size)
        words[: Input.KEY], words[Input.NUM_SHARED] = 0, 0
        words[Input.ROW], words[Input.POSITION] = self._spare_row, FILLING_POSITION
        self.sampler.write_inputs(words, np.zeros(0, dtype=np.int64))
        return words

    def _record(self, kind: Kind) -> Recorded[T]:
        ops, words = self.ops, self._words(kind.size)
        inputs = ops.ids(words.copy())

        def step() -> T:
            batch, sampling = self.pool.decode_batch(inputs, self.state, is_shared=kind.is_shared)
            if not kind.is_cut:
                sampling = replace(sampling, min_p=None, long_cuts=None)
            drawn = ops.sample(self.model.logits(self.model.forward(batch, self.pool.layers)), sampling)
            ops.keep_tokens(inputs, self.state, drawn.tokens)
            return drawn.report

        recorded = self._recorded[kind] = Recorded.of(ops, inputs, step)
        return recorded

    def _teach_blocks(self, sequences: list[Sequence], rows: Ids, positions: Ids) -> None:
        """Send the block lists that the device does not know; the block of the new token always travels with it."""
        own = positions // self.pool.block_size
        unknown = np.flatnonzero(self._num_known[rows] < own)
        if len(unknown):
            self.ops.set_tables(self.state, rows[unknown], pad_tables([sequences[i].blocks for i in unknown.tolist()]))
        self._num_known[rows] = own + 1

    def _find_shared(self, sequences: list[Sequence], rows: Ids) -> int:
        """What `find_shared` finds, looked for anew in new company."""
        members = rows.tobytes()
        if members != self._members:
            self._members = members
            self._num_shared = find_shared([sequence.blocks for sequence in sequences], self.pool.block_size)
        return self._num_shared


def list_sizes(num_rows: int) -> list[int]:
    """Batch sizes to record, the last one holding all rows."""
    sizes = [*SIZES, *range(SIZES[-1] + SIZE_STEP, num_rows + SIZE_STEP, SIZE_STEP)]
    return [size for size in sizes if size < num_rows] + [num_rows]
