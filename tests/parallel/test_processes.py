"""Engines whose ranks are processes that exchange by gloo."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish import LLM, LLMEngine, SamplingParams
from archerfish.config import HubConfig
from archerfish.engine.rank_processes import READY, RankJob
from archerfish.errors import DeviceError, InvalidInputError, StoppedError
from tests.engine.tiny_llama import greedy, prompts, save_tiny_llama, tiny_config, tokens
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.models.adapter_files import random_adapter

pytest.importorskip("torch.distributed")
Save = Callable[..., Path]
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, ignore_eos=True)


def favour(ids: Any, logits: Any) -> Any:
    """A function that cannot be sent to another process as it is used here."""
    return np.where(np.arange(len(logits)) == 7, logits + 3, logits)


def answers(engine: LLMEngine) -> list[Any]:
    """What decodes, prompts in pieces, cached prompts, draws, penalties, functions and scored prompts give."""
    many = prompts(8, most=100)
    processed = greedy(8, logits_processors=[lambda ids, logits: favour(ids, logits)])
    params = [greedy(8, repetition_penalty=1.3), processed, greedy(8)]
    found = [tokens(engine.generate(many, greedy(8))), tokens(engine.generate(many[:3], params))]
    found += [[one.token_ids for one in output.outputs] for output in engine.generate(many[:3], DRAWN)]
    scored = engine.generate([many[0]], greedy(2, prompt_logprobs=1))[0].prompt_logprobs
    logits = engine.generate([many[1]], greedy(1), wants_logits=True)[0].logits
    assert scored is not None and logits is not None
    return [*found, len(scored), int(np.asarray(logits).argmax())]


def compare(model: Path, **options: Any) -> None:
    config = tiny_config(model, max_num_batched_tokens=64)
    with LLMEngine(config) as one:
        expected = answers(one)
    with LLMEngine(config.replace(**options)) as divided:
        assert answers(divided) == expected
        assert divided.cache_stats().hits > 0


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (save_tiny_llama, {"tensor_parallel_size": 2}),
        *(
            pytest.param(save, options, marks=pytest.mark.slow)
            for save, options in (
                (save_tiny_rwkv, {"tensor_parallel_size": 2}),
                (save_tiny_llama, {"tensor_parallel_size": 4}),
                (save_tiny_llama, {"pipeline_parallel_size": 2}),
                (save_tiny_rwkv, {"pipeline_parallel_size": 2}),
                (save_tiny_llama, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "speculation": "ngram"}),
                (save_tiny_rwkv, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
            )
        ),
    ],
)
def test_answers_are_those_of_one_process(tmp_path: Path, save: Save, options: dict[str, Any]) -> None:
    compare(save(tmp_path), **options)


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (save_tiny_llama, {"tensor_parallel_size": 2}),
        *(
            pytest.param(save, options, marks=pytest.mark.slow)
            for save, options in (
                (save_tiny_rwkv, {"tensor_parallel_size": 2}),
                (save_tiny_llama, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
            )
        ),
    ],
)
def test_adapters(tmp_path: Path, save: Save, options: dict[str, Any]) -> None:
    """Two adapters take each other's only slot."""
    config, work = tiny_config(save(tmp_path), enable_lora=True, max_loras=1), prompts(6, most=30)
    found: list[Any] = []
    for more in ({}, options):
        with LLMEngine(config.replace(**more)) as engine:
            assert engine.adapters is not None
            shapes = {
                name: (one.outputs, one.inputs) for name, one in engine.adapters._maps.items() if not one.is_lookup
            }
            for name in ("a", "b"):
                engine.adapters.load(
                    name, random_adapter(tmp_path / name, shapes, ord(name), target_modules=list(shapes))
                )
            used = [[None, "a", "b"][i % 3] for i in range(6)]
            found.append(
                [tokens(engine.generate(work, greedy(8), lora_request=each)) for each in (used, ["a"] * 6, None)]
            )
    assert found[0] == found[1]
    assert found[0][1] != found[0][2], "the adapter changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_smollm2(options: dict[str, Any]) -> None:
    """9 heads share 3 KV heads."""
    texts, params = ["The capital of France is", "Once upon a time"], SamplingParams(max_tokens=16, temperature=0.0)
    found = []
    for more in ({}, options):
        with LLMEngine(
            "smollm2-135m-instruct", dtype="float32", max_cache_tokens=2048, num_threads=1, **more
        ) as engine:
            found.append(tokens(engine.generate(texts, params)))
    assert found[0] == found[1]


def test_a_rank_that_dies_ends_the_engine_with_an_error(tmp_path: Path) -> None:
    llm = LLM(tiny_config(save_tiny_llama(tmp_path), tensor_parallel_size=2))
    others: Any = llm.runner.others
    launched = list[int]()
    with pytest.raises(KeyboardInterrupt), others.launching(None):
        signal.raise_signal(signal.SIGINT)
        launched.append(1)  # ctrl-c comes behind what was sent: ranks would be out of step
    assert launched and not others.problem
    with pytest.raises(InvalidInputError, match="cannot sleep"):
        llm.sleep()
    begun = threading.Event()
    request_id = llm.add_request([5, 6], greedy(200), listener=lambda delta: begun.set())

    def kill() -> None:
        begun.wait()
        os.kill(others._children[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    llm.wait_until(lambda: llm.get_output(request_id) is not None)
    killer.join()
    ended, later = llm.get_output(request_id), llm.generate([[5, 6]], greedy(2))[0]
    assert ended is not None and ended.finish_reason == later.finish_reason == "error"
    assert isinstance(later.outputs[0].error, StoppedError) and "Rank 1 ended with -9" in str(later.outputs[0].error)
    assert others.problem
    llm.close()


def test_a_rank_that_cannot_start_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.engine.rank_processes.MAIN", "raise SystemExit(3)")
    with pytest.raises((DeviceError, StoppedError), match="Rank 1 ended with 3"):
        LLMEngine(tiny_config(save_tiny_llama(tmp_path), tensor_parallel_size=2))


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Red: a child that does not end with its input, or that leaves files behind."""
    code = (
        "import os, sys, pathlib\nfrom archerfish import LLMEngine\nfrom tests.engine.tiny_llama import tiny_config\n"
        "engine = LLMEngine(tiny_config(pathlib.Path(sys.argv[1]), tensor_parallel_size=2))\n"
        "print(engine.runner.others._directory, flush=True)\nos.kill(os.getpid(), 9)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(save_tiny_llama(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, _ = parent.communicate(timeout=120)  # until the child, which has the same standard error, has ended too
    assert parent.returncode == -signal.SIGKILL and out and not Path(out.strip()).exists()


@pytest.mark.slow
def test_a_rank_whose_parent_has_gone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """Red: a child that outlives its parent, because it looks at its input only when it has met the other ranks."""
    config = tiny_config(save_tiny_llama(tmp_path), tensor_parallel_size=2).replace(device="cpu")
    code = "from archerfish.engine import rank_processes as ranks; ranks.CONNECT_S = 2; ranks.main()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(pickle.dumps(RankJob(config, HubConfig(), 1, "gloo", str(tmp_path / "store"))))
    child.stdin.flush()
    assert pickle.load(child.stdout) == READY
    child.stdin.close()
    assert child.wait(60) == -signal.SIGALRM
    child.stdout.close()
