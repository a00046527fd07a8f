"""StreamingInference: many requests at once through an AsyncLLMEngine, and the logits of a prompt.

Prefetching here is the engine's pipeline: while one step computes, the next one is planned and launched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from archerfish.config import EngineConfig
from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine, Prompt
from archerfish.engine.outputs import RequestOutput
from archerfish.errors import InvalidInputError, InvalidOptionError, StoppedError, refuse_unknown
from archerfish.params import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
NO_LOOKAHEAD = "Leave it out: the logits of a token cannot be computed before the token is drawn."
REFUSED = dict.fromkeys(("window_size", "prefetch_threshold"), NO_LOOKAHEAD)


@dataclass(frozen=True)
class PrefetchConfig:
    """max_prefetch: 1 launches a step before the results of the one before it are read; 0 runs one after the other."""

    max_prefetch: int = 1

    def __new__(cls, *_: Any, **values: Any) -> Self:
        refuse_unknown(values, cls.__dataclass_fields__, "option of prefetching", REFUSED)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_prefetch not in (0, 1):
            raise InvalidOptionError(f"max_prefetch must be 0 or 1, not {self.max_prefetch!r}.")


@dataclass(frozen=True)
class InferenceRequest:
    """A prompt and its options. `options` are those of `add_request`: priority, deadline_s, namespace, request_id."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class StreamingInference:
    """Runs batches of requests on an engine that is given, or on one made from a model's name, which `close` closes."""

    def __init__(
        self,
        engine: AsyncLLMEngine | LLMEngine | EngineConfig | str,
        prefetch: PrefetchConfig | None = None,
        **options: Any,
    ) -> None:
        self._is_owner = not isinstance(engine, AsyncLLMEngine)
        self.engine = engine if isinstance(engine, AsyncLLMEngine) else AsyncLLMEngine(engine, **options)
        if prefetch is not None:
            self.engine.engine.configure(pipeline_depth=prefetch.max_prefetch)

    async def batch_infer(self, requests: Sequence[InferenceRequest]) -> list[RequestOutput]:
        """All results in the order of the requests. An invalid request raises its error and ends the whole batch."""
        for request in requests:
            if not isinstance(request, InferenceRequest):
                raise InvalidInputError(
                    f"A request must be an InferenceRequest, not {type(request).__name__}.",
                    hint="Write InferenceRequest(prompt, sampling_params).",
                )
        tasks = [
            asyncio.ensure_future(self.engine.generate(request.prompt, request.sampling_params, **request.options))
            for request in requests
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # until the requests are aborted

    async def get_logits_with_prefetch(self, prompt: Prompt, **options: Any) -> npt.NDArray[np.float32]:
        """The logits of the token after a prompt. Calls that are awaited together are computed together.

        `RwkvSampler.sample_logits` and `sample_optimized` draw from them.
        """
        output = await self.engine.generate(prompt, ONE_TOKEN, wants_logits=True, **options)
        if output.logits is None:
            error = output.outputs[0].error
            raise error or StoppedError(f"The request ended by {output.finish_reason} before its logits came.")
        ops = self.engine.engine.runner.ops
        with ops.computing():
            row: npt.NDArray[np.float32] = ops.fetch(output.logits)()[0]
        return row.astype(np.float32)  # always a copy: the cache may hold the row as well

    async def close(self) -> None:
        if self._is_owner:
            await self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
