"""StreamingInference: batches through the step pipeline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from archerfish import AsyncLLMEngine, LLMEngine, SamplingParams
from archerfish.compat.streaming import InferenceRequest, PrefetchConfig, StreamingInference
from archerfish.errors import InvalidInputError, InvalidOptionError, UnknownOptionError
from archerfish.runtime.runner import RunningStep
from archerfish.step import StepInput
from tests.compat.loops import in_loop
from tests.engine.tiny_llama import check_memory, prompts, tiny_config, tokens
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)


def requests(num: int) -> list[InferenceRequest]:
    return [InferenceRequest(prompt, PARAMS.replace(max_tokens=3 + i % 5)) for i, prompt in enumerate(prompts(num))]


@pytest.mark.parametrize("depth", [0, 1])
@in_loop
async def test_batch_infer_gives_the_tokens_of_generate(engine: LLMEngine, depth: int) -> None:
    many = requests(10)
    expected = [engine.generate(one.prompt, one.sampling_params)[0].token_ids for one in many]
    engine.clear_cache()
    async with StreamingInference(engine, PrefetchConfig(max_prefetch=depth)) as inference:
        assert engine.config.pipeline_depth == depth
        assert tokens(await inference.batch_infer(many)) == expected


@in_loop
async def test_one_step_is_in_flight_while_the_next_is_launched(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    launch = engine.runner.launch

    def counted(plan: StepInput) -> RunningStep:
        counts.append(len(engine._in_flight))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", counted)
    for depth in (1, 0, 1):
        counts.clear()
        async with StreamingInference(engine, PrefetchConfig(depth)) as inference:
            await inference.batch_infer(requests(2))
        assert max(counts) == depth


def test_an_invalid_request_ends_the_batch_and_frees_all_memory(engine: LLMEngine) -> None:
    many = [InferenceRequest(prompt, PARAMS.replace(max_tokens=150)) for prompt in prompts(3)]

    async def run() -> None:
        async with StreamingInference(engine) as inference:
            with pytest.raises(InvalidInputError, match="empty"):
                await inference.batch_infer([*many, InferenceRequest([])])
            with pytest.raises(
                InvalidInputError, match=r"an InferenceRequest, not str\. Write InferenceRequest\(prompt"
            ):
                await inference.batch_infer([*many, "hello"])  # type: ignore[list-item]
            (output,) = await inference.batch_infer(requests(1))
            assert output.finish_reason == "length"
            assert await inference.batch_infer([]) == []

    asyncio.run(run())
    stats = engine.engine_stats()
    assert stats.concurrent_requests == 0 and stats.completed_requests == 1
    check_memory(engine)


@pytest.mark.parametrize(
    "options", [{}, {"logits_cache_mib": 0}, {"pipeline_depth": 0}, {"max_num_batched_tokens": 40}]
)
@pytest.mark.parametrize("kind", ["llama", "rwkv"])
@in_loop
async def test_logits_are_those_of_the_next_token(
    kind: str, options: dict[str, int], llama: Path, tmp_path: Path
) -> None:
    config = tiny_config(llama, **options)
    if kind == "rwkv":
        config = rwkv_config(save_tiny_rwkv(tmp_path), load_format="dummy", **options)
    contexts = [*prompts(4, least=16), [5], list(range(1, 33)), list(range(1, 33))]
    with LLMEngine(config) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
        scored = [engine.generate(context, params)[0] for context in contexts]
        engine.clear_cache()
        async with StreamingInference(engine) as inference:
            found = [await inference.get_logits_with_prefetch(context) for context in contexts]
            found[0] += 1.0  # the caller's own: what is cached stays as it is
            together = await asyncio.gather(*(inference.get_logits_with_prefetch(context) for context in contexts))
        np.testing.assert_allclose(found[1:], together[1:], atol=1e-4)
        for row, output in zip(together, scored, strict=True):
            assert row.shape == (engine.facts.vocab_size,) and row.dtype == np.float32 and output.logits is None
            assert int(row.argmax()) == output.token_ids[0] and output.logprobs is not None
            logprobs = torch.from_numpy(row).log_softmax(0)
            for token_id, logprob in output.logprobs[0].top:
                assert logprobs[token_id].item() == pytest.approx(logprob, abs=1e-4)


@in_loop
async def test_an_invalid_prompt_has_no_logits(engine: LLMEngine) -> None:
    async with StreamingInference(engine) as inference:
        with pytest.raises(InvalidInputError, match="empty"):
            await inference.get_logits_with_prefetch([])
        with pytest.raises(UnknownOptionError, match="colour"):
            await inference.get_logits_with_prefetch([1], colour="red")
    with pytest.raises(InvalidInputError, match="wants_logits"):
        engine.generate([1, 2], wants_logits=1)


def test_a_pipeline_depth_above_one_is_refused() -> None:
    for depth in (2, -1):
        with pytest.raises(InvalidOptionError, match="max_prefetch must be 0 or 1"):
            PrefetchConfig(max_prefetch=depth)


@in_loop
async def test_close_leaves_a_given_engine_open(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    for given in (served, engine, served):
        async with StreamingInference(given) as inference:
            await inference.batch_infer(requests(2))
        assert (inference.engine is served) == (given is served)
        assert inference.engine._thread.is_alive() == (given is served)
    await served.close()
