"""RwkvSampler over tiny random models with the vocabulary of TTS: ranges, ends, batches, streams, and what goes
wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archerfish
from archerfish import (
    EngineConfig,
    LLMEngine,
    PerformanceMonitor,
    RwkvSampler,
    SamplingParams,
    TTSRequest,
    TTSTokens,
    errors,
)
from archerfish.compat.optimization import OptimizationConfig
from archerfish.engine.tts import EOS, GLOBAL_OFFSET, PROPERTIES, TAG_1, VOCAB_SIZE
from archerfish.kernels.torch import reference
from tests.cache.invariants import check_cache, owned_blocks
from tests.engine.test_tts import BAD, REFERENCE, VOICE
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv

TEXTS = [
    "Hello there",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "你好，世界",
    "a",
    "One. Two. Three!",
    "ß" * 40,
]


def config_of(directory: Path, **options: Any) -> EngineConfig:
    save_tiny_rwkv(directory, vocab_size=VOCAB_SIZE + 9, hidden_size=32, max_position_embeddings=2600)
    return rwkv_config(directory, **{"load_format": "dummy", "max_cache_tokens": 40_000, **options})


@pytest.fixture(autouse=True, scope="module")
def large_weights() -> Iterator[None]:
    """Such that what is drawn depends on all that was read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "DUMMY_SCALE", 0.5)
        yield


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RwkvSampler]:
    with RwkvSampler(config_of(tmp_path_factory.mktemp("model"))) as made:
        yield made


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "sampler" in request.fixturenames:
        engine: LLMEngine = request.getfixturevalue("sampler").engine
        engine.settle()
        assert not engine.has_work and not request.getfixturevalue("sampler")._open
        check_cache(engine.scheduler.cache, owned_blocks(engine.scheduler))


def requests(num: int, **options: Any) -> list[TTSRequest]:
    """Of both modes, and of different texts, lengths and seeds."""
    voices: list[dict[str, Any]] = [{}, {}, REFERENCE]
    return [
        TTSRequest(text=TEXTS[i % len(TEXTS)], seed=100 + i, max_tokens=3 + i, **voices[i % 3], **options)
        for i in range(num)
    ]


def favour_end(engine: LLMEngine, bonus: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the end of the semantic tokens likelier than the random model has it."""
    forward = engine.runner._forward

    def favouring(*given: Any) -> list[Any]:
        found = forward(*given)
        for logits in found:
            logits[:, EOS] += bonus
        return found

    monkeypatch.setattr(engine.runner, "_forward", favouring)
    engine.clear_cache()  # of logits too


def test_repr_shows_the_engine(sampler: RwkvSampler) -> None:
    assert repr(sampler) == f"RwkvSampler({sampler.engine!r})" and "device='cpu'" in repr(sampler)


def test_numbers_and_ranges_of_tokens(sampler: RwkvSampler) -> None:
    found = sampler.generate_tts_tokens_batch(requests(12))
    for i, tokens in enumerate(found):
        assert len(tokens.global_tokens) == 32 and all(0 <= token < 4096 for token in tokens.global_tokens)
        assert len(tokens.semantic_tokens) == 3 + i and all(0 <= token < 8192 for token in tokens.semantic_tokens)
        assert (tokens.finish_reason, tokens.error) == ("length", None) and tokens.num_prompt_tokens > 8
        assert (tokens.global_tokens == VOICE) == (i % 3 == 2)
    assert len({tuple(tokens.global_tokens) for tokens in found}) == 9 and len(set(found[-1].semantic_tokens)) > 10


def test_the_sequence_of_sampled_tokens(sampler: RwkvSampler) -> None:
    """Whole, as the engine has it: global tokens with their offset, TAG_1, semantic tokens as they are."""
    request = TTSRequest(text="Hello", seed=4, max_tokens=6)
    (output,) = sampler.engine.generate([request.prompt()], request.params())
    tokens = sampler.generate_tts_tokens(request)
    assert output.token_ids == [*(GLOBAL_OFFSET + i for i in tokens.global_tokens), TAG_1, *tokens.semantic_tokens]
    voiced = TTSRequest(text="Hello", ref_global_tokens=tokens.global_tokens, ref_semantic_tokens=[1])
    assert [*request.prompt(), *output.token_ids[:33]] == voiced.prompt()


def test_the_end_token_ends_a_request(sampler: RwkvSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        favour_end(sampler.engine, 10.0, patch)
        many = [TTSRequest(text=TEXTS[0], seed=i, max_tokens=50, top_k=0, top_p=1.0) for i in range(12)]
        found = sampler.generate_tts_tokens_batch(many)
        ended = [tokens for tokens in found if tokens.finish_reason == "stop"]
        assert len({len(tokens.semantic_tokens) for tokens in ended}) > 2
        assert all(len(tokens.semantic_tokens) < 50 for tokens in ended)
        assert all(EOS not in tokens.semantic_tokens and len(tokens.global_tokens) == 32 for tokens in found)
        assert all(len(tokens.semantic_tokens) == 50 for tokens in found if tokens.finish_reason == "length")
    with monkeypatch.context() as patch:
        favour_end(sampler.engine, 1e4, patch)  # which no global token minds
        at_once = sampler.generate_tts_tokens("Hello", seed=1)
        assert (len(at_once.global_tokens), at_once.semantic_tokens, at_once.finish_reason) == (32, [], "stop")
    sampler.engine.clear_cache()


def test_a_batch_gives_the_tokens_of_single_requests(sampler: RwkvSampler) -> None:
    together = sampler.generate_tts_tokens_batch(requests(6))
    sampler.reset()
    alone = [sampler.generate_tts_tokens(request) for request in requests(6)]
    assert alone == together
    assert sampler.generate_tts_tokens_batch(reversed(requests(6))) == together[::-1]


@pytest.mark.parametrize("kind", PROPERTIES)
def test_every_property_changes_the_tokens(sampler: RwkvSampler, kind: str) -> None:
    voices: list[dict[str, Any]] = [{kind: name} for name in PROPERTIES[kind]]
    prompts = [TTSRequest(text="a", **voice).prompt() for voice in voices]
    outputs = sampler.engine.generate(prompts, SamplingParams(max_tokens=1), wants_logits=True)
    rows = [output.logits[0] for output in outputs]  # not tokens: of random weights, they may be the same
    assert all(abs(one - other).max() > 1e-4 for one, other in itertools.combinations(rows, 2))


def test_llama_models_can_speak(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    with RwkvSampler(tiny_config(tmp_path, max_cache_tokens=2000)) as sampler:
        found = sampler.generate_tts_tokens_batch(requests(4))
        assert [sampler.generate_tts_tokens(request) for request in requests(4)] == found
        for i, tokens in enumerate(found):
            assert len(tokens.global_tokens) == 32 and max(tokens.global_tokens) < 4096
            assert len(tokens.semantic_tokens) == 3 + i and max(tokens.semantic_tokens) < 8192


def test_a_step_of_the_batch_is_one_forward_pass(sampler: RwkvSampler) -> None:
    sampler.reset()
    before = sampler.engine.runner.num_forward_passes
    sampler.generate_tts_tokens_batch([TTSRequest(text="Hello", seed=i, max_tokens=10 + i) for i in range(16)])
    assert (
        sampler.engine.runner.num_forward_passes - before <= 32 + 1 + 25 + 4
    )  # some begin after the first has its prompt


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 3}, {"max_cache_tokens": 200}, {"pipeline_depth": 0}, {"deterministic": True}]
)
def test_few_rows_and_little_memory_change_nothing(
    sampler: RwkvSampler, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = sampler.generate_tts_tokens_batch(requests(8))
    with RwkvSampler(config_of(tmp_path, block_size=4, **options)) as other:
        assert other.generate_tts_tokens_batch(requests(8)) == expected
        if "max_cache_tokens" in options:
            assert other.engine.scheduler.stats().num_preemptions > 0


def test_a_mapping_overrides_the_options_of_its_batch(sampler: RwkvSampler) -> None:
    whole = TTSRequest(text=TEXTS[0], max_tokens=4, seed=3)
    tables: list[Any] = [TEXTS[0], {"text": TEXTS[0], "max_tokens": 5}, whole]
    found = sampler.generate_tts_tokens_batch(tables, max_tokens=3, seed=3)
    assert [len(tokens.semantic_tokens) for tokens in found] == [3, 5, 4]
    assert found[0].semantic_tokens == found[1].semantic_tokens[:3] == found[2].semantic_tokens[:3]


def test_invalid_options_of_a_batch_are_raised(sampler: RwkvSampler) -> None:
    """Beside each of its results it would look like an answer without tokens."""
    for options in ({"emotoin": "SAD"}, {"text": "b"}):
        with pytest.raises(errors.ArcherfishError, match=r"emotoin|text is no option"):
            sampler.generate_tts_tokens_batch(["a", {"text": "b"}], **options)


def test_a_repeated_batch_allocates_no_buffers(sampler: RwkvSampler) -> None:
    sampler.generate_tts_tokens_batch(requests(6))
    before = sampler.engine.pool_stats()
    sampler.generate_tts_tokens_batch(requests(6, age="elderly"))
    after = sampler.engine.pool_stats()
    assert after.total_gets > before.total_gets and after.cache_misses == before.cache_misses > 0


def test_a_monitor_watches_its_engine(sampler: RwkvSampler) -> None:
    with PerformanceMonitor(sampler) as monitor:
        sampler.generate_tts_tokens_batch(requests(3))
        assert monitor.sampling().total_samples > 3 * 3 + 2 * 33  # semantic tokens, global ones and tags
        assert monitor.figures()[sampler.engine.model_name]["inter_token_p50_ms"] > 0
    with pytest.raises(errors.InvalidInputError, match="a RwkvSampler, not str"):
        PerformanceMonitor("rwkv")  # type: ignore[arg-type]


def test_an_invalid_request_does_not_affect_its_batch(sampler: RwkvSampler) -> None:
    good = requests(6)
    expected = sampler.generate_tts_tokens_batch(good)
    bad: list[Any] = [{"text": "Hello", **values} for values, _ in BAD]
    bad += [
        5,
        None,
        {"text": "a", "emotions": "SAD"},
        {"text": "a", 7: 8},
        TTSRequest(text="long " * 3000, max_tokens=2000),
    ]
    mixed = [one for pair in itertools.zip_longest(bad, good) for one in pair if one is not None or pair[0] is None]
    found = sampler.generate_tts_tokens_batch(mixed)
    assert len(found) == len(mixed)
    for request, tokens in zip(mixed, found, strict=True):
        if any(request is one for one in good):
            assert tokens == expected[good.index(request)]
        else:
            assert (
                isinstance(tokens.error, errors.InvalidInputError | errors.UnknownOptionError) and tokens.error.message
            )
            assert (tokens.finish_reason, *tokens) == ("error", [], [])


def test_a_failing_request_does_not_affect_its_batch(sampler: RwkvSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    good = requests(4)
    expected = sampler.generate_tts_tokens_batch(good)
    sampler.reset()
    forward, spoiled = sampler.engine.runner._forward, iter(range(100))

    def failing(*given: Any) -> list[Any]:
        found = forward(*given)
        if next(spoiled) == 20:
            found[0][1] = float("nan")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine.runner, "_forward", failing)
        found = sampler.generate_tts_tokens_batch(good)
    failed = [i for i, tokens in enumerate(found) if tokens.error is not None]
    assert len(failed) == 1 and isinstance(found[failed[0]].error, errors.ModelError)
    assert [tokens for i, tokens in enumerate(found) if i not in failed] == [
        tokens for i, tokens in enumerate(expected) if i not in failed
    ]
    assert sampler.generate_tts_tokens_batch(good) == expected


def test_a_single_request_raises_its_error(sampler: RwkvSampler) -> None:
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("Hello", {"emotion": "hapy"}, errors.InvalidInputError, "no emotion 'hapy'"),
        ("long " * 3000, {}, errors.InputTooLargeError, "leaves room for"),
        (TTSRequest(text="a"), {"seed": 5}, errors.InvalidInputError, "seed is no option of a TTSRequest"),
        ("Hello", {"text": "there"}, errors.InvalidInputError, "text is no option"),
    ]
    for request, options, kind, said in wrong:
        with pytest.raises(kind, match=said):
            sampler.generate_tts_tokens(request, **options)
    with pytest.raises(errors.InvalidInputError, match="Expected a list"):
        sampler.generate_tts_tokens_batch("Hello")
    with pytest.raises(errors.UnknownOptionError, match="'sead'"):
        next(sampler.stream_tts_tokens("Hello", sead=5))
    assert sampler.generate_tts_tokens_batch([]) == []


def test_texts_over_the_limit_of_bytes_are_refused(sampler: RwkvSampler) -> None:
    before = sampler.engine.config.max_prompt_bytes
    sampler.update_config(max_prompt_bytes=20)
    with pytest.raises(errors.InputTooLargeError, match="21 bytes; the limit is 20"):
        sampler.generate_tts_tokens("a" * 21)
    sampler.update_config(max_prompt_bytes=before)


def test_max_tokens_defaults_to_the_room_of_the_model(sampler: RwkvSampler) -> None:
    prompt = TTSRequest(text="word " * 2540)
    room = sampler.engine.facts.max_len - len(prompt.prompt())
    assert 33 < room < 2081
    tokens = sampler.generate_tts_tokens(prompt)
    assert len(tokens.semantic_tokens) == room - 33


def test_a_stream_gives_tokens_as_they_are_drawn(sampler: RwkvSampler) -> None:
    request = requests(2)[1]
    expected = sampler.generate_tts_tokens(request)
    pieces = list(sampler.stream_tts_tokens(request))
    assert len(pieces) > 30 and [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert [token for piece in pieces for token in piece.global_tokens] == expected.global_tokens
    assert [token for piece in pieces for token in piece.semantic_tokens] == expected.semantic_tokens
    assert pieces[-1].finish_reason == "length"
    voiced = list(sampler.stream_tts_tokens("Hello", max_tokens=3, seed=1, **REFERENCE))
    assert voiced[0] == TTSTokens(VOICE) and len(voiced) == 4


def test_streams_of_a_batch_come_together(sampler: RwkvSampler) -> None:
    pieces = list(sampler.stream_tts_tokens_batch([TTSRequest(text="a", seed=i, max_tokens=20) for i in range(4)]))
    places = [place for place, _ in pieces]
    assert set(places[:8]) == {0, 1, 2, 3} and len(pieces) == 4 * 52


def test_leaving_a_stream_aborts_it(sampler: RwkvSampler) -> None:
    before = sampler.engine.scheduler.stats().aborted_requests
    stream = sampler.stream_tts_tokens("Hello", seed=1)
    next(stream)
    stream.close()
    sampler.engine.settle()
    assert sampler.engine.scheduler.stats().aborted_requests == before + 1


def test_seeds(sampler: RwkvSampler) -> None:
    def draw(seed: int | None) -> TTSTokens:
        return sampler.generate_tts_tokens("Hello", seed=seed, max_tokens=4, **REFERENCE)

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_more_requests_than_the_queue_holds(sampler: RwkvSampler) -> None:
    many = [TTSRequest(text="a", seed=i % 5, max_tokens=2) for i in range(40)]
    expected = sampler.generate_tts_tokens_batch(many)
    before = sampler.engine.config.max_queue_size
    assert sampler.update_config(max_queue_size=3)["max_queue_size"] == 3
    assert sampler.generate_tts_tokens_batch(many) == expected
    sampler.update_config(max_queue_size=before)


def test_threads_share_the_engine(sampler: RwkvSampler) -> None:
    expected = sampler.generate_tts_tokens_batch(requests(8))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: sampler.generate_tts_tokens_batch(requests(8)[i::4]), range(4)))
    assert [found[i % 4][i // 4] for i in range(8)] == expected


def test_reset_aborts_requests_and_clears_the_cache(sampler: RwkvSampler) -> None:
    stream = sampler.stream_tts_tokens("Hello there", seed=1)
    next(stream)
    sampler.reset()
    with pytest.raises(errors.StoppedError, match="was aborted"):
        list(stream)
    engine = sampler.engine
    engine.settle()
    sampler.reset()
    assert engine.explain(TTSRequest(text="Hello there").prompt()).num_matched == 0


def test_options_are_changed_while_it_runs(sampler: RwkvSampler) -> None:
    expected = sampler.generate_tts_tokens("Hello", seed=1, max_tokens=9)
    before = OptimizationConfig.of(sampler.engine)
    changed = sampler.update_config(before.updated({"enable_prefetch": False, "enable_prefix_caching": False}))
    assert set(changed) == {"pipeline_depth", "enable_prefix_caching"}
    assert sampler.generate_tts_tokens("Hello", seed=1, max_tokens=9) == expected
    sampler.update_config(before)
    assert OptimizationConfig.of(sampler.engine) == before
    with pytest.raises(errors.UnknownOptionError):
        sampler.update_config(temperature=3)
    with pytest.raises(errors.InvalidInputError, match="not both"):
        sampler.update_config(before, pipeline_depth=0)
    for other in (5, {"cache_size_mb": 3}):
        with pytest.raises(errors.InvalidInputError, match=r"an OptimizationConfig, not (int|dict)\. Give .* by name"):
            sampler.update_config(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_sample_logits(sampler: RwkvSampler, kind: Callable[[list[float]], Any]) -> None:
    logits = [0.0] * 50
    logits[7], logits[30] = 40.0, 50.0
    row = kind(logits)
    assert sampler.sample_logits(row) == sampler.sample_logits(row, temperature=0) == 30
    assert sampler.sample_logits(row, first=5, end=9) == sampler.sample_logits(row, masked=[30], top_k=1) == 7
    drawn = [sampler.sample_logits(row, first=10, end=14, seed=3, position=i) for i in range(50)]
    assert set(drawn) == {10, 11, 12, 13}
    assert drawn == [sampler.sample_logits(row, first=10, end=14, seed=3, position=i) for i in range(50)]


def test_sample_logits_accepts_numbers_of_arrays(sampler: RwkvSampler) -> None:
    row = [0.0, 50.0, 40.0, 30.0]
    kinds: list[Callable[[Any], Any]] = [np.asarray, torch.tensor]
    for kind in kinds:
        where = {"first": kind(1), "end": kind(4), "masked": kind([1, 2])}
        assert sampler.sample_logits(row, seed=kind(7), position=kind(3), **where) == 3


def test_sample_logits_refuses_invalid_values(sampler: RwkvSampler) -> None:
    for logits in ("abc", [[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0, 4.0]], None, 5):
        with pytest.raises(errors.InvalidInputError):
            sampler.sample_logits(logits)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"first": 0.5}, "start of the range must be a whole number, not 0.5"),
        ({"end": "a"}, "end of the range must be a whole number, not 'a'"),
        ({"masked": 1}, "masked must be a list of token ids, not int"),
        ({"masked": ["a"]}, "masked token must be a whole number, not 'a'"),
        ({"seed": None}, "seed must be a whole number, not None"),
        ({"seed": -1}, "seed must be a whole number from 0 to"),
        ({"seed": 2**64}, "seed must be a whole number from 0 to"),
        ({"position": -1}, "position must be a whole number from 0"),
        ({"position": 1.5}, "position must be a whole number, not 1.5"),
        ({"end": 3}, "does not lie within"),
        ({"temperature": -1}, "temperature"),
    ]
    for values, said in wrong:
        with pytest.raises(errors.InvalidInputError, match=said):
            sampler.sample_logits([1.0, 2.0], **values)
    with pytest.raises(errors.ArcherfishError, match="not finite"):
        sampler.sample_logits([float("nan"), 2.0])


def test_a_model_without_tts_tokens_is_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with pytest.raises(errors.UnsupportedModelError, match="has 96 tokens; a TTS model of RWKV-7 has at least 77,871"):
        RwkvSampler(tiny_config(tmp_path))


def test_close_leaves_a_given_engine_open(sampler: RwkvSampler) -> None:
    with RwkvSampler.new(sampler.engine) as other:
        assert other.generate_tts_tokens("a", seed=1, max_tokens=2).error is None
    assert sampler.generate_tts_tokens("a", seed=1, max_tokens=2).error is None
    assert archerfish.RwkvSampler is RwkvSampler
