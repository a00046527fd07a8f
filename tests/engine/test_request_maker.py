"""Requests as they are made, and results as they are collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archerfish import LLMEngine, SamplingParams, remarks
from archerfish.engine.outputs import CompletionOutput, OutputCollector, request_metrics
from archerfish.engine.request_maker import is_token_ids, read_token_ids
from archerfish.errors import DeviceError, InputTooLargeError, InvalidInputError
from archerfish.sequence import Delta, FinishReason, Request, Sequence, SequenceTimes
from tests.engine.tiny_llama import check_memory, save_tiny_llama, tiny_config


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2], True),
        ((5,), True),
        ([], False),
        ("12", False),
        (b"12", False),
        ([[1, 2]], False),
        (["a"], False),
        ([True], False),
        (7, False),
        (None, False),
    ],
)
def test_a_list_is_known_by_its_first(prompt: object, expected: bool) -> None:
    assert is_token_ids(prompt) is expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, -1], "Token id -1 is outside"),
        ([3, 10], "Token id 10 is outside"),
        ([3, 1 << 70], "is outside of the vocabulary of 10"),
        ([3, "a"], "list of token ids"),
        ([3, 1.5], "list of token ids"),
        ([3, None], "list of token ids"),
    ],
)
def test_wrong_ids_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_token_ids(prompt, 10)


def test_max_tokens_is_lowered_to_what_model_and_memory_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remarks, "_said", set())
    save_tiny_llama(tmp_path, max_position_embeddings=128)
    for max_cache_tokens, longest in ((4096, 128), (64, 64)):
        with LLMEngine(tiny_config(tmp_path, max_cache_tokens=max_cache_tokens)) as engine:
            for max_tokens in (1000, longest - 20):
                [output] = engine.generate([[5] * 20], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
                assert len(output.token_ids) == longest - 20 and output.finish_reason == "length"
            with pytest.raises(InputTooLargeError, match=rf"{longest}\b"):
                engine.generate([[5] * longest])
            check_memory(engine)
    [warning] = caplog.messages
    assert "max_tokens is 1,000; 108 fit after a prompt of 20" in warning


# Results and their figures


def sequence(num_output: int = 3, index: int = 0, **times: float) -> Sequence:
    made = Sequence(Request("r", [1, 2, 3, 4], SamplingParams(), 16, frozenset((9,))), index)
    made.tokens.extend([5] * num_output)
    made.times = SequenceTimes(**times)
    return made


def collected(*deltas: Delta, stop: str | None = None) -> CompletionOutput:
    collector = OutputCollector(sequence().request, None, None)
    collector.outputs[0].stop_reason = stop
    for delta in deltas:
        collector.add(delta)
    return collector.outputs[0]


def test_reasons_for_the_end_of_an_output() -> None:
    def finished(reason: FinishReason, *token_ids: int, stop: str | None = None) -> CompletionOutput:
        return collected(Delta(sequence(), list(token_ids)), Delta(sequence(), [], finish_reason=reason), stop=stop)

    output = finished("length", 5, 6)
    assert (output.token_ids, output.finish_reason, output.stop_reason, output.logprobs) == (
        [5, 6],
        "length",
        None,
        None,
    )
    assert finished("stop", 5, 9).stop_reason == 9
    assert finished("stop", 5).stop_reason is None
    late = finished("length", 5, stop="END")  # the sequence reached its length while the stop string was being found
    assert (late.finish_reason, late.stop_reason, late.token_ids) == ("stop", "END", [])
    failed = collected(Delta(sequence(), [], finish_reason="error", error=DeviceError("x")))
    assert isinstance(failed.error, DeviceError)


def test_metrics_of_a_request() -> None:
    metrics = request_metrics(
        [
            sequence(3, arrived=10.0, admitted=10.5, first_token=11.0, finished=13.0),
            sequence(5, 1, arrived=10.0, admitted=10.6, first_token=11.5, finished=12.5),
        ]
    )
    assert (metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms, metrics.ttft_ms) == (500, 500, 2000, 1000)
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.arrival) == (4, 8, 10.0)
    assert metrics.tokens_per_second == pytest.approx(8 / 2.5)


def test_metrics_of_a_request_that_never_ran() -> None:
    metrics = request_metrics([sequence(0, arrived=10.0, finished=12.0)])
    assert (metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms, metrics.tokens_per_second) == (2000, 0, 0, 0)
