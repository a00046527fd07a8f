"""StreamingInference: many requests at once through the step pipeline, answers as they come.

While one step computes, the next one is planned and queued with places for the tokens that the first will choose: that is all
the prefetching there is, and it changes no answer: a token that is not drawn yet has no logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from archerfish.config import EngineConfig
from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine, Prompt
from archerfish.engine.outputs import RequestOutput, TextDelta
from archerfish.errors import InvalidInputError, InvalidOptionError, StoppedError, UnknownOptionError, did_you_mean
from archerfish.params import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
NOT_HERE = ("window_size", "prefetch_threshold")


@dataclass(frozen=True)
class PrefetchConfig:
    """max_prefetch: steps that are launched before the one before them is taken in; 1, or 0 for one after the other."""

    max_prefetch: int = 1

    def __new__(cls, *_: Any, **values: Any) -> Self:
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name in NOT_HERE:
                raise UnknownOptionError(
                    f"{name} does not exist.", hint="A token that is not drawn yet has no logits that could be fetched before."
                )
            if name not in known:
                raise UnknownOptionError(f"Unknown option of prefetching: {name!r}.", hint=did_you_mean(name, known))
        return super().__new__(cls)

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
    """Runs batches of requests on an engine, or on one made from a model's name and options; what it made, `close` closes."""

    def __init__(
        self, engine: AsyncLLMEngine | LLMEngine | EngineConfig | str, prefetch: PrefetchConfig | None = None, **options: Any
    ) -> None:
        self._is_owner = not isinstance(engine, AsyncLLMEngine)
        self.engine = engine if isinstance(engine, AsyncLLMEngine) else AsyncLLMEngine(engine, **options)
        if prefetch is not None:
            self.engine.engine.configure(pipeline_depth=prefetch.max_prefetch)

    async def batch_infer(self, requests: Sequence[InferenceRequest]) -> list[RequestOutput]:
        """All answers, in the order of the requests, which join and leave the batch step by step.

        One that is wrong in itself is refused with an error, and then none of the others goes on.
        """
        tasks = [asyncio.ensure_future(self._infer(request)) for request in checked(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)

    async def _infer(self, request: InferenceRequest) -> RequestOutput:
        return await self.engine.generate(request.prompt, request.sampling_params, **request.options)

    async def get_logits_with_prefetch(self, prompt: Prompt, **options: Any) -> npt.NDArray[np.float32]:
        """The logits of the token after a prompt, out of the same steps as all else that runs; options as of requests.

        Many of them awaited together are computed together. `RwkvSampler.sample_logits` and `FastSampler` draw from them.
        """
        output = await self.engine.generate(prompt, ONE_TOKEN, wants_logits=True, **options)
        if output.logits is None:
            error = output.outputs[0].error
            raise error or StoppedError(f"The request ended by {output.finish_reason} before its logits came.")
        ops = self.engine.engine.runner.ops
        with ops.computing():
            row: npt.NDArray[np.float32] = ops.fetch(output.logits)()[0]
        return row.astype(np.float32)  # always a copy: the cache may hold the row as well

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

        tasks = [asyncio.ensure_future(follow(place, request)) for place, request in enumerate(checked(requests))]
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
        if self._is_owner:
            await self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def checked(requests: Sequence[InferenceRequest]) -> Sequence[InferenceRequest]:
    for request in requests:
        if not isinstance(request, InferenceRequest):
            raise InvalidInputError(
                f"A request must be an InferenceRequest, not {type(request).__name__}.",
                hint="Write InferenceRequest(prompt, sampling_params).",
            )
    return requests


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until its requests are aborted."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
