"""StreamingInference: batches through the step pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from archerfish import AsyncLLMEngine, LLMEngine, SamplingParams
from archerfish.compat.streaming import InferenceRequest, PrefetchConfig, StreamingInference
from archerfish.errors import InvalidInputError, InvalidOptionError, UnknownOptionError
from tests.engine.tiny_llama import prompts, save_tiny_llama, tiny_config
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_config(save_tiny_llama(tmp_path))) as made:
        yield made


def requests(num: int) -> list[InferenceRequest]:
    return [
        InferenceRequest(prompt, PARAMS.replace(max_tokens=3 + place % 5)) for place, prompt in enumerate(prompts(num))
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_batch_infer_gives_the_tokens_of_generate(engine: LLMEngine, depth: int) -> None:
    many = requests(10)
    expected = [engine.generate(one.prompt, one.sampling_params)[0].token_ids for one in many]
    engine.clear_cache()

    async def run() -> list[list[int]]:
        async with StreamingInference(engine, PrefetchConfig(max_prefetch=depth)) as inference:
            assert engine.config.pipeline_depth == depth
            return [output.token_ids for output in await inference.batch_infer(many)]

    assert asyncio.run(run()) == expected


def test_one_step_is_in_flight_while_the_next_is_launched(engine: LLMEngine) -> None:
    most = 0
    launch = engine.runner.launch

    def counted(plan: object) -> object:
        nonlocal most
        most = max(most, len(engine._in_flight))
        return launch(plan)  # type: ignore[arg-type]

    engine.runner.launch = counted  # type: ignore[method-assign, assignment]

    async def run(depth: int) -> int:
        nonlocal most
        most = 0
        async with StreamingInference(engine, PrefetchConfig(depth)) as inference:
            await inference.batch_infer(requests(2))
        return most

    assert [asyncio.run(run(depth)) for depth in (1, 0, 1)] == [1, 0, 1]


def test_an_invalid_request_ends_the_batch_and_frees_all_memory(engine: LLMEngine) -> None:
    many = [InferenceRequest(prompt, PARAMS.replace(max_tokens=150)) for prompt in prompts(3)]

    async def run() -> None:
        async with StreamingInference(engine) as inference:
            with pytest.raises(InvalidInputError, match="empty"):
                await inference.batch_infer([*many, InferenceRequest([])])
            with pytest.raises(InvalidInputError, match=r"an InferenceRequest, not str\. Write InferenceRequest\(prompt"):
                await inference.batch_infer([*many, "hello"])  # type: ignore[list-item]
            (output,) = await inference.batch_infer(requests(1))
            assert output.finish_reason == "length"
            assert await inference.batch_infer([]) == []

    asyncio.run(run())
    stats = engine.engine_stats()
    assert stats.concurrent_requests == 0 and stats.completed_requests == 1
    blocks, cache = engine.scheduler.blocks, engine.scheduler.cache
    assert blocks.num_total - blocks.num_free - cache.num_evictable == 0


@pytest.mark.parametrize("options", [{}, {"logits_cache_mib": 0}, {"pipeline_depth": 0}, {"max_num_batched_tokens": 40}])
@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_logits_are_those_of_the_next_token(kind: str, options: dict[str, int], tmp_path: Path) -> None:
    if kind == "llama":
        config = tiny_config(save_tiny_llama(tmp_path), **options)
    else:
        config = rwkv_config(save_tiny_rwkv(tmp_path), load_format="dummy", **options)
    contexts = [*prompts(4, least=16), [5], list(range(1, 33)), list(range(1, 33))]

    async def run(engine: LLMEngine) -> list[np.ndarray]:
        async with StreamingInference(engine) as inference:
            found = [await inference.get_logits_with_prefetch(context) for context in contexts]
            found[0] += 1.0  # the caller's own: what is cached stays as it is
            together = await asyncio.gather(*(inference.get_logits_with_prefetch(context) for context in contexts))
            for one, other in zip(found[1:], together[1:], strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)
            return together

    with LLMEngine(config) as engine:
        scored = [
            engine.generate(context, SamplingParams(max_tokens=1, temperature=0, logprobs=5))[0] for context in contexts
        ]
        engine.clear_cache()
        for row, output in zip(asyncio.run(run(engine)), scored, strict=True):
            assert row.shape == (engine.facts.vocab_size,) and row.dtype == np.float32 and output.logits is None
            assert int(row.argmax()) == output.token_ids[0] and output.logprobs is not None
            logprobs = torch.from_numpy(row).log_softmax(0)
            for token_id, logprob in output.logprobs[0].top:
                assert logprobs[token_id].item() == pytest.approx(logprob, abs=1e-4)


def test_an_invalid_prompt_has_no_logits(engine: LLMEngine) -> None:
    async def run() -> None:
        async with StreamingInference(engine) as inference:
            with pytest.raises(InvalidInputError, match="empty"):
                await inference.get_logits_with_prefetch([])
            with pytest.raises(UnknownOptionError, match="colour"):
                await inference.get_logits_with_prefetch([1], colour="red")

    asyncio.run(run())
    with pytest.raises(InvalidInputError, match="wants_logits"):
        engine.generate([1, 2], wants_logits=1)


@pytest.mark.parametrize("depth", [2, -1])
def test_a_pipeline_depth_above_one_is_refused(depth: int) -> None:
    with pytest.raises(InvalidOptionError, match="max_prefetch must be 0 or 1"):
        PrefetchConfig(max_prefetch=depth)


def test_close_leaves_a_given_engine_open(engine: LLMEngine) -> None:
    async def run() -> None:
        served = AsyncLLMEngine(engine)
        for given in (served, engine, served):
            async with StreamingInference(given) as inference:
                await inference.batch_infer(requests(2))
            assert (inference.engine is served) == (given is served)
            assert inference.engine._thread.is_alive() == (given is served)
        await served.close()

    asyncio.run(run())
