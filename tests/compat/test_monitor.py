"""PerformanceMonitor and RealTimeMonitor."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Mapping

import pytest

from archerfish import ArrowEngine, AsyncLLMEngine, LLMEngine
from archerfish.compat.monitor import MetricEvent, PerformanceMonitor, RealTimeMonitor
from archerfish.errors import InvalidInputError, NotFoundError
from archerfish.observe.metrics import ENCODE, ENDS, GAPS, TTFT, WHOLE
from archerfish.serve.metrics import exposition
from tests.compat.loops import in_loop
from tests.engine.tiny_llama import greedy, prompts

GREEDY = greedy(6)


def test_latencies_rates_and_hits_of_requests(engine: LLMEngine) -> None:
    now = 100.0
    many = prompts(8, least=20)
    engine.generate(many[:4], GREEDY)  # before it is watched: not counted
    with PerformanceMonitor(engine, clock=lambda: now) as monitor:
        assert monitor.figures() == {engine.model_name: {}}
        now = 102.0
        outputs = engine.generate(many, GREEDY)
        figures = monitor.figures()[engine.model_name]
    histograms, label = monitor.collector.histograms, {"model_name": engine.model_name}
    assert [histograms[name].count(**label) for name in (TTFT, WHOLE, GAPS)] == [8, 8, 8 * 5]
    assert (figures["generated_tok_s"], figures["completed_req_s"]) == (8 * 6 / 2, 8 / 2)
    cached, total = sum(output.num_cached_tokens for output in outputs), sum(map(len, many))
    assert figures["prefix_hit_ratio"] == pytest.approx(cached / total) and cached > 0
    assert figures["prompt_tok_s"] == total / 2
    longest = max(output.metrics.queue_ms + output.metrics.prefill_ms + output.metrics.decode_ms for output in outputs)
    assert figures["e2e_p99_ms"] == pytest.approx(longest)
    assert figures["ttft_p50_ms"] <= figures["ttft_p99_ms"] <= figures["e2e_p99_ms"]
    assert "encode_p50_ms" not in figures and not any(map(math.isnan, figures.values()))
    engine.generate(many[0], GREEDY)
    assert monitor.collector.histograms[WHOLE].count(**label) == 8  # closed


def test_each_request_has_at_most_one_first_token(engine: LLMEngine) -> None:
    monitor = PerformanceMonitor(engine)
    assert engine.abort(engine.add_request(prompts(1)[0], GREEDY))
    histograms, label = monitor.collector.histograms, {"model_name": engine.model_name}
    assert histograms[TTFT].count(**label) == 0
    engine.generate(prompts(1), GREEDY.replace(n=3, temperature=1.0))
    assert [histograms[name].count(**label) for name in (TTFT, GAPS)] == [1, 3 * 5]
    ends = monitor.collector.counters[ENDS]
    assert ends.value(model_name=engine.model_name, finished_reason="abort") == 1


def test_a_real_time_monitor_gives_rates_since_the_reading_before(engine: LLMEngine) -> None:
    now, name = 0.0, engine.model_name
    monitor = PerformanceMonitor(engine, clock=lambda: now)
    real_time = monitor.real_time(alert_thresholds={f"{name}/generated_tok_s": 1.0})
    engine.generate(prompts(1), GREEDY)
    for seconds, expected in ((3.0, (2.0, False)), (5.0, (0.0, True))):
        now = seconds
        events = {event.name: (event.value, event.is_alert) for event in real_time.collect()}
        assert events[f"{name}/generated_tok_s"] == expected
        assert events["memory_bytes"][0] > 1e6 and not events["memory_bytes"][1]
    assert monitor.figures()[name]["generated_tok_s"] == 6 / 5  # since it is watched


def test_metrics_have_the_names_of_a_server(engine: LLMEngine) -> None:
    monitor = PerformanceMonitor(engine)
    engine.generate(prompts(2), GREEDY)
    page = exposition(monitor.metrics()).decode()
    label = f'{{model_name="{engine.model_name}"}}'
    for line in (
        f"archerfish_generation_tokens_total{label} 12.0",
        f"archerfish_num_requests_running{label} 0.0",
        f'archerfish_e2e_request_latency_seconds_count{label[:-1]},tenant=""}} 2.0',
    ):
        assert line in page.splitlines()
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_sampling_metrics(engine: LLMEngine) -> None:
    monitor = PerformanceMonitor(engine)
    prompt = prompts(1, least=20)[0]
    engine.generate(prompt, GREEDY)
    found = monitor.sampling()
    assert (found.total_samples, found.fast_path_samples, found.cache_hits) == (6, 6, 0)
    assert found.avg_sample_time == found.sample_seconds / 6 > 0
    allocations = found.memory_allocations
    engine.generate(prompt, GREEDY.replace(temperature=1.0, max_tokens=3))
    found = monitor.sampling(engine.model_name)
    assert (found.total_samples, found.fast_path_samples, found.cache_hits) == (9, 6, 1)  # a repeat costs no pass
    assert found.memory_allocations == allocations + 1  # once for three steps of the same row
    with pytest.raises(NotFoundError, match="No generation model 'other'"):
        monitor.sampling("other")
    with pytest.raises(NotFoundError, match="0 generation models"):
        PerformanceMonitor().sampling()


def test_an_engine_is_watched_once(engine: LLMEngine) -> None:
    with PerformanceMonitor(engine), pytest.raises(InvalidInputError, match="watched already"):
        PerformanceMonitor(engine)
    PerformanceMonitor(engine).close()
    with pytest.raises(InvalidInputError, match="window"):
        PerformanceMonitor(engine, window=0)


@in_loop
async def test_an_async_engine_can_be_watched(engine: LLMEngine) -> None:
    served = AsyncLLMEngine(engine)
    monitor = PerformanceMonitor(served)
    await asyncio.gather(*(served.generate(prompt, GREEDY) for prompt in prompts(3)))
    await served.close()
    assert monitor.figures()[engine.model_name]["e2e_p50_ms"] > 0


def test_an_encoder_can_be_watched(minilm: ArrowEngine) -> None:
    now = 0.0
    with PerformanceMonitor(minilm, clock=lambda: now) as monitor:
        minilm.encode(["one", "two", "two"])
        minilm.compute(minilm.tokenize(["three"]))
        minilm.encode([])
        now = 2.0
        figures = monitor.figures()[minilm.model_name]
        assert figures["encoded_texts/s"] == 2.0 and figures["encode_p99_ms"] > 0
        page = exposition(monitor.metrics()).decode()
        assert f'archerfish_encoded_texts_total{{model_name="{minilm.model_name}"}} 4.0' in page
    minilm.encode("more")
    assert monitor.collector.histograms[ENCODE].count(model_name=minilm.model_name) == 2


# test_real_time


def test_a_listener_that_fails_disturbs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    monitor, events = RealTimeMonitor(lambda: {"a": 1.0}, clock=lambda: 0.0), list[MetricEvent]()

    def fail(event: MetricEvent) -> None:
        raise RuntimeError

    monitor.subscribe(fail)
    unsubscribe = monitor.subscribe(events.append)
    monitor.collect()
    unsubscribe()
    monitor.collect()
    assert events == [MetricEvent("a", 1.0, 0.0)] and "A listener of a failed." in caplog.text


def test_values_beyond_a_threshold_are_alerts() -> None:
    monitor = RealTimeMonitor(lambda: {"a": 1.0, "b": 9.0}, alert_thresholds={"a": 1.0, "b": 5.0}, clock=lambda: 42.0)
    events: list[MetricEvent] = []
    monitor.subscribe(events.append)
    assert monitor.collect() == events == [MetricEvent("a", 1.0, 42.0), MetricEvent("b", 9.0, 42.0, is_alert=True)]
    with pytest.raises(ValueError, match="above 0"):
        RealTimeMonitor(dict, monitoring_interval_s=0)


def test_a_rate_or_a_ratio_alerts_when_it_is_too_low() -> None:
    now = {"m/generated_tok_s": 90.0, "m/prefix_hit_ratio": 0.5, "m/e2e_p99_ms": 90.0, "memory_bytes": 90.0}
    monitor = RealTimeMonitor(lambda: now, alert_thresholds=dict.fromkeys(now, 100.0))
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/generated_tok_s", "m/prefix_hit_ratio"}
    now = dict.fromkeys(now, 101.0)
    assert {event.name for event in monitor.collect() if event.is_alert} == {"m/e2e_p99_ms", "memory_bytes"}


def test_a_failed_reading_does_not_stop_the_monitor() -> None:
    readings: queue.Queue[str] = queue.Queue()

    def read() -> Mapping[str, float]:
        if readings.qsize() == 0:
            readings.put("failed")
            raise OSError("not now")
        return {"a": 1.0}

    has_event = threading.Event()
    with RealTimeMonitor(read, monitoring_interval_s=0.001) as monitor:
        monitor.subscribe(lambda event: has_event.set())
        monitor.start_monitoring()  # again: nothing
        assert has_event.wait(30)
    assert not any(thread.name == "archerfish-monitor" for thread in threading.enumerate())


def test_a_subscriber_may_stop_the_monitor() -> None:
    stopped = threading.Event()
    monitor = RealTimeMonitor(lambda: {"a": 1.0}, monitoring_interval_s=0.001)

    def stop(event: MetricEvent) -> None:
        monitor.stop()
        stopped.set()

    monitor.subscribe(stop)
    monitor.start_monitoring()
    assert stopped.wait(30)
