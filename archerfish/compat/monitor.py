"""PerformanceMonitor: percentiles of latency, throughput and hit rates of engines in this process, without a server.

RealTimeMonitor reads such figures in equal steps of time and sends them to listeners as MetricEvents.

The histograms have the names of a server's. What engines count themselves is read from them and not counted again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.async_engine import AsyncLLMEngine
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import RequestOutput, engine_counts
from archerfish.engine.rwkv_sampler import RwkvSampler
from archerfish.errors import InvalidInputError, NotFoundError, did_you_mean
from archerfish.observe import metrics as names
from archerfish.observe.metrics import Metric, MetricsCollector, SamplingMetrics
from archerfish.observe.regression import is_beyond
from archerfish.sequence import Delta

logger = logging.getLogger("archerfish.monitor")
NO_THRESHOLDS: Mapping[str, float] = {}
PERCENTS = (50, 90, 95, 99)
LATENCIES = {
    "ttft": names.TTFT,
    "inter_token": names.GAPS,
    "e2e": names.WHOLE,
    "queue": names.QUEUE,
    "prefill": names.PREFILL,
    "decode": names.DECODE,
    "encode": names.ENCODE,
}
RATES = {  # a count, and the name of its growth per second
    "total_tokens_generated": "generated_tok_s",
    "num_prompt_tokens": "prompt_tok_s",
    "completed_requests": "completed_req_s",
    "num_texts": "encoded_texts/s",
}
RATIOS = {  # hits as a share of hits and misses
    "prefix_hit_ratio": ("cache_hits", "cache_misses"),
    "logits_hit_ratio": ("logits_cache_hits", "logits_cache_misses"),
}
WINDOW = 4096  # values that percentiles are taken of
Counts = Mapping[str, Any]
Watchable = LLMEngine | AsyncLLMEngine | ArrowEngine | RwkvSampler


@dataclass(frozen=True, slots=True)
class MetricEvent:
    """One figure at one moment. is_alert: the value is beyond the threshold of its name."""

    name: str
    value: float
    timestamp: float  # on the monitor's clock, in seconds
    is_alert: bool = False


Listener = Callable[[MetricEvent], None]


class RealTimeMonitor:
    """Calls `read` in equal steps of time; `with` starts and stops it.

    `read` gives figures by name. A threshold makes an event an alert when the value is above it, or below it where less
    is worse (rates and ratios, by the endings that RegressionDetector knows).
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        *,
        monitoring_interval_s: float = 1.0,
        alert_thresholds: Mapping[str, float] = NO_THRESHOLDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not monitoring_interval_s > 0:
            raise ValueError(f"monitoring_interval_s must be above 0, not {monitoring_interval_s}.")
        self.monitoring_interval_s, self.alert_thresholds = monitoring_interval_s, dict(alert_thresholds)
        self._read, self._clock = read, clock
        self._listeners: list[Listener] = []
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event, in the monitor's thread. Calling the result ends the subscription."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def collect(self) -> list[MetricEvent]:
        """Read the figures once and send them to the listeners. A listener that raises is logged and disturbs no
        other."""
        now, limits = self._clock(), self.alert_thresholds
        events = []
        for name, value in self._read().items():
            events.append(MetricEvent(name, value, now, name in limits and is_beyond(name, value, limits[name])))
            for listener in list(self._listeners):
                try:
                    listener(events[-1])
                except Exception:
                    logger.exception("A listener of %s failed.", name)
        return events

    def start_monitoring(self) -> None:
        """Collect in a thread until `stop`."""
        if self._thread is None:
            self._is_stopping.clear()
            self._thread = threading.Thread(target=self._run, name="archerfish-monitor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping.wait(self.monitoring_interval_s):
            try:
                self.collect()
            except Exception:  # the next reading may succeed
                logger.exception("The figures could not be read.")

    def stop(self) -> None:
        self._is_stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        self.start_monitoring()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class PerformanceMonitor:
    """Watches engines from the call of `watch` until `close`. An engine has one monitor at a time.

    Figures of a model are named as those of benches, so that a RegressionDetector knows them: ttft_p50_ms,
    inter_token_p99_ms, e2e_p95_ms, generated_tok_s, completed_req_s, prefix_hit_ratio and so on. Percentiles are of the
    last `window` values.
    """

    def __init__(self, *engines: Watchable, window: int = WINDOW, clock: Callable[[], float] = time.monotonic) -> None:
        if window < 1:
            raise InvalidInputError(f"window must be at least 1, not {window}.")
        self.collector = MetricsCollector(window=window, clock=clock)
        self._clock = clock
        self._watched: dict[str, WatchedLLM | WatchedEncoder] = {}
        for engine in engines:
            self.watch(engine)

    def watch(self, engine: Watchable) -> None:
        """Count what this engine does from now on."""
        inner: object = engine.engine if isinstance(engine, AsyncLLMEngine | RwkvSampler) else engine
        if not isinstance(inner, LLMEngine | ArrowEngine):
            known = "an LLMEngine, an AsyncLLMEngine, an ArrowEngine or a RwkvSampler"
            raise InvalidInputError(f"A monitor watches {known}, not {type(inner).__name__}.")
        if inner.watcher is not None or inner.model_name in self._watched:
            raise InvalidInputError(
                f"{inner.model_name} is watched already.", hint="Close the monitor that watches it."
            )
        self._watched[inner.model_name] = (
            WatchedLLM(inner, self.collector, self._clock())
            if isinstance(inner, LLMEngine)
            else WatchedEncoder(inner, self.collector, self._clock())
        )

    def close(self) -> None:
        """Stop watching; the counts stay."""
        for watched in self._watched.values():
            watched.engine.watcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def figures(self) -> dict[str, dict[str, float]]:
        """By model: percentiles, and rates and hit ratios since it is watched. What has not happened yet is left
        out."""
        histograms, now = self.collector.histograms, self._clock()
        found: dict[str, dict[str, float]] = {}
        for model, watched in self._watched.items():
            figures = found[model] = {}
            for short, name in LATENCIES.items():
                if histograms[name].count(model_name=model):
                    seconds = histograms[name].percentiles(PERCENTS, model_name=model)
                    figures |= {
                        f"{short}_p{percent}_ms": s * 1000 for percent, s in zip(PERCENTS, seconds, strict=True)
                    }
            counts = watched.counts()
            figures |= rates(watched.first, counts, now - watched.since) | ratios(watched.first, counts)
        return found

    def sampling(self, model: str = "") -> SamplingMetrics:
        """What the sampler of a generation model has done; without a name, that of the only one."""
        known = {name: one for name, one in self._watched.items() if isinstance(one, WatchedLLM)}
        found = known.get(model) if model else next(iter(known.values())) if len(known) == 1 else None
        if found is None:
            what = (
                f"No generation model {model!r} is watched."
                if model
                else f"{len(known)} generation models are watched."
            )
            raise NotFoundError(what, hint=did_you_mean(model, known))
        metrics = found.engine.runner.sampler.metrics
        return dataclasses.replace(metrics, cache_hits=metrics.cache_hits + found.counts()["cached_logits_used"])

    def metrics(self) -> list[Metric]:
        """All metrics of a server: `archerfish.serve.metrics.exposition(monitor.metrics())` is the page for
        Prometheus."""
        return self.collector.metrics({model: watched.counts() for model, watched in self._watched.items()})

    def real_time(
        self, monitoring_interval_s: float = 1.0, alert_thresholds: Mapping[str, float] = NO_THRESHOLDS
    ) -> RealTimeMonitor:
        """A monitor of memory_bytes and of the figures by `MODEL/NAME`, its rates since the reading before."""
        last = {model: (self._clock(), watched.counts()) for model, watched in self._watched.items()}

        def read() -> dict[str, float]:
            found = {} if (resident := resident_bytes()) is None else {"memory_bytes": float(resident)}
            now = self._clock()
            for model, figures in self.figures().items():
                watched = self._watched[model]
                before, earlier = last.get(model, (watched.since, watched.first))
                last[model] = now, watched.counts()
                figures |= rates(earlier, last[model][1], now - before)
                found |= {f"{model}/{name}": value for name, value in figures.items()}
            return found

        return RealTimeMonitor(
            read, monitoring_interval_s=monitoring_interval_s, alert_thresholds=alert_thresholds, clock=self._clock
        )


class WatchedLLM:
    """An LLMEngine whose deltas go to a collector."""

    def __init__(self, engine: LLMEngine, collector: MetricsCollector, now: float) -> None:
        self.engine, self._collector = engine, collector
        self._last_tokens: dict[str, dict[int, float]] = {}  # by request and sequence: the time of its last token
        self.since, self.first = now, self.counts()
        engine.watcher = self.on_delta

    def on_delta(self, delta: Delta, result: RequestOutput | None) -> None:
        """Called in the thread that steps the engine, or in the one that makes text."""
        model, sequence = self.engine.model_name, delta.sequence
        request_id = sequence.request.request_id
        if delta.token_ids:
            now = self.engine.scheduler.clock()
            times = self._last_tokens.get(request_id)
            if times is None:
                times = self._last_tokens[request_id] = {}
                self._collector.first_token(model, sequence.times.first_token - sequence.times.arrived)
            elif sequence.index in times:
                self._collector.gaps(model, (now - times[sequence.index],))
            times[sequence.index] = now
        if result is not None:
            self._last_tokens.pop(request_id, None)
            spent, reasons = result.metrics, [output.finish_reason for output in result.outputs]
            self._collector.ended(
                model,
                spent.queue_ms,
                spent.prefill_ms,
                spent.decode_ms,
                reasons,
                num_prompt_tokens=spent.num_prompt_tokens,
                num_output_tokens=spent.num_output_tokens,
            )

    def counts(self) -> Counts:
        return engine_counts(self.engine)


class WatchedEncoder:
    """An ArrowEngine whose calls go to a collector."""

    def __init__(self, engine: ArrowEngine, collector: MetricsCollector, now: float) -> None:
        self.engine, self._collector = engine, collector
        self._num_texts = 0
        self._lock = threading.Lock()
        self.since, self.first = now, self.counts()
        engine.watcher = self.on_texts

    def on_texts(self, num_texts: int, seconds: float) -> None:
        """Called in the thread that asked for the vectors."""
        with self._lock:
            self._num_texts += num_texts
        self._collector.embedded(self.engine.model_name, seconds)

    def counts(self) -> Counts:
        return {"num_texts": self._num_texts}


def rates(before: Counts, now: Counts, seconds: float) -> dict[str, float]:
    """The growth of counts per second."""
    if seconds <= 0:
        return {}
    return {name: (now[key] - before[key]) / seconds for key, name in RATES.items() if key in now and key in before}


def ratios(before: Counts, now: Counts) -> dict[str, float]:
    """The hit ratios of the lookups between two counts."""
    found = {}
    for name, keys in RATIOS.items():
        hits, misses = (now.get(key, 0) - before.get(key, 0) for key in keys)
        if hits + misses:
            found[name] = hits / (hits + misses)
    return found


def resident_bytes() -> int | None:
    """The memory of this process; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
