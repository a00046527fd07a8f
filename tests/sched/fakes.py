"""A runner without a model or a device."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable

import numpy as np

from archerfish.sched.plan import Plan
from archerfish.sequence import FinishReason, Request, Sequence
from archerfish.step import PENDING, RowEntry, StepInput, StepResult, TokenLogprobs

EMPTY, VOCAB = -1, 50


def fake_logits(tokens: Iterable[int]) -> int:
    """Stands for a row of logits: a hash of the whole context."""
    return zlib.crc32(array("I", tokens).tobytes())


def fake_token(logits: int, seed: int, index: int) -> int:
    """The token that follows: it depends on every token before it, on the seed, and on which of the request's n this
    is."""
    return zlib.crc32(b"%d %d %d" % (logits, seed, index)) % VOCAB


def expected_output(request: Request, index: int = 0) -> tuple[list[int], FinishReason]:
    """What a request must give, whatever else runs and however it is scheduled."""
    tokens = list(request.prompt_token_ids)
    num_prompt = len(tokens)
    while True:
        tokens.append(fake_token(fake_logits(tokens), request.seed, index))
        num_output = len(tokens) - num_prompt
        if tokens[-1] in request.stop_token_ids and num_output > request.params.min_tokens:
            return tokens[num_prompt:], "stop"
        if num_output >= request.max_tokens:
            return tokens[num_prompt:], "length"


class FakeRunner:
    """Keeps tokens where a real runner keeps KV, and checks that each sequence sees its own context through its
    blocks."""

    _replaces_blocks = False  # a row may get another block for one that it has

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_forward_tokens = 0
        self._block_size = block_size
        self._memory = [[EMPTY] * block_size for _ in range(num_blocks)]
        self._entries: dict[int, RowEntry] = {}  # by row
        self._blocks: dict[int, list[int]] = {}  # by row
        self._sampled: dict[int, tuple[int, int]] = {}  # row -> position, token
        self._logits: dict[int, int] = {}  # by handle
        self._last_step = -1

    def execute(self, plan: Plan) -> StepResult:
        step = plan.input
        self._enter(step)
        self._check_shape(plan)
        for source, target in step.copies:
            self._memory[target] = list(self._memory[source])
        result = StepResult(np.full((len(step.rows), max(1, int(step.samples.max()))), EMPTY, dtype=np.int64))
        first = 0
        for index, seq in enumerate(plan.sequences):
            start, count = int(step.starts[index]), int(step.counts[index])
            context = self._write(seq, start, step.tokens[first : first + count].tolist())
            self._check_context(seq, context)
            self._finish(step, result, index, context)
            first += count
        for handle in step.dropped:
            self._logits.pop(handle, None)
        self.num_forward_tokens += len(step.tokens)
        return result

    def spoil(self, plan: Plan) -> None:
        """Make garbage of what a step wrote or was to write, as if it had broken off, before the scheduler learns of
        it."""
        self._enter(plan.input)
        for row, start, count in self._spans(plan.input):
            for position in range(start, min(start + count, len(self._blocks[row]) * self._block_size)):
                self._memory[self._blocks[row][position // self._block_size]][position % self._block_size] = EMPTY
        self._logits |= {handle: EMPTY for _, handle in plan.input.kept}

    @property
    def kept_handles(self) -> set[int]:
        """Handles of the logits that are kept."""
        return set(self._logits)

    def _enter(self, step: StepInput) -> None:
        if step.step <= self._last_step:  # it was executed before it was spoiled
            return
        self._last_step = step.step
        for entry in step.entries:
            self._entries[entry.row], self._blocks[entry.row] = entry, []
            self._sampled.pop(entry.row, None)
        new = zip(step.block_rows.tolist(), step.block_places.tolist(), step.block_ids.tolist(), strict=True)
        for row, place, block in new:
            del self._blocks[row][place if self._replaces_blocks else len(self._blocks[row]) :]
            assert len(self._blocks[row]) == place, f"row {row}: block {place} follows {len(self._blocks[row])} blocks"
            self._blocks[row].append(block)

    def _spans(self, step: StepInput) -> list[tuple[int, int, int]]:
        return list(zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True))

    def _write(self, seq: Sequence, start: int, new: list[int]) -> list[int]:
        """Put the new tokens into the blocks; the whole context up to them."""
        end = start + len(new)
        size = self._block_size
        blocks = self._blocks[seq.row]
        assert blocks == seq.blocks, f"{seq.key}: blocks {blocks} in place of {seq.blocks}"
        assert len(blocks) * size >= end, f"{seq.key}: {len(blocks)} blocks for {end} tokens"
        tokens = seq.tokens[:end].tolist()
        tokens += new[len(tokens) - start :] if PENDING not in new else []  # proposed ones
        if new and new[-1] == PENDING:
            position, new[-1] = self._sampled[seq.row]
            assert position == end - 1, f"{seq.key}: no token for position {end - 1}"
            tokens += new[-1:] if len(tokens) < end else []
        assert tokens[start:] == new, f"{seq.key}: tokens {new} in place of {tokens[start:]}"
        for position in range(start, end):
            self._memory[blocks[position // size]][position % size] = tokens[position]
        return tokens

    def _finish(self, step: StepInput, result: StepResult, index: int, context: list[int]) -> None:
        row = int(step.rows[index])
        entry = self._entries[row]
        if index in step.scored:
            result.prompt_logprobs[index] = [TokenLogprobs(token, -1.0, 1, []) for token in step.scored[index][1]]
        if not step.samples[index]:
            return
        logits = fake_logits(context)
        if not step.counts[index]:
            kept = self._logits[dict(step.reused)[index]]
            assert kept == logits, f"row {row}: kept logits of another context"
        num_samples = int(step.samples[index])
        for nth in range(num_samples):
            seen = context[: len(context) + 1 - num_samples + nth]
            result.tokens[index, nth] = token = fake_token(fake_logits(seen), entry.seed, entry.index)
        self._sampled[row] = len(context), token
        for kept_index, handle in step.kept:
            if kept_index == index:
                self._logits[handle] = logits
        if index in step.returned:
            result.logits[index] = logits
        if entry.params.logprobs is not None:
            drawn = result.tokens[index, :num_samples].tolist()
            result.logprobs[index] = [TokenLogprobs(token, -1.0, 1, []) for token in drawn]

    def _check_context(self, seq: Sequence, context: list[int]) -> None:
        seen = [token for block in seq.blocks[: -(-len(context) // self._block_size)] for token in self._memory[block]]
        assert seen[: len(context)] == context, f"{seq.key}: its blocks hold another context"

    def _check_shape(self, plan: Plan) -> None:
        step = plan.input
        rows, counts = step.rows.tolist(), step.counts.tolist()
        assert rows == [seq.row for seq in plan.sequences], f"rows {rows}"
        assert len(set(rows)) == len(rows) and min(rows) >= 0, f"rows {rows}"
        kinds = [0 if count == 1 else 1 if count else 2 for count in counts]
        assert kinds == sorted(kinds) and kinds.count(0) == step.num_decodes, f"order of {counts}"
        assert sum(counts) == len(step.tokens), f"{len(step.tokens)} tokens in {counts}"
        size = self._block_size
        written: set[int] = set()
        for row, start, count in self._spans(step):
            mine = set(self._blocks[row][start // size : -(-(start + count) // size)]) if count else set()
            assert not mine & written, f"row {row} writes a block that another writes"
            written |= mine


class FakeStateRunner(FakeRunner):
    """Keeps the whole context behind a block's last computed token where a real runner keeps a state."""

    _replaces_blocks = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._states: list[list[int] | None] = [None] * num_blocks
        self._kept: dict[int, list[int]] = {}  # of the step: by row, blocks for the states behind each new token

    def execute(self, plan: Plan) -> StepResult:
        assert not plan.input.copies, f"states are copied: {plan.input.copies}"
        self._kept = {int(plan.input.rows[index]): blocks for index, blocks in plan.input.states}
        return super().execute(plan)

    def spoil(self, plan: Plan) -> None:
        super().spoil(plan)
        for row, start, count in self._spans(plan.input):
            size = self._block_size
            for block in self._blocks[row][start // size : -(-(start + count) // size)] if count else ():
                self._states[block] = None
        for _, blocks in plan.input.states:
            for block in blocks:
                self._states[block] = None

    def _write(self, seq: Sequence, start: int, new: list[int]) -> list[int]:
        size = self._block_size
        count = len(new)
        kept = self._kept.get(seq.row)
        tokens = super()._write(seq, start, new) if kept is None else [*seq.tokens[:start], *new]
        if start and count:
            assert self._states[seq.blocks[(start - 1) // size]] == tokens[:start], f"{seq.key}: no state at {start}"
        ends = [*range(start - start % size + size, start + count, size), start + count] if count else []
        blocks = (
            [(end, seq.blocks[(end - 1) // size]) for end in ends] if kept is None else list(enumerate(kept, start + 1))
        )
        assert not count or blocks[-1][0] == start + count, (
            f"{seq.key}: blocks {blocks} for tokens up to {start + count}"
        )
        for end, block in blocks:
            self._states[block] = tokens[:end]
        return tokens

    def _check_context(self, seq: Sequence, context: list[int]) -> None:
        block = self._kept[seq.row][-1] if seq.row in self._kept else seq.blocks[(len(context) - 1) // self._block_size]
        assert self._states[block] == context, f"{seq.key}: another state"
