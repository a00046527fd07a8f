"""MetricEvent, and RealTimeMonitor, which tells subscribers in equal steps of time how things go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from archerfish.observe.regression import is_beyond

logger = logging.getLogger("archerfish.observe")
NO_THRESHOLDS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class MetricEvent:
    """One figure at one moment. is_alert: it is beyond the threshold of its name."""

    name: str
    value: float
    timestamp: float  # on the monitor's clock, in seconds
    is_alert: bool = False


Listener = Callable[[MetricEvent], None]


class Publisher:
    """Passes events on to whoever wants them; safe to use from any thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Hear of every event, in the thread where it happens; calling the result ends it."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    def publish(self, event: MetricEvent) -> None:
        """A listener that raises is logged; neither the others nor who publishes notice."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("A subscriber of %s failed.", event.name)


class RealTimeMonitor:
    """Reads figures in equal steps of time and sends them to its subscribers as events; `with` starts and stops it.

    read: figures by name, at this moment. alert_thresholds: above which value of a figure its events are alerts, or below
    which where less is worse (rates and ratios, by the endings that RegressionDetector knows).
    """

    def __init__(
        self, read: Callable[[], Mapping[str, float]], *, monitoring_interval_s: float = 1.0,
        alert_thresholds: Mapping[str, float] = NO_THRESHOLDS, publisher: Publisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not monitoring_interval_s > 0:
            raise ValueError(f"monitoring_interval_s must be above 0, not {monitoring_interval_s}.")
        self.monitoring_interval_s = monitoring_interval_s
        self.alert_thresholds = dict(alert_thresholds)
        self._read, self._clock = read, clock
        self._publisher = publisher or Publisher()
        self.subscribe = self._publisher.subscribe
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def collect(self) -> list[MetricEvent]:
        """Read the figures once and tell the subscribers."""
        now, thresholds = self._clock(), self.alert_thresholds
        events = [
            MetricEvent(name, value, now, name in thresholds and is_beyond(name, value, thresholds[name]))
            for name, value in self._read().items()
        ]  # fmt: skip
        for event in events:
            self._publisher.publish(event)
        return events

    def start_monitoring(self) -> None:
        """Collect in a thread until `stop`."""
        if self._thread is not None:
            return
        self._is_stopping.clear()
        self._thread = threading.Thread(target=self._run, name="archerfish-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping.wait(self.monitoring_interval_s):
            try:
                self.collect()
            except Exception:  # what is read now may be there the next time
                logger.exception("The figures could not be read.")

    def stop(self) -> None:
        self._is_stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> RealTimeMonitor:
        self.start_monitoring()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
