"""LLMEngine on RWKV-7: the logits of the package rwkv, whatever is cut, cached, restored, preempted or run beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archerfish.config import HubConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import InvalidOptionError, UnsupportedModelError
from archerfish.params import SamplingParams
from tests.engine.tiny_llama import check_memory, greedy, tokens
from tests.engine.tiny_rwkv import DTYPES, prompts, rwkv_config
from tests.models.recurring import SIZES, random_tokens, write_checkpoint
from tests.models.test_rwkv7 import load_rwkv, needs_rwkv, their_logits

TOLERANCE = 1e-4
VOCAB = SIZES["tiny"].vocab_size


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SIZES["tiny"], tmp_path_factory.mktemp("rwkv7") / "tiny.pth")


@pytest.fixture
def engine(tiny: Path, hub: HubConfig) -> Iterator[LLMEngine]:
    with make(tiny, hub) as made:
        yield made


def make(model: Path, hub: HubConfig, **options: Any) -> LLMEngine:
    return LLMEngine(rwkv_config(model, **options), hub=hub)


def note_logits(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of all sequences that get a token, from now on."""
    noted: list[torch.Tensor] = []
    original = engine.runner._forward

    def forward(*given: Any) -> list[Any]:
        found = original(*given)
        noted.extend(row for each in found for row in torch.tensor(each))
        return found

    monkeypatch.setattr(engine.runner, "_forward", forward)
    return noted


# Whole, and in chunks that end inside of blocks; with one state for all, and with some between.
CUTS: list[dict[str, Any]] = [
    {},
    {"block_size": 7},
    {"max_num_batched_tokens": 43},
    {"enable_prefix_caching": False, "block_size": 0},
]


@needs_rwkv
@pytest.mark.parametrize("options", CUTS, ids=str)
def test_logits_equal_the_package_rwkv(
    options: dict[str, Any], tmp_path: Path, hub: HubConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the prefill, whole or in chunks, of every decode, of both again from a state that was kept, and of
    several."""
    path = write_checkpoint(SIZES["small"], tmp_path / "small.pth")
    prompt, *others = random_tokens(SIZES["small"], 3, 90)
    with make(path, hub, **options) as engine:
        noted = note_logits(engine, monkeypatch)
        first = engine.generate([prompt], greedy(20))[0]
        theirs = load_rwkv(path)
        expected = their_logits(theirs, prompt + first.token_ids[:-1])[89:]
        torch.testing.assert_close(torch.stack(noted), expected, atol=TOLERANCE, rtol=TOLERANCE)
        noted.clear()
        again = engine.generate([prompt], greedy(20))[0]
        torch.testing.assert_close(torch.stack(noted), expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert again.token_ids == first.token_ids
        noted.clear()
        resumed = engine.generate([prompt + first.token_ids[:19]], greedy(1))[0]
        torch.testing.assert_close(noted[-1], expected[-1], atol=TOLERANCE, rtol=TOLERANCE)
        size = engine.facts.memory.block_size
        assert (again.num_cached_tokens, resumed.num_cached_tokens) == (
            (90 // size * size, 108 // size * size) if engine.config.enable_prefix_caching else (0, 0)
        )
        noted.clear()
        engine.generate([others[0][:50], others[1][:70]], greedy(1))
        rows = [their_logits(theirs, some)[-1] for some in (others[0][:50], others[1][:70])]
        torch.testing.assert_close(torch.stack(noted), torch.stack(rows), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def mixed(tiny: Path, hub: HubConfig) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, some of which begin alike, with a seed each, and what each gives alone with no state kept."""
    shared = prompts(1, VOCAB, 5, 50, 50)[0]
    many = [*prompts(20, VOCAB), *(shared + prompt for prompt in prompts(12, VOCAB, 1, 1, 20))]
    each = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True) for i in range(len(many))]
    with make(tiny, hub, enable_prefix_caching=False, block_size=0, pipeline_depth=0) as engine:
        return many, each, [engine.generate([prompt], one)[0].token_ids for prompt, one in zip(many, each, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 256},
        {"enable_prefix_caching": False, "block_size": 0},
        {"deterministic": True},
        {"max_cache_tokens": 112, "pipeline_depth": 0},
        {"eviction_policy": "lfu", "max_cache_tokens": 320},
    ],
    ids=str,
)
def test_32_streams_give_what_each_gives_alone(
    tiny: Path,
    hub: HubConfig,
    mixed: tuple[list[list[int]], list[SamplingParams], list[list[int]]],
    options: dict[str, Any],
) -> None:
    many, each, expected = mixed
    with make(tiny, hub, **options) as engine:
        assert tokens(engine.generate(many, each)) == expected
        assert tokens(engine.generate(many, each)) == expected  # now out of the cache
        check_memory(engine)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    block_size=st.integers(1, 70),
    num_blocks=st.integers(3, 40),
    budget=st.integers(1, 90),
    max_num_seqs=st.integers(1, 32),
    depth=st.integers(0, 1),
)
def test_tokens_do_not_depend_on_memory(
    tiny: Path,
    hub: HubConfig,
    mixed: tuple[list[list[int]], list[SamplingParams], list[list[int]]],
    block_size: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    depth: int,
) -> None:
    many = mixed[0][::4]
    each = mixed[1][::4]
    expected = mixed[2][::4]
    num_tokens = max(num_blocks * block_size, 90 + block_size)  # the longest sequence fits
    options = {"max_num_batched_tokens": max_num_seqs + budget, "max_num_seqs": max_num_seqs, "pipeline_depth": depth}
    with make(tiny, hub, block_size=block_size, max_cache_tokens=num_tokens, **options) as engine:
        assert tokens(engine.generate(many, each)) == expected
        check_memory(engine)


def test_a_preempted_sequence_goes_on_from_the_nearest_state(tiny: Path, hub: HubConfig) -> None:
    many = prompts(10, VOCAB, 3, 20, 30)
    with make(tiny, hub, enable_prefix_caching=False, block_size=0) as engine:
        expected = tokens(engine.generate(many, greedy(30)))
    with make(tiny, hub, block_size=8, max_cache_tokens=160) as engine:
        assert tokens(engine.generate(many, greedy(30))) == expected
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        every = sum(map(len, many)) + 30 * len(many)
        assert stats.prefill_tokens_computed < every  # not all over again from the beginning
        check_memory(engine)


def test_requests_that_begin_alike_compute_that_once(engine: LLMEngine) -> None:
    shared = prompts(1, VOCAB, 9, 128, 128)[0]
    many = [shared + own for own in prompts(8, VOCAB, 10, 4, 4)]
    outputs = engine.generate(many, greedy(4))
    assert [output.num_cached_tokens for output in outputs] == [0, *[128] * 7]
    assert engine.scheduler.stats().prefill_tokens_computed == 128 + 8 * 4
    stats = engine.cache_stats()
    assert stats.hits == 7 * 128 and stats.misses == 128 + 8 * 4
    assert stats.total_cached == 128 and stats.total_capacity == engine.facts.memory.num_blocks * 16


def test_an_exact_repeat_needs_no_pass_where_a_state_is_kept(engine: LLMEngine) -> None:
    for num, passes in ((48, 0), (50, 1)):
        prompt = prompts(1, VOCAB, num, num, num)[0]
        first = engine.generate([prompt], greedy(1))[0]
        before = engine.runner.num_forward_passes
        again = engine.generate([prompt], greedy(1))[0]
        assert engine.runner.num_forward_passes - before == passes
        assert again.token_ids == first.token_ids and again.num_cached_tokens == 48
    assert engine.engine_stats().cache_hits == 96


def test_what_the_cache_says(engine: LLMEngine) -> None:
    prompt = prompts(1, VOCAB, 12, 60, 60)[0]
    assert engine.explain(prompt).num_matched == 0
    engine.generate([prompt], greedy(30))  # 89 tokens are computed: five states of 16
    found = engine.explain(prompt)
    assert (found.num_matched, found.reason) == (48, "between_states")
    assert "48 of 60 tokens" in found.explain() and "state" in found.explain()
    assert engine.explain([*prompt[:50], 1, 2, 3]).num_matched == 48
    assert engine.explain(prompt[:20]).num_matched == 16
    assert engine.explain(prompt[:8]).reason == "between_states"  # seen, but too short for a state
    assert engine.explain([9] * 40).reason == "never_seen"
    assert engine.explain(prompt[:48]).num_matched == 32  # its last token must be computed
    assert engine.cache_stats().total_cached == 80
    engine.clear_cache()
    assert engine.explain(prompt).num_matched == 0


def test_n_sequences_share_the_states_of_their_prompt(engine: LLMEngine) -> None:
    prompt = prompts(1, VOCAB, 13, 40, 40)[0]
    params = SamplingParams(n=4, max_tokens=20, seed=3, ignore_eos=True)
    output = engine.generate([prompt], params)[0]
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    assert engine.scheduler.stats().prefill_tokens_computed == 40 + 3 * 8
    again = engine.generate([prompt], params)[0]
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in output.outputs]


def test_one_state_a_sequence_without_a_prefix_cache(tiny: Path, hub: HubConfig) -> None:
    """However long: so that all may run at once in memory that is known beforehand."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "block_size": 0}
    with make(tiny, hub, max_num_seqs=24, **options) as engine:
        assert (engine.facts.memory.num_blocks, engine.facts.memory.block_size) == (24, 1 << 20)
        assert "states=24" in repr(engine)
        most = 0

        def watch(*_: Any) -> None:
            nonlocal most
            most = max(most, engine.scheduler.num_running)

        engine.watcher = watch
        engine.generate(prompts(24, VOCAB, 1, 3, 30), greedy(40))
        assert most == 24
        assert engine.scheduler.stats().num_preemptions == 0
        with pytest.raises(InvalidOptionError, match="one state for each sequence"):
            engine.configure(enable_prefix_caching=True)
        engine.configure(max_queue_size=7)
    with pytest.raises(InvalidOptionError, match="max_cache_tokens has no meaning"):
        make(tiny, hub, max_cache_tokens=4096, **options)


def test_the_prefix_cache_can_be_turned_off_and_on(engine: LLMEngine) -> None:
    prompt = prompts(1, VOCAB, 14, 40, 40)[0]
    expected = engine.generate([prompt], greedy(8))[0].token_ids
    for is_on, cached in ((False, 0), (True, 0), (True, 32)):
        engine.configure(enable_prefix_caching=is_on)
        output = engine.generate([prompt], greedy(8))[0]
        assert (output.token_ids, output.num_cached_tokens) == (expected, cached)


def test_a_step_that_fails_leaves_no_state_behind(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(1, VOCAB, 15, 70, 70)[0]
    expected = engine.generate([prompt], greedy(8))[0].token_ids
    engine.clear_cache()

    forward = engine.runner._forward

    def broken(*given: Any) -> None:
        forward(*given)  # which changes states
        raise RuntimeError("at the end of a pass")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_forward", broken)
        assert engine.generate([prompt], greedy(8))[0].finish_reason == "error"
    output = engine.generate([prompt], greedy(8))[0]
    assert (output.token_ids, output.num_cached_tokens) == (expected, 0)
    check_memory(engine)


@pytest.mark.parametrize("model_type", ["rwkv", "rwkv5", "rwkv6"])
def test_older_configurations_are_refused(model_type: str, tmp_path: Path, hub: HubConfig) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}", "vocab_size": 65536}}')
    with pytest.raises(UnsupportedModelError, match="only RWKV-7"):
        make(tmp_path, hub, load_format="dummy")


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_logits_do_not_depend_on_other_requests(
    dtype: str, weights: str, tiny: Path, hub: HubConfig
) -> None:
    """Also where a prompt goes on from a kept state, and where a sequence was preempted."""
    shared = prompts(1, VOCAB, 20, 270, 270)[0]
    many = [*prompts(5, VOCAB, 21, 3, 40), *(shared + own for own in prompts(3, VOCAB, 22, 5, 30))]
    params = greedy(20, logprobs=2)

    def run(batches: list[list[list[int]]], **options: Any) -> list[list[Any]]:
        with make(tiny, hub, dtype=dtype, weights=weights, deterministic=True, max_num_seqs=8, **options) as engine:
            outputs = [output for batch in batches for output in engine.generate(batch, params)]
            assert (engine.scheduler.stats().num_preemptions > 0) == ("max_cache_tokens" in options)
            return [[output.token_ids, output.logprobs] for output in outputs]

    alone = run([[prompt] for prompt in many], enable_prefix_caching=False, block_size=0)
    assert run([many]) == alone
    assert run([many], max_cache_tokens=400) == alone
