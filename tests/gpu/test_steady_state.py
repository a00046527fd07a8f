"""While only decodes run, a step is one launch of a recorded graph: nothing is allocated, and no thread waits for the
device but for the tokens of the step before."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish import LLMEngine, SamplingParams
from archerfish.bench.gpu import SHAPES
from archerfish.bench.rwkv import write_shape
from tests.gpu.given_tokens import DEVICE, DTYPE, needs_card

pytestmark = needs_card
NUM_WARM, NUM_STEPS = (
    30,
    60,
)  # steps: until the rhythm is steady, and watched; contexts grow by several blocks meanwhile
PARAMS = {
    "greedy": SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=200, temperature=0.8, top_p=0.9, top_k=50, seed=3, ignore_eos=True),
}
MEMORY_CALLS = {
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaFree",
    "cudaFreeAsync",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cuMemCreate",
    "cuMemMap",
}
WAITING_CALLS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMemset"}
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WATCHED = "steady state"


@pytest.fixture(scope="module", params=["qwen3", "rwkv7"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    """With keys, or with a state for each sequence."""
    directory, options = tmp_path_factory.mktemp(request.param), {}
    if request.param == "qwen3":
        (directory / "config.json").write_text(json.dumps({**SHAPES["qwen3-0.6b"], "num_hidden_layers": 4}))
        options = {"max_cache_tokens": 64 * 512}
    else:
        write_shape("0.1b", directory)
    with new_engine(directory, **options) as made:
        yield made


def new_engine(directory: Path, **options: Any) -> LLMEngine:
    return LLMEngine(
        str(directory),
        device=DEVICE,
        dtype=DTYPE,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        **options,
    )


@contextmanager
def decoding(engine: LLMEngine, num: int, params: SamplingParams) -> Iterator[list[str]]:
    """Requests that only decode: they are far past their prompts, and the rhythm is steady. At the end all must finish
    well."""
    request_ids = [engine.add_request([3 + (i * 31 + j * 7) % 5000 for j in range(20 + i)], params) for i in range(num)]
    for _ in range(NUM_WARM):
        engine.step()
    torch.cuda.synchronize()
    yield request_ids
    while engine.has_work:
        engine.step()
    outputs = [engine.get_output(request_id) for request_id in request_ids]
    assert all(output is not None and len(output.token_ids) == params.max_tokens for output in outputs)


def memory_counts() -> dict[str, int]:
    """How often memory of the device, and pinned memory of the host, has been asked for until now."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    counts = {name: device[name] for name in ("allocation.all.allocated", "segment.all.allocated", "num_device_alloc")}
    return counts | {name: host[name] for name in ("num_host_alloc", "segment.allocated") if name in host}


@pytest.mark.parametrize("num", [1, 64])
@pytest.mark.parametrize("params", PARAMS)
def test_nothing_is_allocated(engine: LLMEngine, params: str, num: int) -> None:
    with decoding(engine, num, PARAMS[params]):
        before = memory_counts()
        torch.cuda.set_sync_debug_mode("error")  # a call that would wait for the device raises
        try:
            for _ in range(NUM_STEPS):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert memory_counts() == before
        assert before["num_device_alloc"] > 0


@pytest.mark.parametrize("num", [1, 64])
def test_no_thread_waits_for_the_device(engine: LLMEngine, num: int, record_property: Any) -> None:
    with decoding(engine, num, PARAMS["sampled"]):
        calls = calls_of_steps(engine, NUM_STEPS)
    record_property("calls", calls)
    print(f"{num} sequences, calls of {NUM_STEPS} steps: {dict(calls)}")
    assert not (MEMORY_CALLS | WAITING_CALLS) & calls.keys()
    assert not LAUNCHES & calls.keys()  # all kernels are in the graph
    assert calls["cudaGraphLaunch"] == NUM_STEPS
    assert (
        calls["cudaEventSynchronize"] == 2 * NUM_STEPS
    )  # for its tokens, and for a copy of some steps ago, which has ended
    assert calls["cudaMemcpyAsync"] == 2 * NUM_STEPS  # what the step reads, and its tokens


def calls_of_steps(engine: LLMEngine, num_steps: int) -> Counter[str]:
    """Calls of the CUDA runtime and driver that steps make, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler, record_function(WATCHED):
        for _ in range(num_steps):
            engine.step()
    events = profiler.events()
    assert events is not None
    span = next(event.time_range for event in events if event.name == WATCHED and event.cpu_time_total > 0)
    return Counter(
        event.name
        for event in events
        if event.name.startswith("cu") and span.start <= event.time_range.start <= span.end
    )
