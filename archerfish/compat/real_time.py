"""RealTimeMonitor: reads figures in equal steps of time and sends them to listeners as MetricEvents."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from archerfish.observe.regression import is_beyond

logger = logging.getLogger("archerfish.monitor")
NO_THRESHOLDS: Mapping[str, float] = {}


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

    `read` gives figures by name. A threshold makes an event an alert when the value is above it, or below it where less is
    worse (rates and ratios, by the endings that RegressionDetector knows).
    """

    def __init__(
        self, read: Callable[[], Mapping[str, float]], *, monitoring_interval_s: float = 1.0,
        alert_thresholds: Mapping[str, float] = NO_THRESHOLDS, clock: Callable[[], float] = time.monotonic,
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
        """Read the figures once and send them to the listeners. A listener that raises is logged and disturbs no other."""
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
