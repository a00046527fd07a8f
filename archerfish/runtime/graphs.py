"""Passes that are recorded once and repeated without the host: steps of decodes, and passes over prompts.

A pass is recorded for some sizes, and a batch is filled up to the next one. All that a pass needs of the host travels
in one
copy: `kernels/decoding.py` says how it is laid out. Tokens stay on the device from step to step, and so do the block
lists of models with keys.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import cycle
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from archerfish.kernels.batches import Ids, T
from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, Input, PassSize
from archerfish.kernels.ops import Ops
from archerfish.kernels.sampling import draw
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.batch import MIN_SHARED_SEQUENCES, BlockTables, find_shared
from archerfish.runtime.kv_pool import MemoryPool
from archerfish.runtime.sampler import FastSampler, Mode
from archerfish.step import StepInput

SIZES = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))  # sequences
SIZE_STEP = 64  # between larger ones
# Of passes over prompts: their tokens, and the decodes beside them.
PASS_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PASS_DECODES = (0, 8, 32, 128, 512)
MOST_WORK = 1 << 33  # tokens times the model's width squared; beyond it, computing takes longer than launching
PROMPT_TOKENS, MOST_PROMPTS = 16, 64  # tokens of a pass for each prompt that it has room for, and most prompts
DRAFT_TOKENS = (4, 8, 16, 32, 64, 128)  # of the drafts of a step, each with the known one before it
MIN_DRAFT = 2  # tokens
SHARED_DRAFTS = 2  # sizes beyond that of a lone sequence's longest draft, for the drafts of several
MISSES = 8  # of a kind of passes before it is recorded among others' work: recording takes as long as running some
NUM_BUFFERS = 8  # of the host; a step that needs one more waits until the oldest is copied
K = TypeVar("K", bound=Hashable)
logger = logging.getLogger("archerfish.runtime")


class Kind(NamedTuple):
    """Steps of decodes that one recording serves."""

    size: int
    is_shared: bool = False  # sequences have keys in common
    mode: Mode = Mode.DRAWN
    has_adapters: bool = False  # of some sequences


class Recorded(NamedTuple, Generic[T]):
    """What a recorded pass gives, with a row or column for each of its columns."""

    logits: T
    report: T  # of `Drawn`, or of `Ops.scored_report`
    is_behind: npt.NDArray[np.bool_]  # whose token must be chosen from the logits


class RecordedPasses(ABC, Generic[T, K]):
    """Passes by their kind K, each recorded when it is first used, or before."""

    def __init__(self, model: ModelAdapter[T], pool: MemoryPool[T], num_words: int) -> None:
        self.ops: Ops[T] = model.ops
        self.model, self.pool = model, pool
        self._recorded: dict[K, tuple[T, Callable[[], tuple[T, T]]]] = {}
        self._buffers = cycle([self.ops.host_buffer(num_words) for _ in range(NUM_BUFFERS)])
        self._under_way: dict[int, Callable[[], None]] = {}  # by the address of a buffer: waits until it is copied

    @abstractmethod
    def kinds(self) -> Iterable[K]:
        """All kinds, in the order in which to record them: the largest first, since the others use its memory after
        it."""

    @abstractmethod
    def empty_inputs(self, kind: K) -> Ids:
        """Inputs that are all filling."""

    @abstractmethod
    def compute(self, kind: K, inputs: T) -> tuple[T, T]:
        """What is recorded: a pass that reads its inputs where they lie, and gives logits and a report."""

    @property
    def adapted(self) -> tuple[bool, ...]:
        """Kinds of passes: without adapters, and with some if there can be some."""
        return (False,) if self.ops.adapters is None else (False, True)

    def _read_adapters(self, inputs: T, size: PassSize | None, has_adapters: bool) -> None:
        if self.ops.adapters is not None:
            self.ops.adapters.rows = None
            if has_adapters:
                self.ops.adapters.read_rows(inputs, size)

    def run_each(self) -> None:
        """Run a pass of each kind, without recording it."""
        for kind in self.kinds():
            self.compute(kind, self.ops.tensor(self.empty_inputs(kind).copy()))

    def _buffer(self, num_words: int) -> Ids:
        """Words of the host that nothing reads."""
        words = next(self._buffers)[:num_words]
        wait = self._under_way.pop(words.ctypes.data, None)
        if wait is not None:
            wait()
        return words

    def _repeat(self, kind: K, words: Ids) -> tuple[T, T]:
        """Run a pass over these inputs, in the words of a buffer."""
        inputs, repeat = self.recorded(kind)
        self._under_way[words.ctypes.data] = self.ops.send(words, inputs)
        return repeat()

    def recorded(self, kind: K) -> tuple[T, Callable[[], tuple[T, T]]]:
        """The inputs of a recorded pass, and what repeats it and gives its result."""
        found = self._recorded.get(kind)
        if found is None:
            inputs = self.ops.tensor(self.empty_inputs(kind).copy())
            try:
                repeat = self.ops.capture(lambda: self.compute(kind, inputs))
            except Exception as error:  # such as a lack of memory: the pass can still be run
                logger.warning(
                    "Steps of %s are launched kernel by kernel, since recording them failed: %s", kind, error
                )
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
    """Inputs of a step of decodes, the longest sequences first: the device has small pieces of work left for the
    end."""

    words: Ids
    order: Ids  # which sequence of the step stands in each column
    rows: Ids
    num_shared: int
    unknown: Ids  # rows whose blocks the device does not know
    tables: Ids  # and their blocks
    has_adapters: bool


class DecodeGraphs(RecordedPasses[T, Kind]):
    """Steps that are only decodes, from the embedding to the sampled token."""

    def __init__(
        self, model: ModelAdapter[T], pool: MemoryPool[T], sampler: FastSampler[T], *, num_rows: int, max_len: int
    ) -> None:
        self.sizes = list_sizes(num_rows)
        super().__init__(model, pool, NUM_INPUTS * num_rows)
        self.sampler = sampler
        self.state = pool.new_decode_state(num_rows, max_len)
        self.filling = np.zeros((NUM_INPUTS, 1), dtype=np.int64)
        self.filling[Input.ROW], self.filling[Input.POSITION] = num_rows, FILLING_POSITION
        self.filling[Input.KEY :] = sampler.filling
        self._num_known = np.zeros(num_rows, dtype=np.int64)  # blocks of each row that the device knows
        self._members: bytes = b""  # the rows for which _num_shared holds
        self._num_shared = 0

    def forget_changes(self, step: StepInput) -> None:
        """Forget what the device knows of rows that get other sequences or blocks. Call it for every step, in order."""
        if step.entries:
            self._num_known[[entry.row for entry in step.entries]], self._members = 0, b""
        np.minimum.at(self._num_known, step.block_rows, step.block_places)  # a block may take another's place

    def warm_up(self) -> None:
        """Record batches that share nothing and draw from all tokens, and one of each other kind.

        The sizes between powers of two follow when they are used or in idle time.
        """
        plain, *others = self._groups()
        early = [kind for kind in plain if kind.size & (kind.size - 1) == 0 or kind is plain[0]]
        for kind in early + [kinds[0] for kinds in others if kinds]:
            self.recorded(kind)

    def kinds(self) -> Iterable[Kind]:
        return [kind for group in self._groups() for kind in group]

    def _groups(self) -> list[list[Kind]]:
        """All kinds that are recorded before they are used, those first that share nothing and draw from all tokens; of
        those that choose in rarer ways only one, for which kernels are compiled."""
        sizes = self.sizes[::-1]
        shared = [size for size in sizes if size >= MIN_SHARED_SEQUENCES and self.pool.has_keys]
        return [
            [Kind(size, is_shared, mode, has_adapters) for size in (shared if is_shared else sizes)]
            for has_adapters in self.adapted
            for mode in (Mode.DRAWN, Mode.CUT)
            for is_shared in (False, True)
        ] + [[Kind(sizes[0], mode=mode)] for mode in (Mode.PENALISED, Mode.SCORED, Mode.MANY_SCORED)]

    def prepare(self, step: StepInput, tables: BlockTables) -> PreparedDecodes:
        """The inputs of a step, but for what the sampler writes into them."""
        order = np.argsort(-step.starts, kind="stable")
        rows, positions = step.rows[order], step.starts[order]
        num, own = len(rows), positions // self.pool.block_size
        size = self.sizes[bisect_left(self.sizes, num)]
        words = self.empty_inputs(Kind(size))
        words[Input.TOKEN, :num] = step.tokens[order]
        words[Input.ROW, :num] = rows
        words[Input.POSITION, :num] = positions
        words[Input.BLOCK, :num] = tables.at(rows, own)
        unknown, num_shared = rows[:0], 0
        if self.pool.has_keys:
            unknown = self.find_unknown(rows, own)
            self._num_known[rows] = own + 1  # the block of the new token always travels with it
            num_shared = words[Input.NUM_SHARED, 0] = self._find_shared(rows, tables)
        else:
            before = tables.at(rows, np.maximum(positions - 1, 0) // self.pool.block_size)
            words[Input.SOURCE, :num] = np.where(positions > 0, before, NO_BLOCK)
        words[Input.ADAPTER, :num] = step.adapters[order]
        return PreparedDecodes(
            words, order, rows, int(num_shared), unknown, tables.of(unknown), bool(step.adapters.any())
        )

    def find_unknown(self, rows: Ids, num_blocks: Ids) -> Ids:
        """The rows of which the device knows fewer blocks than that. The caller tells it, so that it counts as
        known."""
        unknown = rows[self._num_known[rows] < num_blocks]
        self._num_known[rows] = np.maximum(self._num_known[rows], num_blocks)
        return unknown

    def start(self, prepared: PreparedDecodes) -> Recorded[T]:
        """Queue the work of a step, of which the columns are in the order of `prepared.rows`."""
        if len(prepared.unknown):
            self.ops.set_tables(self.state, prepared.unknown, prepared.tables)
        needs = self.sampler.write_inputs(prepared.words, prepared.rows)
        mode = Mode.of(needs)
        kind = Kind(prepared.words.shape[1], prepared.num_shared > 0, mode, prepared.has_adapters)
        return Recorded(*self._repeat(kind, prepared.words), needs & mode.lacks != 0)

    def empty_inputs(self, kind: Kind) -> Ids:
        words = self._buffer(NUM_INPUTS * kind.size).reshape(NUM_INPUTS, kind.size)
        words[:] = self.filling
        return words

    def compute(self, kind: Kind, inputs: T) -> tuple[T, T]:
        mode, state = kind.mode, self.state
        if mode == Mode.PENALISED:
            state = state._replace(counts=self.sampler.counts())
        batch, sampling = self.pool.decode_batch(inputs, state, is_shared=kind.is_shared)
        if mode == Mode.DRAWN:
            sampling = replace(sampling, min_p=None, cuts=None)
        self._read_adapters(inputs, None, kind.has_adapters)
        logits = self.model.logits(self.model.forward(batch, self.pool.layers))
        drawn = draw(self.ops, logits, sampling)
        self.ops.keep_tokens(inputs, state, drawn.tokens)
        if mode.num_top is None or not self.ops.ranks.is_last:
            return logits, drawn.report
        return logits, self.ops.scored_report(drawn.report, self.ops.token_logprobs(logits, drawn.tokens, mode.num_top))

    def _find_shared(self, rows: Ids, tables: BlockTables) -> int:
        """The result of `find_shared`, computed anew when the sequences change."""
        members = rows.tobytes()
        if members != self._members:
            self._members = members
            self._num_shared = find_shared(tables.of(rows), self.pool.block_size)
        return self._num_shared


class PassKind(NamedTuple):
    """Passes over prompts, with decodes beside them, that one recording serves."""

    num_decodes: int  # for how many there is room
    num_tokens: int  # of prompts
    is_draft: bool = False  # logits behind every token are wanted, not only behind each sequence's last
    has_adapters: bool = False  # of some sequences

    @property
    def size(self) -> PassSize:
        tokens_each = MIN_DRAFT if self.is_draft else PROMPT_TOKENS
        return PassSize(self.num_decodes, max(1, min(MOST_PROMPTS, self.num_tokens // tokens_each)), self.num_tokens)


class PreparedPass(NamedTuple):
    """Inputs of a pass over prompts."""

    kind: PassKind
    num_decodes: int  # that are there
    words: Ids
    unknown: Ids  # rows whose blocks the device does not know
    tables: Ids  # and their blocks

    def at(self, places: Ids) -> Ids:
        """Sequences of the step to columns, or tokens of the step to rows: what fills up the decodes stands between
        them."""
        return places + (places >= self.num_decodes) * (self.kind.num_decodes - self.num_decodes)


class PassGraphs(RecordedPasses[T, PassKind]):
    """Passes over prompts, or what of them is not in the cache, and over drafts, with decodes beside them: a request
    waits for its first token, not for the host."""

    def __init__(self, decodes: DecodeGraphs[T], max_tokens: int, num_draft_tokens: int = 0) -> None:
        """decodes: recorded steps without prompts; both use its tables of blocks. max_tokens: of a step.
        num_draft_tokens: most tokens that are proposed for a sequence."""
        self.decodes = decodes
        self.ops = decodes.ops
        num_rows = decodes.sizes[-1]
        model = decodes.model
        most = min(max_tokens, MOST_WORK // model.config.integer("hidden_size") ** 2)
        self.token_sizes = PASS_TOKENS[: bisect_left(PASS_TOKENS, most) + 1]
        self.decode_sizes = PASS_DECODES[: bisect_left(PASS_DECODES, num_rows) + 1]
        num_sizes = bisect_left(DRAFT_TOKENS, num_draft_tokens + 1) + 1 + SHARED_DRAFTS if num_draft_tokens else 0
        self.draft_sizes = DRAFT_TOKENS[:num_sizes]
        super().__init__(model, decodes.pool, max(kind.size.num_words for kind in self.kinds()))
        self._missed: Counter[PassKind] = Counter()  # how often one was asked for that is not recorded

    def prepare(self, step: StepInput, tables: BlockTables) -> PreparedPass | None:
        """The inputs of a step, but for what the sampler writes into them. None: it is not run here, for its size, for
        what it asks for, or because it is one of the first of its kind and not recorded yet."""
        num_decodes, num = step.num_decodes, int(np.count_nonzero(step.counts))
        kind = self._kind_of(
            num_decodes, num - num_decodes, len(step.tokens) - num_decodes, bool((step.samples > 1).any())
        )
        kind = None if kind is None else kind._replace(has_adapters=bool(step.adapters[:num].any()))
        if kind is None or step.scored:
            return None
        if kind not in self._recorded and self._missed[kind] < MISSES:
            self._missed[kind] += 1
            return None
        rows, last = step.rows[:num], (step.starts + step.counts)[:num] - 1
        unknown = self.decodes.find_unknown(rows, last // self.pool.block_size + 1)
        prepared = PreparedPass(kind, num_decodes, self.empty_inputs(kind), unknown, tables.of(unknown))
        columns, tokens = self._parts(kind, prepared.words)
        own = prepared.at(np.arange(num))
        columns[Input.ROW, own] = rows
        columns[Input.POSITION, own] = last
        columns[Input.COUNT, own] = step.counts[:num]
        tokens[prepared.at(np.arange(len(step.tokens)))] = step.tokens
        columns[Input.ADAPTER, own] = step.adapters[:num]
        return prepared

    def start(self, prepared: PreparedPass) -> Recorded[T]:
        """Queue a pass. For a draft it gives logits and tokens behind every token, first of all decodes that there is
        room for; which of them must be chosen from logits is said of sequences."""
        if len(prepared.unknown):
            self.ops.set_tables(self.decodes.state, prepared.unknown, prepared.tables)
        columns = self._parts(prepared.kind, prepared.words)[0]
        needs = self.decodes.sampler.write_inputs(columns, columns[Input.ROW])
        return Recorded(*self._repeat(prepared.kind, prepared.words), needs & Mode.CUT.lacks != 0)

    def warm_up(self) -> None:
        """Record what lone prompts need, and drafts of a lone sequence, whose steps are measured to decide on
        drafts."""
        for size in reversed(self.token_sizes):
            self.recorded(PassKind(0, size))
        for size in self.draft_sizes[:-SHARED_DRAFTS]:
            self.recorded(PassKind(0, size, is_draft=True))

    def kinds(self) -> Iterable[PassKind]:
        sizes = [(size, False) for size in reversed(self.token_sizes)] + [
            (size, True) for size in reversed(self.draft_sizes)
        ]
        return [
            PassKind(num_decodes, *size, has_adapters)
            for has_adapters in self.adapted
            for size in sizes
            for num_decodes in reversed(self.decode_sizes)
        ]

    def empty_inputs(self, kind: PassKind) -> Ids:
        words = self._buffer(kind.size.num_words)
        columns, tokens = self._parts(kind, words)
        columns[:] = self.decodes.filling
        columns[Input.COUNT, : kind.num_decodes], tokens[:] = 1, 0
        return words

    def compute(self, kind: PassKind, inputs: T) -> tuple[T, T]:
        state, block_size = self.decodes.state, self.pool.block_size
        batch, sampling, columns = self.ops.pass_batch(inputs, kind.size, state, block_size, keeps_all=kind.is_draft)
        self._read_adapters(inputs, kind.size, kind.has_adapters)
        hidden = self.model.forward(batch, self.pool.layers)
        if not self.model.gives_kept_rows and batch.kept_rows is not None:
            (hidden,) = self.ops.keep_rows(batch.kept_rows, hidden)
        logits = self.model.logits(hidden)
        drawn = draw(self.ops, logits, sampling)
        self.ops.keep_tokens(columns, state, drawn.tokens)
        return logits, drawn.report

    def _kind_of(self, num_decodes: int, num_prompts: int, num_tokens: int, is_draft: bool) -> PassKind | None:
        sizes = self.draft_sizes if is_draft else self.token_sizes
        place, decode_place = bisect_left(sizes, num_tokens), bisect_left(self.decode_sizes, num_decodes)
        if not num_prompts or place == len(sizes) or decode_place == len(self.decode_sizes):
            return None
        kind = PassKind(self.decode_sizes[decode_place], sizes[place], is_draft)
        return kind if num_prompts <= kind.size.num_prompts else None

    def _parts(self, kind: PassKind, words: Ids) -> tuple[Ids, Ids]:
        """Columns and tokens of inputs."""
        num = kind.size.num_columns
        return words[: NUM_INPUTS * num].reshape(NUM_INPUTS, num), words[NUM_INPUTS * num :]


def list_sizes(num_rows: int) -> list[int]:
    """Batch sizes to record, the last one holding all rows."""
    sizes = [*SIZES, *range(SIZES[-1] + SIZE_STEP, num_rows + SIZE_STEP, SIZE_STEP)]
    return [size for size in sizes if size < num_rows] + [num_rows]
