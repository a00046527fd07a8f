"""AsyncLLMEngine: an LLMEngine with a thread that steps it, for programs with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from archerfish.config import EngineConfig
from archerfish.engine.llm_engine import LLMEngine, Message, Prompt
from archerfish.engine.outputs import RequestOutput, TextDelta
from archerfish.errors import StoppedError
from archerfish.params import SamplingParams


class AsyncLLMEngine:
    """LLMEngine for asyncio. Give an engine, or a model's name and options to make one; `close` closes only one that it made.

    All that one step brings reaches an event loop in one wake-up.
    """

    def __init__(self, engine: LLMEngine | EngineConfig | str, **options: Any) -> None:
        self._is_owner = not isinstance(engine, LLMEngine)
        self.engine = engine if isinstance(engine, LLMEngine) else LLMEngine(engine, **options)
        self._outbox: deque[tuple[asyncio.Queue[TextDelta | None], TextDelta | None]] = deque()
        self._open: dict[asyncio.Queue[TextDelta | None], str] = {}  # with the id of its request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=run, args=(self.engine, self._is_closing), name="archerfish-engine", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        if hasattr(self, "_is_closing"):
            self._is_closing.set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[TextDelta]:
        """What an answer gains, as it comes. Leaving the loop, or being cancelled, aborts the request."""
        loop = self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TextDelta | None] = asyncio.Queue()

        def post(delta: TextDelta) -> None:
            self._outbox.append((queue, delta))
            if len(self._outbox) == 1:
                loop.call_soon_threadsafe(self._drain)

        request = await asyncio.to_thread(self.engine.requests.make, prompt, sampling_params, listener=post, **options)
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
                yield delta
        finally:
            del self._open[queue]
            if num_open:
                self.engine.abort(request_id)

    def _drain(self) -> None:
        while self._outbox:
            queue, delta = self._outbox.popleft()
            queue.put_nowait(delta)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """The whole answer."""
        result: RequestOutput | None = None
        async for delta in self.stream(prompt, sampling_params, **options):
            result = delta.output
        assert result is not None  # the last delta of a request carries all of it
        return result

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The answer to a conversation."""
        prompt = await asyncio.to_thread(self.engine.render_chat, messages)
        params = self.engine.chat_template.stopping(sampling_params or self.engine.get_default_sampling_params())
        return await self.generate(prompt, params, **options)

    async def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[TextDelta]:
        """The answer to a conversation as it comes."""
        prompt = await asyncio.to_thread(self.engine.render_chat, messages)
        params = self.engine.chat_template.stopping(sampling_params or self.engine.get_default_sampling_params())
        async for delta in self.stream(prompt, params, **options):
            yield delta

    async def close(self) -> None:
        """Abort what runs here, end the streams that wait, stop the thread, and close the engine, unless it was given."""
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
