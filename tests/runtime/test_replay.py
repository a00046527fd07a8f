"""A step is plain data: a run that was recorded as pickled steps gives the same tokens in a second runner."""

from __future__ import annotations

import ast
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.llm_loading import load_adapter
from archerfish.params import SamplingParams, Stage
from archerfish.runtime import runner as runner_module
from archerfish.runtime.kv_pool import allocate_pool
from archerfish.runtime.runner import ModelRunner, RunningStep
from archerfish.step import RowEntry, StepInput, StepResult
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.runtime.test_token_masks import Listed

STAGES = (Stage(num_tokens=3, first=5, end=40), Stage(num_tokens=9, first=50, end=90, offset=2))
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"n": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"grammar": {"kind": "json"}, "ignore_eos": False},
    {"logit_bias": {7: 2.0}, "min_tokens": 5},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stages": STAGES},
    {"top_k": 5, "top_p": 0.8},
]


def second_runner(engine: LLMEngine) -> ModelRunner[Any]:
    """A runner with the same weights, and with memory of its own."""
    adapter = load_adapter(engine.facts, engine.config)
    pool, _ = allocate_pool(adapter.ops, engine.facts.memory_shape, engine.facts.memory)
    size, max_num_seqs = engine.facts.vocab_size, engine.config.max_num_seqs
    return ModelRunner(adapter, pool, vocab_size=size, max_num_seqs=max_num_seqs, num_threads=1)


def recorded_run(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[tuple[bytes, bytes]]:
    """All steps of a run, and what they gave, pickled."""
    steps: list[tuple[bytes, RunningStep]] = []
    launch = engine.runner.launch

    def watch(step: StepInput) -> RunningStep:
        steps.append((pickle.dumps(step), launch(step)))
        return steps[-1][1]

    engine.runner.launch = watch  # type: ignore[method-assign]
    for _ in range(2):  # the second time out of the cache
        outputs = engine.generate(prompts, params)
        assert all(output.finish_reason in ("stop", "length") for output in outputs)
    return [(step, pickle.dumps(running.result())) for step, running in steps]


@pytest.mark.parametrize("model", ["llama", "rwkv"])
def test_pickled_steps_give_the_same_tokens_in_a_second_runner(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config((save_tiny_llama if model == "llama" else save_tiny_rwkv)(tmp_path)).replace(
        max_num_seqs=6, max_num_batched_tokens=30, block_size=4, max_cache_tokens=160, pipeline_depth=1, seed=1
    )
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 90, 30).tolist()
    prompts = [shared[: 4 * i] + rng.integers(3, 90, 1 + 5 * i % 17).tolist() for i in range(16)]
    params = [
        SamplingParams(**{"max_tokens": 12 + i, "ignore_eos": True} | OPTIONS[i % len(OPTIONS)]) for i in range(16)
    ]
    params = [dataclasses.replace(one, max_tokens=12) if one.stages else one for one in params]
    with LLMEngine(config) as engine:
        monkeypatch.setattr(engine.grammars, "compile", lambda grammar: Listed(range(10, 60)))
        steps = recorded_run(engine, prompts, params)
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0 and engine.cache_stats().hits > 0
        other = second_runner(engine)
        seen: dict[str, int] = {}
        for step_bytes, expected_bytes in steps:
            step: StepInput = pickle.loads(step_bytes)
            expected: StepResult = pickle.loads(expected_bytes)
            found = other.launch(step).result()
            is_real = np.arange(expected.tokens.shape[1]) < step.samples[:, None]
            assert found.tokens[is_real].tolist() == expected.tokens[is_real].tolist()
            assert found.logprobs == expected.logprobs and found.prompt_logprobs == expected.prompt_logprobs
            for name in ("copies", "entries", "masked", "scored", "kept", "reused", "dropped"):
                seen[name] = seen.get(name, 0) + len(getattr(step, name))
        assert len(other._logits) == len(engine.runner._logits)
        other.close()
    wanted = {"entries", "masked", "scored"} | ({"copies", "kept", "reused", "dropped"} if model == "llama" else set())
    assert all(seen[name] for name in wanted)


def test_a_sequence_can_be_sampled_at_several_places(tmp_path: Path) -> None:
    """As a verified draft is: the tokens that follow each of its last new tokens."""
    with LLMEngine(tiny_config(save_tiny_llama(tmp_path))) as engine:
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        prompt = [5, 9, 40, 7]
        expected = engine.generate([prompt], greedy)[0].token_ids
        tokens = np.array([*prompt, *expected[:3]])
        num_blocks = -(-len(tokens) // engine.facts.memory.block_size)
        runner = second_runner(engine)

        def ids(*values: int) -> Any:
            return np.array(values)

        result = runner.launch(
            StepInput(
                0,
                ids(0),
                ids(0),
                ids(len(tokens)),
                ids(4),
                ids(0),
                tokens,
                0,
                block_rows=np.zeros(num_blocks, np.int64),
                block_places=np.arange(num_blocks),
                block_ids=np.arange(num_blocks),
                entries=[RowEntry(0, "draft", greedy, len(prompt))],
            )
        ).result()
        assert result.tokens.tolist() == [expected[:4]]
        runner.close()


def test_runtime_imports_no_scheduler_or_cache() -> None:
    folder = Path(runner_module.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert not node.module.startswith(("archerfish.sched", "archerfish.cache", "archerfish.sequence")), (
                    file.name
                )
