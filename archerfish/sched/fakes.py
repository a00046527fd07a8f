"""A model that needs no device: for tests, benchmarks and users who try a policy of their own."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from archerfish.errors import InvariantError
from archerfish.sched.scheduler import Scheduler
from archerfish.sequence import Delta, FinishReason, Plan, Request, Sequence, StepResult, TokenLogprobs

EMPTY = -1


@dataclass(slots=True, frozen=True)
class FakeLogits:
    """Stands for a row of logits: a hash of the whole context."""

    value: int
    nbytes: int = 64


def fake_logits(tokens: Iterable[int]) -> FakeLogits:
    return FakeLogits(zlib.crc32(array("I", tokens).tobytes()))


def fake_token(logits: FakeLogits, seed: int, index: int, vocab_size: int) -> int:
    """The token that follows: it depends on every token before it, on the seed, and on which of the request's n this is."""
    return zlib.crc32(b"%d %d %d" % (logits.value, seed, index)) % vocab_size


def expected_output(request: Request, index: int = 0, vocab_size: int = 1000) -> tuple[list[int], FinishReason]:
    """What a request must give, whatever else runs and however it is scheduled."""
    tokens = list(request.prompt_token_ids)
    num_prompt = len(tokens)
    while True:
        tokens.append(fake_token(fake_logits(tokens), request.seed, index, vocab_size))
        num_output = len(tokens) - num_prompt
        if tokens[-1] in request.stop_token_ids and num_output > request.params.min_tokens:
            return tokens[num_prompt:], "stop"
        if num_output >= request.max_tokens:
            return tokens[num_prompt:], "length"


class FakeRunner:
    """Keeps tokens where a real runner keeps KV, and checks that each sequence sees its own context through its blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self.num_forward_tokens = 0
        self._block_size = block_size
        self._memory = [[EMPTY] * block_size for _ in range(num_blocks)]
        self._sampled: dict[int, tuple[Sequence, int, int]] = {}  # row -> sequence, position, token

    def execute(self, plan: Plan) -> StepResult:
        self._check_shape(plan)
        for source, target in plan.copies:
            self._memory[target] = list(self._memory[source])
        contexts = list(map(self._write, plan.sequences, plan.starts, plan.counts))
        result = StepResult([EMPTY] * len(contexts))
        for index, context in enumerate(contexts):
            self._finish(plan, result, index, context)
        self.num_forward_tokens += plan.num_tokens
        return result

    def spoil(self, plan: Plan) -> None:
        """As a step does that breaks off: what it was to write is garbage. Call it before the scheduler learns of it."""
        for seq, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                self._memory[seq.blocks[position // self._block_size]][position % self._block_size] = EMPTY

    def _write(self, seq: Sequence, start: int, count: int) -> list[int]:
        """Put the new tokens into the blocks; the whole context up to them."""
        end, size = start + count, self._block_size
        tokens = seq.tokens[:end].tolist()
        if len(tokens) < end:  # the last one is still in flight
            owner, position, token = self._sampled[seq.row]
            _demand(owner is seq and position == len(tokens) == end - 1, f"{seq.key}: no token for position {end - 1}")
            tokens.append(token)
        _demand(len(seq.blocks) * size >= end, f"{seq.key}: {len(seq.blocks)} blocks for {end} tokens")
        for position in range(start, end):
            self._memory[seq.blocks[position // size]][position % size] = tokens[position]
        return tokens

    def _finish(self, plan: Plan, result: StepResult, index: int, context: list[int]) -> None:
        seq, request = plan.sequences[index], plan.sequences[index].request
        self._check_context(seq, context)
        if request.params.prompt_logprobs is not None:
            told = range(plan.starts[index] + 1, min(len(context) + 1, seq.num_prompt))
            result.prompt_logprobs[index] = [TokenLogprobs(seq.tokens[i], -1.0, 1, []) for i in told]
        if not plan.samples[index]:
            return
        logits = fake_logits(context)
        if not plan.counts[index]:
            _demand(seq.cached_logits == logits, f"{seq.key}: cached logits of another context")
        token = fake_token(logits, request.seed, seq.index, self.vocab_size)
        result.tokens[index] = token
        self._sampled[seq.row] = seq, len(context), token
        if index in plan.keeps_logits:
            result.logits[index] = logits
        if request.params.logprobs is not None:
            result.logprobs[index] = TokenLogprobs(token, -1.0, 1, [])

    def _check_context(self, seq: Sequence, context: list[int]) -> None:
        seen = [token for block in seq.blocks[: -(-len(context) // self._block_size)] for token in self._memory[block]]
        _demand(seen[: len(context)] == context, f"{seq.key}: its blocks hold another context")

    def _check_shape(self, plan: Plan) -> None:
        counts = plan.counts
        rows = [seq.row for seq in plan.sequences]
        _demand(len(set(rows)) == len(rows) and min(rows) >= 0, f"rows {rows}")
        _demand(all(count == 1 for count in counts[: plan.num_decodes]), f"decodes {counts}")
        kinds = [0 if count == 1 else 1 if count else 2 for count in counts]
        _demand(kinds == sorted(kinds) and kinds.count(0) == plan.num_decodes, f"order of {counts}")
        _demand(sum(counts) == plan.num_tokens, f"{plan.num_tokens} tokens in {counts}")
        size = self._block_size
        written: set[int] = set()
        for seq, start, count in zip(plan.sequences, plan.starts, counts, strict=True):
            mine = set(seq.blocks[start // size : -(-(start + count) // size)]) if count else set()
            _demand(not mine & written, f"{seq.key} writes a block that another writes")
            written |= mine


class FakeStateRunner(FakeRunner):
    """Keeps the whole context behind a block's last computed token where a real runner keeps a state."""

    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int = 1000) -> None:
        super().__init__(num_blocks, block_size, vocab_size=vocab_size)
        self._states: list[list[int] | None] = [None] * num_blocks

    def execute(self, plan: Plan) -> StepResult:
        _demand(not plan.copies, f"states are copied: {plan.copies}")
        return super().execute(plan)

    def spoil(self, plan: Plan) -> None:
        for seq, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            for block in seq.blocks[start // self._block_size : -(-(start + count) // self._block_size)] if count else ():
                self._states[block] = None

    def _write(self, seq: Sequence, start: int, count: int) -> list[int]:
        size, tokens = self._block_size, super()._write(seq, start, count)
        if start and count:
            _demand(self._states[seq.blocks[(start - 1) // size]] == tokens[:start], f"{seq.key}: no state at {start}")
        for end in [*range(start - start % size + size, start + count, size), start + count] if count else ():
            self._states[seq.blocks[(end - 1) // size]] = tokens[:end]
        return tokens

    def _check_context(self, seq: Sequence, context: list[int]) -> None:
        _demand(self._states[seq.blocks[(len(context) - 1) // self._block_size]] == context, f"{seq.key}: another state")


class FakeLoop:
    """Plan, execute, commit, with `depth` steps in flight while the next is planned."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.in_flight: deque[tuple[Plan, StepResult]] = deque()

    def step(self) -> list[Delta]:
        """One plan, and the commit of the step that is due."""
        plan = self.scheduler.plan()
        _demand(plan is not None or bool(self.in_flight) or not self.scheduler.has_work, "there is work but no plan")
        if plan is not None:
            self.in_flight.append((plan, self.runner.execute(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.scheduler.commit(*self.in_flight.popleft())
        return self.scheduler.take_deltas()

    def run(self, max_steps: int = 100_000) -> list[Delta]:
        """Until nothing is left to do."""
        deltas: list[Delta] = []
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return deltas + self.scheduler.take_deltas()
            deltas += self.step()
        raise InvariantError(f"Not done after {max_steps} steps.")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"Fake runner: {what}.")
