"""AsyncLLMEngine: many callers on one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.vllm_options import AsyncEngineArgs
from archerfish.errors import InvalidInputError, StoppedError
from tests.cache.invariants import check_cache
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
    check_cache(engine.scheduler.cache, [])


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
    check_cache(engine.scheduler.cache, [])


@in_loop
async def test_generate_yields_the_answer_so_far(engine: LLMEngine) -> None:
    served, prompt = AsyncLLMEngine(engine), prompts(1)[0]
    expected = engine.generate([prompt], PARAMS)[0].token_ids
    found = [one async for one in served.generate(prompt, PARAMS.replace(logprobs=0), "mine")]
    assert [one.finished for one in found] == [False] * (len(found) - 1) + [True] and len(found) > 2
    for one in found:
        output = one.outputs[0]
        assert one.request_id == "mine" and one.prompt_token_ids == prompt
        assert output.token_ids == expected[: len(output.token_ids)] and len(output.logprobs or []) == len(
            output.token_ids
        )
    assert found[-1].outputs[0].token_ids == expected and found[-1].finish_reason == "length"
    pieces = [one async for one in served.generate(prompt, PARAMS.replace(output_kind=1))]
    assert [i for one in pieces for i in one.outputs[0].token_ids] == expected and pieces[-1].finished
    last = [one async for one in served.generate(prompt, PARAMS.replace(output_kind="FINAL_ONLY"))]
    assert tokens(last) == [expected]
    assert (await served.generate({"prompt_token_ids": prompt}, PARAMS.replace(output_kind=1))).token_ids == expected
    await served.close()


@in_loop
async def test_abort_ends_a_request_and_leaving_the_loop_aborts_it(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    reasons: list[str | None] = []
    async for one in served.generate(prompts(1)[0], PARAMS.replace(max_tokens=150), "long"):
        if not one.finished and not reasons:
            assert await served.abort("long")
        reasons.append(one.outputs[0].finish_reason)
    assert reasons[-1] == "abort" and not await served.abort("long")
    answer = served.generate(prompts(1)[0], PARAMS.replace(max_tokens=150))
    await anext(answer)
    await answer.aclose()
    await served.generate(prompts(1, 2)[0], PARAMS)
    assert engine.queue_status()["running"] == 0
    await served.close()


@in_loop
async def test_from_engine_args(llama: Path) -> None:
    args = AsyncEngineArgs(
        model=str(llama), dtype="float", load_format="dummy", max_cache_tokens=512, enforce_eager=True
    )
    served = AsyncLLMEngine.from_engine_args(args)
    assert len((await served.generate([5, 6], PARAMS)).token_ids) == 8
    await served.close()
