"""Passes that are recorded once and repeated without the host: steps of decodes, and passes over one prompt.

A pass is recorded for some sizes. A batch is filled up to the next one, unless the backend repeats recorded work for any number
of rows. All that a pass needs of the host travels in one copy: `kernels/decoding.py` says how it is laid out. Tokens stay on
the device from step to step, and so do the block lists of models with keys.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import cycle
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, Input, Word
from archerfish.kernels.ops import Ids, Ops, T
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.batch import MIN_SHARED_SEQUENCES, BlockTables, find_shared
from archerfish.runtime.kv_pool import MemoryPool
from archerfish.runtime.sampler import FastSampler, is_plain
from archerfish.step import StepInput

SIZES = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))  # sequences
SIZE_STEP = 64  # between larger ones
PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens; beyond the last, computing takes longer than the host
DRAFT_SIZES = (4, 8, 16, 32)  # tokens of a draft, with the known one before it
COMPILING_S = 5.0  # recording takes longer than this if kernels have to be compiled, and far less if not
NUM_BUFFERS = 36  # more than the steps that are open at once: a draft model has one for each token that it proposes
K = TypeVar("K", bound=Hashable)


class Kind(NamedTuple):
    """Steps of decodes that one recording serves."""

    size: int
    is_shared: bool = False  # sequences have keys in common
    is_cut: bool = False  # some draw from fewer than all tokens: by top_k, top_p or min_p
    is_sampled: bool = True  # it gives a report of tokens; else logits


class RecordedPasses(ABC, Generic[T, K]):
    """Passes by their kind K, each recorded when it is first used, or before."""

    def __init__(self, model: ModelAdapter[T], pool: MemoryPool[T], num_words: int) -> None:
        self.ops: Ops[T] = model.ops
        self.model, self.pool = model, pool
        self._recorded: dict[K, tuple[T, Callable[[], T]]] = {}
        self._buffers = cycle([self.ops.host_buffer(num_words) for _ in range(NUM_BUFFERS)])

    @abstractmethod
    def kinds(self) -> Iterable[K]:
        """All kinds, in the order in which to record them: the largest first, since the others use its memory after it."""

    @abstractmethod
    def empty_inputs(self, kind: K) -> Ids:
        """Inputs that are all filling."""

    @abstractmethod
    def compute(self, kind: K, inputs: T) -> T:
        """What is recorded: a pass that reads its inputs where they lie."""

    def recorded(self, kind: K) -> tuple[T, Callable[[], T]]:
        """The inputs of a recorded pass, and what repeats it and gives its result."""
        found = self._recorded.get(kind)
        if found is None:
            inputs = self.ops.tensor(self.empty_inputs(kind).copy())
            try:
                repeat = self.ops.capture(lambda: self.compute(kind, inputs))
            except Exception:  # such as a lack of memory: the pass can still be run
                repeat = None
            found = self._recorded[kind] = inputs, repeat or (lambda: self.compute(kind, inputs))
        return found

    def record_next(self) -> bool:
        """Record one more kind, in idle time. False: all are recorded."""
        kind = next((kind for kind in self.kinds() if kind not in self._recorded), None)
        if kind is not None:
            self.recorded(kind)
        return kind is not None


class PreparedDecodes(NamedTuple):
    """Inputs of a step of decodes, the longest sequences first: the device has small pieces of work left for the end."""

    words: Ids
    order: Ids  # which sequence of the step stands in each column
    rows: Ids
    num_shared: int
    unknown: Ids  # rows whose blocks the device does not know
    tables: Ids  # and their blocks
    is_plain: bool  # the recorded work samples all of them


class DecodeGraphs(RecordedPasses[T, Kind]):
    """Steps that are only decodes, from the embedding to the sampled token; to the logits if some are not sampled plainly."""

    def __init__(
        self, model: ModelAdapter[T], pool: MemoryPool[T], sampler: FastSampler[T], *, num_rows: int, max_len: int
    ) -> None:
        self.sizes = list_sizes(num_rows)
        super().__init__(model, pool, NUM_INPUTS * num_rows)
        self.sampler = sampler
        self.state = pool.new_decode_state(num_rows, max_len)
        self._filling = np.zeros((NUM_INPUTS, 1), dtype=np.int64)
        self._filling[Input.ROW], self._filling[Input.POSITION] = num_rows, FILLING_POSITION
        self._filling[Input.KEY :] = sampler.filling
        self._special_rows: set[int] = set()  # rows of sequences that are not sampled plainly
        self._num_known = np.zeros(num_rows, dtype=np.int64)  # blocks of each row that the device knows
        self._members: bytes = b""  # the rows for which _num_shared holds
        self._num_shared = 0

    def takes(self, step: StepInput) -> bool:
        """Whether a step can be run here. Every step must be asked about, in order: it may bring other sequences for rows."""
        for entry in step.entries:
            self._num_known[entry.row] = 0
            self._members = b""
            if is_plain(entry):
                self._special_rows.discard(entry.row)
            else:
                self._special_rows.add(entry.row)
        return step.is_decode_only

    def warm_up(self) -> bool:
        """Record batches that share nothing and draw from all tokens, and one of each other kind.

        The sizes between powers of two follow at once if kernels had to be compiled, so that no request waits for that, and
        else when they are used or in idle time. Returns whether kernels had to be compiled.
        """
        began = time.perf_counter()
        plain, *others = self._groups()
        early = [kind for kind in plain if kind.size & (kind.size - 1) == 0 or kind is plain[0]]
        for kind in early + [kinds[0] for kinds in others if kinds]:
            self.recorded(kind)
        has_compiled = time.perf_counter() - began > COMPILING_S
        if has_compiled:
            for kind in plain:
                self.recorded(kind)
        return has_compiled

    def kinds(self) -> Iterable[Kind]:
        return [kind for group in self._groups() for kind in group]

    def _groups(self) -> list[list[Kind]]:
        """All kinds, those first that share nothing and draw from all tokens."""
        sizes = self.sizes[::-1]
        shared = [size for size in sizes if size >= MIN_SHARED_SEQUENCES and self.pool.has_keys]
        return [
            [Kind(size, is_shared, *how) for size in (shared if is_shared else sizes)]
            for how in ((False,), (True,), (False, False)) for is_shared in (False, True)
        ]

    def prepare(self, step: StepInput, tables: BlockTables) -> PreparedDecodes:
        """The inputs of a step, but for what the sampler writes into them."""
        order = np.argsort(-step.starts, kind="stable")
        rows, positions = step.rows[order], step.starts[order]
        num, own = len(rows), positions // self.pool.block_size
        size = self.sizes[bisect_left(self.sizes, num)]
        words = self.empty_inputs(Kind(size))
        words[Input.TOKEN, :num], words[Input.ROW, :num], words[Input.POSITION, :num] = step.tokens[order], rows, positions
        words[Input.BLOCK, :num] = tables.at(rows, own)
        unknown, num_shared = rows[:0], 0
        if self.pool.has_keys:
            unknown = rows[self._num_known[rows] < own]  # the block of the new token always travels with it
            self._num_known[rows] = own + 1
            num_shared = words[Input.NUM_SHARED, 0] = self._find_shared(rows, tables)
        else:
            before = tables.at(rows, np.maximum(positions - 1, 0) // self.pool.block_size)
            words[Input.SOURCE, :num] = np.where(positions > 0, before, NO_BLOCK)
        new_tables = tables.of(unknown) if len(unknown) else unknown
        is_plain = self._special_rows.isdisjoint(rows.tolist())
        return PreparedDecodes(words, order, rows, int(num_shared), unknown, new_tables, is_plain)

    def start(self, prepared: PreparedDecodes) -> T:
        """Queue the work of a step; gives the (2, rows) report of `Drawn`, or logits, in the order of `prepared.rows`."""
        if len(prepared.unknown):
            self.ops.set_tables(self.state, prepared.unknown, prepared.tables)
        is_cut = prepared.is_plain and self.sampler.write_inputs(prepared.words, prepared.rows)
        inputs, repeat = self.recorded(Kind(prepared.words.shape[1], prepared.num_shared > 0, is_cut, prepared.is_plain))
        self.ops.send(prepared.words, inputs)
        return repeat()

    def empty_inputs(self, kind: Kind) -> Ids:
        words = next(self._buffers)[: NUM_INPUTS * kind.size].reshape(NUM_INPUTS, kind.size)
        words[:] = self._filling
        return words

    def compute(self, kind: Kind, inputs: T) -> T:
        batch, sampling = self.pool.decode_batch(inputs, self.state, is_shared=kind.is_shared)
        if not kind.is_cut:
            sampling = replace(sampling, min_p=None, cuts=None)
        logits = self.model.logits(self.model.forward(batch, self.pool.layers))
        if not kind.is_sampled:
            return logits
        drawn = self.ops.sample(logits, sampling)
        self.ops.keep_tokens(inputs, self.state, drawn.tokens)
        return drawn.report

    def _find_shared(self, rows: Ids, tables: BlockTables) -> int:
        """The result of `find_shared`, computed anew when the sequences change."""
        members = rows.tobytes()
        if members != self._members:
            self._members = members
            self._num_shared = find_shared(tables.of(rows), self.pool.block_size)
        return self._num_shared


class Prompt(NamedTuple):
    """New tokens of the only sequence of a pass, up to its last one.

    The step waits for the token that is drawn behind it, and so for the copy out of the host's buffer.
    """

    tokens: Ids
    start: int
    blocks: Ids
    is_draft: bool = False  # logits behind each token are wanted, not only behind the last


class PromptKind(NamedTuple):
    """Passes over one prompt that one recording serves."""

    size: int  # tokens
    is_draft: bool = False


class PromptGraphs(RecordedPasses[T, PromptKind]):
    """Passes over one prompt, or what of it is not in the cache: a lone request waits for its first token, not for the host.

    A draft that a lone sequence verifies is such a prompt.
    """

    def __init__(self, model: ModelAdapter[T], pool: MemoryPool[T], num_draft_tokens: int = 0) -> None:
        """num_draft_tokens: most tokens that are proposed for a sequence."""
        self.draft_sizes = DRAFT_SIZES[: bisect_left(DRAFT_SIZES, num_draft_tokens + 1) + 1] if num_draft_tokens else ()
        self.sizes = PROMPT_SIZES[: bisect_left(PROMPT_SIZES, model.max_len) + 1]
        self._num_blocks = -(-model.max_len // pool.block_size)
        super().__init__(model, pool, self._num_words(self.sizes[-1]))
        self._missed: set[PromptKind] = set()  # that were asked for once: recording takes longer than running

    def takes(self, num_new: int, *, is_draft: bool = False) -> bool:
        """Whether a prompt of so many new tokens is run here: not a single one, which is a decode, nor the first of its size
        where that is not recorded yet."""
        if not 1 < num_new <= (self.draft_sizes or (0,) if is_draft else self.sizes)[-1]:
            return False
        kind = self._kind_of(num_new, is_draft)
        if kind in self._recorded or kind in self._missed:
            return True
        self._missed.add(kind)
        return False

    def warm_up(self) -> None:
        """Record what drafts need: how long their steps take decides whether there are any."""
        for size in self.draft_sizes:
            self.recorded(PromptKind(size, is_draft=True))

    def start(self, prompt: Prompt) -> T:
        """Queue a pass; gives the (1, vocabulary) logits behind its last token, or those behind each token of a draft."""
        num_new = len(prompt.tokens)
        kind = self._kind_of(num_new, prompt.is_draft)
        inputs, repeat = self.recorded(kind)
        words, first_block = self.empty_inputs(kind), Word.TOKENS + kind.size
        words[Word.NUM_NEW], words[Word.START] = num_new, prompt.start
        words[Word.TOKENS : Word.TOKENS + num_new] = prompt.tokens
        num_blocks = -(-(prompt.start + num_new) // self.pool.block_size)
        words[first_block : first_block + num_blocks] = prompt.blocks[:num_blocks]
        self.ops.send(words, inputs)
        logits = repeat()
        kept = self.ops.first_rows(logits, num_new) if prompt.is_draft else logits
        return self.ops.concat([kept])  # a copy: other recorded work has the same memory

    def kinds(self) -> Iterable[PromptKind]:
        return [*map(PromptKind, reversed(self.sizes)), *(PromptKind(size, is_draft=True) for size in self.draft_sizes)]

    def empty_inputs(self, kind: PromptKind) -> Ids:
        words = next(self._buffers)[: self._num_words(kind.size)]
        words[:] = 0
        return words

    def compute(self, kind: PromptKind, inputs: T) -> T:
        batch = self.ops.prompt_batch(inputs, kind.size, self.pool.block_size)
        if kind.is_draft:
            batch = replace(batch, kept_rows=None)
        hidden = self.model.forward(batch, self.pool.layers)
        if not self.model.gives_kept_rows and batch.kept_rows is not None:
            hidden = self.ops.rows(hidden, batch.kept_rows)
        return self.model.logits(hidden)

    def _kind_of(self, num_new: int, is_draft: bool) -> PromptKind:
        sizes = self.draft_sizes if is_draft else self.sizes
        return PromptKind(sizes[bisect_left(sizes, num_new)], is_draft)

    def _num_words(self, size: int) -> int:
        return Word.TOKENS + size + self._num_blocks


def list_sizes(num_rows: int) -> list[int]:
    """Batch sizes to record, the last one holding all rows."""
    sizes = [*SIZES, *range(SIZES[-1] + SIZE_STEP, num_rows + SIZE_STEP, SIZE_STEP)]
    return [size for size in sizes if size < num_rows] + [num_rows]
