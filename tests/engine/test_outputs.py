"""Results and their figures."""

from __future__ import annotations

import pytest

from archerfish.engine.outputs import CompletionOutput, OutputCollector, request_metrics
from archerfish.errors import DeviceError
from archerfish.params import SamplingParams
from archerfish.sequence import Delta, FinishReason, Request, Sequence, SequenceTimes


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
    assert (output.token_ids, output.finish_reason, output.stop_reason, output.logprobs) == ([5, 6], "length", None, None)
    assert finished("stop", 5, 9).stop_reason == 9
    assert finished("stop", 5).stop_reason is None
    late = finished("length", 5, stop="END")  # the sequence reached its length while the stop string was being found
    assert (late.finish_reason, late.stop_reason, late.token_ids) == ("stop", "END", [])
    failed = collected(Delta(sequence(), [], finish_reason="error", error=DeviceError("x")))
    assert isinstance(failed.error, DeviceError)


def test_metrics_of_a_request() -> None:
    metrics = request_metrics([
        sequence(3, arrived=10.0, admitted=10.5, first_token=11.0, finished=13.0),
        sequence(5, 1, arrived=10.0, admitted=10.6, first_token=11.5, finished=12.5),
    ])  # fmt: skip
    assert (metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms, metrics.ttft_ms) == (500, 500, 2000, 1000)
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.arrival) == (4, 8, 10.0)
    assert metrics.tokens_per_second == pytest.approx(8 / 2.5)


def test_metrics_of_a_request_that_never_ran() -> None:
    metrics = request_metrics([sequence(0, arrived=10.0, finished=12.0)])
    assert (metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms, metrics.tokens_per_second) == (2000, 0, 0, 0)
