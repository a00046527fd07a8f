"""ModelRunner: a StepInput becomes buffers, logits and tokens.

The caller can plan the next step while one computes: on a CPU steps run in a thread of their own, a GPU is given its
work and not waited for. Tokens that the step before is still choosing are filled in where they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from archerfish.background import Lazy
from archerfish.kernels.adapters import LowRank
from archerfish.kernels.batches import Ids, T
from archerfish.kernels.ops import Ops, PagedBatch
from archerfish.kernels.recurrent import RecurrentBatch
from archerfish.kernels.sampling import SamplingBatch
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.batch import BlockTables
from archerfish.runtime.graphs import DecodeGraphs, PassGraphs, PreparedDecodes, PreparedPass, Recorded
from archerfish.runtime.kv_pool import MemoryPool
from archerfish.runtime.rehearsal import rehearse
from archerfish.runtime.sampler import FastSampler, prompt_logprobs
from archerfish.step import NO_IDS, PENDING, StepInput, StepResult, TokenLogprobs
from archerfish.types import Progress, no_progress

DECODE_TILE = 32  # rows of every decode pass in deterministic mode, filled up with rows that mean nothing
CALIBRATED = 256  # tokens by which scales are set
LOGPROB_ROWS = 64  # rows of prompt logits made at a time
WARM_UPS = (  # new tokens and contexts of sequences: long prompts, short ones, and what stands after a long context
    [(256, 256)],
    [(20, 20)] * 8,
    [(1, 40), (2, 300)],
)
Scores = tuple[
    int, Callable[[], list[TokenLogprobs]]
]  # the sequence of prompt tokens, and what waits for their logprobs


@dataclass(frozen=True)
class Pass(Generic[T]):
    """One forward pass of a step. Sequences are indices into the step; places are rows of the batch."""

    batch: PagedBatch[T] | RecurrentBatch[T] | PreparedPass
    num_tokens: int
    is_decode: bool  # each sequence has one new token
    pending_places: Ids = field(default_factory=NO_IDS.view)  # tokens that the step before chooses
    pending_rows: Ids = field(default_factory=NO_IDS.view)  # and the rows of their sequences
    sampled: Ids = field(default_factory=NO_IDS.view)  # the sequence of each token to choose
    sampled_places: Ids = field(default_factory=NO_IDS.view)  # and the place of the token before it
    nth: Ids = field(default_factory=NO_IDS.view)  # and how many of the sequence's are chosen before it
    scored: list[tuple[int, int]] = field(
        default_factory=list
    )  # for prompt logprobs: sequence and place of its first token


class QueuedStep:
    """A step whose work was given to the device."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._result = Lazy(finish)

    def result(self) -> StepResult:
        """What it brought, or the error that it raised; waits for it."""
        return self._result.get()

    def done(self) -> bool:
        """Whether asking for the result is all that is left to do: it is there, or on its way from the device."""
        return True


RunningStep = QueuedStep | Future[StepResult]  # a step that has been launched


class OtherRanks:
    """The other processes that compute a model's steps, if there are any: here there are none."""

    problem: str = ""  # why no step can be computed any more

    def launching(self, step: StepInput | None) -> AbstractContextManager[object]:
        """Have them compute a step, or use idle time, while this process begins to do the same."""
        return nullcontext()

    def filling(self, slot: int, matrices: Mapping[str, LowRank]) -> AbstractContextManager[object]:
        """Have them put an adapter into a slot, while this process does the same; when it ends, all have done so."""
        return nullcontext()

    def guard(self) -> AbstractContextManager[object]:
        """Around all that they do too. If it fails here, they wait for it or are out of step, and are ended."""
        return nullcontext()

    def close(self) -> None:
        """End them."""


class ModelRunner(Generic[T]):
    """Runs steps of one model over one pool of blocks. executor: the one thread that CPU steps run in; None: one of its
    own."""

    def __init__(
        self,
        model: ModelAdapter[T],
        pool: MemoryPool[T],
        *,
        vocab_size: int,
        max_num_seqs: int,
        is_deterministic: bool = False,
        num_threads: int = 0,
        max_tokens: int = 0,
        num_draft_tokens: int = 0,
        executor: Executor | None = None,
    ) -> None:
        """max_tokens: most of a step. num_draft_tokens: most that are proposed for a sequence."""
        self.model, self.pool = model, pool
        self._options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "max_num_seqs": max_num_seqs,
            "is_deterministic": is_deterministic,
            "max_tokens": max_tokens,
            "num_draft_tokens": num_draft_tokens,
        }
        self.ops: Ops[T] = model.ops
        self.is_deterministic = is_deterministic
        self.others = OtherRanks()
        self.sampler: FastSampler[T] = FastSampler(self.ops, vocab_size, max_num_seqs)
        self.num_forward_passes = 0
        self._tables = BlockTables(max_num_seqs)
        self._logits: dict[int, T] = {}  # rows of logits by their handle
        self._graphs: DecodeGraphs[T] | None = None
        self._passes: PassGraphs[T] | None = None
        self._hidden: Callable[[Any], T] = self.ops.replayed(lambda batch: forward(model, batch, pool))
        self._logits_of: Callable[[Any], T] = self.ops.replayed(lambda batch: model.logits(forward(model, batch, pool)))
        self._thread: Executor | None = None
        self._owns_thread = executor is None
        if self.ops.can_record and not is_deterministic and pool.records_decodes:
            self._graphs = DecodeGraphs(model, pool, self.sampler, num_rows=max_num_seqs, max_len=model.max_len)
            self._passes = PassGraphs(self._graphs, max_tokens, num_draft_tokens) if pool.has_keys else None
        if not self.ops.is_async:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="archerfish-step") if executor is None else executor
            self._thread.submit(self.ops.start_thread, num_threads).result()
        tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_tokens = self._graphs.state.last_tokens if self._graphs else self.ops.tensor(tokens)

    @property
    def executor(self) -> Executor | None:
        """The one thread that steps run in; None on a GPU."""
        return self._thread

    def fill_slot(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """As `Adapters.fill`, on all ranks."""
        assert self.ops.adapters is not None
        with self.others.filling(slot, matrices):
            self.ops.adapters.fill(slot, matrices)

    def launch(self, step: StepInput) -> RunningStep:
        """Start computing a step after all that was launched before."""
        with self.others.launching(step):
            return self._launch(step)

    def _launch(self, step: StepInput) -> RunningStep:
        self._tables.update(step)
        work: PreparedDecodes | list[Pass[T]]  # arrays of the host: they are made while the step before computes
        if self._graphs is not None:
            self._graphs.forget_changes(step)
        if self._graphs is not None and step.is_decode_only:
            work = self._graphs.prepare(step, self._tables)
        else:
            num_computed = int(np.count_nonzero(step.counts))
            bounds = [0, num_computed] if num_computed else []
            if self.is_deterministic:  # numbers must not depend on neighbours
                bounds = [
                    *range(0, step.num_decodes, DECODE_TILE),
                    *range(step.num_decodes, num_computed),
                    num_computed,
                ]
            work = [self._prepare_pass(step, first, end) for first, end in pairwise(bounds)]
        if self._thread is not None:
            return self._thread.submit(self._guarded, lambda: self._start(step, work)())
        finish = self._start(step, work)
        return QueuedStep(lambda: self._guarded(finish))

    def _guarded(self, work: Callable[[], StepResult]) -> StepResult:
        with self.others.guard():
            return work()

    def fit_kv_scales(self) -> None:
        """Set the scales of keys and values in FP8 by those of made-up tokens, over blocks that are free."""
        if not self.pool.has_keys or self.pool.layers[0].scales is None:
            return
        size, num = (
            self.pool.block_size,
            min(CALIBRATED, self.model.max_len, self.pool.num_blocks * self.pool.block_size),
        )
        lens, blocks = np.array([num]), np.arange(-(-num // size))[None]
        tokens = np.random.default_rng(0).integers(0, self.sampler.vocab_size, num)
        with self.ops.computing():
            batch = self.pool.pack_batch(self.ops, tokens, lens, np.zeros_like(lens), blocks, size)
            forward(self.model, batch, self.pool)
            self.ops.fit_kv_scales(self.pool.layers, blocks.size)

    def warm_up(self, key: str = "", progress: Progress = no_progress) -> None:
        """Run each kind of step once, over blocks that are free. Before, what any step needs is compiled:
        `Ops.starting`."""
        if not self.ops.can_record:
            return
        with self.ops.starting(f"{key}/{self._options}", self._rehearse, progress), self.ops.computing():
            self.run_first()

    def run_first(self) -> None:
        """Run some kinds of passes, and record some."""
        first = np.zeros(1, dtype=np.int64)
        zero, one = self.ops.tensor(first), self.ops.tensor(np.ones(1))
        for kind in WARM_UPS:
            logits = self.model.logits(self.ops.rows(forward(self.model, self.free_batch(kind), self.pool), first))
            if self.ops.ranks.is_last:
                self.ops.sample(logits, SamplingBatch())
                self.ops.sample(logits, SamplingBatch(temperature=one, keys=zero, positions=zero))
        for passes in (self._graphs, self._passes):
            if passes is not None:
                passes.warm_up()

    def _rehearse(self) -> None:
        with self.ops.ranks.quiet():
            rehearse(ModelRunner(self.model, self.pool, **self._options))

    def free_batch(self, sequences: SequenceOf[tuple[int, int]]) -> PagedBatch[T] | RecurrentBatch[T]:
        """Sequences of so many new tokens and so long a context each, over blocks that must be free."""
        size, max_len = self.pool.block_size, self.model.max_len
        lens, contexts = np.minimum(np.asarray(sequences, dtype=np.int64), max_len).T
        blocks = np.arange(-(-int(contexts.max()) // size)) % self.pool.num_blocks
        batch: PagedBatch[T] | RecurrentBatch[T] = self.pool.pack_batch(
            self.ops,
            np.zeros(lens.sum(), dtype=np.int64),
            lens,
            contexts - lens,
            np.tile(blocks, (len(lens), 1)),
            size,
            is_deterministic=self.is_deterministic,
        )
        return batch

    def use_idle_time(self) -> bool:
        """Do a piece of what later steps would have to do; False: nothing is left."""
        if self._graphs is None:
            return False
        with self.others.launching(None), self.ops.computing():
            return self._graphs.record_next() or (self._passes is not None and self._passes.record_next())

    def close(self, *, waits: bool = True, keeps_model: bool = False) -> None:
        """End the thread and give the memory back. waits: until the thread has ended. keeps_model: all but the
        weights'."""
        self.others.close()
        if self._thread is not None and self._owns_thread:
            self._thread.shutdown(wait=waits)
        self._graphs = self._passes = None
        for name in ("_hidden", "_logits_of"):  # they hold the model and the pool
            vars(self).pop(name, None)
        self._logits.clear()
        self.pool.close()
        if not keeps_model:
            vars(self).pop("model", None)
            self.ops.release()

    def _prepare_pass(self, step: StepInput, first: int, end: int) -> Pass[T]:
        """The pass over the sequences from `first` to `end`."""
        counts = step.counts[first:end]
        rows = step.rows[first:end]
        starts = step.starts[first:end]
        before, ends = int(step.counts[:first].sum()), np.cumsum(counts)
        num_tokens = int(ends[-1])
        tokens = step.tokens[before : before + num_tokens]
        samples = step.samples[first:end]
        sampled, sample_ends = first + np.repeat(np.arange(end - first), samples), np.cumsum(samples)
        places = np.repeat(ends - sample_ends, samples) + np.arange(len(sampled))  # the last ones of each sequence
        nth = np.arange(len(sampled)) - np.repeat(sample_ends - samples, samples)
        pending = np.flatnonzero(tokens == PENDING)
        pending_rows = np.repeat(rows, counts)[pending] if len(pending) else NO_IDS
        begins = ends - counts
        scored = [(index, int(begins[index - first])) for index in step.scored if first <= index < end]
        is_decode = end <= step.num_decodes
        states = {index - first: blocks for index, blocks in step.states if first <= index < end}
        more: dict[str, Any] = {"states": states} if states else {}
        adapters = step.adapters[first:end]
        if self.ops.adapters is not None and (
            self.is_deterministic or adapters.any()
        ):  # else products are fused with others
            more["adapters"] = adapters
        batch: PagedBatch[T] | RecurrentBatch[T] | PreparedPass | None = None
        if self._passes is not None:
            batch = self._passes.prepare(step, self._tables)
        if batch is None:
            keeps_all = (
                bool(scored) or self.is_deterministic or len(places) == num_tokens or not self.model.gives_kept_rows
            )
            batch = self.pool.pack_batch(
                self.ops,
                tokens,
                counts,
                starts,
                self._tables.of(rows),
                self.pool.block_size,
                is_deterministic=self.is_deterministic,
                num_rows=DECODE_TILE if self.is_deterministic and is_decode else 0,
                kept_rows=None if keeps_all else places,
                **more,
            )
        return Pass(batch, num_tokens, is_decode, pending, pending_rows, sampled, places, nth, scored)

    def _start(self, step: StepInput, work: PreparedDecodes | list[Pass[T]]) -> Callable[[], StepResult]:
        """Compute a step, or queue all that computes it; the result waits for it."""
        ops = self.ops
        with ops.computing():
            for entry in step.entries:
                self.sampler.add(entry)
            if step.copies:
                ops.copy_blocks(self.pool.layers, step.copies)
            finish = (
                self._start_graph(step, work) if isinstance(work, PreparedDecodes) else self._start_passes(step, work)
            )
            for handle in step.dropped:
                self._logits.pop(handle, None)
        return finish

    def _start_graph(self, step: StepInput, prepared: PreparedDecodes) -> Callable[[], StepResult]:
        assert self._graphs is not None
        self.num_forward_passes += 1
        found, columns = self._graphs.start(prepared), np.argsort(prepared.order)
        every, first = np.arange(len(columns)), np.zeros(len(columns), dtype=np.int64)
        return self._finish_recorded(step, found, found.is_behind[columns], columns, every, first)

    def _finish_recorded(
        self, step: StepInput, found: Recorded[T], is_behind: npt.NDArray[np.bool_], rows: Ids, sampled: Ids, nth: Ids
    ) -> Callable[[], StepResult]:
        """The tokens of a recorded pass. rows: of its logits and its report, for token nth[i] of sequence sampled[i];
        is_behind: those that are chosen from logits."""
        own = self._read_report(step, found.report, rows[~is_behind], sampled[~is_behind], nth[~is_behind])
        if not is_behind.any():
            return own
        places = sampled[is_behind]
        others = self._choose(step, self.ops.rows(found.logits, rows[is_behind]), places, nth[is_behind])

        def finish() -> StepResult:
            result, chosen = own(), others()
            result.tokens[places] = chosen.tokens[places]
            result.logprobs |= chosen.logprobs
            result.errors |= chosen.errors
            return result

        return finish

    def _read_report(self, step: StepInput, found: T, columns: Ids, sampled: Ids, nth: Ids) -> Callable[[], StepResult]:
        """Fetch the report of a recorded pass, for some of its columns: token nth[i] of sequence sampled[i]."""
        fetch, rows = self.ops.fetch(found), step.rows[sampled]

        def finish() -> StepResult:
            report = fetch()[:, columns]
            self.sampler.metrics.total_samples += len(sampled)
            result = StepResult(no_tokens(step))
            result.tokens[sampled, nth] = report[0]
            result.errors = {int(sampled[i]): error for i, error in self.sampler.failures(report, rows).items()}
            if len(report) > 2:
                scores = self.sampler.read_scored(report, rows)
                result.logprobs = {
                    int(sampled[i]): [one] for i, one in scores.items() if int(sampled[i]) not in result.errors
                }
            return result

        return finish

    def _start_passes(self, step: StepInput, passes: list[Pass[T]]) -> Callable[[], StepResult]:
        scores: list[Scores] = []
        logits: list[T] = []
        for one in passes:
            self.num_forward_passes += 1
            if not isinstance(one.batch, PreparedPass):
                logits += self._forward(step, one, one.batch, scores)
                continue
            assert self._passes is not None
            found, columns = self._passes.start(one.batch), one.batch.at(one.sampled)
            rows = one.batch.at(one.sampled_places) if one.batch.kind.is_draft else columns
            if not (step.reused or step.kept or step.returned):
                return self._finish_recorded(step, found, found.is_behind[columns], rows, one.sampled, one.nth)
            logits += [self.ops.rows(found.logits, rows)] if len(rows) else []
        order = [np.stack((one.sampled, one.nth)) for one in passes]
        if step.reused:
            logits += [self._logits[handle] for _, handle in step.reused]
            order.append(np.array([(index, 0) for index, _ in step.reused], dtype=np.int64).T)
        joined = None if not logits else logits[0] if len(logits) == 1 else self.ops.concat(logits)
        sampled, nth = np.concatenate(order, axis=1)
        return self._choose(step, joined, sampled, nth, scores)

    def _choose(
        self, step: StepInput, logits: T | None, sampled: Ids, nth: Ids, scores: SequenceOf[Scores] = ()
    ) -> Callable[[], StepResult]:
        """Queue the choice of token nth[i] of sequence sampled[i] by row i of the logits; the result waits for it."""
        read, returned = None, dict[int, Any]()
        if logits is not None:
            returned = {index: self.ops.rows(logits, np.flatnonzero(sampled == index)[:1]) for index in step.returned}
            for index, handle in step.kept:
                self._logits[handle] = self.ops.rows(logits, np.flatnonzero(sampled == index)[:1])
            masks = None
            if step.mask_bits is not None:
                masks = np.concatenate([np.flatnonzero(sampled == index) for index in step.masked]), step.mask_bits
            rows, positions = step.rows[sampled], (step.starts + step.counts + 1 - step.samples)[sampled] + nth
            ends, many = np.cumsum(step.counts), np.flatnonzero(step.samples > 1).tolist()
            drafts = {int(step.rows[i]): step.tokens[ends[i] + 1 - step.samples[i] : ends[i]] for i in many}
            tokens, read = self.sampler.sample(logits, rows, positions, masks, drafts)
            self.ops.put(self._last_tokens, rows, tokens)

        def finish() -> StepResult:  # an interrupt may make the caller ask again
            result = StepResult(no_tokens(step), logits=returned)
            for index, read_scores in scores:
                result.prompt_logprobs.setdefault(index, []).extend(read_scores())
            if read is not None:
                chosen = read()
                result.tokens[sampled, nth] = chosen.tokens
                for i, one in chosen.logprobs.items():
                    result.logprobs.setdefault(int(sampled[i]), []).append(one)
                result.errors = {int(sampled[i]): error for i, error in chosen.errors.items()}
            return result

        return finish

    def _forward(
        self, step: StepInput, one: Pass[T], batch: PagedBatch[T] | RecurrentBatch[T], scores: list[Scores]
    ) -> list[T]:
        """Logits of the pass's sampled places: none, or one tensor. Adds to the scores of prompts."""
        ops = self.ops
        if len(one.pending_places):
            ops.put(batch.token_ids, one.pending_places, ops.rows(self._last_tokens, one.pending_rows))
        num_sampled = len(one.sampled)
        is_kept = batch.kept_rows is not None or num_sampled == one.num_tokens
        if num_sampled and is_kept and not one.scored and not self.is_deterministic:
            return [ops.first_rows(self._logits_of(batch), num_sampled)]
        hidden = self._hidden(batch)
        for index, place in one.scored if ops.ranks.is_last else ():
            num_top, next_tokens = step.scored[index]
            for first in range(0, len(next_tokens), LOGPROB_ROWS):
                part = next_tokens[first : first + LOGPROB_ROWS].tolist()
                rows = np.arange(place + first, place + first + len(part))
                scores.append((index, prompt_logprobs(ops, self._logits_at(batch, hidden, rows), part, num_top)))
        if not num_sampled:
            return []
        if self.is_deterministic and one.is_decode:
            every = np.arange(hidden.shape[0])  # always DECODE_TILE rows
            return [ops.rows(self._logits_at(batch, hidden, every), one.sampled_places)]
        return [self._logits_at(batch, hidden, one.sampled_places)]

    def _logits_at(self, batch: PagedBatch[T] | RecurrentBatch[T], hidden: T, rows: Ids) -> T:
        """Logits of some of the rows of a pass."""
        if self.ops.adapters is not None:
            self.ops.adapters.rows = None if batch.adapters is None else self.ops.rows(batch.adapters, rows)
        return self.model.logits(self.ops.rows(hidden, rows))


def forward(model: ModelAdapter[T], batch: PagedBatch[T] | RecurrentBatch[T], pool: MemoryPool[T]) -> T:
    """Hidden states of a pass, whose rows have the adapters that the batch says."""
    if model.ops.adapters is not None:
        model.ops.adapters.rows = batch.adapters
    return model.forward(batch, pool.layers)


def no_tokens(step: StepInput) -> Ids:
    """Room for the tokens of a step, of each sequence as many as it is sampled most often."""
    return np.zeros((len(step.rows), max(1, int(step.samples.max()))), dtype=np.int64)
