"""FastSampler: from logits to tokens, each row by its own request's parameters.

A row's draw depends on its request's seed, its sequence's index, its position and its logits, and on nothing else. The
numerical work is `Ops.sample`; here are the parameters of each row.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import Any, Generic, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.errors import ArcherfishError
from archerfish.kernels import sampling
from archerfish.kernels.batches import Ids, T
from archerfish.kernels.decoding import FIRST_FLOAT, NUM_INPUTS, Input
from archerfish.kernels.ops import Ops
from archerfish.observe.metrics import SamplingMetrics
from archerfish.params import Stage
from archerfish.runtime.host_sampling import failure
from archerfish.runtime.processors import RowProcessors
from archerfish.step import MOST_PENALISED_DRAFTS, NO_IDS, RowEntry, TokenLogprobs

ROW = np.dtype(
    [
        ("key", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("is_penalised", np.bool_),
        ("free_from", np.int64),  # the position from which stop tokens are allowed
        ("is_ranged", np.bool_),
        ("first", np.int64),
        ("end", np.int64),
        ("offset", np.int64),
        ("until", np.int64),  # the position from which another stage says how to choose
    ],
    align=True,
)
NEVER = np.iinfo(np.int64).max
# What a row needs of a recorded step. SPECIAL: its logits, from which `FastSampler.sample` chooses.
CUT, PENALTY, SCORES, MANY_SCORES, SPECIAL = (1 << bit for bit in range(5))
FEW_TOP, MANY_TOP = 5, 20  # of the likeliest tokens, whose log-probabilities a recorded step gives
Drafts = Mapping[int, Ids]  # by row: proposed tokens that a step verifies


class Mode(IntEnum):
    """How a recorded step chooses tokens: for all rows in the way that one of them needs."""

    DRAWN = 0  # from all tokens, or greedily
    CUT = 1  # after a top_k, top_p or min_p too
    PENALISED = 2  # after penalties and cuts
    SCORED = 3  # after cuts, with log-probabilities of FEW_TOP tokens
    MANY_SCORED = 4  # of MANY_TOP

    @classmethod
    def of(cls, needs: Ids) -> Mode:
        """What most rows with these needs can be chosen by."""
        needed = int(np.bitwise_or.reduce(needs))
        if needed & PENALTY:
            return cls.PENALISED
        if needed & (SCORES | MANY_SCORES):
            return cls.MANY_SCORED if needed & MANY_SCORES else cls.SCORED
        return cls.CUT if needed & CUT else cls.DRAWN

    @property
    def lacks(self) -> int:
        """Needs of rows that must be chosen from their logits."""
        return ~(0, CUT, CUT | PENALTY, CUT | SCORES, CUT | SCORES | MANY_SCORES)[self]

    @property
    def num_top(self) -> int | None:
        return {Mode.SCORED: FEW_TOP, Mode.MANY_SCORED: MANY_TOP}.get(self)


class Chosen(NamedTuple):
    """What a call of `sample` chose, on the host. Rows are named by their place in the batch."""

    tokens: list[int]  # 0 where one failed
    logprobs: dict[int, TokenLogprobs]  # before penalties and temperature; of rows that asked for them and did not fail
    errors: dict[int, BaseException]  # why rows got no token; the others are not touched by it


class FastSampler(Generic[T]):
    """Samples tokens for sequences, each of which has a row. One thread at a time may use it."""

    def __init__(self, ops: Ops[T], vocab_size: int, max_rows: int) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self._table: npt.NDArray[Any] = np.zeros(max_rows + 1, dtype=ROW)
        self._words = np.zeros((NUM_INPUTS - Input.KEY, max_rows + 1), dtype=np.int64)
        self._needs = np.zeros(max_rows + 1, dtype=np.int64)
        self._bias: dict[int, tuple[Ids, npt.NDArray[np.float64]]] = {}  # by row
        self._stop_ids: dict[int, Ids] = {}
        self._num_top: dict[int, int] = {}  # by row, if it wants logprobs: of how many of the likeliest tokens
        self._names: dict[int, str] = {}  # by row: its request's id
        self._staged: dict[int, tuple[int, SequenceOf[Stage]]] = {}  # by row: where its output begins, and its stages
        self._processors: dict[int, RowProcessors] = {}  # by row
        self._counts: sampling.TokenCounts[T] | None = None  # of `counts`
        self._batch_key: object = None
        self._batch: sampling.SamplingBatch[T] = sampling.SamplingBatch()
        self.metrics = SamplingMetrics()
        self._table["top_k"], self._table["top_p"] = _limits(0, 1.0, vocab_size)
        self._table["end"] = vocab_size
        self._table["until"], self._table["repetition"] = NEVER, 1.0
        self._set_words(max_rows)
        self.filling = self._words[:, max_rows:]  # how to sample columns without a sequence: greedily

    def add(self, entry: RowEntry) -> None:
        """Take over the parameters of a sequence for its row, which another one may have had before."""
        row, params = entry.row, entry.params
        for known in (self._bias, self._stop_ids, self._num_top, self._staged, self._processors):
            known.pop(row, None)
        self._batch_key = None
        self._needs[row] = needs_of(entry)
        self._table[row] = (
            sampling.stream_key(entry.seed, entry.index),
            params.temperature,
            *_limits(params.top_k, params.top_p, self.vocab_size),
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.has_penalties,
            entry.num_prompt + params.min_tokens,
            False,
            0,
            self.vocab_size,
            0,
            0 if params.stages else NEVER,
        )
        if self.ops.can_record:
            self._set_words(row)
        self._names[row] = entry.request_id
        if params.stages:
            self._staged[row] = entry.num_prompt, params.stages
        if params.logprobs is not None:
            self._num_top[row] = params.logprobs
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, dtype=np.int64)
            self._bias[row] = ids, np.fromiter(params.logit_bias.values(), dtype=np.float64)
        if params.logits_processors:
            self._processors[row] = RowProcessors(params.logits_processors, entry.tokens[:], entry.num_prompt)
        if params.min_tokens:
            self._stop_ids[row] = self._known(entry.stop_token_ids)
        if params.has_penalties:
            prompt, output = entry.tokens[: entry.num_prompt], entry.tokens[entry.num_prompt :]
            self.ops.set_counts(self.counts(), row, self._known(prompt), self._known(output))

    def counts(self) -> sampling.TokenCounts[T]:
        """Of the tokens of all rows and, behind them, of drafts."""
        if self._counts is None:
            self._counts = self.ops.new_counts(self.max_rows + MOST_PENALISED_DRAFTS, self.vocab_size)
        return self._counts

    def write_inputs(self, words: Ids, rows: Ids) -> Ids:
        """How to sample rows, into the first columns of `decoding.Input`, where their positions stand already; gives
        what each needs of a recorded step."""
        num = len(rows)
        if self._staged:
            self._enter_stages(rows, words[Input.POSITION, :num] + 1)
        words[Input.KEY :, :num] = self._words[:, rows]
        return self._needs[rows]

    def _set_words(self, row: int) -> None:
        """Write down what the table says of a row in the way of `decoding.Input`; of a special one that it is
        greedy."""
        if self._needs[row] & SPECIAL:
            self._words[:, row] = self._words[:, self.max_rows]
            return
        key, temperature, top_k, top_p, min_p, *penalties, _, _, _, first, end, offset, _ = self._table[row].item()
        is_greedy = temperature == 0
        is_cut = not is_greedy and (top_k < self.vocab_size or top_p < 1 or min_p > 0)
        self._words[: FIRST_FLOAT - Input.KEY, row] = key, is_greedy, top_k, first, end, offset
        self._words[FIRST_FLOAT - Input.KEY :, row].view(np.float64)[:] = temperature or 1.0, top_p, min_p, *penalties
        self._needs[row] = self._needs[row] & ~CUT | CUT * is_cut

    def sample(
        self, logits: T, rows: Ids, positions: Ids, masks: tuple[Ids, Ids] | None = None, drafts: Drafts | None = None
    ) -> tuple[T, Callable[[], Chosen]]:
        """One token for each row of float32 logits, which are left as they are: on the device, and what waits for them.

        rows[i]: the row whose parameters apply. positions[i]: the number of tokens before the one to choose. masks:
        which logits a grammar applies to, and the `bits` of `Masks`. drafts: of rows that stand here more than once,
        behind each of their proposed tokens in turn. Nothing waits for the device. In a stage before the last one,
        logits are rows that mean nothing, and what is chosen comes from the last one.
        """
        if not self.ops.ranks.is_last:
            tokens = sampling.draw(self.ops, logits, self._batch).tokens
            return tokens, lambda: Chosen([0] * len(rows), {}, {})
        if logits.shape[0] != len(rows) or logits.shape[1] != self.vocab_size:
            raise ArcherfishError(
                f"Logits of shape {tuple(logits.shape)} came for {len(rows)} sequences and {self.vocab_size} tokens."
            )
        started = time.perf_counter()
        penalised = {row: tokens for row, tokens in (drafts or {}).items() if self._table["is_penalised"][row]}
        ops = self.ops
        batch = self._batch_for(rows, positions, self._draft_slots(rows, penalised))
        metrics = self.metrics
        if masks is not None:
            batch = dataclasses.replace(batch, masks=sampling.Masks(ops.tensor(masks[0]), ops.tensor(masks[1])))
        processed, failed = self._process(logits, rows, positions) if self._processors else (logits, {})
        drawn = sampling.draw(ops, processed, batch)
        fetch_report, fetch_scores = ops.fetch(drawn.report), None
        wanted = (
            {i: self._num_top[row] for i, row in enumerate(rows.tolist()) if row in self._num_top}
            if self._num_top
            else {}
        )
        if wanted:
            some = None if len(wanted) == len(rows) else np.fromiter(wanted, dtype=np.int64)
            tokens = drawn.tokens if some is None else ops.rows(drawn.tokens, some)
            fetch_scores = fetch_logprobs(ops, ops.token_logprobs(logits, tokens, max(wanted.values()), rows=some))
        metrics.total_samples += len(rows)
        metrics.num_timed += len(rows)
        metrics.fast_path_samples += len(rows) if batch.temperature is None else 0
        metrics.sample_seconds += time.perf_counter() - started

        def read() -> Chosen:
            report = fetch_report()
            tokens, errors = report[0].tolist(), self.failures(report, rows) if report[1].any() else {}
            while penalised:
                row, proposed = penalised.popitem()
                self._count_accepted(row, proposed, report[0][rows == row])
            errors |= failed
            for i, row in enumerate(rows.tolist() if self._processors else ()):
                if row in self._processors:
                    self._processors[row].add(tokens[i], int(positions[i]))
            scores = (
                fetch_scores([tokens[i] for i in wanted], list(wanted.values())) if fetch_scores is not None else ()
            )
            return Chosen(tokens, {i: one for i, one in zip(wanted, scores, strict=True) if i not in errors}, errors)

        return drawn.tokens, read

    def _draft_slots(self, rows: Ids, drafts: Drafts) -> Ids:
        """Where the counts of each row stand: behind a proposed token, a copy that counts it and those before it."""
        if not drafts:
            return rows
        slots, free = rows.copy(), self.max_rows
        for row, proposed in drafts.items():
            places = np.flatnonzero(rows == row)
            for before, place, token in zip(places[:-1], places[1:], proposed, strict=True):
                self.ops.add_counts(self.counts(), free, np.array([token]), source=int(slots[before]))
                slots[place], free = free, free + 1
        return slots

    def _count_accepted(self, row: int, proposed: Ids, drawn: Ids) -> None:
        """Count the drawn tokens that followed accepted ones; the first is counted already."""
        num_accepted = int(np.append(drawn[:-1] != proposed, True).argmax())
        with self.ops.computing():
            self.ops.add_counts(self.counts(), row, drawn[1 : num_accepted + 1])

    def _process(self, logits: T, rows: Ids, positions: Ids) -> tuple[T, dict[int, BaseException]]:
        """A copy of the logits after the processors of their rows, and the errors that these raised. Waits for the
        device."""
        places = [i for i, row in enumerate(rows.tolist()) if row in self._processors]
        errors: dict[int, BaseException] = {}
        changed: dict[int, npt.NDArray[np.float32]] = {}
        if not places:
            return logits, errors
        found = self.ops.to_numpy(self.ops.rows(logits, np.asarray(places, dtype=np.int64)))
        for i, row in zip(places, found, strict=True):
            try:
                changed[i] = self._processors[int(rows[i])].apply(row, int(positions[i]))
            except ArcherfishError as error:
                errors[i] = error
        if changed:
            logits = self.ops.rows(logits, np.arange(len(rows)))
            self.ops.put(
                logits, np.fromiter(changed, dtype=np.int64), self.ops.tensor(np.stack(list(changed.values())))
            )
        return logits, errors

    def failures(self, report: Ids, rows: Ids) -> dict[int, BaseException]:
        """Why rows got no token, by index, as a (2, rows) report says."""
        return {
            int(i): failure(int(report[1, i]), f"The logits of request {self._names[int(rows[i])]!r}")
            for i in np.flatnonzero(report[1] != sampling.CHOSEN)
        }

    def _known(self, token_ids: SequenceOf[int]) -> Ids:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[ids < self.vocab_size]

    def _batch_for(self, rows: Ids, positions: Ids, slots: Ids) -> sampling.SamplingBatch[T]:
        """The parameters of these rows, whose counts stand in slots; what is on the device is used again while it stays
        so."""
        if self._staged:
            self._enter_stages(rows, positions)
        part = self._table[rows]
        waiting = np.flatnonzero(positions < part["free_from"]) if self._stop_ids else NO_IDS
        key = rows.tobytes(), waiting.tobytes(), slots.tobytes()
        if key != self._batch_key:
            self._batch, self._batch_key = self._build(part, rows, waiting, slots), key
            self.metrics.memory_allocations += 1
        if self._batch.temperature is None:
            return self._batch
        return dataclasses.replace(self._batch, positions=self.ops.tensor(positions))

    def _enter_stages(self, rows: Ids, positions: Ids) -> None:
        """Set the parameters of rows that reach another stage. The stage follows from the position alone."""
        for place in np.flatnonzero(positions >= self._table["until"][rows]).tolist():
            row = int(rows[place])
            end, stages = self._staged[row]
            for stage in stages:
                end += stage.num_tokens
                if positions[place] < end:
                    break
            top_k, top_p = _limits(stage.top_k, stage.top_p, stage.end - stage.first)
            entry = self._table[row]
            for name, value in (
                ("temperature", stage.temperature),
                ("top_k", top_k),
                ("top_p", top_p),
                ("is_ranged", True),
                ("first", stage.first),
                ("end", stage.end),
                ("offset", stage.offset),
                ("until", end),
            ):
                entry[name] = value
            if self.ops.can_record:
                self._set_words(row)
            self._batch_key = None

    def _build(self, part: npt.NDArray[Any], rows: Ids, waiting: Ids, slots: Ids) -> sampling.SamplingBatch[T]:
        """The batch of some rows of the table, less its positions. waiting: places where stop tokens are not allowed
        yet."""
        ops = self.ops
        bias = {i: self._bias[row] for i, row in enumerate(rows.tolist()) if row in self._bias} if self._bias else {}
        banned = {
            i: self._stop_ids[int(rows[i])] for i in waiting.tolist() if len(self._stop_ids.get(int(rows[i]), NO_IDS))
        }
        batch: sampling.SamplingBatch[T] = sampling.SamplingBatch(
            bias=self._entries({i: ids for i, (ids, _) in bias.items()}) if bias else None,
            bias_values=ops.tensor(np.concatenate([values for _, values in bias.values()])) if bias else None,
            banned=self._entries(banned) if banned else None,
            penalties=self._penalties(part, slots) if part["is_penalised"].any() else None,
            ranges=sampling.Ranges(*self._columns(part, "first", "end", "offset")) if part["is_ranged"].any() else None,
        )
        is_greedy = part["temperature"] == 0
        if is_greedy.all():
            return batch
        cut = np.flatnonzero(~is_greedy & ((part["top_k"] != sampling.TOP_K_OFF) | (part["top_p"] <= 1)))
        return dataclasses.replace(
            batch,
            temperature=ops.tensor(np.where(is_greedy, 1.0, part["temperature"])),
            is_greedy=ops.tensor(is_greedy.astype(np.int64)) if is_greedy.any() else None,
            keys=ops.tensor(np.ascontiguousarray(part["key"])),
            min_p=ops.tensor(np.ascontiguousarray(part["min_p"])) if part["min_p"].any() else None,
            cuts=sampling.Cuts(ops.tensor(cut), *self._columns(part[cut], "top_k", "top_p")) if len(cut) else None,
        )

    def _columns(self, part: npt.NDArray[Any], *names: str) -> Iterator[T]:
        return (self.ops.tensor(np.ascontiguousarray(part[name])) for name in names)

    def _entries(self, ids: dict[int, Ids]) -> sampling.Entries[T]:
        rows = np.repeat(np.fromiter(ids, dtype=np.int64), [len(some) for some in ids.values()])
        return sampling.Entries(self.ops.tensor(rows), self.ops.tensor(np.concatenate(list(ids.values()))))

    def _penalties(self, part: npt.NDArray[Any], slots: Ids) -> sampling.Penalties[T]:
        places = np.flatnonzero(part["is_penalised"])
        some = part[places]
        given = {
            name: self.ops.tensor(np.ascontiguousarray(some[name])) if (some[name] != off).any() else None
            for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
        }
        own = slots[places]
        return sampling.Penalties(self.ops.tensor(places), self.counts(), own, self.ops.tensor(own), **given)

    def read_scored(self, found: Ids, rows: Ids) -> dict[int, TokenLogprobs]:
        """Log-probabilities of rows that asked for them, by index, from the result of `Ops.scored_report`."""
        num_top = (len(found) - 4) // 2
        floats = found.view(np.float64)
        own, top = floats[3].astype(np.float32).tolist(), floats[4 + num_top :].T.astype(np.float32).tolist()
        (tokens, _, ranks), top_ids = found[:3].tolist(), found[4 : 4 + num_top].T.tolist()
        wanted = [(i, self._num_top[row]) for i, row in enumerate(rows.tolist()) if row in self._num_top]
        return {
            i: TokenLogprobs(tokens[i], own[i], ranks[i], list(zip(top_ids[i][:num], top[i][:num], strict=True)))
            for i, num in wanted
        }


def needs_of(entry: RowEntry) -> int:
    """What a sequence needs of a recorded step, but for cuts, which its stages may change."""
    params, num_top = entry.params, entry.params.logprobs
    is_special = params.logit_bias or params.min_tokens or entry.has_grammar or params.logits_processors
    if is_special or (num_top or 0) > MANY_TOP:
        return SPECIAL
    if num_top is not None:
        return SPECIAL if params.has_penalties else SCORES if num_top <= FEW_TOP else MANY_SCORES
    return PENALTY if params.has_penalties else 0


def prompt_logprobs(ops: Ops[T], logits: T, next_tokens: list[int], num_top: int) -> Callable[[], list[TokenLogprobs]]:
    """Log-probabilities of the tokens that followed, one for each row of float32 logits; the result waits for them."""
    scores = ops.token_logprobs(logits, ops.tensor(np.asarray(next_tokens, dtype=np.int64)), num_top)
    fetch = fetch_logprobs(ops, scores)
    return lambda: fetch(next_tokens, [num_top] * len(next_tokens))


def fetch_logprobs(ops: Ops[T], scores: sampling.Logprobs[T]) -> Callable[[list[int], list[int]], list[TokenLogprobs]]:
    """Begin to bring log-probabilities to the host; the result takes the tokens and how many of the likeliest each
    wants."""
    own, top = ops.fetch(scores.logprobs), ops.fetch(scores.top_logprobs)
    ranks, top_ids = ops.fetch(scores.ranks), ops.fetch(scores.top_ids)

    def read(token_ids: list[int], nums_top: list[int]) -> list[TokenLogprobs]:
        chosen, likeliest = (found().astype(np.float32).tolist() for found in (own, top))  # they are given as float32
        columns = zip(chosen, ranks().tolist(), top_ids().tolist(), likeliest, token_ids, nums_top, strict=True)
        return [
            TokenLogprobs(token_id, logprob, rank, list(zip(ids[:num], top_logprobs[:num], strict=True)))
            for logprob, rank, ids, top_logprobs, token_id, num in columns
        ]

    return read


def _limits(top_k: int, top_p: float, size: int) -> tuple[int, float]:
    """top_k and top_p as the op takes them, where off."""
    return top_k if 0 < top_k < size else sampling.TOP_K_OFF, top_p if top_p < 1 else float("inf")
