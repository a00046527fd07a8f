"""BatchInferenceServer: callers that arrive together share one call of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from archerfish.errors import CallerError, InvalidOptionError, ModelError, StoppedError, TooManyRequestsError

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
NO_FUTURE_CARRIES = (StopIteration, StopAsyncIteration)


class BatchModel(Protocol[In_contra, Out_co]):
    """A model that gives one result for each input, in their order: LLMEngine, LLM, ArrowEngine, or one of the
    caller's."""

    def generate_batch(self, inputs: Sequence[In_contra], /) -> Sequence[Out_co]: ...


@dataclass(frozen=True)
class _Failed:
    """The error of one input. A model may also give exceptions as results, so errors need a type of their own."""

    error: Exception


class _Item(Generic[In, Out]):
    def __init__(self, value: In) -> None:
        loop = asyncio.get_running_loop()
        self.value = value
        self.arrived = loop.time()
        self.future = loop.create_future()

    def end(self, result: Out | _Failed) -> None:
        if self.future.done():  # the caller has left
            return
        if isinstance(result, _Failed):
            self.future.set_exception(result.error)
        else:
            self.future.set_result(result)


class BatchInferenceServer(Generic[In, Out]):
    """Dynamic batching in front of a model, which runs in a thread of its own.

    A batch starts when `max_batch_size` inputs wait or the first one has waited `max_wait_time` seconds. Every
    `predict` ends exactly once: with its result, with the model's error for that input, with StoppedError, or by the
    caller's cancellation. When a batch fails, its inputs are computed one by one. A server runs in one event loop and
    is started once.
    """

    def __init__(
        self,
        model: BatchModel[In, Out] | Callable[[Sequence[In]], Sequence[Out]],
        max_batch_size: int = 8,
        max_wait_time: float = 0.01,
        max_queue_size: int = 8192,
    ) -> None:
        """`model` has `generate_batch(inputs)` or is itself such a function."""
        if max_batch_size < 1 or max_queue_size < 1 or not max_wait_time >= 0:
            raise InvalidOptionError("max_batch_size and max_queue_size must be at least 1, max_wait_time at least 0.")
        generate_batch = getattr(model, "generate_batch", model)
        if not callable(generate_batch):
            raise InvalidOptionError(
                f"A model has generate_batch(inputs) or is callable; {type(model).__name__} is neither."
            )
        self.max_batch_size = max_batch_size
        self.max_wait_time = max_wait_time
        self.max_queue_size = max_queue_size
        self._generate_batch: Callable[[Sequence[In]], Sequence[Out]] = generate_batch
        self._queue: asyncio.Queue[_Item[In, Out] | None] = asyncio.Queue()  # None ends the loop of `start`
        self._finished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_started = self._is_stopping = self._is_discarding = False

    @property
    def running(self) -> bool:
        """Whether the loop of `start` takes inputs."""
        return self._is_started and not self._is_stopping

    async def start(self) -> None:
        """Serve until `stop`. Run it as a task; cancelling the task stops the server at once."""
        if self._is_started:
            raise CallerError("This batch server has been started already.")
        self._is_started = True
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archerfish-batch")
        try:
            while batch := await self._collect_batch():
                await self._process_batch(batch, thread)
        finally:
            self._is_stopping = True
            self._fail_queue()
            thread.shutdown(wait=False, cancel_futures=True)
            self._finished.set()

    async def stop(self, drain: bool = True) -> None:
        """Refuse new inputs and wait for the end. With `drain` waiting inputs are computed, else they get StoppedError.

        A batch that is being computed is finished and delivered in both cases.
        """
        self._is_stopping = True
        if not drain or not self._is_started:
            self._is_discarding = True
            self._fail_queue()
        self._queue.put_nowait(None)
        if self._is_started:
            await self._finished.wait()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.start())
        await asyncio.sleep(0)  # lets `start` begin
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._task is not None
        await self.stop(drain=error is None)
        await self._task

    async def predict(self, input_data: In) -> Out:
        """The model's result for one input. Before `start` it waits for the server to be started."""
        if self._is_stopping:
            raise StoppedError("This batch server has been stopped.")
        if self._queue.qsize() >= self.max_queue_size:
            raise TooManyRequestsError(f"{self._queue.qsize()} inputs wait; the limit is {self.max_queue_size}.")
        item: _Item[In, Out] = _Item(input_data)
        self._queue.put_nowait(item)
        result: Out = await item.future
        return result

    async def _collect_batch(self) -> list[_Item[In, Out]]:
        """The inputs of the next batch; empty when the server has been stopped and no input is left."""
        batch: list[_Item[In, Out]] = []
        deadline = None
        try:
            while len(batch) < self.max_batch_size:
                async with asyncio.timeout_at(deadline):
                    item = await self._queue.get()
                if item is None:
                    if batch:
                        self._queue.put_nowait(None)
                    break
                batch.append(item)
                deadline = batch[0].arrived + self.max_wait_time
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._fail(batch)
            raise
        return batch

    async def _process_batch(self, batch: list[_Item[In, Out]], thread: ThreadPoolExecutor) -> None:
        present = [item for item in batch if not item.future.done()]
        try:
            if present and not self._is_discarding:
                inputs = [item.value for item in present]
                results = await asyncio.get_running_loop().run_in_executor(thread, self._compute, inputs)
                for item, result in zip(present, results, strict=True):
                    item.end(result)
        finally:
            self._fail(present)

    def _compute(self, inputs: list[In]) -> list[Out | _Failed]:
        """In the thread of the model: the result or the error of each input."""
        try:
            results = list(self._generate_batch(inputs))
            if len(results) != len(inputs):
                raise ModelError(f"The model gave {len(results)} results for {len(inputs)} inputs.")
            return [*results]
        except BaseException as error:  # an error that left this thread would leave callers without an answer
            if len(inputs) == 1:
                return [_Failed(as_exception(error))]
        return [result for one in inputs for result in self._compute([one])]

    def _fail_queue(self) -> None:
        items = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        self._fail([item for item in items if item is not None])

    def _fail(self, items: Sequence[_Item[In, Out]]) -> None:
        for item in items:
            item.end(_Failed(StoppedError("This batch server was stopped before it had a result for this input.")))


def as_exception(error: BaseException) -> Exception:
    """An error that a future can carry and that does not end the caller's event loop."""
    if isinstance(error, Exception) and not isinstance(error, NO_FUTURE_CARRIES):
        return error
    wrapped = ModelError(f"The model raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
