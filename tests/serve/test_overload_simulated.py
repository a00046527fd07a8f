"""Three times what an engine can do, with the gate in front of it and a clock of the test's.

The engine of this test computes prompts in chunks beside the tokens of all that run, as ours does: whoever is let in slows down
those that run already, so that a time estimated from steps without prompts would be far too short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from archerfish.serve.admission import AdmissionLimits
from archerfish.serve.gate import Gate, Pass
from archerfish.serve.limits import RateLimits, RefusedError
from archerfish.serve.tenants import ANONYMOUS

PROMPT, CHUNK, MAX_RUNNING = 94, 512, 256
COSTS = (0.0008, 0.02, 0.0015)  # seconds of a prompt's token, a step, and a sequence in it: as SmolLM2-135M on two cores


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Asked:
    arrived: float
    entry: Pass
    num_prompt_left: int = PROMPT
    num_written: int = 0


@dataclass
class Engine:
    """Requests of one size behind a gate."""

    num_output: int
    deadline_s: float
    slowness: float = 0.0  # how much steps vary
    costs: tuple[float, float, float] = COSTS
    clock: Clock = field(default_factory=Clock)
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    num_good: int = 0
    num_late: int = 0
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(7)
        limits = AdmissionLimits(is_fair=False)
        self.gate = Gate(RateLimits(self.clock), limits, max_running=MAX_RUNNING, max_tokens=8192, clock=self.clock)
        self.done = [0, 0]

    def ask(self, at: float) -> bool:
        try:
            entry = self.gate.admit(
                ANONYMOUS, max_tokens=self.num_output, num_sequences=1, num_prompt_tokens=PROMPT, deadline_s=self.deadline_s
            )
        except RefusedError as error:
            assert error.retry_after_s >= 0
            self.num_refused += 1
            return False
        self.waiting.append(Asked(at, entry))
        return True

    def step(self) -> None:
        self._drop_late()
        begun: list[Asked] = []
        num_prompt, room = 0, CHUNK - len(self.running)
        for asked in list(self.waiting):
            size = min(room, asked.num_prompt_left)
            if size <= 0 or len(self.running) + len(begun) >= MAX_RUNNING:
                break
            asked.num_prompt_left -= size
            num_prompt, room = num_prompt + size, room - size
            if not asked.num_prompt_left:
                self.waiting.remove(asked)
                begun.append(asked)
        token_s, step_s, sequence_s = self.costs
        seconds = num_prompt * token_s + (step_s + sequence_s * len(self.running) if self.running else 0.0)
        self.clock.now += seconds * (1 + self.slowness * self.chance.random())
        self.running += begun
        self.done[0] += num_prompt
        self.done[1] += len(self.running)
        self.gate.watch(*self.done)
        for asked in begun:
            asked.entry.started()
        for asked in list(self.running):
            asked.num_written += 1
            if asked.num_written == self.num_output:
                self.running.remove(asked)
                self._end(asked, is_late=self.clock.now - asked.arrived > self.deadline_s)

    def _drop_late(self) -> None:
        for group in (self.waiting, self.running):
            for asked in list(group):
                if self.clock.now - asked.arrived > self.deadline_s:
                    group.remove(asked)
                    self._end(asked, is_late=True)

    def _end(self, asked: Asked, is_late: bool) -> None:
        asked.entry.num_output, asked.entry.reason = asked.num_written, "deadline" if is_late else "length"
        asked.entry.ended()
        self.num_late += is_late
        self.num_good += not is_late


def keep_busy(engine: Engine, num_at_once: int, duration_s: float) -> float:
    """Requests a second of so many clients, each of which waits for its answer."""
    end, num_good = engine.clock.now + duration_s, engine.num_good
    while engine.clock.now < end:
        for _ in range(num_at_once - len(engine.waiting) - len(engine.running)):
            engine.ask(engine.clock.now)
        engine.step()
    return (engine.num_good - num_good) / duration_s


def overload(engine: Engine, rate: float, duration_s: float) -> float:
    """Requests a second that end in time, of so many that come. Fails where many are let in for nothing."""
    chance, next_at, end = random.Random(3), engine.clock.now, engine.clock.now + duration_s
    while engine.clock.now < end:
        while next_at <= engine.clock.now:
            engine.ask(next_at)
            next_at += chance.expovariate(rate)
        if engine.waiting or engine.running:
            engine.step()
        else:
            engine.clock.now = next_at
    assert engine.num_late < 0.1 * engine.num_good
    assert engine.num_refused > engine.num_good
    return engine.num_good / duration_s


@pytest.mark.parametrize(
    ("num_output", "slowness", "deadline_s"),
    [(16, 0.0, 5.0), (16, 0.0, 10.0), (16, 0.0, 30.0), (16, 2.0, 10.0), (16, 2.0, 30.0), (64, 0.5, 20.0), (64, 0.5, 30.0)],
)
def test_goodput_at_three_times_the_capacity_is_the_capacity(num_output: int, slowness: float, deadline_s: float) -> None:
    most = keep_busy(Engine(num_output, 1000.0, slowness), 32, 30.0)
    assert overload(Engine(num_output, deadline_s, slowness), 3 * most, 90.0) > 0.9 * most


@pytest.mark.parametrize("slowness", [0.0, 0.5])
@pytest.mark.parametrize("costs", [COSTS, (0.0003, 0.03, 0.0024), (0.0003, 0.04, 0.001), (0.0002, 0.05, 0.004)])
def test_batches_that_were_never_seen_are_not_taken_to_cost_nothing(costs: tuple[float, float, float], slowness: float) -> None:
    """Rates of 16 and 32 at once are known, then three times as many come as can be served: letting all of them in would be
    followed by refusing all, and that by letting in all."""
    engine = Engine(16, 1000.0, slowness, costs)
    most = max(keep_busy(engine, num_at_once, 12.0) for num_at_once in (16, 32))
    while engine.waiting or engine.running:
        engine.step()
    engine.deadline_s, engine.num_good = 10.0, 0
    assert overload(engine, 3 * most, 90.0) > 0.95 * most


def test_a_long_answer_that_runs_does_not_shut_out_a_short_one() -> None:
    engine = Engine(16, 10.0)
    while engine.clock.now < 20.0:  # so that rates are known
        if not engine.waiting and not engine.running:
            engine.ask(engine.clock.now)
        engine.step()
    while engine.running or engine.waiting:
        engine.step()
    long = engine.gate.admit(ANONYMOUS, max_tokens=8000, num_sequences=1, num_prompt_tokens=PROMPT)
    long.started()
    assert engine.ask(engine.clock.now)
