"""Random arrivals, departures, failures and stops; whatever happens, every predict ends exactly once."""

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.compat.batch_server import BatchInferenceServer
from archerfish.errors import OverloadedError, StoppedError

from .loops import run

Step = tuple[str, int]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 9)),
        st.tuples(st.just("many"), st.integers(0, 6)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.just("tick"), st.integers(1, 5)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    max_size=40,
)


class Flaky:
    """Fails for numbers that end in 3, gives too few results for a batch that ends in 7, and waits for permits."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.free = False

    def generate_batch(self, inputs: Sequence[int]) -> list[int]:
        if not self.free:
            self.permits.acquire(timeout=20)
        if any(number % 10 == 3 for number in inputs):
            raise ValueError("ends in 3")
        if inputs[-1] % 10 == 7:
            return []
        return [2 * number for number in inputs]

    def release_all(self) -> None:
        self.free = True
        self.permits.release(1000)


class Simulation:
    def __init__(self, batch: int, queue: int, ending: str) -> None:
        self.model = Flaky()
        self.server = BatchInferenceServer[int, int](self.model, max_batch_size=batch, max_wait_time=0, max_queue_size=queue)
        self.ending = ending
        self.asked: list[tuple[list[int], asyncio.Task[list[int]]]] = []
        self.left: set[asyncio.Task[list[int]]] = set()
        self.ended: list[asyncio.Task[list[int]]] = []

    def ask(self, numbers: list[int]) -> None:
        task = asyncio.create_task(self.server.predict_many(numbers))
        task.add_done_callback(self.ended.append)
        self.asked.append((numbers, task))

    async def play(self, plan: Sequence[Step]) -> None:
        serving = asyncio.create_task(self.server.start())
        for kind, number in plan:
            if kind == "ask":
                self.ask([number])
            elif kind == "many":
                self.ask([random.Random(number).randrange(100) for _ in range(number)])
            elif kind == "leave" and self.asked:
                _, task = self.asked[number % len(self.asked)]
                if not task.done():
                    self.left.add(task)
                    task.cancel()
            elif kind == "tick":
                for _ in range(number):
                    await asyncio.sleep(0)
            elif kind == "release":
                self.model.permits.release()
        await self.end(serving)

    async def end(self, serving: asyncio.Task[None]) -> None:
        if self.ending == "cancel":
            await asyncio.sleep(0)
            serving.cancel()
            self.model.release_all()
        else:
            stopping = asyncio.create_task(self.server.stop(drain=self.ending == "drain"))
            await asyncio.sleep(0)
            self.model.release_all()
            await stopping
        await asyncio.gather(serving, *(task for _, task in self.asked), return_exceptions=True)
        self.check()

    def check(self) -> None:
        assert sorted(map(id, self.ended)) == sorted(id(task) for _, task in self.asked)
        assert self.server.queue_depth() == 0
        for numbers, task in self.asked:
            if task.cancelled():
                assert task in self.left
            elif task.exception() is None:
                assert task.result() == [2 * number for number in numbers]
            elif isinstance(task.exception(), ValueError):
                assert any(number % 10 == 3 for number in numbers)
            elif not isinstance(task.exception(), StoppedError | OverloadedError):
                assert any(number % 10 == 7 for number in numbers), task.exception()


@pytest.mark.no_cover
@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 5), st.integers(6, 20), st.sampled_from(["drain", "discard", "cancel"]))
def test_every_predict_ends_exactly_once(plan: list[Step], batch: int, queue: int, ending: str) -> None:
    run(lambda: Simulation(batch, queue, ending).play(plan))
