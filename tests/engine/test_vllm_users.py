"""What scripts written for vLLM use: options, sampling parameters, encoders, beam search, sleep."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish import LLM, ArrowEngine, HubConfig, SamplingParams, errors, remarks
from archerfish.engine.beam_search import BeamSearchParams
from archerfish.engine.llm import EncoderLLM
from archerfish.engine.vllm_options import EngineArgs
from archerfish.errors import (
    ArcherfishError,
    InvalidInputError,
    InvalidOptionError,
    StoppedError,
    UnsupportedModelError,
)
from archerfish.store.names import choose_files
from tests.engine.tiny_llama import check_memory, greedy, save_tiny_llama, tiny_config
from tests.text.tiny_tokenizers import byte_fallback, save_text_llama

TINY: dict[str, Any] = {
    "dtype": "float",
    "load_format": "dummy",
    "max_cache_tokens": 1024,
    "max_num_seqs": 32,
    "seed": 7,
    "num_threads": 1,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_llama(tmp_path_factory.mktemp("talking-llama"), 256)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(tiny_config(directory)) as made:
        yield made


# Options


def test_options_without_effect_are_accepted_with_one_remark_each(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    names = ("trust_remote_code", "enforce_eager", "swap_space", "disable_log_stats", "disable_custom_all_reduce")
    options: dict[str, Any] = {**dict.fromkeys(names, 1), "enable_chunked_prefill": True, "tokenizer_mode": "auto"}
    with caplog.at_level(logging.WARNING, "archerfish"):
        for _ in range(2):
            LLM(str(directory), **TINY, **options, max_model_len=None, quantization=None).close()
    for name in names:
        assert [f"option {name} has no effect" in text for text in caplog.messages].count(True) == 1, name
    assert len(caplog.messages) == len(names)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype cannot be 'fp4'.*auto, int8"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill cannot be False. .*max_num_batched_tokens"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb"),
        ({"quantization": "awq"}, "quantization is 'awq', but the files of .* say 'none'.*weights='int8'"),
        ({"task": "embed"}, "generates text: it cannot do the task 'embed'"),
        ({"task": "sing"}, "task cannot be 'sing'"),
        ({"dtype": "double"}, "dtype cannot be 'double'"),
        ({"enforce_eagre": True}, "Unknown option"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(directory: Path, option: dict[str, Any], said: str) -> None:
    with pytest.raises(ArcherfishError, match=said):
        LLM(str(directory), **{**TINY, **option})


def test_quantization_that_the_files_state_is_accepted(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, quantization_config={"quant_method": "awq"})
    LLM(str(tmp_path), quantization="AWQ", **TINY).close()
    with pytest.raises(InvalidOptionError, match=r"quantization is 'gptq', but the files of .* say 'awq'"):
        LLM(str(tmp_path), quantization="gptq", **TINY)


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32"), ("torch.bfloat16", "bfloat16")])
def test_names_of_types(directory: Path, name: str, dtype: str) -> None:
    with LLM(str(directory), **{**TINY, "dtype": name}) as made:
        assert made.config.dtype == dtype


def test_another_tokenizer_is_used(tmp_path: Path, directory: Path) -> None:
    mute = tmp_path / "mute"
    mute.mkdir()
    save_tiny_llama(mute, vocab_size=288)
    other = byte_fallback(tmp_path / "other")
    with LLM(str(mute), tokenizer=str(tmp_path / "other"), **TINY) as made:
        assert made.generate("a cat", greedy(2))[0].prompt_token_ids == other.encode("a cat")
    with (
        LLM(str(directory), skip_tokenizer_init=True, **TINY) as made,
        pytest.raises(InvalidInputError, match="no tokenizer"),
    ):
        made.generate("a cat")
    small = tmp_path / "small"
    small.mkdir()
    save_tiny_llama(small)
    for wrong, said in (
        (tmp_path / "other", "up to 269, but the model's table has 96 rows"),
        (mute, "has no tokenizer.json"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            LLM(str(small), tokenizer=str(wrong), **TINY)


def test_a_tokenizer_of_the_hub_comes_without_weights() -> None:
    files = ["config.json", "model.safetensors", "onnx/config.json", "tokenizer.json", "tokenizer_config.json"]
    assert choose_files("org/name", files, "tokenizer") == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    with pytest.raises(errors.ModelNotFoundError, match="has no file 'tokenizer'"):
        choose_files("org/name", files[:2], "tokenizer")


def test_from_engine_args(directory: Path) -> None:
    with LLM.from_engine_args(EngineArgs(model=str(directory), enforce_eager=True, **TINY)) as made:
        assert made.llm_engine is made and made.get_tokenizer().encode("a")


# Sampling


def test_bad_words_never_appear(llm: LLM) -> None:
    tokenizer, params = llm.get_tokenizer(), SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    free = llm.generate("the cat", params)[0]
    words = ["cat", "a", tokenizer.decode(free.token_ids[40:41])]
    banned = [tokenizer.encode(prefix + word, add_special_tokens=False) for word in words for prefix in ("", " ")]
    found = llm.generate("the cat", params.replace(bad_words=words))[0].token_ids
    assert len(found) == 200
    for ids in banned:
        assert not any(found[i : i + len(ids)] == ids for i in range(len(found))), ids


def test_the_last_token_of_a_bad_word_is_ruled_out_after_the_others(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("a", add_special_tokens=False)
    assert len(ids) == 2

    def in_turn(output: list[int], logits: Any) -> Any:
        logits[:] = -math.inf
        logits[ids] = 0.0
        logits[ids[len(output) % 2]] = 1.0
        return logits

    params = greedy(4, logits_processors=[in_turn])
    assert llm.generate([5], params)[0].token_ids == ids * 2
    assert llm.generate([5], params.replace(bad_words=["a"]))[0].token_ids == ids[:1] * 4


def test_allowed_token_ids_are_the_only_ones(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, temperature=2.0, seed=1, allowed_token_ids=[20, 31, 32, 287], n=2)
    for output in llm.generate([5, 6], params)[0].outputs:
        assert set(output.token_ids) <= {20, 31, 32, 287} and len(output.token_ids) == 50
    plain = llm.generate([5, 6], greedy(1, logprobs=64))[0].outputs[0].logprobs
    assert plain is not None
    best_two = [token_id for token_id, _ in plain[0].top[1:3]]
    assert llm.generate([5, 6], greedy(1, allowed_token_ids=best_two))[0].token_ids == best_two[:1]
    with pytest.raises(InvalidInputError, match="allowed_token_ids names token 288"):
        llm.generate([5, 6], SamplingParams(allowed_token_ids=[288]))


def test_nothing_left_to_draw_ends_the_request_with_an_error(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[7], grammar={"kind": "choice", "value": ["b"]})
    output = llm.generate([5], params)[0].outputs[0]
    assert output.finish_reason == "error" and "rule them all out" in str(output.error)


def test_a_logits_processor_forces_tokens_and_sees_the_output(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def with_prompt(prompt: list[int], output: list[int], logits: Any) -> Any:
        seen.append((prompt, output))
        return logits.masked_fill(logits != logits[30 + len(output)], -math.inf)

    def count_up(output: list[int], logits: Any) -> Any:
        forced = np.full(len(logits), -np.inf, np.float32)
        forced[40 + len(output)] = 0.0
        return forced

    assert llm.generate([5, 6], greedy(4, logits_processors=[count_up]))[0].token_ids == [40, 41, 42, 43]
    assert llm.generate([5, 6], greedy(3, logits_processors=[with_prompt]))[0].token_ids == [30, 31, 32]
    assert seen == [([5, 6], [30, 31, 32][:i]) for i in range(3)]
    unchanged = llm.generate([[5, 6], [7], [5, 6]], [greedy(9), greedy(9, logits_processors=[count_up]), greedy(9)])
    alone = llm.generate([5, 6], greedy(9))[0].token_ids
    assert unchanged[0].token_ids == unchanged[2].token_ids == alone and unchanged[1].token_ids[0] == 40


def test_a_failing_logits_processor_ends_its_own_request_only(llm: LLM) -> None:
    def short(output: list[int], logits: Any) -> Any:
        return logits[:5]

    def broken(output: list[int], logits: Any) -> Any:
        raise KeyError("fish")

    wrong, short_one, right = llm.generate(
        [[5], [6], [7]], [greedy(3, logits_processors=[broken]), greedy(3, logits_processors=[short]), greedy(3)]
    )
    assert "broken failed: KeyError" in str(wrong.outputs[0].error) and wrong.finish_reason == "error"
    assert "gave 5 logits for 288" in str(short_one.outputs[0].error)
    assert right.finish_reason == "length"


def test_structured_outputs_are_a_grammar() -> None:
    class Guided:
        def __init__(self) -> None:
            self.regex = "a+"
            self.json = None
            self.backend = None

    for value, grammar in (
        ({"json": {"type": "object"}}, {"kind": "json_schema", "value": {"type": "object"}}),
        ({"choice": ["a", "b"]}, {"kind": "choice", "value": ["a", "b"]}),
        ({"json_object": True}, {"kind": "json", "value": None}),
        (Guided(), {"kind": "regex", "value": "a+"}),
    ):
        params = SamplingParams(structured_outputs=value)
        assert params.grammar == grammar == SamplingParams(guided_decoding=value).replace(n=2).grammar
    for wrong in ({}, {"json": {}, "regex": "a"}, {"structural_tag": "x"}):
        with pytest.raises(InvalidInputError, match="structured_outputs"):
            SamplingParams(structured_outputs=wrong)


def test_other_parameters_of_vllm(llm: LLM) -> None:
    params = SamplingParams(spaces_between_special_tokens=True, best_of=None, max_tokens=3, detokenize=False)  # type: ignore[call-arg]
    output = llm.generate("a cat", params)[0]
    assert output.outputs[0].text == "" and len(output.token_ids) == 3 and output.prompt == "a cat" and output.finished
    for wrong in (
        {"best_of": 2},
        {"use_beam_search": True},
        {"output_kind": "all"},
        {"detokenize": False, "stop": "a"},
    ):
        with pytest.raises(ArcherfishError, match=next(iter(wrong))):
            SamplingParams(**wrong)


# Beam search


def next_logprobs(llm: LLM, tokens: list[int]) -> list[float]:
    logits = llm.generate([tokens], greedy(1), wants_logits=True)[0].logits
    import torch

    found: list[float] = torch.tensor(logits).double().log_softmax(-1)[0].tolist()
    return found


def test_beam_search_equals_trying_every_sequence(tmp_path: Path) -> None:
    """As wide as the vocabulary it misses none of the sequences of two tokens."""
    save_tiny_llama(tmp_path, vocab_size=8)
    with LLM(tiny_config(tmp_path)) as small:
        prompt, first = [5, 6, 7], next_logprobs(small, [5, 6, 7])
        every: dict[tuple[int, ...], float] = {
            (a, b): first[a] + next_logprobs(small, [*prompt, a])[b] for a in range(8) if a != 2 for b in range(8)
        } | {(2,): first[2]}  # which is the end token
        scores = {key: total / (3 + len(key) - (key[-1] == 2)) for key, total in every.items()}
        expected = sorted(scores, key=lambda one: -scores[one])[:8]
        found = small.beam_search({"prompt_token_ids": prompt}, BeamSearchParams(beam_width=8, max_tokens=2))[
            0
        ].sequences
        assert [tuple(one.tokens[3:]) for one in found] == expected
        assert {one.finish_reason for one in found if one.tokens[-1] == 2} <= {"stop"}
        assert [one.cum_logprob for one in found] == pytest.approx([every[key] for key in expected], abs=1e-4)
        check_memory(small)


def test_beam_search_of_one_beam_is_greedy(llm: LLM) -> None:
    beams = llm.beam_search(["a cat", "the"], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    for prompt, beam in zip(["a cat", "the"], beams, strict=True):
        expected = llm.generate(prompt, greedy(6))[0]
        assert beam.sequences[0].tokens == [*expected.prompt_token_ids, *expected.token_ids]
        assert beam.sequences[0].text is not None and len(beam.sequences[0].logprobs) == 6
    with pytest.raises(InvalidInputError, match="beam_width must be a whole number from 1 to 32"):
        BeamSearchParams(beam_width=33, max_tokens=1)


# Sleep


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_answers_stay_the_same(directory: Path, level: int) -> None:
    with LLM(tiny_config(directory)) as tired:
        prompt = list(range(3, 60))
        expected = tired.generate(prompt, greedy(5))[0].token_ids
        queued = tired.add_request([5], greedy(100))
        keys, weights = (weakref.ref(one) for one in (tired.runner.pool.layers[0].keys, tired.runner.model))
        tired.sleep(level)
        gc.collect()
        assert tired.is_sleeping() and keys() is None and (weights() is None) == (level == 2)
        result = tired.get_output(queued)
        assert result is not None and result.finish_reason == "abort"
        with pytest.raises(StoppedError, match=r"sleeps. Call wake_up\(\) first"):
            tired.generate(prompt, greedy(5))
        tired.wake_up()
        assert tired.generate(prompt, greedy(5))[0].token_ids == expected and not tired.is_sleeping()
        check_memory(tired)
        tired.sleep(level)  # closing a sleeping engine is fine
    with pytest.raises(InvalidInputError, match="level must be 1"):
        LLM.sleep(tired, 3)


# Encoders


def test_an_embedding_model_embeds_and_scores(minilm: ArrowEngine, caplog: pytest.LogCaptureFixture) -> None:
    made: Any = LLM("all-minilm-l6-v2", task="embed", max_model_len=128, gpu_memory_utilization=0.5)
    assert isinstance(made, EncoderLLM) and isinstance(made, LLM)
    made.embed("word " * 200)
    assert "all-minilm-l6-v2 reads 128 tokens of a text. Longer ones were cut: split them." in caplog.messages
    outputs = made.embed(["a fish", {"prompt": "a bird"}], use_tqdm=True)
    vectors = minilm.encode(["a fish", "a bird"], normalize=True)
    np.testing.assert_allclose([one.outputs.embedding for one in outputs], vectors, atol=1e-6)
    assert outputs[0].prompt_token_ids[0] == 101 and outputs[0].finished
    scores = made.score("a fish", ["a bird", "a fish"])
    np.testing.assert_allclose([one.outputs.score for one in scores], [vectors[0] @ vectors[1], 1.0], atol=1e-3)
    for call in (
        lambda: made.generate("a"),
        lambda: made.chat([{"role": "user", "content": "a"}]),
        lambda: made.classify("a"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"all-minilm-l6-v2 (is an encoder|embeds texts)"):
            call()
    with pytest.raises(InvalidInputError, match="two lists of the same length, not 2 and 3"):
        made.score(["a", "b"], ["a", "b", "c"])
    made.close()


def test_a_model_that_generates_has_no_vectors(llm: LLM) -> None:
    for call in (llm.embed, llm.encode, llm.classify):
        with pytest.raises(UnsupportedModelError, match=r"generates text: it has no (embed|encode|classify)"):
            call("a")


@pytest.mark.parametrize(
    ("num_labels", "activation", "kind"),
    [
        (1, None, None),
        (3, None, None),
        (1, "Identity", None),
        (3, "Sigmoid", None),
        (3, None, "multi_label_classification"),
        (1, None, "regression"),
        (3, "torch.nn.Tanh", "multi_label_classification"),
    ],
)
def test_cross_encoders_score_and_classify(
    num_labels: int, activation: str | None, kind: str | None, tiny_model: Any, hub: HubConfig
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config = {"num_labels": num_labels, "sbert_ce_default_activation_function": activation, "problem_type": kind}
    path = tiny_model(head="ForSequenceClassification", config=config)
    texts = ["the cat", "fish spits water"]
    made = LLM(str(path), task="classify", dtype="float32", hub=hub)
    peer, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        logits = peer(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        pairs = peer(**tokenizer(["the cat"], ["a dog"], return_tensors="pt")).logits
    has_sigmoid = activation == "Sigmoid" or (activation is None and num_labels == 1)
    probs = logits.sigmoid() if has_sigmoid else logits if num_labels == 1 else logits.softmax(-1)
    if kind is not None:
        probs = logits.tanh() if activation else logits if kind == "regression" else logits.sigmoid()
    for found in (made.classify(texts), made.encode(texts)):
        np.testing.assert_allclose([one.outputs.probs for one in found], probs.numpy(), atol=2e-5)
    if num_labels == 1:
        expected = (pairs.sigmoid() if has_sigmoid else pairs).item()
        assert made.score("the cat", "a dog")[0].outputs.score == pytest.approx(expected, abs=2e-5)
    else:
        with pytest.raises(UnsupportedModelError, match=r"3 labels. Use classify"):
            made.score("the cat", "a dog")
    with pytest.raises(UnsupportedModelError, match="is a cross-encoder: it has no vectors"):
        made.embed("the cat")
