"""A draft model: a second, small model with memory of its own that proposes the tokens which the engine's model verifies.

It computes in the thread in which the engine's model computes, so that they do not compete for cores. Of each sequence it keeps
the keys of all tokens; where proposals were not accepted, it begins again behind the last one that was.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

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
logger = logging.getLogger("archerfish.engine")


@dataclass(slots=True)
class DraftedSequence:
    """What a draft model keeps of a sequence."""

    row: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the runner knows
    num_known: int = 0  # leading tokens that are computed
    proposed: list[int] = field(default_factory=list)  # tokens that are computed behind them


Chunk = tuple[DraftedSequence, int, SequenceOf[int]]  # a sequence, where its next tokens begin, and these


class ModelDrafter:
    """The DraftModel over a runner. vocab_size: of the engine's model. It has rows for so many sequences."""

    def __init__(self, runner: ModelRunner[Any], *, vocab_size: int, max_sequences: int) -> None:
        self.runner, self.vocab_size, self.max_len = runner, vocab_size, runner.model.max_len
        self.times = StepTimes()  # of a decode, by the number of sequences
        self._blocks = BlockManager(runner.pool.num_blocks, runner.pool.block_size)
        self._free = list(range(max_sequences))
        self._known: dict[Sequence, DraftedSequence] = {}
        self._entered: list[DraftedSequence] = []  # that the runner does not know yet
        self._steps = itertools.count()

    def takes(self, seq: Sequence, count: int) -> bool:
        for ended in [other for other in self._known if other.finish_reason is not None]:
            self.forget(ended)
        known, num_tokens = self._known.get(seq), len(seq.tokens) + count
        has_room = self._num_missing(num_tokens, known) <= self._blocks.num_free and num_tokens <= self.max_len
        return has_room and (known is not None or bool(self._free))

    def begin(self, sequences: SequenceOf[Sequence], count: int) -> ComputedDraft:
        began = time.perf_counter()
        found = [(seq, chunk) for seq in sequences if (chunk := self._catch_up(seq, count)) is not None]
        found.sort(key=lambda pair: len(pair[1][2]) > 1)  # those with one new token stand first
        chunks, is_usual = [chunk for _, chunk in found], all(len(chunk[2]) <= USUAL_CHUNK for _, chunk in found)
        steps = [self._launch(chunks)] if chunks else []
        decodes = [[(known, known.num_known + place, [PENDING]) for known, _, _ in chunks] for place in range(count - 1)]
        steps += [self._launch(decode) for decode in decodes if decode]
        proposed = {seq: known.proposed for seq, (known, _, _) in found}
        return ComputedDraft(self, proposed, steps, began if is_usual else None)

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
        if max(seq.tokens[start:]) >= self.runner.sampler.vocab_size:
            return None  # a row of the model that stands for no token
        known.blocks += self._blocks.allocate(max(0, self._num_missing(num_tokens + count, known)))
        known.num_known, known.proposed = num_tokens, []
        while num_tokens - start > MAX_CHUNK:
            self._launch([(known, start, seq.tokens[start : start + MAX_CHUNK])], num_samples=0)
            start += MAX_CHUNK
        return known, start, seq.tokens[start:]

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
        return -(-num_tokens // self._blocks.block_size) - (len(known.blocks) if known is not None else 0)

    def _launch(self, chunks: SequenceOf[Chunk], num_samples: int = 1) -> RunningStep:
        """Compute tokens of sequences, and so many behind them."""
        rows, places, ids = list[int](), list[int](), list[int]()
        for known, _, _ in chunks:
            rows += [known.row] * (len(known.blocks) - known.num_sent)
            places += range(known.num_sent, len(known.blocks))
            ids += known.blocks[known.num_sent :]
            known.num_sent = len(known.blocks)
        counts = np.array([len(tokens) for _, _, tokens in chunks], np.int64)
        entered, self._entered = self._entered, []
        return self.runner.launch(StepInput(
            next(self._steps), np.array([known.row for known, _, _ in chunks], np.int64),
            np.array([start for _, start, _ in chunks], np.int64), counts, np.full(len(chunks), num_samples, np.int64),
            np.zeros(len(chunks), np.int64), np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens in chunks]),
            int(np.count_nonzero(counts == 1)), np.array(rows, np.int64), np.array(places, np.int64), np.array(ids, np.int64),
            entries=[RowEntry(known.row, "draft", GREEDY, 0) for known in entered],
        ))  # fmt: skip


class ComputedDraft:
    """The DraftJob of a ModelDrafter. began: when, if its time is to be measured."""

    def __init__(
        self, drafter: ModelDrafter, proposed: dict[Sequence, list[int]], steps: list[RunningStep], began: float | None
    ) -> None:
        self._drafter, self._proposed, self._steps, self._began = drafter, proposed, steps, began
        self._found: dict[Sequence, list[int]] | None = None

    def done(self) -> bool:
        return not self._steps or self._steps[-1].done()

    def tokens(self, seq: Sequence) -> list[int]:
        if self._found is None:
            self._found = self._read()
        return self._found.get(seq, [])

    def wait(self) -> None:
        if self._found is None:
            self._found = self._read()

    def _read(self) -> dict[Sequence, list[int]]:
        drafter, found = self._drafter, dict[Sequence, list[int]]()
        try:
            columns = [step.result().tokens[:, 0].tolist() for step in self._steps]
        except Exception:  # without proposals the sequences go on
            logger.exception("The draft model failed.")
            for seq in self._proposed:
                drafter.forget(seq)
            return found
        if self._began is not None and columns:
            drafter.times.add(len(self._proposed), (time.perf_counter() - self._began) / len(columns))
        for (seq, proposed), tokens in zip(self._proposed.items(), zip(*columns, strict=True), strict=True):
            proposed += tokens[:-1]  # the last one is not computed
            found[seq] = list(itertools.takewhile(lambda token: token < drafter.vocab_size, tokens))
        return found
