"""Seed 004, serving: dynamic batching in front of a model, and vLLM's `LLM`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from archerfish import LLM, ArrowEngine, BatchInferenceServer, SamplingParams
from tests.engine.tiny_llama import prompts, save_tiny_llama, tiny_config


def test_batch_inference_server_runs_an_llm(tmp_path: Path) -> None:
    model = LLM(tiny_config(save_tiny_llama(tmp_path)))

    async def main() -> list[str]:
        server = BatchInferenceServer(model, max_batch_size=8, max_wait_time=0.01)
        task = asyncio.create_task(server.start())
        results = await asyncio.gather(*(server.predict(prompt) for prompt in prompts(3)))
        await server.stop()
        await task
        return list(results)

    assert len(asyncio.run(main())) == 3 and len(model.generate_batch(prompts(2))) == 2
    model.close()


def test_batch_inference_server_runs_an_encoder(minilm: ArrowEngine) -> None:
    async def main() -> tuple[int, ...]:
        async with BatchInferenceServer(minilm) as server:
            return tuple((await server.predict("Hello, how are you?")).shape)

    assert asyncio.run(main()) == (384,)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_llm_as_in_vllm(size: int) -> None:
    llm = LLM(model="story-rwkv7", tensor_parallel_size=size, gpu_memory_utilization=0.9, num_threads=1)
    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=3)
    texts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
    outputs = llm.generate(texts, sampling_params)
    for prompt, output in zip(texts, outputs, strict=True):
        assert output.prompt == prompt and output.outputs[0].text
    llm.close()
