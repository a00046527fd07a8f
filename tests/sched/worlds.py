"""A scheduler with its cache and a fake runner, and what must hold for them at any moment."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from archerfish.cache.adaptive import LogitsCache
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache
from archerfish.params import SamplingParams
from archerfish.sched.plan import Plan
from archerfish.sched.policy import SchedulingPolicy
from archerfish.sched.scheduler import Scheduler
from archerfish.sequence import Delta, Namespace, Request, Sequence
from archerfish.step import StepResult
from tests.cache.invariants import check_cache, owned_blocks
from tests.sched.fakes import VOCAB, FakeRunner, FakeStateRunner, expected_output, fake_logits, fake_token


class OracleDrafter:
    """Proposes what requests with seed 0 will draw, with mistakes."""

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        context = tokens.tolist()
        for _ in range(count):
            token = fake_token(fake_logits(context), 0, 0)
            context.append((token + (fake_logits(context) % 5 == 0)) % VOCAB)
        return context[len(tokens) :]


class OracleModel:
    """A DraftModel that proposes what the OracleDrafter does, some time later."""

    def __init__(self, max_sequences: int = 4) -> None:
        self.rows: set[Sequence] = set()
        self.max_sequences = max_sequences
        self.num_begun = 0
        self.seconds = 0.0

    def takes(self, seq: Sequence, count: int) -> bool:
        self.rows = {other for other in self.rows if other.finish_reason is None}
        return seq in self.rows or len(self.rows) < self.max_sequences

    def begin(self, sequences: SequenceOf[Sequence], count: int) -> OracleJob:
        assert not any(seq.num_pending or seq.finish_reason for seq in sequences)
        self.rows.update([seq for seq in sequences if seq not in self.rows][: self.max_sequences - len(self.rows)])
        taken = [seq for seq in sequences if seq in self.rows]
        self.num_begun += 1
        return OracleJob({seq: OracleDrafter().propose(seq.tokens, count, is_bold=True) for seq in taken})

    def expect_seconds(self, num_sequences: int, count: int) -> float:
        return count * self.seconds

    def close(self) -> None:
        self.rows.clear()


class OracleJob:
    def __init__(self, found: dict[Sequence, list[int]]) -> None:
        self.found, self.num_asked = found, 0

    def done(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 2

    def tokens(self, seq: Sequence) -> list[int]:
        self.num_asked = 2
        return self.found.get(seq, [])


DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class World:
    """Everything that a test of the scheduler needs; time stands still unless told."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        depth: int = 0,
        policy: SchedulingPolicy | str = "fcfs",
        has_cache: bool = True,
        has_logits_cache: bool = True,
        has_states: bool = False,
        **options: Any,
    ) -> None:
        self.now = 100.0
        self.blocks = BlockManager(num_blocks, block_size)
        self.logits_cache = LogitsCache(1 << 16, 1e9, clock=lambda: self.now) if has_logits_cache else None
        on_drop = self.logits_cache.drop if self.logits_cache is not None else None
        self.cache = RadixCache(
            self.blocks, is_enabled=has_cache, clock=lambda: self.now, on_drop=on_drop, whole_blocks=has_states
        )
        settings = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_queue_size": 100,
            "max_model_len": 1000,
        } | options
        self.scheduler = Scheduler(
            blocks=self.blocks,
            cache=self.cache,
            logits_cache=self.logits_cache,
            model_state_hash="model",
            policy=policy,
            clock=lambda: self.now,
            logits_row_bytes=64,
            **settings,
        )
        self.runner: FakeRunner = (FakeStateRunner if has_states else FakeRunner)(num_blocks, block_size)
        self.depth = depth  # steps in flight while the next is planned
        self.in_flight: deque[tuple[Plan, StepResult]] = deque()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.order_of_ends: list[str] = []
        self._ids = itertools.count()

    def add(
        self,
        prompt: SequenceOf[int] | int,
        max_tokens: int = 4,
        *,
        tenant: str = "",
        n: int = 1,
        request_id: str | None = None,
        stop: SequenceOf[int] = (),
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> list[Sequence]:
        """A whole number stands for a prompt of that length which shares nothing with others."""
        number = next(self._ids)
        if isinstance(prompt, int):
            prompt = [1000 + number, *range(1, prompt)]
        params_made = SamplingParams(n=n, max_tokens=max_tokens, **(params or {}))
        request = Request(
            request_id or f"r{number}", prompt, params_made, max_tokens, frozenset(stop), Namespace(tenant), **fields
        )
        return self.scheduler.add(request)

    def launch(self) -> bool:
        """Plan and execute a step, if there is anything to do."""
        plan = self.scheduler.plan()
        if plan is None and not self.in_flight:
            self.scheduler.wait()
            plan = self.scheduler.plan()
        assert plan is not None or self.in_flight or not self.scheduler.has_work, "there is work but no plan"
        if plan is not None:
            assert len(plan.input.tokens) <= self.scheduler.max_num_batched_tokens
            assert len(plan.sequences) <= self.scheduler.max_num_seqs
            self.in_flight.append((plan, self.runner.execute(plan)))
        return plan is not None

    def step(self) -> list[Delta]:
        """One plan, and the commit of the step that is due."""
        if (not self.launch() and self.in_flight) or len(self.in_flight) > self.depth:
            self.scheduler.commit(*self.in_flight.popleft())
        deltas = self.scheduler.take_deltas()
        self.take(deltas)
        return deltas

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = delta.sequence.key
            assert key not in self.ends, f"{key} has ended already"
            self.outputs.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta.finish_reason
                self.order_of_ends.append(key[0])

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        self.take(self.scheduler.take_deltas())
        self.check()
        assert not owned_blocks(self.scheduler)
        self.check_nothing_is_held()

    def check_nothing_is_held(self) -> None:
        assert self.blocks.num_free + self.cache.num_evictable == self.blocks.num_total
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        num_kept = 0 if self.logits_cache is None else len(self.logits_cache)
        dropped = self.scheduler._live.dropped  # the next step brings them to the runner
        assert len(self.runner.kept_handles.difference(dropped)) == num_kept

    def check(self) -> None:
        """The books balance: free + cached + owned = total, and no block has an owner that is not known."""
        check_cache(self.cache, owned_blocks(self.scheduler))

    def check_output(self, seq: Sequence) -> None:
        """The whole output of a sequence that was left to end by itself."""
        tokens, reason = expected_output(seq.request, seq.index)
        assert self.outputs[seq.key] == tokens
        assert self.ends[seq.key] == reason

    def check_end(self, seq: Sequence) -> None:
        """The whole output of a sequence, or of one that was interrupted, the beginning of what it would have given."""
        tokens, reason = expected_output(seq.request, seq.index)
        output = self.outputs.get(seq.key, [])
        assert output == tokens[: len(output)]
        assert self.ends[seq.key] != "length" or (len(output), reason) == (len(tokens), "length")

    def fail(self, made: Plan) -> None:
        """A step breaks off."""
        self.runner.spoil(made)
        self.scheduler.fail(made, RuntimeError("a step that raised"))


def plan(world: World) -> Plan:
    made = world.scheduler.plan()
    assert made is not None
    return made


def commit(world: World, made: Plan, **changes: Any) -> None:
    result = world.runner.execute(made)
    for name, value in changes.items():
        setattr(result, name, value)
    world.scheduler.commit(made, result)
    world.take(world.scheduler.take_deltas())


def counts(made: Plan) -> dict[str, int]:
    return {
        seq.request.request_id: count for seq, count in zip(made.sequences, made.input.counts.tolist(), strict=True)
    }
