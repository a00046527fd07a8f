"""ModelRunner: a plan becomes buffers, logits and tokens.

The caller can plan the next step while one computes: on a CPU steps run in a thread of their own, a GPU is given its work and
not waited for. What a plan says is read when it is launched; tokens that the step before it is still choosing are filled in
where they are chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol

import numpy as np

from archerfish.background import Lazy
from archerfish.kernels.ops import Ids, Ops, PagedBatch, T
from archerfish.kernels.recurrent import RecurrentBatch
from archerfish.kernels.sampling import SamplingBatch
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.graphs import DecodeGraphs
from archerfish.runtime.pool import MemoryPool
from archerfish.runtime.prompt_graphs import Prompt, PromptGraphs
from archerfish.runtime.sampler import FastSampler, failures, prompt_logprobs
from archerfish.runtime.token_masks import MaskFinder
from archerfish.sequence import Plan, Sequence, StepResult

DECODE_TILE = 32  # rows of every decode pass in deterministic mode, filled up with rows that mean nothing
LOGPROB_ROWS = 64  # rows of prompt logits made at a time
WARM_UPS = (  # new tokens and contexts of sequences: long prompts, short ones, and what stands after a long context
    [(256, 256)], [(20, 20)] * 8, [(1, 40), (2, 300)],
)


@dataclass(frozen=True)
class Pass(Generic[T]):
    """One forward pass of a step: which sequences of the plan it computes, and what must be filled in before."""

    members: list[int]  # indices into the plan
    batch: PagedBatch[T] | RecurrentBatch[T] | Prompt
    pending_places: Ids  # tokens of the batch that the step before chooses
    pending_rows: Ids  # rows of their sequences
    last_places: Ids  # of members that are sampled: where their last token stands
    sampled: list[int]  # those members, as indices into the plan
    prompt_spans: list[tuple[int, int, array[int]]] = field(default_factory=list)  # plan index, first place, next tokens


class RunningStep(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """What it brought, or the error that it raised; waits for it."""

    def done(self) -> bool:
        """Whether asking for the result is all that is left to do: it is there, or on its way from a device."""


class QueuedStep:
    """A step whose work the device has."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._result = Lazy(finish)

    def result(self) -> StepResult:
        return self._result.get()

    def done(self) -> bool:
        return True


class ModelRunner(Generic[T]):
    """Runs plans of one model over one pool of blocks. executor: the one thread that CPU steps run in; None: one of its own."""

    def __init__(
        self, model: ModelAdapter[T], pool: MemoryPool[T], *, vocab_size: int, max_num_seqs: int,
        is_deterministic: bool = False, num_threads: int = 0, executor: Executor | None = None,
    ) -> None:
        self.model, self.pool = model, pool
        self.ops: Ops[T] = model.ops
        self.is_deterministic = is_deterministic
        self.sampler: FastSampler[T] = FastSampler(self.ops, vocab_size, max_num_seqs)
        self.masks = MaskFinder(vocab_size, getattr(executor, "wake", None))
        self.num_forward_passes = 0
        self._known: list[tuple[Sequence, int] | None] = [None] * max_num_seqs  # who has a row, and since which preemption
        self._graphs: DecodeGraphs[T] | None = None
        self._prompts: PromptGraphs[T] | None = None
        self._thread: Executor | None = None
        self._owns_thread = executor is None
        if self.ops.is_async:
            if not is_deterministic and pool.records_decodes:
                self._graphs = DecodeGraphs(model, pool, self.sampler, num_rows=max_num_seqs, max_len=model.max_len)
                self._prompts = PromptGraphs(model, pool) if pool.has_keys else None
        elif executor is not None:
            executor.submit(self.ops.start_thread, num_threads).result()
            self._thread = executor
        else:
            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="archerfish-step", initializer=self.ops.start_thread, initargs=(num_threads,)
            )
        self._last_tokens = self._graphs.state.last_tokens if self._graphs else self.ops.ids(np.zeros(max_num_seqs, np.int64))

    def launch(self, plan: Plan) -> RunningStep:
        """Read the plan and start computing it after all that was launched before."""
        entering = []
        for sequence in plan.sequences:
            seat = (sequence, sequence.num_preemptions)
            if self._known[sequence.row] != seat:
                self._known[sequence.row] = seat
                entering.append(sequence)
        for sequence, samples in zip(plan.sequences, plan.samples, strict=True):
            if samples and sequence.request.grammar is not None:
                self.masks.begin(sequence)
        if self._thread is not None:
            passes = [self._prepare(plan, members) for members in self._split(plan)]
            return self._thread.submit(lambda: self._start(plan, passes, entering)())
        with self.ops.computing():
            for sequence in entering:
                self.sampler.add(sequence)
                if self._graphs is not None:
                    self._graphs.forget(sequence.row)
        if self._graphs is not None and self._graphs.takes(plan):
            return QueuedStep(self._start_graph(plan, self._graphs))
        passes = [self._prepare(plan, members) for members in self._split(plan)]
        return QueuedStep(self._start(plan, passes, []))

    def warm_up(self) -> None:
        """Run each kind of step once, over blocks that nobody has, so that no request waits for a compiler."""
        if not self.ops.is_async:
            return
        ops, size = self.ops, self.pool.block_size
        with ops.computing():
            zero, one = ops.ids(host_ids([0])), ops.floats(np.ones(1))
            for kind in WARM_UPS:
                lens = [(min(new, self.model.max_len), min(context, self.model.max_len)) for new, context in kind]
                batch = self.pool.build_batch(
                    tokens=[[0] * new for new, _ in lens], starts=[context - new for new, context in lens],
                    blocks=[[i % self.pool.num_blocks for i in range(-(-context // size))] for _, context in lens],
                    is_deterministic=self.is_deterministic,
                )
                logits = self.model.logits(ops.rows(self.model.forward(batch, self.pool.layers), host_ids([0])))
                ops.sample(logits, SamplingBatch())
                ops.sample(logits, SamplingBatch(temperature=one, keys=zero, positions=zero, has_uncut=True))
            has_compiled = self._graphs is not None and self._graphs.warm_up()
            while has_compiled and self._prompts is not None and self._prompts.record_next():
                pass  # nobody should wait for a compiler later

    def use_idle_time(self) -> bool:
        """Do a piece of what later steps would have to do; False: nothing is left."""
        if self._graphs is None:
            return False
        with self.ops.computing():
            return self._graphs.record_next() or (self._prompts is not None and self._prompts.record_next())

    def close(self) -> None:
        """End the thread and give the memory of blocks and recorded steps back; weights go with the runner."""
        if self._thread is not None and self._owns_thread:
            self._thread.shutdown(wait=True)
        self._graphs = self._prompts = None
        self.pool.close()
        self.ops.free_unused()

    def _start_graph(self, plan: Plan, graphs: DecodeGraphs[T]) -> Callable[[], StepResult]:
        self.num_forward_passes += 1
        with self.ops.computing():
            self.pool.copy(plan.copies)
            drawn, columns = graphs.start(plan)
            fetch = self.ops.fetch(drawn)

        def finish() -> StepResult:
            report = fetch()[:, columns]
            return StepResult(report[0].tolist(), errors=failures(report, plan.sequences))

        return finish

    def _split(self, plan: Plan) -> list[list[int]]:
        """Which sequences share a forward pass: all of them, unless numbers must not depend on neighbours."""
        computed = [index for index, count in enumerate(plan.counts) if count]
        if not self.is_deterministic:
            return [computed] if computed else []
        decodes, prefills = computed[: plan.num_decodes], computed[plan.num_decodes :]
        tiles = [decodes[i : i + DECODE_TILE] for i in range(0, len(decodes), DECODE_TILE)]
        return [*tiles, *([index] for index in prefills)]

    def _prepare(self, plan: Plan, members: list[int]) -> Pass[T]:
        tokens: list[array[int]] = []
        pending_places: list[int] = []
        pending_rows: list[int] = []
        last_places: list[int] = []
        sampled: list[int] = []
        spans: list[tuple[int, int, array[int]]] = []
        place = 0
        for index in members:
            sequence, start, count = plan.sequences[index], plan.starts[index], plan.counts[index]
            end = start + count
            new = sequence.tokens[start:end]
            if len(new) < count:
                pending_places.append(place + count - 1)
                pending_rows.append(sequence.row)
                new.append(0)
            if sequence.request.params.prompt_logprobs is not None and start < sequence.num_prompt - 1:
                spans.append((index, place, sequence.tokens[start + 1 : min(end + 1, sequence.num_prompt)]))
            tokens.append(new)
            place += count
            if plan.samples[index]:
                last_places.append(place - 1)
                sampled.append(index)
        is_prompt = len(members) == len(sampled) == 1 and not (spans or pending_places)
        if is_prompt and self._prompts and self._prompts.takes(place):
            prompt = Prompt(tokens[0], plan.starts[members[0]], plan.sequences[members[0]].blocks)
            return Pass(members, prompt, host_ids([]), host_ids([]), host_ids(last_places), sampled)
        is_decode_tile = self.is_deterministic and plan.counts[members[0]] == 1
        keeps_all = bool(spans) or self.is_deterministic or len(last_places) == place or not self.model.gives_kept_rows
        batch = self.pool.build_batch(
            tokens=tokens, starts=[plan.starts[i] for i in members], blocks=[plan.sequences[i].blocks for i in members],
            is_deterministic=self.is_deterministic, num_rows=DECODE_TILE if is_decode_tile else 0,
            kept_rows=None if keeps_all else host_ids(last_places),
        )
        return Pass(members, batch, host_ids(pending_places), host_ids(pending_rows), host_ids(last_places), sampled, spans)

    def _start(self, plan: Plan, passes: list[Pass[T]], entering: list[Sequence]) -> Callable[[], StepResult]:
        """Compute a plan, or queue all that computes it; the result waits for it."""
        result = StepResult([0] * len(plan.sequences))
        endings: list[Callable[[], None]] = []
        with self.ops.computing():
            for sequence in entering:
                self.sampler.add(sequence)
            self.pool.copy(plan.copies)
            logits: list[T] = []
            order: list[int] = []
            for one in passes:
                logits += self._forward(plan, one, result, endings)
                order += one.sampled
            for index, sequence in enumerate(plan.sequences):
                if not plan.counts[index]:
                    logits.append(sequence.cached_logits)
                    order.append(index)
            if order:
                joined = logits[0] if len(logits) == 1 else self.ops.concat(logits)
                endings.append(self._sample(plan, joined, order, result))

        def finish() -> StepResult:
            while endings:  # each once, even if an interrupt makes the caller ask again
                endings[0]()
                del endings[0]
            return result

        return finish

    def _forward(self, plan: Plan, one: Pass[T], result: StepResult, endings: list[Callable[[], None]]) -> list[T]:
        """Logits of the pass's sampled members: none, or one tensor."""
        ops, batch = self.ops, one.batch
        self.num_forward_passes += 1
        if isinstance(batch, Prompt):
            assert self._prompts is not None
            return [self._prompts.start(batch)]
        if len(one.pending_places):
            ops.put(batch.token_ids, one.pending_places, ops.rows(self._last_tokens, one.pending_rows))
        hidden = self.model.forward(batch, self.pool.layers)
        for index, place, next_tokens in one.prompt_spans:
            top = plan.sequences[index].request.params.prompt_logprobs or 0
            found = result.prompt_logprobs.setdefault(index, [])
            for first in range(0, len(next_tokens), LOGPROB_ROWS):
                part = next_tokens[first : first + LOGPROB_ROWS].tolist()
                rows = np.arange(place + first, place + first + len(part))
                read = prompt_logprobs(ops, self.model.logits(ops.rows(hidden, rows)), part, top)
                endings.append(lambda found=found, read=read: found.extend(read()))  # type: ignore[misc]
        if not one.sampled:
            return []
        if self.is_deterministic and batch.num_decodes:
            return [ops.rows(self.model.logits(hidden), one.last_places)]  # always DECODE_TILE rows
        if batch.kept_rows is not None or len(one.last_places) == batch.num_tokens:
            return [ops.first_rows(self.model.logits(hidden), len(one.last_places))]
        return [self.model.logits(ops.rows(hidden, one.last_places))]

    def _sample(self, plan: Plan, logits: T, order: list[int], result: StepResult) -> Callable[[], None]:
        ops = self.ops
        sequences = [plan.sequences[index] for index in order]
        for index in plan.keeps_logits:
            result.logits[index] = ops.rows(logits, host_ids([order.index(index)]))
        positions = [plan.starts[index] + plan.counts[index] for index in order]
        sampled = self.sampler.sample(logits, sequences, positions)
        ops.put(self._last_tokens, host_ids([sequence.row for sequence in sequences]), sampled.tokens)

        def finish() -> None:
            wanting = [i for i, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]
            if wanting:
                result.logprobs = {order[i]: found for i, found in sampled.logprobs(wanting).items()}
            result.errors = {order[i]: error for i, error in sampled.errors.items()}
            for index, token in zip(order, sampled.to_host(), strict=True):
                result.tokens[index] = token
                if plan.sequences[index].request.grammar is not None and index not in result.errors:
                    self.masks.begin(plan.sequences[index], token)

        return finish


def host_ids(values: list[int]) -> Ids:
    return np.asarray(values, dtype=np.int64)
