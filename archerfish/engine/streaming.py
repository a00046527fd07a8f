"""StreamingInference: many requests at once through the step pipeline, answers as they come.

While one step computes, the next one is planned and queued with places for the tokens that the first will choose: that is all
the prefetching there is, and it changes no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from archerfish.config import EngineConfig
from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine, Prompt
from archerfish.engine.outputs import RequestOutput, TextDelta
from archerfish.errors import InvalidOptionError
from archerfish.params import SamplingParams


@dataclass(frozen=True)
class PrefetchConfig:
    """max_prefetch: steps that are launched before the one before them is taken in; 1, or 0 for one after the other."""

    max_prefetch: int = 1

    def __post_init__(self) -> None:
        if self.max_prefetch not in (0, 1):
            raise InvalidOptionError(f"max_prefetch must be 0 or 1, not {self.max_prefetch!r}.")


@dataclass(frozen=True)
class InferenceRequest:
    """A prompt and what is wanted of it. options: as `add_request` takes them (priority, deadline_s, namespace, request_id)."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class StreamingInference:
    """Runs batches of requests on an engine, or on one made from a model's name and options; `async with` closes it."""

    def __init__(
        self, engine: AsyncLLMEngine | LLMEngine | EngineConfig | str, prefetch: PrefetchConfig | None = None, **options: Any
    ) -> None:
        self.engine = engine if isinstance(engine, AsyncLLMEngine) else AsyncLLMEngine(engine, **options)
        if prefetch is not None:
            self.engine.engine.configure(pipeline_depth=prefetch.max_prefetch)

    async def batch_infer(self, requests: Sequence[InferenceRequest]) -> list[RequestOutput]:
        """All answers, in the order of the requests, which join and leave the batch step by step.

        One that is wrong in itself is refused with an error, and then none of the others goes on.
        """
        tasks = [asyncio.ensure_future(self._infer(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)

    async def _infer(self, request: InferenceRequest) -> RequestOutput:
        return await self.engine.generate(request.prompt, request.sampling_params, **request.options)

    async def stream(self, requests: Sequence[InferenceRequest]) -> AsyncIterator[tuple[int, TextDelta]]:
        """What the answers gain as it comes, each piece with the place of its request. Leaving the loop aborts what is left."""
        arrived: asyncio.Queue[tuple[int, TextDelta] | BaseException | None] = asyncio.Queue()

        async def follow(place: int, request: InferenceRequest) -> None:
            try:
                async for delta in self.engine.stream(request.prompt, request.sampling_params, **request.options):
                    arrived.put_nowait((place, delta))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        tasks = [asyncio.ensure_future(follow(place, request)) for place, request in enumerate(requests)]
        num_open = len(tasks)
        try:
            while num_open:
                found = await arrived.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    num_open -= 1
                else:
                    yield found
        finally:
            await end_all(tasks)

    async def close(self) -> None:
        await self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until its requests are aborted."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
