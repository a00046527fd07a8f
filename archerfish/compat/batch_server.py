"""BatchInferenceServer: callers that arrive together share one call of the model."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from archerfish.errors import CallerError, InputTooLargeError, InvalidOptionError, ModelError, OverloadedError, StoppedError
from archerfish.observe.metrics import SIZE_BUCKETS, MetricRegistry

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class BatchModel(Protocol[In_contra, Out_co]):
    """What a BatchInferenceServer runs: as many results as inputs, in their order."""

    def generate_batch(self, inputs: Sequence[In_contra], /) -> Sequence[Out_co]: ...


class _Item(Generic[In, Out]):
    __slots__ = ("arrived", "future", "value")

    def __init__(self, value: In, future: asyncio.Future[Out], arrived: float) -> None:
        self.value = value
        self.future = future
        self.arrived = arrived


class _Failure:
    """The error of one input, told apart from a result that happens to be an exception."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class BatchInferenceServer(Generic[In, Out]):
    """Dynamic batching in front of a model.

    `model` has `generate_batch(inputs)` or is itself such a function; it runs in one thread of its own. A batch starts when
    `max_batch_size` inputs wait or the first has waited `max_wait_time` seconds; while one is computed the next one collects.
    Every `predict` ends exactly once: with its result, with the model's error for that input, with StoppedError, or by the
    caller's own cancellation. A batch that fails is split until the input at fault stands alone.

    A server lives in the event loop that first uses it and is not restarted once it has stopped. `predict` before `start()`
    waits for it.
    """

    def __init__(
        self,
        model: BatchModel[In, Out] | Callable[[Sequence[In]], Sequence[Out]],
        max_batch_size: int = 8,
        max_wait_time: float = 0.01,
        max_queue_size: int = 8192,
        *,
        name: str = "default",
        registry: MetricRegistry | None = None,
    ) -> None:
        if max_batch_size < 1 or max_queue_size < 1 or not max_wait_time >= 0:
            raise InvalidOptionError("max_batch_size and max_queue_size must be at least 1, max_wait_time at least 0.")
        generate_batch: Callable[[Sequence[In]], Sequence[Out]] | None = getattr(model, "generate_batch", None)
        if generate_batch is None and callable(model):
            generate_batch = model
        if generate_batch is None:
            raise InvalidOptionError(f"A model has generate_batch(inputs) or is callable; {type(model).__name__} is neither.")
        self.name = name
        self.max_batch_size = max_batch_size
        self.max_wait_time = max_wait_time
        self.max_queue_size = max_queue_size
        self._generate_batch = generate_batch
        self._queue: OrderedDict[_Item[In, Out], None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._stopping = False
        self._discarding = False
        self._meters = _Meters(registry or MetricRegistry(), name)

    @property
    def running(self) -> bool:
        """Whether the loop of `start()` is taking work."""
        return self._started and not self._stopping

    def queue_depth(self) -> int:
        """How many inputs wait for a batch."""
        return len(self._queue)

    async def start(self) -> None:
        """Serve until `stop()`; run it as a task. Cancelling that task stops the server at once."""
        self._bind_loop()
        if self._started:
            raise CallerError(f"The batch server {self.name!r} has been started already.")
        if self._stopping:
            return
        self._started = True
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"archerfish-{self.name}")
        clean = False
        try:
            await self._serve(executor)
            clean = True
        finally:
            self._stopping = self._discarding = True
            self._fail_queue()
            # After a cancellation the model may still be computing: its thread ends with that call, and is not waited for.
            executor.shutdown(wait=clean, cancel_futures=True)
            self._finished.set()

    async def stop(self, drain: bool = True) -> None:
        """Refuse new work and wait for the end. With `drain` what waits is still computed, else it gets StoppedError.

        A batch that is being computed is finished and delivered either way.
        """
        self._bind_loop()
        self._stopping = True
        if not drain or not self._started:
            self._discarding = True
            self._fail_queue()
        self._wake.set()
        if self._started:
            await self._finished.wait()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.start(), name=f"batch server {self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await asyncio.sleep(0)  # lets start() begin, so that stop() has something to drain
        await self.stop(drain=error is None)
        await self._task

    async def predict(self, input_data: In) -> Out:
        """The model's result for one input."""
        return (await self.predict_many((input_data,)))[0]

    async def predict_many(self, inputs: Sequence[In]) -> list[Out]:
        """Results for several inputs, which are admitted or refused together; the first error ends them all."""
        items = self._admit(inputs)
        try:
            return [await item.future for item in items]
        finally:
            self._leave(items)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise CallerError(f"The batch server {self.name!r} belongs to another event loop.")
        return loop

    def _admit(self, inputs: Sequence[In]) -> list[_Item[In, Out]]:
        loop = self._bind_loop()
        if self._stopping:
            raise StoppedError(f"The batch server {self.name!r} has been stopped.")
        if len(inputs) > self.max_queue_size:
            raise InputTooLargeError(f"{len(inputs)} inputs at once are more than the queue takes ({self.max_queue_size}).")
        was_empty = not self._queue
        if len(self._queue) + len(inputs) > self.max_queue_size:
            self._meters.refused.add(len(inputs), queue=self.name)
            raise OverloadedError(f"{len(self._queue)} of at most {self.max_queue_size} inputs wait; {len(inputs)} do not fit.")
        now = time.monotonic()
        items: list[_Item[In, Out]] = [_Item(value, loop.create_future(), now) for value in inputs]
        self._queue.update((item, None) for item in items)
        self._note_depth()
        if self._queue and (was_empty or len(self._queue) >= self.max_batch_size):
            self._wake.set()
        return items

    def _leave(self, items: Sequence[_Item[In, Out]]) -> None:
        """The caller is gone: what it still has in the queue is dropped, and no error of its own is reported as unseen."""
        for item in items:
            self._queue.pop(item, None)
            if not item.future.done():
                item.future.cancel()
            elif not item.future.cancelled():
                item.future.exception()
        self._note_depth()

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        batch: list[_Item[In, Out]] = []
        try:
            while True:
                if not batch:
                    if not await self._wait_until_due():
                        return
                    batch = self._take()
                    computing = self._submit(executor, batch)
                results = await computing
                finished, batch = batch, []
                try:
                    # The model gets its next batch before anybody handles the results of this one.
                    if self._is_due():
                        batch = self._take()
                        computing = self._submit(executor, batch)
                finally:
                    _deliver(finished, results)
        finally:
            for item in batch:
                _fail(item, StoppedError(f"The batch server {self.name!r} was stopped while it computed."))

    async def _wait_until_due(self) -> bool:
        """Sleep until a batch should start; false when there is nothing left to do."""
        loop = asyncio.get_running_loop()
        while not self._is_due():
            if self._stopping and not self._queue:
                return False
            self._wake.clear()
            timer = loop.call_later(self._window_left(), self._wake.set) if self._queue else None
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        return True

    def _is_due(self) -> bool:
        if not self._queue:
            return False
        return self._stopping or len(self._queue) >= self.max_batch_size or self._window_left() <= 0

    def _window_left(self) -> float:
        first = next(iter(self._queue))
        return first.arrived + self.max_wait_time - time.monotonic()

    def _take(self) -> list[_Item[In, Out]]:
        batch = [self._queue.popitem(last=False)[0] for _ in range(min(self.max_batch_size, len(self._queue)))]
        now = time.monotonic()
        self._meters.wait.observe_many([now - item.arrived for item in batch], queue=self.name)
        self._meters.batches.add(queue=self.name)
        self._meters.size.observe(len(batch), queue=self.name)
        self._note_depth()
        return batch

    def _submit(self, executor: ThreadPoolExecutor, batch: list[_Item[In, Out]]) -> asyncio.Future[list[Out | _Failure]]:
        return asyncio.get_running_loop().run_in_executor(executor, self._compute, batch)

    def _compute(self, batch: list[_Item[In, Out]]) -> list[Out | _Failure]:
        """In the worker thread: the result or the failure of each input."""
        began = time.perf_counter()
        try:
            return self._results(batch)
        finally:
            self._meters.compute.observe(time.perf_counter() - began, queue=self.name)

    def _results(self, batch: list[_Item[In, Out]]) -> list[Out | _Failure]:
        try:
            results = list(self._generate_batch([item.value for item in batch]))
            if len(results) != len(batch):
                raise ModelError(f"The model gave {len(results)} results for {len(batch)} inputs.")
            return [*results]
        except BaseException as error:  # nothing may leave this thread and strand the callers
            failure = _Failure(_presentable(error))
        if len(batch) == 1:
            self._meters.failures.add(queue=self.name)
            return [failure]
        if self._discarding:
            return [_Failure(StoppedError(f"The batch server {self.name!r} has been stopped.")) for _ in batch]
        middle = len(batch) // 2
        return [result for part in (batch[:middle], batch[middle:]) for result in self._results_of_present(part)]

    def _results_of_present(self, part: list[_Item[In, Out]]) -> list[Out | _Failure]:
        """Like `_results`, without the inputs whose callers left in the meantime."""
        present = [item for item in part if not item.future.done()]
        results = dict(zip(present, self._results(present), strict=True)) if present else {}
        return [results.get(item, _GONE) for item in part]

    def _fail_queue(self) -> None:
        while self._queue:
            item, _ = self._queue.popitem(last=False)
            _fail(item, StoppedError(f"The batch server {self.name!r} was stopped before it came to this input."))
        self._note_depth()

    def _note_depth(self) -> None:
        self._meters.depth.set(len(self._queue), queue=self.name)


class _Meters:
    def __init__(self, registry: MetricRegistry, name: str) -> None:
        labels = ("queue",)
        self.batches = registry.counter("archerfish_batches_total", "Batches given to the model.", labels)
        self.failures = registry.counter("archerfish_failed_inputs_total", "Inputs for which the model failed.", labels)
        self.refused = registry.counter("archerfish_refused_inputs_total", "Inputs refused because the queue was full.", labels)
        self.size = registry.histogram("archerfish_batch_size", "Inputs in a batch.", labels, SIZE_BUCKETS)
        self.wait = registry.histogram("archerfish_queue_wait_seconds", "Wait of an input for its batch.", labels)
        self.compute = registry.histogram("archerfish_compute_seconds", "Time of the model for a batch.", labels)
        self.depth = registry.gauge("archerfish_queue_depth", "Inputs that wait.", labels)
        self.depth.set(0, queue=name)


_GONE = _Failure(StoppedError("The caller left."))


def _presentable(error: BaseException) -> Exception:
    """An error that a future can carry: no StopIteration, and nothing that would end the event loop of the caller."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = ModelError(f"The model raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _deliver(items: Sequence[_Item[Any, Out]], results: Sequence[Out | _Failure]) -> None:
    for item, result in zip(items, results, strict=True):
        if isinstance(result, _Failure):
            _fail(item, result.error)
        elif not item.future.done():
            item.future.set_result(result)


def _fail(item: _Item[Any, Any], error: Exception) -> None:
    if not item.future.done():
        item.future.set_exception(error)
