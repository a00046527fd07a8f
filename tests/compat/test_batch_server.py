"""BatchInferenceServer and BatchProcessor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish import errors
from archerfish.compat.batch_processor import BatchProcessor
from archerfish.compat.batch_server import BatchInferenceServer
from archerfish.errors import (
    CallerError,
    InvalidInputError,
    InvalidOptionError,
    ModelError,
    StoppedError,
    TooManyRequestsError,
)
from tests.engine.fakes import FakeEngine

from .loops import LIMIT_S, in_loop, run, until

Server = BatchInferenceServer[int, int]


class Doubler:
    """Doubles numbers; a negative one fails its batch; blocks while its gate is closed."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.entered = threading.Event()

    def generate_batch(self, inputs: Sequence[int]) -> list[int]:
        self.batches.append(list(inputs))
        self.entered.set()
        self.gate.wait(LIMIT_S)
        bad = [number for number in inputs if number < 0]
        if bad:
            raise ValueError(f"bad number {bad[0]}")
        return [2 * number for number in inputs]


def ask(server: Server, numbers: Sequence[int]) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(server.predict(number)) for number in numbers]


@in_loop
async def test_callers_share_a_batch_and_results_keep_their_order() -> None:
    model = Doubler()
    async with Server(model, max_batch_size=4) as server:
        assert await asyncio.gather(*ask(server, range(10))) == [2 * n for n in range(10)]
    assert [len(batch) for batch in model.batches] == [4, 4, 2]


@in_loop
async def test_a_full_batch_does_not_wait_and_a_function_serves_as_a_model() -> None:
    async with Server(lambda inputs: [-n for n in inputs], max_batch_size=2, max_wait_time=3600) as server:
        assert await asyncio.gather(*ask(server, [1, 2])) == [-1, -2]


@in_loop
async def test_inputs_that_come_during_a_batch_are_the_next_batch() -> None:
    model = Doubler(is_open=False)
    async with Server(model, max_wait_time=0) as server:
        first = ask(server, [0])
        await until(model.entered.is_set)
        rest = ask(server, range(1, 6))
        await asyncio.sleep(0)
        rest[0].cancel()  # a caller that left is not computed
        model.gate.set()
        await asyncio.gather(*first, *rest[1:])
    assert model.batches == [[0], [2, 3, 4, 5]]


@in_loop
async def test_only_a_bad_input_gets_the_error() -> None:
    async with Server(Doubler(), max_batch_size=16) as server:
        answers = await asyncio.gather(*ask(server, (1, 2, -3, 4, -6)), return_exceptions=True)
        assert [a if isinstance(a, int) else str(a) for a in answers] == [2, 4, "bad number -3", 8, "bad number -6"]


@pytest.mark.parametrize("results", [[], [1, 2, 3], None, 7])
@in_loop
async def test_a_wrong_number_of_results_is_an_error_for_all(results: Any) -> None:
    async with Server(lambda inputs: results, max_batch_size=2) as server:
        answers = await asyncio.gather(*ask(server, [1, 2]), return_exceptions=True)
        assert all(isinstance(answer, ModelError | TypeError) for answer in answers)


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_errors_that_a_future_cannot_carry_are_wrapped(error: BaseException) -> None:
    def model(inputs: Sequence[int]) -> list[int]:
        raise error

    async def main() -> None:
        async with Server(model) as server:
            with pytest.raises(ModelError, match=type(error).__name__):
                await server.predict(1)

    run(main)


@in_loop
async def test_a_full_queue_refuses() -> None:
    model = Doubler(is_open=False)
    async with Server(model, max_batch_size=1, max_wait_time=0, max_queue_size=2) as server:
        first = ask(server, [0])
        await until(model.entered.is_set)
        waiting = ask(server, [1, 2])
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequestsError, match="2 inputs wait; the limit is 2"):
            await server.predict(3)
        model.gate.set()
        assert await asyncio.gather(*first, *waiting) == [0, 2, 4]


@in_loop
async def test_predict_before_start_waits_for_it_and_stop_computes_waiting_inputs() -> None:
    server = Server(Doubler(), max_batch_size=2, max_wait_time=3600)
    asking = ask(server, range(5))
    await asyncio.sleep(0)
    running = [server.running]
    task = asyncio.create_task(server.start())
    await asyncio.sleep(0)
    assert [*running, server.running] == [False, True]
    await asyncio.gather(server.stop(), server.stop())
    assert await asyncio.gather(*asking) == [0, 2, 4, 6, 8]
    with pytest.raises(StoppedError):
        await server.predict(1)
    await task


@in_loop
async def test_stop_without_start_ends_waiting_callers() -> None:
    server = Server(Doubler())
    (early,) = ask(server, [1])
    await asyncio.sleep(0)
    await server.stop()
    with pytest.raises(StoppedError):
        await early
    await server.start()


@in_loop
async def test_stop_without_drain_finishes_only_the_running_batch() -> None:
    model = Doubler(is_open=False)
    server = Server(model, max_batch_size=1, max_wait_time=0)
    task = asyncio.create_task(server.start())
    asking = ask(server, (1, 2, 3))
    await until(model.entered.is_set)
    stopping = asyncio.create_task(server.stop(drain=False))
    await until(lambda: asking[1].done() and asking[2].done())
    assert not stopping.done()
    model.gate.set()
    await stopping
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert answers[0] == 2 and [type(answer) for answer in answers[1:]] == [StoppedError, StoppedError]
    await task


@in_loop
async def test_an_error_inside_the_with_block_discards_waiting_inputs() -> None:
    model = Doubler()
    with pytest.raises(KeyError):
        async with Server(model, max_wait_time=3600) as server:
            (asking,) = ask(server, [1])
            for _ in range(5):
                await asyncio.sleep(0)
            raise KeyError
    with pytest.raises(StoppedError):
        await asking
    assert model.batches == []


@in_loop
async def test_wrong_use_is_an_error() -> None:
    async with Server(Doubler()) as server:
        with pytest.raises(CallerError, match="started already"):
            await server.start()
    with pytest.raises(InvalidOptionError, match="neither"):
        Server(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="at least 1"):
        Server(Doubler(), max_batch_size=0)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(-3, 9)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.just("tick"), st.integers(1, 5)),
        st.tuples(st.just("open"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.no_cover
@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 5), st.integers(6, 20), st.sampled_from(["drain", "discard", "cancel"]))
def test_every_predict_ends_exactly_once(plan: list[tuple[str, int]], batch: int, queue: int, ending: str) -> None:
    """Random arrivals, departures, failures and stops."""

    async def main() -> None:
        model = Doubler(is_open=False)
        server = Server(model, max_batch_size=batch, max_wait_time=0, max_queue_size=queue)
        serving = asyncio.create_task(server.start())
        asked: list[tuple[int, asyncio.Task[int]]] = []
        left = set()
        for kind, number in plan:
            if kind == "ask":
                asked += [(number, task) for task in ask(server, [number])]
            elif kind == "leave" and asked and not (task := asked[number % len(asked)][1]).done():
                left.add(task)
                task.cancel()
            elif kind == "tick":
                await asyncio.sleep(0)
            elif kind == "open":
                model.gate.set()
        await asyncio.sleep(0)
        if ending == "cancel":
            serving.cancel()
        stopping = asyncio.create_task(server.stop(drain=ending == "drain"))
        await asyncio.sleep(0)
        model.gate.set()
        await asyncio.gather(serving, stopping, *(task for _, task in asked), return_exceptions=True)
        for number, task in asked:
            if task.cancelled():
                assert task in left
            elif task.exception() is None:
                assert task.result() == 2 * number
            elif isinstance(task.exception(), ValueError):
                assert number < 0
            else:
                assert isinstance(task.exception(), StoppedError | TooManyRequestsError)

    run(main)


# test_batch_processor


def test_a_full_buffer_is_encoded_in_order() -> None:
    engine = FakeEngine()
    processor = BatchProcessor(engine, max_batch_size=3)
    assert processor.add("a") is processor.add("b") is None and len(processor) == 2
    vectors = processor.add("c")
    assert vectors is not None and engine.batches == [["a", "b", "c"]]
    np.testing.assert_array_equal(np.stack(vectors), FakeEngine().encode_batch(["a", "b", "c"]))
    processor.add("d")
    assert len(processor.flush()) == 1 and processor.flush() == [] and len(engine.batches) == 2
    processor.add("e")
    assert processor.clear() == ["e"] and len(processor) == 0


def test_a_failing_engine_loses_no_text() -> None:
    engine = FakeEngine(poison="bad")
    processor = BatchProcessor(engine, max_batch_size=2)
    processor.add("good")
    with pytest.raises(RuntimeError, match="poisoned"):
        processor.add("bad")
    with pytest.raises(RuntimeError, match="poisoned"):
        processor.add("third")
    assert len(processor) == 3
    engine.poison = ""
    engine.batches.clear()
    assert len(processor.flush()) == 3
    assert [len(batch) for batch in engine.batches] == [2, 1]


def test_a_bad_text_is_refused_when_it_is_added() -> None:
    processor = BatchProcessor(FakeEngine(max_text_bytes=3))
    with pytest.raises(InvalidInputError, match="not int"):
        processor.add(3)  # type: ignore[arg-type]
    with pytest.raises(errors.InputTooLargeError):
        processor.add("abcd")
    assert len(processor) == 0
    with pytest.raises(InvalidOptionError):
        BatchProcessor(FakeEngine(), max_batch_size=0)


def test_a_wrong_number_of_vectors_is_an_error() -> None:
    class Short:
        def encode_batch(self, texts: Sequence[str]) -> npt.NDArray[Any]:
            return np.zeros((1, 2))

    processor = BatchProcessor(Short(), max_batch_size=2)
    processor.add("a")
    with pytest.raises(ModelError, match="1 vectors for 2 texts"):
        processor.add("b")
    assert len(processor) == 2


def test_threads_lose_nothing() -> None:
    processor = BatchProcessor(FakeEngine(), max_batch_size=7)
    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(lambda number: len(processor.add(str(number)) or []), range(400)))
    assert sum(counts) + len(processor.flush()) == 400
