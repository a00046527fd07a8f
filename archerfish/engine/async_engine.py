"""AsyncLLMEngine: an LLMEngine with a thread that steps it, for programs with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, Self

from archerfish.config import EngineConfig
from archerfish.engine.llm import LLM, plain_prompt
from archerfish.engine.llm_engine import LLMEngine, Message, Prompt
from archerfish.engine.outputs import CompletionOutput, RequestOutput, TextDelta, split_reasoning
from archerfish.engine.vllm_options import as_options
from archerfish.errors import StoppedError
from archerfish.params import SamplingParams
from archerfish.sequence import Request


class PendingAnswer(Coroutine[Any, Any, RequestOutput]):
    """The result of AsyncLLMEngine.generate: iterated over, it grows as the answer does; awaited, it is the whole
    answer."""

    def __init__(self, start: Callable[[bool], AsyncGenerator[RequestOutput, None]]) -> None:
        """start: makes the results, all of them or only the last."""
        self._start = start

    @cached_property
    def _results(self) -> AsyncGenerator[RequestOutput, None]:
        return self._start(False)

    def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        return self._results

    def __anext__(self) -> Any:
        return self._results.__anext__()

    def aclose(self) -> Any:
        """Abort the request, unless it has ended."""
        return self._results.aclose()

    async def _last(self) -> RequestOutput:
        async with aclosing(self._start(True)) as results:
            return await anext(results)

    @cached_property
    def _whole(self) -> Coroutine[Any, Any, RequestOutput]:
        return self._last()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._whole.__await__()

    def send(self, value: Any) -> Any:
        return self._whole.send(value)

    def throw(self, *error: Any) -> Any:
        return self._whole.throw(*error)

    def close(self) -> None:
        self._whole.close()


class AsyncLLMEngine:
    """LLMEngine for asyncio. Give an engine, or a model's name and options to make one; `close` closes only one that it
    made.

    All that one step brings reaches an event loop in one wake-up.
    """

    def __init__(self, engine: LLMEngine | EngineConfig | str, **options: Any) -> None:
        self._is_owner = not isinstance(engine, LLMEngine)
        self.engine = engine if isinstance(engine, LLMEngine) else LLM(engine, **options)
        self._outbox: deque[tuple[asyncio.Queue[TextDelta | None], TextDelta | None]] = deque()
        self._open: dict[asyncio.Queue[TextDelta | None], str] = {}  # with the id of its request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=run, args=(self.engine, self._is_closing), name="archerfish-engine", daemon=True
        )
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> Self:
        """An engine of AsyncEngineArgs, or of a mapping of options."""
        options = as_options(engine_args)
        return cls(options.pop("model", EngineConfig().model), **options)

    def __del__(self) -> None:
        if hasattr(self, "_is_closing"):
            self._is_closing.set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[TextDelta]:
        """What an answer gains, as it comes. Leaving the loop, or being cancelled, aborts the request."""
        async with aclosing(self._deltas(prompt, sampling_params, options)) as deltas:
            async for _, delta in deltas:
                yield delta

    async def _deltas(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> AsyncGenerator[tuple[Request, TextDelta], None]:
        """The request of a prompt, with each piece of its answer."""
        loop = self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TextDelta | None] = asyncio.Queue()

        def post(delta: TextDelta) -> None:
            self._outbox.append((queue, delta))
            if len(self._outbox) == 1:
                loop.call_soon_threadsafe(self._drain)

        request = await asyncio.to_thread(self.engine.requests.make, prompt, params, listener=post, **options)
        if self._is_closing.is_set():
            raise StoppedError("This engine has been closed.")
        self.engine.submit(request)
        num_open, request_id = request.params.n, request.request_id
        self._open[queue] = request_id
        try:
            while num_open:
                delta = await queue.get()
                if delta is None:
                    raise StoppedError("The engine was closed before the answer was complete.")
                num_open -= delta.finish_reason is not None
                yield request, delta
        finally:
            del self._open[queue]
            if num_open:
                self.engine.abort(request_id)

    def _drain(self) -> None:
        while self._outbox:
            queue, delta = self._outbox.popleft()
            queue.put_nowait(delta)

    def generate(
        self,
        prompt: Prompt | dict[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> PendingAnswer:
        """The answer so far, again and again (`async for`), or the whole answer (`await`).

        By `SamplingParams.output_kind` an item has all of the answer so far, only what is new, or there is one, the
        last.
        """
        options["request_id"] = request_id
        return PendingAnswer(lambda is_whole: self._results(plain_prompt(prompt), sampling_params, options, is_whole))

    async def _results(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any], is_whole: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        so_far: dict[int, CompletionOutput] = {}
        async with aclosing(self._deltas(prompt, params, options)) as deltas:
            async for request, delta in deltas:
                kind = "final_only" if is_whole else request.params.output_kind
                if delta.output is not None and kind != "delta":
                    yield delta.output
                elif kind != "final_only":
                    new = CompletionOutput(
                        delta.index, delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason
                    )
                    new.logprobs = delta.logprobs
                    old = so_far.get(delta.index)
                    if old is not None and kind == "cumulative":
                        new.text, new.token_ids = old.text + new.text, old.token_ids + new.token_ids
                        new.logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
                    so_far[delta.index] = new
                    outputs = [new] if kind == "delta" else [so_far[index] for index in sorted(so_far)]
                    yield RequestOutput(
                        request.request_id,
                        request.collector.prompt,
                        list(request.prompt_token_ids),
                        outputs,
                        finished=delta.output is not None,
                    )

    async def abort(self, request_id: str) -> bool:
        """End a request; what waits for it gets what there is. False if it is not there any more."""
        return await asyncio.to_thread(self.engine.abort, request_id)

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The answer to a conversation."""
        prompt = await asyncio.to_thread(self.engine.render_chat, messages)
        params = self.engine.chat_template.stopping(sampling_params or self.engine.get_default_sampling_params())
        return split_reasoning(self.engine, [await self.generate(prompt, params, **options)], [params])[0]

    async def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[TextDelta]:
        """The answer to a conversation as it comes."""
        prompt = await asyncio.to_thread(self.engine.render_chat, messages)
        params = self.engine.chat_template.stopping(sampling_params or self.engine.get_default_sampling_params())
        async for delta in self.stream(prompt, params, **options):
            yield delta

    async def close(self) -> None:
        """Abort what runs here, end the streams that wait, stop the thread, and close the engine, unless it was
        given."""
        self._is_closing.set()
        if self._is_owner:
            await asyncio.to_thread(self.engine.close)
        else:
            await asyncio.to_thread(self._leave, [*self._open.values()])
        await asyncio.to_thread(self._thread.join)
        self._drain()
        for queue in self._open:
            queue.put_nowait(None)

    def _leave(self, request_ids: Sequence[str]) -> None:
        """Abort requests, and take in the steps that still compute them: no other thread may step the engine."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        self._thread.join()
        for _ in range(self.engine.config.pipeline_depth + 1):
            if self.engine.has_work:
                self.engine.step()


def run(engine: LLMEngine, is_closing: threading.Event) -> None:
    """Step an engine until it is to be closed. The thread holds no AsyncLLMEngine, so that one can be deleted."""
    while not is_closing.is_set():
        if engine.wait_for_work(engine.config.schedule_interval_ms / 1000):
            engine.step()
        else:
            engine.use_idle_time()
