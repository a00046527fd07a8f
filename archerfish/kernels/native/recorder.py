"""Operations on a tape: recorded for later replays, or run at once where nothing is being recorded.

A tensor is an array of the host, or, while a pass is recorded, a `Value` whose number of rows is not known yet.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.background import finish_before_fork, in_background
from archerfish.kernels.machine import FreeCores
from archerfish.kernels.native._native import Level, Matrix, Packing, Tape, Threads
from archerfish.kernels.pool import is_forked, num_pass_threads

Array = npt.NDArray[Any]
ROW_ITEM_BYTES = 4  # activations are float32


class Rows(IntEnum):
    """What the rows of a value are; the order of the sizes of a replay."""

    TOKENS = 0
    KEPT = 1
    SEQUENCES = 2


class Input(IntEnum):
    """Arrays that a step brings, in the order in which a replay takes them."""

    TOKEN_IDS = 0
    POSITIONS = 1
    SLOTS = 2
    BLOCK_TABLES = 3
    STARTS = 4
    CONTEXT_LENS = 5
    KEPT_ROWS = 6
    TYPE_IDS = 7
    PREVIOUS = 8
    SOURCES = 9
    TARGETS = 10
    PIECE_STARTS = 11
    FIRST_PIECES = 12
    ADAPTERS = 13


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a tape. number: of the tape's value; of ids that a step brings, `source` instead."""

    rows: Rows
    width: int
    number: int = -1
    source: Input | None = None
    offset: int = 0  # added to ids

    @property
    def shape(self) -> tuple[int, ...]:
        return (-1, self.width)

    def __add__(self, offset: int) -> Value:
        return dataclasses.replace(self, offset=self.offset + offset)


Handle = Any  # an array, or a Value


@dataclass
class StepArrays:
    """The numbers of one step."""

    arrays: list[Array | None] = dataclasses.field(default_factory=lambda: [None] * len(Input))
    sizes: list[int] = dataclasses.field(
        default_factory=lambda: [0] * 6
    )  # by Rows, then table width, block size, pieces

    def set(self, which: Input, array: Array | None) -> None:
        if array is not None:
            self.arrays[which] = array if array.dtype == np.int64 else array.astype(np.int64)


class Recorder:
    """Adds operations to a tape. An eager one runs its tape at the end, and its values are arrays."""

    def __init__(self, level: Level, *, is_eager: bool) -> None:
        self.tape, self.is_eager = Tape(level), is_eager
        self.step = StepArrays()
        self._kept: list[Any] = []

    def __call__(self, x: Handle | None) -> int:
        """The number of a tensor on the tape."""
        if x is None:
            return -1
        if isinstance(x, Value):
            return x.number
        array = np.ascontiguousarray(x)
        self._kept.append(array)
        return self.tape.constant(array)

    def new(self, rows: Rows, width: int, num_rows: int) -> Handle:
        """A new tensor of float32; num_rows counts only where it is computed at once."""
        if not self.is_eager:
            return Value(rows, width, self.tape.value(rows, width * ROW_ITEM_BYTES))
        array = np.empty((num_rows, width), dtype=np.float32)
        self.step.sizes[rows] = num_rows
        return array

    def like(self, x: Handle, width: int) -> Handle:
        """A new tensor with the rows of another one."""
        return self.new(x.rows, width, 0) if isinstance(x, Value) else self.new(Rows.TOKENS, width, x.shape[0])


class Replayer:
    """A function of a batch that was recorded, one tape for each kind of batch."""

    def __init__(self, owner: TapeRunner, call: Callable[[Any], Handle]) -> None:
        self._owner, self._call = owner, call
        self._tapes: dict[tuple[int, ...], tuple[Tape, Value]] = {}
        self._lock = threading.Lock()

    def __call__(self, batch: Any) -> Array:
        step, kind = read_batch(batch)
        found = self._tapes.get(kind)
        if found is None:
            with self._lock:
                found = self._tapes.get(kind) or self._record(batch, kind)
        tape, value = found
        result = np.empty((step.sizes[value.rows], value.width), dtype=np.float32)
        self._owner.run(tape, step, [result])
        return result

    def _record(self, batch: Any, kind: tuple[int, ...]) -> tuple[Tape, Value]:
        recorder = Recorder(self._owner.level, is_eager=False)
        with self._owner.recording(recorder):
            value = self._call(symbolic(batch))
        result = Value(value.rows, value.width, recorder.tape.result(value.rows, value.width * ROW_ITEM_BYTES))
        recorder.tape.copy(value.number, result.number, value.width * ROW_ITEM_BYTES)
        found = self._tapes[kind] = recorder.tape, result
        return found


class TapeRunner:
    """The threads of a backend, and what is being recorded in this thread."""

    def __init__(self, level: Level, threads: Threads) -> None:
        self.level = level
        self.threads = threads
        self._free_cores = FreeCores()
        self._local = threading.local()
        self._unpacked: list[Matrix] = []  # those that nothing packs yet
        self._packing: Future[None] | None = None
        self._lock = threading.Lock()

    def current(self) -> Recorder:
        """What operations are added to."""
        recorder: Recorder | None = getattr(self._local, "recorder", None)
        return Recorder(self.level, is_eager=True) if recorder is None else recorder

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """The context in which operations are recorded."""
        self._local.recorder = recorder
        try:
            yield
        finally:
            self._local.recorder = None

    def finish(self, recorder: Recorder) -> None:
        """Called after each operation: computes it unless it is recorded."""
        if recorder.is_eager:
            self.run(recorder.tape, recorder.step, [])

    @property
    def num_threads(self) -> int:
        """How many threads a pass of this thread uses."""
        return num_pass_threads() or self._all_threads()

    def _all_threads(self) -> int:
        return 1 if is_forked() else min(self.threads.count, self._free_cores.count())

    def pack(self, matrix: Matrix, *, is_copy: bool = False) -> Matrix:
        """Have a matrix packed together with others before a tape runs; at once if its rows are a copy, to free
        that."""
        with self._lock:
            self._unpacked.append(matrix)
        if is_copy:
            self.finish_packing()
        return matrix

    def start_packing(self, then: Callable[[], None] = lambda: None) -> None:
        """Pack in the background, by all threads and without the interpreter lock. then: called afterwards."""
        with self._lock:
            matrices, self._unpacked = self._unpacked, []
            packing = Packing(matrices)
            num_threads = self._all_threads()
            before = self._packing

            def pack() -> None:
                if before is not None:
                    before.result()
                packing.run(self.threads, num_threads)

            try:
                running = in_background(pack, "packing")
            except RuntimeError:  # the system has no thread left
                running = Future()
                pack()
                running.set_result(None)
            self._packing = finish_before_fork(running)
        running.add_done_callback(lambda _: then())

    def finish_packing(self) -> None:
        if self._unpacked:
            self.start_packing()
        with self._lock:
            packing = self._packing
        if packing is not None:
            packing.result()
            with self._lock:
                if self._packing is packing:
                    self._packing = None

    def run(self, tape: Tape, step: StepArrays, results: list[Array]) -> None:
        self.finish_packing()
        tape.run(self.threads, self.num_threads, step.sizes, step.arrays, results)


class RecordedSegments(NamedTuple):
    """Stands for the Segments of a batch while its pass is recorded."""

    positions: Value
    lengths: tuple[int, ...]  # the longest, where some tokens are not seen: the pass is for this one alone


def read_batch(batch: Any) -> tuple[StepArrays, tuple[int, ...]]:
    """The numbers of a batch, and all that decides what is recorded for it."""
    step = StepArrays()
    step.set(Input.TOKEN_IDS, batch.token_ids)
    step.sizes[Rows.TOKENS] = getattr(batch, "num_tokens", len(batch.token_ids))  # what follows them is filling
    if hasattr(batch, "segments"):
        set_segments(step, batch.segments)
        step.set(Input.POSITIONS, batch.segments.positions)
        step.set(Input.TYPE_IDS, batch.type_ids)
        if batch.num_attended is None:
            return step, (batch.type_ids is not None,)
        step.sizes[3] = max(batch.segments.lengths)
        return step, (batch.type_ids is not None, batch.num_attended, step.sizes[3])
    set_batch(step, batch)
    return step, (batch.kept_rows is not None, batch.adapters is not None)


def set_segments(step: StepArrays, segments: Any) -> None:
    step.set(Input.STARTS, segments.starts)
    step.sizes[Rows.SEQUENCES] = len(segments.lengths)


def set_batch(step: StepArrays, batch: Any) -> None:
    """The numbers of a PagedBatch or a RecurrentBatch."""
    step.set(Input.KEPT_ROWS, batch.kept_rows)
    step.set(Input.ADAPTERS, batch.adapters)
    step.sizes[Rows.KEPT] = 0 if batch.kept_rows is None else len(batch.kept_rows)
    step.sizes[Rows.SEQUENCES] = len(batch.query_lens)
    if hasattr(batch, "block_tables"):
        starts = np.zeros(len(batch.query_lens) + 1, dtype=np.int64)
        np.cumsum(batch.query_lens, out=starts[1:])
        tables = np.ascontiguousarray(batch.block_tables)
        for which, array in (
            (Input.POSITIONS, batch.positions),
            (Input.SLOTS, batch.slots),
            (Input.BLOCK_TABLES, tables),
            (Input.STARTS, starts),
            (Input.CONTEXT_LENS, batch.context_lens),
        ):
            step.set(which, array)
        step.sizes[3:5] = tables.shape[1], batch.block_size
        return
    for which, array in (
        (Input.PREVIOUS, batch.previous),
        (Input.SOURCES, batch.sources),
        (Input.TARGETS, batch.targets),
        (Input.PIECE_STARTS, batch.starts),
        (Input.FIRST_PIECES, batch.first_pieces),
    ):
        step.set(which, array)
    step.sizes[5] = len(batch.sources)


def symbolic(batch: Any) -> Any:
    """A batch whose arrays are inputs of a tape."""
    names: dict[str, Any] = {"token_ids": Value(Rows.TOKENS, 1, source=Input.TOKEN_IDS)}
    if hasattr(batch, "segments"):
        lengths = () if batch.num_attended is None else (max(batch.segments.lengths),)
        names["segments"] = RecordedSegments(Value(Rows.TOKENS, 1, source=Input.POSITIONS), lengths)
        names["type_ids"] = None if batch.type_ids is None else Value(Rows.TOKENS, 1, source=Input.TYPE_IDS)
    else:
        if hasattr(batch, "block_tables"):
            names["positions"] = Value(Rows.TOKENS, 1, source=Input.POSITIONS)
        if batch.kept_rows is not None:
            names["kept_rows"] = Value(Rows.KEPT, 1, source=Input.KEPT_ROWS)
        if batch.adapters is not None:
            names["adapters"] = Value(Rows.TOKENS, 1, source=Input.ADAPTERS)
    return dataclasses.replace(batch, **names)
