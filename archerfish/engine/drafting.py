"""A draft model: a second, small model with memory of its own that proposes the tokens which the engine's model
verifies.

It computes in the thread in which the engine's model computes, so that they do not compete for cores. Of each sequence
it keeps the keys of all tokens, or the states behind the last ones. Where proposals were not accepted, it begins again
behind the last one that was.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from archerfish.cache.block_manager import BlockManager
from archerfish.params import SamplingParams
from archerfish.runtime.runner import ModelRunner, RunningStep
from archerfish.sched.drafts import StepTimes
from archerfish.sequence import Sequence
from archerfish.step import PENDING, RowEntry, StepInput

GREEDY = SamplingParams(temperature=0.0)
MAX_CHUNK = 512  # tokens of a sequence in one step
USUAL_CHUNK = 2  # tokens to catch up on, at most, where the last proposals were accepted or the first of them was not
MOST_FAILURES = 3
logger = logging.getLogger("archerfish.engine")


@dataclass(slots=True)
class DraftedSequence:
    """What a draft model keeps of a sequence."""

    row: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the runner knows
    num_known: int = 0  # leading tokens that are computed
    proposed: list[int] = field(default_factory=list)  # tokens that are computed behind them
    states: dict[int, int] = field(
        default_factory=dict
    )  # of a recurrent model: the block of the state behind so many tokens


class Chunk(NamedTuple):
    """Tokens of a sequence for one step."""

    known: DraftedSequence
    start: int  # their place, as the runner is told
    tokens: SequenceOf[int]
    places: list[tuple[int, int]]  # blocks that the runner is told of: the place of each, and its number


class ModelDrafter:
    """The DraftModel over a runner. vocab_size: of the engine's model. It has rows for so many sequences.

    A recurrent model has `num_states` blocks of each sequence. The runner finds the state to begin with in a row's
    block 0, and leaves the next one in block 1: each step says which these are.
    """

    def __init__(self, runner: ModelRunner[Any], *, vocab_size: int, max_sequences: int, num_states: int) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_len = runner.model.max_len
        self.num_states = 0 if runner.pool.has_keys else num_states
        self.times = StepTimes()  # of a decode, by the number of sequences
        self._blocks = BlockManager(runner.pool.num_blocks, runner.pool.block_size)
        self._free = list(range(max_sequences))
        self._known: dict[Sequence, DraftedSequence] = {}
        self._entered: list[DraftedSequence] = []  # that the runner does not know yet
        self._steps = itertools.count()
        self._num_failures = 0

    def takes(self, seq: Sequence, count: int) -> bool:
        for ended in [other for other in self._known if other.finish_reason is not None]:
            self.forget(ended)
        known, num_tokens = self._known.get(seq), len(seq.tokens) + count
        has_room = self._num_missing(num_tokens, known) <= self._blocks.num_free and num_tokens <= self.max_len
        return has_room and (known is not None or bool(self._free)) and self._num_failures < MOST_FAILURES

    def begin(self, sequences: SequenceOf[Sequence], count: int) -> ComputedDraft:
        try:
            return self._begin(sequences, count)
        except Exception:  # without proposals the sequences go on
            return self.fail(sequences)

    def fail(self, sequences: Iterable[Sequence]) -> ComputedDraft:
        """Forget sequences of which it is not known any more what was computed; a draft without proposals."""
        self._num_failures += 1
        logger.exception(
            "The draft model failed%s.", ", and is left out from now on" * (self._num_failures == MOST_FAILURES)
        )
        for seq in sequences:
            self.forget(seq)
        return ComputedDraft(self, {}, [], None)

    def _begin(self, sequences: SequenceOf[Sequence], count: int) -> ComputedDraft:
        began = time.perf_counter()
        found = [(seq, chunk) for seq in sequences if (chunk := self._catch_up(seq, count)) is not None]
        found.sort(key=lambda pair: len(pair[1].tokens) > 1)  # those with one new token stand first
        steps = [self._launch([chunk for _, chunk in found])] if found else []
        for place in range(count - 1 if found else 0):
            decodes = [self._chunk(chunk.known, chunk.known.num_known + place, [PENDING]) for _, chunk in found]
            steps.append(self._launch(decodes))
        is_usual = all(len(chunk.tokens) <= USUAL_CHUNK for _, chunk in found)
        return ComputedDraft(
            self, {seq: chunk.known.proposed for seq, chunk in found}, steps, began if is_usual else None
        )

    def _catch_up(self, seq: Sequence, count: int) -> Chunk | None:
        """The last tokens of a sequence that are not computed, with room for so many more; None: there is no room."""
        if not self.takes(seq, count):
            return None
        known, num_tokens = self._known.get(seq), len(seq.tokens)
        if known is None:
            known = self._known[seq] = DraftedSequence(self._free.pop())
            self._entered.append(known)
        right = zip(known.proposed, seq.tokens[known.num_known :], strict=False)
        start = known.num_known + next((i for i, (a, b) in enumerate(right) if a != b), len(known.proposed))
        start = min(start, num_tokens - 1)
        if self.num_states and start not in known.states:
            start = 0
        if max(seq.tokens[start:]) >= self.runner.sampler.vocab_size:
            self.forget(seq)  # a row of the model that stands for no token
            return None
        known.blocks += self._blocks.allocate(max(0, self._num_missing(num_tokens + count, known)))
        known.num_known, known.proposed = num_tokens, []
        while num_tokens - start > MAX_CHUNK:
            self._launch([self._chunk(known, start, seq.tokens[start : start + MAX_CHUNK])], num_samples=0)
            start += MAX_CHUNK
        return self._chunk(known, start, seq.tokens[start:])

    def _chunk(self, known: DraftedSequence, start: int, tokens: SequenceOf[int]) -> Chunk:
        if not self.num_states:
            num_sent, known.num_sent = known.num_sent, len(known.blocks)
            return Chunk(known, start, tokens, list(enumerate(known.blocks[num_sent:], num_sent)))
        if tokens[0] != PENDING:  # sure to stay: nothing goes back behind them
            known.states = {start: known.states[start]} if start else {}
        target = next(block for block in known.blocks if block not in known.states.values())
        known.states[start + len(tokens)] = target
        if not start:
            return Chunk(known, 0, tokens, [(0, target)])
        return Chunk(known, self._blocks.block_size, tokens, [(0, known.states[start]), (1, target)])

    def expect_seconds(self, num_sequences: int, count: int) -> float:
        return count * self.times.expect(num_sequences, 0.0)

    def forget(self, seq: Sequence) -> None:
        known = self._known.pop(seq, None)
        if known is not None:
            self._blocks.free(known.blocks)
            self._free.append(known.row)

    def close(self) -> None:
        for seq in list(self._known):
            self.forget(seq)
        self.runner.close()

    def _num_missing(self, num_tokens: int, known: DraftedSequence | None) -> int:
        num_blocks = self.num_states or -(-num_tokens // self._blocks.block_size)
        return num_blocks - (len(known.blocks) if known is not None else 0)

    def _launch(self, chunks: SequenceOf[Chunk], num_samples: int = 1) -> RunningStep:
        """Compute tokens of sequences, and so many behind them."""
        counts = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
        places = [(chunk.known.row, *place) for chunk in chunks for place in chunk.places]
        block_rows, block_places, block_ids = np.array(places, np.int64).reshape(-1, 3).T.copy()
        entered, self._entered = self._entered, []
        return self.runner.launch(
            StepInput(
                next(self._steps),
                np.array([chunk.known.row for chunk in chunks], np.int64),
                np.array([chunk.start for chunk in chunks], np.int64),
                counts,
                np.full(len(chunks), num_samples, np.int64),
                np.zeros(len(chunks), np.int64),
                np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks]),
                int(np.count_nonzero(counts == 1)),
                block_rows,
                block_places,
                block_ids,
                entries=[RowEntry(known.row, "draft", GREEDY, 0) for known in entered],
            )
        )


class ComputedDraft:
    """The DraftJob of a ModelDrafter. computed: where proposals go that are computed. began: when, if that is
    measured."""

    def __init__(
        self, drafter: ModelDrafter, computed: dict[Sequence, list[int]], steps: list[RunningStep], began: float | None
    ) -> None:
        self._drafter = drafter
        self.computed = computed
        self._steps = steps
        self._began = began
        self._found: dict[Sequence, list[int]] | None = None

    def done(self) -> bool:
        return not self._steps or self._steps[-1].done()

    def tokens(self, seq: Sequence) -> list[int]:
        if self._found is None:
            self._found = self.read()
        return self._found.get(seq, [])

    def read(self) -> dict[Sequence, list[int]]:
        drafter, found = self._drafter, dict[Sequence, list[int]]()
        try:
            columns = [step.result().tokens[:, 0].tolist() for step in self._steps]
        except Exception:
            drafter.fail(self.computed)
            return found
        if self._began is not None and columns:
            drafter.times.add(len(self.computed), (time.perf_counter() - self._began) / len(columns))
        for (seq, computed), tokens in zip(self.computed.items(), zip(*columns, strict=True), strict=True):
            computed += tokens[:-1]
            found[seq] = list(itertools.takewhile(lambda token: token < drafter.vocab_size, tokens))
        return found
