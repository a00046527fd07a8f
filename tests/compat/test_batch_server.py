import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from archerfish.compat.batch_server import BatchInferenceServer
from archerfish.errors import CallerError, InputTooLargeError, InvalidOptionError, ModelError, OverloadedError, StoppedError
from archerfish.observe import MetricRegistry

from .loops import LIMIT_S, run, until


class Doubler:
    """Doubles numbers; a negative one fails its batch; blocks while its gate is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
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


Server = BatchInferenceServer[int, int]


def test_as_the_seed_uses_it() -> None:
    async def main() -> None:
        server = BatchInferenceServer(Doubler())
        task = asyncio.create_task(server.start())
        assert await server.predict(21) == 42
        await server.stop()
        await task

    run(main)


def test_a_function_serves_as_a_model() -> None:
    async def main() -> None:
        async with BatchInferenceServer[str, int](lambda texts: [len(text) for text in texts], max_wait_time=0) as server:
            assert await server.predict("four") == 4

    run(main)


def test_callers_share_a_batch_and_results_keep_their_order() -> None:
    async def main() -> None:
        model = Doubler()
        async with Server(model, max_batch_size=4) as server:
            assert await asyncio.gather(*(server.predict(n) for n in range(10))) == [2 * n for n in range(10)]
        assert [len(batch) for batch in model.batches] == [4, 4, 2]

    run(main)


def test_a_full_batch_does_not_wait() -> None:
    async def main() -> None:
        async with Server(Doubler(), max_batch_size=2, max_wait_time=3600) as server:
            assert await server.predict_many([1, 2]) == [2, 4]

    run(main)


def test_the_next_batch_collects_while_one_is_computed() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        async with Server(model, max_batch_size=8, max_wait_time=0) as server:
            first = asyncio.create_task(server.predict(0))
            await until(model.entered.is_set)
            rest = [asyncio.create_task(server.predict(n)) for n in range(1, 6)]
            await until(lambda: server.queue_depth() == 5)
            model.gate.set()
            await asyncio.gather(first, *rest)
        assert model.batches == [[0], [1, 2, 3, 4, 5]]

    run(main)


def test_only_the_culprit_gets_the_error() -> None:
    async def main() -> None:
        async with Server(Doubler(), max_batch_size=16) as server:
            answers = await asyncio.gather(*(server.predict(n) for n in (1, 2, -3, 4, 5, -6, 7)), return_exceptions=True)
            assert [a if isinstance(a, int) else str(a) for a in answers] == [
                2, 4, "bad number -3", 8, 10, "bad number -6", 14,
            ]
            assert await server.predict(8) == 16

    run(main)


@pytest.mark.parametrize("results", [[], [1, 2, 3], None, 7])
def test_a_wrong_number_of_results_is_an_error_for_everyone(results: Any) -> None:
    async def main() -> None:
        async with Server(lambda inputs: results, max_batch_size=2) as server:
            answers = await asyncio.gather(server.predict(1), server.predict(2), return_exceptions=True)
            assert all(isinstance(answer, ModelError | TypeError) for answer in answers)

    run(main)


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_errors_that_a_future_cannot_carry_are_wrapped(error: BaseException) -> None:
    def model(inputs: Sequence[int]) -> list[int]:
        raise error

    async def main() -> None:
        async with Server(model) as server:
            with pytest.raises(ModelError, match=type(error).__name__):
                await server.predict(1)

    run(main)


def test_an_error_of_one_input_ends_predict_many_and_frees_the_queue() -> None:
    async def main() -> None:
        model = Doubler()
        async with Server(model, max_batch_size=2, max_wait_time=0) as server:
            with pytest.raises(ValueError, match="bad number -1"):
                await server.predict_many([1, -1, 3, 4, 5, 6, 7, 8])
            assert server.queue_depth() == 0
        assert [7, 8] not in model.batches

    run(main)


def test_callers_that_left_are_not_computed() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        async with Server(model, max_batch_size=8, max_wait_time=0) as server:
            first = asyncio.create_task(server.predict(0))
            await until(model.entered.is_set)
            gone = asyncio.create_task(server.predict(1))
            stays = asyncio.create_task(server.predict(2))
            await until(lambda: server.queue_depth() == 2)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert server.queue_depth() == 1
            first.cancel()
            model.gate.set()
            assert await stays == 4
            assert gone.cancelled()
            await asyncio.gather(first, return_exceptions=True)
        assert model.batches == [[0], [2]]

    run(main)


def test_a_full_queue_refuses_and_recovers() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        registry = MetricRegistry()
        async with Server(model, max_batch_size=1, max_wait_time=0, max_queue_size=2, registry=registry) as server:
            first = asyncio.create_task(server.predict(0))
            await until(model.entered.is_set)
            waiting = asyncio.create_task(server.predict_many([1, 2]))
            await until(lambda: server.queue_depth() == 2)
            with pytest.raises(OverloadedError):
                await server.predict(3)
            with pytest.raises(InputTooLargeError):
                await server.predict_many([1, 2, 3])
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            late = asyncio.create_task(server.predict(4))
            model.gate.set()
            assert list(await asyncio.gather(first, late)) == [0, 8]
        assert registry.counter("archerfish_refused_inputs_total", label_names=("queue",)).value(queue="default") == 1

    run(main)


def test_predict_before_start_waits_for_it() -> None:
    async def main() -> None:
        server = Server(Doubler())
        early = asyncio.create_task(server.predict(1))
        await until(lambda: server.queue_depth() == 1)
        assert not server.running
        async with server:
            assert await early == 2

    run(main)


def test_stop_without_start_ends_those_who_wait() -> None:
    async def main() -> None:
        server = Server(Doubler())
        early = asyncio.create_task(server.predict(1))
        await until(lambda: server.queue_depth() == 1)
        await server.stop()
        with pytest.raises(StoppedError):
            await early
        await server.start()
        with pytest.raises(StoppedError):
            await server.predict(2)

    run(main)


def test_stop_computes_what_waits() -> None:
    async def main() -> None:
        server = Server(Doubler(), max_batch_size=2, max_wait_time=3600)
        task = asyncio.create_task(server.start())
        asking = [asyncio.create_task(server.predict(n)) for n in range(5)]
        await until(lambda: server.queue_depth() > 0)
        await asyncio.gather(server.stop(), server.stop())
        assert await asyncio.gather(*asking) == [0, 2, 4, 6, 8]
        with pytest.raises(StoppedError):
            await server.predict(1)
        await task

    run(main)


def test_stop_without_drain_finishes_only_the_running_batch() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        server = Server(model, max_batch_size=1, max_wait_time=0)
        task = asyncio.create_task(server.start())
        asking = [asyncio.create_task(server.predict(n)) for n in (1, 2, 3)]
        await until(model.entered.is_set)
        stopping = asyncio.create_task(server.stop(drain=False))
        await until(lambda: asking[1].done() and asking[2].done())
        assert not stopping.done()
        model.gate.set()
        await stopping
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert answers[0] == 2
        assert [type(answer) for answer in answers[1:]] == [StoppedError, StoppedError]
        assert model.batches == [[1]]
        await task

    run(main)


def test_stop_without_drain_cuts_the_search_for_a_culprit_short() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        server = Server(model, max_batch_size=64)
        task = asyncio.create_task(server.start())
        asking = asyncio.gather(*(server.predict(-n) for n in range(64)), return_exceptions=True)
        await until(model.entered.is_set)
        stopping = asyncio.create_task(server.stop(drain=False))
        await asyncio.sleep(0)
        model.gate.set()
        await stopping
        assert {type(answer) for answer in await asking} == {StoppedError}
        assert len(model.batches) == 1
        await task

    run(main)


def test_cancelling_start_ends_everyone_at_once() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        server = Server(model, max_batch_size=2, max_wait_time=0)
        task = asyncio.create_task(server.start())
        asking = [asyncio.create_task(server.predict(n)) for n in range(5)]
        await until(lambda: model.entered.is_set() and server.queue_depth() > 0)
        task.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoppedError] * 5
        assert task.cancelled()
        model.gate.set()
        await server.stop()

    run(main)


def test_the_event_loop_ticks_during_a_long_call() -> None:
    async def main() -> None:
        model = Doubler()
        model.gate.clear()
        async with Server(model, max_wait_time=0) as server:
            asking = asyncio.create_task(server.predict(1))
            await until(model.entered.is_set)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not asking.done()
            model.gate.set()
            assert await asking == 2

    run(main)


def test_an_idle_server_does_not_wake_up() -> None:
    async def main() -> None:
        async with Server(Doubler(), max_wait_time=0.0001) as server:
            assert await server.predict(1) == 2
            wake = CountingEvent()
            server._wake.set()
            server._wake = wake
            await until(lambda: wake.waits == 1)
            for _ in range(100):
                await asyncio.sleep(0)
            assert wake.waits == 1
            loop_timers: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            assert [timer.cancelled() for timer in loop_timers].count(False) == 1  # that of `run`

    run(main)


class CountingEvent(asyncio.Event):
    waits = 0

    async def wait(self) -> Any:
        self.waits += 1
        return await super().wait()


def test_misuse_is_named() -> None:
    server = Server(Doubler())

    async def twice() -> None:
        async with server:
            await server.predict(1)
            with pytest.raises(CallerError, match="started already"):
                await server.start()

    run(twice)
    with pytest.raises(CallerError, match="another event loop"):
        asyncio.run(server.predict(1))
    with pytest.raises(InvalidOptionError, match="neither"):
        Server(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="at least 1"):
        Server(Doubler(), max_batch_size=0)


def test_an_error_inside_the_with_block_stops_without_draining() -> None:
    async def main() -> None:
        model = Doubler()
        with pytest.raises(KeyError):
            async with Server(model, max_wait_time=3600) as server:
                asking = asyncio.create_task(server.predict(1))
                await until(lambda: server.queue_depth() == 1)
                raise KeyError
        with pytest.raises(StoppedError):
            await asking
        assert model.batches == []

    run(main)


def test_figures_are_counted() -> None:
    async def main() -> None:
        registry = MetricRegistry()
        async with Server(Doubler(), max_batch_size=4, name="texts", registry=registry) as server:
            await server.predict_many(range(10))
        by_name = {metric.name: metric.samples()[0] for metric in registry if metric.samples()}
        assert by_name["archerfish_batches_total"].value == 3
        assert by_name["archerfish_batch_size"].value == 10
        assert by_name["archerfish_queue_wait_seconds"].count == 10
        assert by_name["archerfish_compute_seconds"].count == 3
        assert by_name["archerfish_queue_depth"].value == 0
        assert by_name["archerfish_queue_depth"].labels == ("texts",)

    run(main)
