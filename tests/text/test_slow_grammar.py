"""Grammars whose masks take long: nobody waits for them but the sequences that have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from archerfish.engine.llm_engine import LLMEngine
from archerfish.params import SamplingParams
from archerfish.sched.masks import NUM_THREADS, MaskFinder
from archerfish.sequence import Request
from archerfish.sequence import Sequence as TokenSequence
from tests.calls import spy_on
from tests.engine.tiny_llama import check_memory, tiny_config

LIMIT_S = 60
NUM_TOKENS = 24


class Gated:
    """A grammar of even tokens. The first mask is there at once; others wait for the gate, and are counted."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.waits = threading.Semaphore(0)
        self.num_fills = 0

    def start(self) -> Gated:
        return self

    def copy(self) -> Gated:
        return self

    def forced(self) -> list[int]:
        return []

    def fill(self, output: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        self.num_fills += 1
        if output:
            self.waits.release()
            assert self.gate.wait(LIMIT_S)
        bits[:] = 0x55555555
        bits[0] = 0x55555500  # no end token


@pytest.fixture
def grammars() -> dict[str, Gated]:
    return {"slow": Gated(), "quick": Gated()}


@pytest.fixture
def engine(llama: Path, grammars: dict[str, Gated], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_config(llama)) as engine:
        monkeypatch.setattr(engine.grammars, "compile", lambda grammar: grammars[grammar["value"]])
        yield engine


def params(grammar: str = "") -> SamplingParams:
    given: dict[str, Any] = {"grammar": {"kind": "regex", "value": grammar}} if grammar else {"ignore_eos": True}
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, **given)


def test_a_slow_mask_does_not_delay_other_sequences(engine: LLMEngine, grammars: dict[str, Gated]) -> None:
    slow, quick = grammars["slow"], grammars["quick"]
    quick.gate.set()
    for name, one in (("slow", "slow"), ("quick", "quick"), ("plain", "")):
        engine.add_request([5, 6, 7], params(one), request_id=name)
    ended: dict[str, list[int]] = {}
    while len(ended) < 2:
        ended |= {output.request_id: list(output.token_ids) for output in engine.step()}
    assert set(ended) == {"quick", "plain"}
    assert slow.num_fills == 2  # of the first token, and of the second, which is not there yet
    assert len(ended["quick"]) == len(ended["plain"]) == NUM_TOKENS
    slow.gate.set()
    while len(ended) < 3:
        ended |= {output.request_id: list(output.token_ids) for output in engine.step()}
    assert ended["slow"] == ended["quick"]
    assert not any(token % 2 for token in ended["slow"])
    assert slow.num_fills in (NUM_TOKENS, NUM_TOKENS + 1)  # none twice


def test_waiting_for_a_mask_does_not_spin(
    engine: LLMEngine, grammars: dict[str, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = grammars["slow"]
    plan = spy_on(monkeypatch, engine.scheduler, "plan")
    running = threading.Thread(target=lambda: engine.generate([[5, 6, 7]], params("slow")))
    running.start()
    assert slow.waits.acquire(timeout=LIMIT_S)
    slow.gate.set()
    running.join(LIMIT_S)
    assert not running.is_alive()
    assert plan.call_count < 10 * NUM_TOKENS


def test_abort_while_a_mask_is_computed(engine: LLMEngine, grammars: dict[str, Gated]) -> None:
    slow = grammars["slow"]
    engine.add_request([5, 6, 7], params("slow"), request_id="slow")
    plain = engine.add_request([5, 6, 7], params(), request_id="plain")
    while not slow.waits.acquire(blocking=False):
        engine.step()
    assert engine.abort("slow")
    ended: list[str] = []
    while plain not in ended:
        ended += [output.request_id for output in engine.step()]
    slow.gate.set()
    check_memory(engine)


def test_slow_grammars_leave_threads_for_fast_ones() -> None:
    told = threading.Semaphore(0)
    finder = MaskFinder(64, told.release)
    slow, quick = Gated(), Gated()
    quick.gate.set()

    def sequence(grammar: Gated) -> TokenSequence:
        return TokenSequence(Request("r", [1], SamplingParams(), 9, grammar=grammar))

    held = [sequence(slow) for _ in range(NUM_THREADS - 1)]
    free = sequence(quick)
    for one in (*held, free):
        one.tokens.append(2)
        finder.begin(one)
    assert told.acquire(timeout=LIMIT_S)
    assert [one.mask is not None and one.mask.done() for one in (*held, free)] == [False] * len(held) + [True]
    mask = free.mask
    finder.begin(free)
    assert free.mask is mask
    slow.gate.set()
    for _ in held:
        assert told.acquire(timeout=LIMIT_S)
    finder.wait()  # for nothing
    assert all(one.mask is not None and one.mask.error is None for one in held)
