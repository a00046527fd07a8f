"""PerformanceMonitor: percentiles of latency, throughput and hit rates of engines in this process, without a server.

Its histograms are those of a server, under the same names; what engines count themselves it reads and does not count again.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.counts import engine_counts
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import RequestOutput
from archerfish.engine.rwkv_sampler import RwkvSampler
from archerfish.errors import InvalidInputError, NotFoundError, did_you_mean
from archerfish.observe import collector as names
from archerfish.observe.collector import MetricsCollector
from archerfish.observe.events import NO_THRESHOLDS, Listener, MetricEvent, Publisher, RealTimeMonitor
from archerfish.observe.metrics import Metric
from archerfish.observe.sampling import SamplingMetrics
from archerfish.sequence import Delta

PERCENTS = (50, 90, 95, 99)
LATENCIES = {
    "ttft": names.TTFT, "inter_token": names.GAPS, "e2e": names.WHOLE, "queue": names.QUEUE, "prefill": names.PREFILL,
    "decode": names.DECODE, "encode": names.ENCODE,
}  # fmt: skip
RATES = {  # what grows, and what its growth a second is called
    "total_tokens_generated": "generated_tok_s", "num_prompt_tokens": "prompt_tok_s", "completed_requests": "completed_req_s",
    "num_texts": "encoded_texts/s",
}  # fmt: skip
WINDOW = 4096  # values that percentiles are taken of
Counts = Mapping[str, Any]
Watchable = LLMEngine | AsyncLLMEngine | ArrowEngine | RwkvSampler


class PerformanceMonitor:
    """Watches engines from when it is made, or `watch` is called, until it is closed. An engine has one monitor at a time.

    Figures of a model are named as those of benches, so that a RegressionDetector knows them: ttft_p50_ms, inter_token_p99_ms,
    e2e_p95_ms, generated_tok_s, completed_req_s, prefix_hit_ratio and so on. Percentiles are of the last `window` values.
    """

    def __init__(
        self, *engines: Watchable, window: int = WINDOW, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if window < 1:
            raise InvalidInputError(f"window must be at least 1, not {window}.")
        self.collector = MetricsCollector(window=window, clock=clock)
        self._clock = clock
        self._publisher = Publisher()
        self._watched: dict[str, Watched] = {}
        for engine in engines:
            self.watch(engine)

    def watch(self, engine: Watchable) -> None:
        """Count what this engine does from now on."""
        inner: object = engine.engine if isinstance(engine, AsyncLLMEngine | RwkvSampler) else engine
        if not isinstance(inner, LLMEngine | ArrowEngine):
            known = "an LLMEngine, an AsyncLLMEngine, an ArrowEngine or a RwkvSampler"
            raise InvalidInputError(f"A monitor watches {known}, not {type(inner).__name__}.")
        if inner.watcher is not None or inner.model_name in self._watched:
            raise InvalidInputError(f"{inner.model_name} is watched already.", hint="Close the monitor that watches it.")
        told = self.collector, self._publisher, self._clock
        watched = WatchedLLM(inner, *told) if isinstance(inner, LLMEngine) else WatchedEncoder(inner, *told)
        self._watched[inner.model_name] = watched

    def close(self) -> None:
        """Watch no more; what was counted stays."""
        for watched in self._watched.values():
            watched.engine.watcher = None

    def __enter__(self) -> PerformanceMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Hear of every request that ends (`MODEL/e2e_ms`, `MODEL/ttft_ms`; of texts `MODEL/encode_ms`) and of all that
        `real_time` reads, in the thread where it happens. Calling the result ends it.
        """
        return self._publisher.subscribe(listener)

    def figures(self) -> dict[str, dict[str, float]]:
        """By model: percentiles, rates since it is watched, and hit ratios. What has not happened yet is left out."""
        histograms, now = self.collector.histograms, self._clock()
        found: dict[str, dict[str, float]] = {}
        for model, watched in self._watched.items():
            figures = found[model] = {}
            for short, name in LATENCIES.items():
                if histograms[name].count(model_name=model):
                    found_s = histograms[name].percentiles(PERCENTS, model_name=model)
                    figures |= {f"{short}_p{percent}_ms": s * 1000 for percent, s in zip(PERCENTS, found_s, strict=True)}
            counts = watched.counts()
            figures |= rates(watched.first, counts, now - watched.since) | watched.ratios(counts)
        return found

    def sampling(self, model: str = "") -> SamplingMetrics:
        """What the sampler of a generation model has done; without a name, of the only one."""
        known = {name: one for name, one in self._watched.items() if isinstance(one, WatchedLLM)}
        found = known.get(model) if model else next(iter(known.values())) if len(known) == 1 else None
        if found is None:
            what = f"No generation model {model!r} is watched." if model else f"{len(known)} generation models are watched."
            raise NotFoundError(what, hint=did_you_mean(model, known))
        return found.sampling()

    def metrics(self) -> list[Metric]:
        """All for Prometheus, as a server has it: `archerfish.serve.metrics.exposition(monitor.metrics())` is the page."""
        return self.collector.metrics({model: watched.counts() for model, watched in self._watched.items()})

    def real_time(
        self, monitoring_interval_s: float = 1.0, alert_thresholds: Mapping[str, float] = NO_THRESHOLDS
    ) -> RealTimeMonitor:
        """A monitor that tells the subscribers in equal steps of time: figures by `MODEL/NAME`, rates since the step before."""
        last = {model: (self._clock(), watched.counts()) for model, watched in self._watched.items()}

        def read() -> dict[str, float]:
            found = {} if (resident := resident_bytes()) is None else {"memory_bytes": float(resident)}
            now = self._clock()
            for model, figures in self.figures().items():
                counts = self._watched[model].counts()
                before, earlier = last.get(model, (self._watched[model].since, self._watched[model].first))
                figures |= rates(earlier, counts, now - before)
                last[model] = now, counts
                found |= {f"{model}/{name}": value for name, value in figures.items()}
            return found

        return RealTimeMonitor(
            read, monitoring_interval_s=monitoring_interval_s, alert_thresholds=alert_thresholds, publisher=self._publisher,
            clock=self._clock,
        )


class WatchedLLM:
    """An LLMEngine and the requests that it is answering."""

    def __init__(
        self, engine: LLMEngine, collector: MetricsCollector, publisher: Publisher, clock: Callable[[], float]
    ) -> None:
        self.engine, self._collector, self._publisher, self._clock = engine, collector, publisher, clock
        self._last_tokens: dict[str, dict[int, float]] = {}  # of requests that run: when each of their sequences got its last
        self.since, self.first = clock(), self.counts()
        engine.watcher = self.hear

    def hear(self, delta: Delta, result: RequestOutput | None) -> None:
        """In the thread that steps, or where text is made."""
        model, sequence = self.engine.model_name, delta.sequence
        request_id = sequence.request.request_id
        if delta.token_ids:
            now = self.engine.scheduler.clock()
            moments = self._last_tokens.get(request_id)
            if moments is None:
                moments = self._last_tokens[request_id] = {}
                self._collector.token(model, sequence.times.first_token - sequence.times.arrived, is_first=True)
            elif sequence.index in moments:
                self._collector.gaps(model, (now - moments[sequence.index],))
            moments[sequence.index] = now
        if result is not None:
            has_token = self._last_tokens.pop(request_id, None) is not None
            self._end(model, result, has_token=has_token)

    def _end(self, model: str, result: RequestOutput, *, has_token: bool) -> None:
        metrics = result.metrics
        self._collector.settle()
        self._collector.ended(model, result)
        if self._publisher.has_listeners:
            now, whole_ms = self._clock(), metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms
            self._publisher.publish(MetricEvent(f"{model}/e2e_ms", whole_ms, now))
            if has_token:
                self._publisher.publish(MetricEvent(f"{model}/ttft_ms", metrics.ttft_ms, now))

    def counts(self) -> dict[str, Any]:
        return engine_counts(self.engine)

    def ratios(self, counts: Counts) -> dict[str, float]:
        """Of what was looked up since it is watched."""
        pairs = {
            "prefix_hit_ratio": ("cache_hits", "cache_misses"),
            "logits_hit_ratio": ("logits_cache_hits", "logits_cache_misses"),
        }
        found = {}
        for name, keys in pairs.items():
            hits, misses = (counts[key] - self.first[key] for key in keys)
            if hits + misses:
                found[name] = hits / (hits + misses)
        return found

    def sampling(self) -> SamplingMetrics:
        metrics = self.engine.runner.sampler.metrics
        used = self.engine.scheduler.stats().cached_logits_used
        return dataclasses.replace(metrics, cache_hits=metrics.cache_hits + used)


class WatchedEncoder:
    """An ArrowEngine and what it has computed since it is watched."""

    def __init__(
        self, engine: ArrowEngine, collector: MetricsCollector, publisher: Publisher, clock: Callable[[], float]
    ) -> None:
        self.engine, self._collector, self._publisher, self._clock = engine, collector, publisher, clock
        self._num_texts = 0
        self._lock = threading.Lock()
        self.since, self.first = clock(), self.counts()
        engine.watcher = self.hear

    def hear(self, num_texts: int, seconds: float) -> None:
        """In any thread."""
        model = self.engine.model_name
        with self._lock:
            self._num_texts += num_texts
        self._collector.embedded(model, seconds)
        if self._publisher.has_listeners:
            self._publisher.publish(MetricEvent(f"{model}/encode_ms", seconds * 1000, self._clock()))

    def counts(self) -> dict[str, Any]:
        return {"num_texts": self._num_texts}

    def ratios(self, counts: Counts) -> dict[str, float]:
        return {}


Watched = WatchedLLM | WatchedEncoder


def rates(before: Counts, now: Counts, seconds: float) -> dict[str, float]:
    """How much more a second."""
    if seconds <= 0:
        return {}
    return {name: (now[key] - before[key]) / seconds for key, name in RATES.items() if key in now and key in before}


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
