"""LLMEngine on a tiny random Llama: scheduling must never change what comes out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from archerfish import errors
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import RequestOutput
from archerfish.params import SamplingParams
from tests.engine.tiny_llama import VOCAB, check_memory, greedy, prompts, tiny_config, tokens


def make(llama: Path, **options: Any) -> LLMEngine:
    return LLMEngine(tiny_config(llama), **options)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[LLMEngine]:
    with make(llama) as made:
        yield made


def test_an_engine_refuses_after_a_fork(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.engine.llm_engine.os.getpid", lambda: -1)
    with pytest.raises(errors.StoppedError, match="fork"):
        engine.generate(prompts(1), greedy(1))


def alone(llama: Path, many: list[list[int]], params: SamplingParams) -> list[list[int]]:
    with make(llama, enable_prefix_caching=False, pipeline_depth=0) as engine:
        return [engine.generate([prompt], params)[0].token_ids for prompt in many]


@pytest.fixture(scope="module")
def mixed(llama: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, some of which begin alike, and what each gives alone."""
    shared = prompts(1, 5, 30, 30)[0]
    many = [*prompts(12), *(shared + prompt for prompt in prompts(8, 1, 1, 20))]
    return many, alone(llama, many, greedy())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_depth": 0},
        {"block_size": 1},
        {"block_size": 5},
        {"max_num_batched_tokens": 33},
        {"enable_prefix_caching": False},
        {"max_cache_tokens": 256},
        {"max_cache_tokens": 112, "pipeline_depth": 0},
        {"max_num_seqs": 3},
        {"scheduling_policy": "fair-share"},
        {"deterministic": True},
        {"eviction_policy": "lfu", "max_cache_tokens": 320},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_scheduling(
    llama: Path, mixed: tuple[list[list[int]], list[list[int]]], options: dict[str, Any]
) -> None:
    many, expected = mixed
    with make(llama, **options) as engine:
        assert tokens(engine.generate(many, greedy())) == expected
        assert tokens(engine.generate(many, greedy())) == expected  # now out of the cache
        check_memory(engine)


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}], ids=str)
def test_preemption_changes_no_tokens(llama: Path, penalties: dict[str, Any]) -> None:
    many, params = prompts(10, 3, 20, 30), greedy(30, **penalties)
    with make(llama, max_cache_tokens=160) as engine:
        assert tokens(engine.generate(many, params)) == alone(llama, many, params)
        assert engine.scheduler.stats().num_preemptions > 0


def test_exact_repeat_has_its_first_token_without_a_forward_pass(engine: LLMEngine) -> None:
    prompt = prompts(1, 11, 50, 50)[0]
    first = engine.generate([prompt], greedy(1))[0]
    before = engine.runner.num_forward_passes
    again = engine.generate([prompt], greedy(1))[0]
    assert engine.runner.num_forward_passes == before
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == 50


def test_n_sequences_share_one_prefill(llama: Path) -> None:
    prompt = prompts(1, 12, 40, 40)[0]
    with make(llama) as engine:
        output = engine.generate([prompt], SamplingParams(n=4, max_tokens=8, seed=3, ignore_eos=True))[0]
        assert len(output.outputs) == 4
        assert len({tuple(o.token_ids) for o in output.outputs}) > 1
        assert engine.scheduler.stats().prefill_tokens_computed < 2 * len(prompt)
        again = engine.generate([prompt], SamplingParams(n=4, max_tokens=8, seed=3, ignore_eos=True))[0]
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]


def test_sampled_tokens_do_not_depend_on_the_batch(llama: Path, engine: LLMEngine) -> None:
    many = prompts(16, 21)
    params = [
        SamplingParams(max_tokens=10, seed=i, temperature=0.9, top_p=0.95, top_k=40, ignore_eos=True) for i in range(16)
    ]
    together = tokens(engine.generate(many, params))
    with make(llama, enable_prefix_caching=False) as other:
        assert together == [other.generate([p], s)[0].token_ids for p, s in zip(many, params, strict=True)]


def test_stream_gives_what_generate_gives(engine: LLMEngine) -> None:
    prompt = prompts(1, 31)[0]
    deltas = list(engine.stream(prompt, greedy(9)))
    assert [i for delta in deltas for i in delta.token_ids] == engine.generate([prompt], greedy(9))[0].token_ids
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_closing_a_stream_frees_its_memory(engine: LLMEngine) -> None:
    stream = engine.stream(prompts(1, 32)[0], greedy(100))
    next(stream)
    stream.close()
    while engine.has_work:
        engine.step()
    check_memory(engine)
    assert engine.queue_status()["running"] == 0


def test_step_by_step(engine: LLMEngine) -> None:
    request_id = engine.add_request(prompts(1, 33)[0], greedy(5))
    assert engine.get_output(request_id) is None
    ended: list[RequestOutput] = []
    while not ended:
        ended = engine.step()
    found = engine.get_output(request_id)
    assert found is not None and found.token_ids == ended[0].token_ids and len(found.token_ids) == 5
    with pytest.raises(errors.NotFoundError):
        engine.get_output("never")


def test_several_threads_at_once(llama: Path) -> None:
    many = prompts(24, 41)
    with make(llama) as engine:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda prompt: engine.generate([prompt], greedy(6))[0], many))
        check_memory(engine)
    assert tokens(found) == alone(llama, many, greedy(6))


def test_stop_tokens_and_min_tokens(engine: LLMEngine) -> None:
    prompt = prompts(1, 51)[0]
    free = engine.generate([prompt], greedy(20))[0].token_ids
    stop = free[4]
    at = free.index(stop)
    stopped = engine.generate([prompt], greedy(20, stop_token_ids=[stop]))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free[: at + 1]
    longer = engine.generate([prompt], greedy(20, stop_token_ids=[stop], min_tokens=at + 3))[0]
    assert len(longer.token_ids) >= at + 3
    assert stop not in longer.token_ids[: at + 2]


def test_logprobs_sum_to_the_cumulative_one(engine: LLMEngine) -> None:
    output = engine.generate([prompts(1, 52)[0]], greedy(6, logprobs=3))[0]
    assert output.logprobs is not None and len(output.logprobs) == 6
    assert all(len(one.top) == 3 and one.rank == 1 and one.top[0][0] == one.token_id for one in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(sum(one.logprob for one in output.logprobs))


@pytest.mark.parametrize("budget", [512, 33])
def test_prompt_logprobs_are_those_of_the_prompt(llama: Path, budget: int) -> None:
    prompt = prompts(1, 53, 50, 50)[0]
    with make(llama, max_num_batched_tokens=budget) as engine:
        engine.generate([prompt], greedy(1))  # what is cached must not be missing from the answer
        output = engine.generate([prompt], greedy(1, prompt_logprobs=0))[0]
        found = output.prompt_logprobs
        assert found is not None and [one.token_id for one in found] == prompt[1:]
        for place in (0, 20, 48):
            forced = greedy(1, logprobs=0, logit_bias={prompt[place + 1]: 100.0})
            check = engine.generate([prompt[: place + 1]], forced)[0]
            assert check.logprobs is not None and check.token_ids == [prompt[place + 1]]
            assert found[place].logprob == pytest.approx(check.logprobs[0].logprob, abs=1e-4)


def test_deterministic_logprobs_do_not_depend_on_other_requests(llama: Path) -> None:
    prompt, others = prompts(1, 61, 40, 40)[0], prompts(31, 62)
    params = greedy(16, logprobs=0)
    for dtype in ("float32", "bfloat16"):
        with make(llama, deterministic=True, dtype=dtype) as engine:
            single = engine.generate([prompt], params)[0]
        with make(llama, deterministic=True, dtype=dtype) as engine:
            among = engine.generate([*others[:15], prompt, *others[15:]], params)[15]
        assert single.token_ids == among.token_ids
        assert single.logprobs is not None and among.logprobs is not None
        assert [one.logprob for one in single.logprobs] == [one.logprob for one in among.logprobs]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        *(
            (prompt, errors.InvalidInputError)
            for prompt in ([], [VOCAB], [-1], "text without a tokenizer", [1.5], None)
        ),
        ([5] * 256, errors.InputTooLargeError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_refused_and_costs_others_nothing(engine: LLMEngine, prompt: Any, kind: type[Exception]) -> None:
    good = prompts(4, 71)
    expected = tokens(engine.generate(good, greedy(8)))
    ids = [engine.add_request(one, greedy(8)) for one in good]
    engine.step()
    with pytest.raises(kind):
        engine.generate([prompt])
    while engine.has_work:
        engine.step()
    outputs = [engine.get_output(i) for i in ids]
    assert [o.token_ids for o in outputs if o is not None] == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ({"prompt": "Hi"}, {}, "not dict"),
        (None, {}, "not NoneType"),
        (b"hi", {}, "not bytes"),
        ({5, 6}, {}, "not set"),
        ([5], {"sampling_params": {"max_tokens": 4}}, "must be a SamplingParams"),
        ([5], {"max_tokens": 4}, "Put it into SamplingParams"),
        ([5], {"priorty": 4}, "'priority'"),
    ],
    ids=str,
)
def test_mistakes_in_a_call_are_named(engine: LLMEngine, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArcherfishError, match=message):
        engine.generate(prompt, **options)


def test_a_prompt_bigger_than_memory_is_refused_at_once(llama: Path) -> None:
    with make(llama, max_cache_tokens=64) as engine:
        with pytest.raises(errors.InputTooLargeError, match="the whole memory holds 64"):
            engine.generate([[5] * 64], greedy(100))
        with pytest.raises(errors.InputTooLargeError):
            engine.generate([[5] * 100], SamplingParams(max_tokens=None))
        filling = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        assert engine.generate([[5] * 20], filling)[0].finish_reason == "length"


def test_a_failing_step_ends_its_requests_and_nothing_else(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(llama) as engine:
        good = tokens(engine.generate(prompts(2, 81), greedy(4)))
        real = engine.runner._forward
        calls = 0

        def fail_once(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("the card fell out")
            return real(*args)

        monkeypatch.setattr(engine.runner, "_forward", fail_once)
        failed = engine.generate([[7, 8, 9]], greedy(6))[0]
        assert failed.finish_reason == "error"
        assert "fell out" in str(failed.outputs[0].error)
        assert tokens(engine.generate(prompts(2, 81), greedy(4))) == good
        check_memory(engine)


def test_ctrl_c_while_a_step_runs_loses_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = prompts(6, 82)
    expected = alone(llama, many, greedy(8))
    with make(llama) as engine:
        ids = [engine.add_request(prompt, greedy(8)) for prompt in many]
        engine.step()
        for call in (engine.step, lambda: engine.generate([[5, 6, 7]], greedy(50))):
            with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
                patch.setattr(Future, "result", interrupted)
                call()
        while engine.has_work:
            engine.step()
        outputs = [engine.get_output(i) for i in ids]
        assert [output.token_ids for output in outputs if output is not None] == expected
        check_memory(engine)


def interrupted(future: Future[Any], *args: Any, wait: Any = Future.result) -> Any:
    """Ctrl-C comes to the main thread alone."""
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    return wait(future, *args)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_batch_size": 2, "max_concurrent_requests": 3}, "max_concurrent_requests"),
        ({"max_num_seqs": 2, "max_queue_size": 4}, "requests"),
    ],
    ids=str,
)
def test_limits_of_requests_but_generate_waits_for_room(llama: Path, options: dict[str, int], said: str) -> None:
    with make(llama, **options) as engine:
        assert engine.config.max_num_seqs == 2
        assert len(engine.generate(prompts(20, 91), greedy(3))) == 20
        with pytest.raises(errors.TooManyRequestsError, match=said):
            for prompt in prompts(20, 92):
                engine.add_request(prompt, greedy(3))


def test_a_deadline_ends_a_request(engine: LLMEngine) -> None:
    output = engine.generate([prompts(1, 93)[0]], greedy(50), deadline_s=0.0)[0]
    assert output.finish_reason == "deadline"


def test_namespaces_share_nothing(engine: LLMEngine) -> None:
    prompt = prompts(1, 94, 48, 48)[0]
    engine.generate([prompt], greedy(2), namespace="a")
    assert engine.generate([prompt], greedy(2), namespace="b")[0].num_cached_tokens == 0
    assert engine.generate([prompt], greedy(2), namespace="a")[0].num_cached_tokens == 48
    assert engine.explain(prompt, "c").num_matched == 0
    assert engine.explain(prompt, "a").num_matched == 48
    longer = [*prompt, *engine.generate([prompt], greedy(2), namespace="a")[0].token_ids[:1]]
    told = engine.explain(longer, "a")
    run = engine.generate([longer], greedy(1), namespace="a")[0]
    assert (told.num_matched, told.reason) == (run.num_cached_tokens, run.hit.reason) == (48, "limit")


def test_statistics_add_up(llama: Path) -> None:
    with make(llama) as engine:
        engine.generate(prompts(5, 95), greedy(4))
        stats = engine.engine_stats()
        assert (stats.total_requests, stats.completed_requests, stats.failed_requests) == (5, 5, 0)
        assert stats.total_tokens_generated == 20
        cache = engine.cache_stats()
        assert cache.total_cached > 0 and cache.protected_size == 0
        engine.clear_cache()
        assert engine.cache_stats().total_cached == 0


def test_a_closed_engine_frees_its_blocks_and_refuses(llama: Path) -> None:
    engine = make(llama)
    engine.generate(prompts(2))
    kept = [weakref.ref(layer.keys) for layer in engine.runner.pool.layers]
    assert all(keys() is not None for keys in kept)
    engine.close()
    assert all(keys() is None for keys in kept)
    assert engine.engine_stats().completed_requests == 2
    with pytest.raises(errors.StoppedError):
        engine.generate([[5]], greedy(1))
