"""AsyncLLMEngine: many callers on one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidInputError, StoppedError
from tests.compat.loops import in_loop
from tests.engine.tiny_llama import greedy, prompts, tokens

PARAMS = greedy(8)


@in_loop
async def test_gathered_answers_equal_those_of_the_plain_engine(engine: LLMEngine) -> None:
    many = prompts(12)
    expected = tokens(engine.generate(many, PARAMS))
    served = AsyncLLMEngine(engine)
    assert tokens(await asyncio.gather(*(served.generate(prompt, PARAMS) for prompt in many))) == expected
    await served.close()


@in_loop
async def test_a_name_and_options_make_an_engine(llama: Path) -> None:
    served = AsyncLLMEngine(str(llama), dtype="float32", load_format="dummy", max_cache_tokens=512, num_threads=1)
    assert len((await served.generate([5, 6], sampling_params=PARAMS)).token_ids) == 8
    await served.close()


@in_loop
async def test_leaving_a_stream_aborts_its_request(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    stream = served.stream(prompts(1)[0], PARAMS.replace(max_tokens=150))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    other = await served.generate(prompts(1, 2)[0], PARAMS)
    assert len(other.token_ids) == 8
    assert engine.queue_status()["running"] == 0
    await served.close()
    engine.scheduler.cache.check([])


@in_loop
async def test_cancelling_a_task_aborts_its_request(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    task = asyncio.create_task(served.generate(prompts(1)[0], PARAMS.replace(max_tokens=150)))
    await asyncio.sleep(0)
    await served.generate(prompts(1, 3)[0], PARAMS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await served.generate(prompts(1, 4)[0], PARAMS)
    assert engine.queue_status()["running"] == 0
    await served.close()


@in_loop
async def test_bad_input_raises_and_closing_ends_streams(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    with pytest.raises(InvalidInputError):
        await served.generate([], PARAMS)
    task = asyncio.create_task(served.generate(prompts(1)[0], PARAMS.replace(max_tokens=180)))
    while not engine.queue_status()["running"]:
        await asyncio.sleep(0)
    await served.close()
    output = await task
    assert output.finish_reason == "abort"
    with pytest.raises(StoppedError):
        await served.generate(prompts(1)[0], PARAMS)


def test_closing_closes_only_an_engine_of_its_own(engine: LLMEngine) -> None:
    async def run(served: AsyncLLMEngine) -> None:
        await served.generate(prompts(1)[0], PARAMS)
        await served.close()
        await served.close()
        with pytest.raises(StoppedError):
            await served.generate(prompts(1)[0], PARAMS)

    for _ in range(2):
        asyncio.run(run(AsyncLLMEngine(engine)))
        assert [len(output.token_ids) for output in engine.generate(prompts(2), PARAMS)] == [8, 8]
    own = AsyncLLMEngine(engine.config)
    asyncio.run(run(own))
    with pytest.raises(StoppedError):
        own.engine.generate(prompts(1), PARAMS)


@in_loop
async def test_closing_aborts_only_what_came_through_it(engine: LLMEngine) -> None:
    own = engine.add_request(prompts(1, 2)[0], PARAMS.replace(max_tokens=100))
    served = AsyncLLMEngine(engine)
    long = [served.generate(prompt, PARAMS.replace(max_tokens=180)) for prompt in prompts(3)]
    tasks = [asyncio.create_task(one) for one in long]
    while engine.queue_status()["running"] < 4:
        await asyncio.sleep(0)
    await served.close()
    assert [output.finish_reason for output in await asyncio.gather(*tasks)] == ["abort"] * 3
    while engine.has_work:
        engine.step()
    output = engine.get_output(own)
    assert output is not None and len(output.token_ids) == 100
    engine.scheduler.cache.check([])
