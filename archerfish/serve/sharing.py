"""What the front ends of a service share, by way of the engine process: their metrics and changed options.

So `/metrics` is the same whichever front end answers, and a change of the result cache reaches all of them within SHARE_S. Of
two changes at the same time, the one that reaches the engine process first is in force everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import Any

from archerfish.errors import ArcherfishError
from archerfish.observe.metrics import GivenMetric, Metric, MetricRegistry, Sample
from archerfish.serve.catalog import Catalog
from archerfish.serve.metrics import gauges, metric_values, read_metrics
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.wire import FrontEndState, Query, Report

SHARE_S = 1.0  # between two messages of a front end, if there are several
ANSWER_S = 5.0  # limit for the engine process's answer to a request of `/metrics`
CACHE_COUNTERS = {"hits": "Answers from it.", "misses": "Lookups without an answer.", "evictions": "Answers removed for room.",
                  "expirations": "Answers removed for age.", "refusals": "Answers not kept."}  # fmt: skip
CACHE_GAUGES = {"entries": "Answers in it.", "bytes": "Their size."}


class FrontEndSync:
    """Exchanges the state of this front end with that of the others."""

    def __init__(self, catalog: Catalog, registry: MetricRegistry, results: ResultCache) -> None:
        self.source = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._catalog, self._registry, self._results = catalog, registry, results
        self._version = 0  # of the options; 0: those of the configuration

    def own_metrics(self) -> list[Metric]:
        totals = self._results.totals()
        cache = [
            GivenMetric(kind, f"archerfish_result_cache_{name}", f"Result cache: {text}", (), [Sample((), float(totals[name]))])
            for kind, texts in (("counter", CACHE_COUNTERS), ("gauge", CACHE_GAUGES)) for name, text in texts.items()
        ]  # fmt: skip
        return [*self._registry, *cache]

    async def query(self, about: str) -> dict[str, Any]:
        """Ask the engine process for a report, and send it the state of this front end."""
        metrics = {metric.name: metric_values(metric) for metric in self.own_metrics()}
        answer = await self._catalog.backend.ask(Query(
            request_id="", about=about, credentials=self._catalog.credentials, source=self.source,
            values=FrontEndState(metrics=metrics, version=self._version, options=self._options()),
        ))  # fmt: skip
        assert isinstance(answer, Report)
        return answer.values

    def _options(self) -> dict[str, Any]:
        return {"max_bytes": self._results.max_bytes, "ttl_seconds": self._results.ttl_seconds}

    async def sync(self) -> None:
        """Send the state of this front end and take over the options of the others, unless the own ones are newer."""
        found = await self.query("options")
        if found.get("version", 0) >= max(1, self._version):
            self._version = found["version"]
            if found["options"] != self._options():
                self._results.resize(**found["options"])

    async def publish_options(self) -> None:
        """Send changed options to the other front ends."""
        self._version += 1
        with contextlib.suppress(ArcherfishError):  # the next message repeats them
            await self.sync()

    async def all_metrics(self) -> list[Metric]:
        """The metrics of the engine process and of all front ends; while the process is away, those of this front end."""
        found: dict[str, Metric] = {metric.name: metric for metric in self.own_metrics()}
        is_up = True
        try:
            async with asyncio.timeout(ANSWER_S):
                found |= {metric.name: metric for metric in read_metrics(await self.query("metrics"))}
        except TimeoutError:
            is_up = False
        except ArcherfishError as error:
            if error.status != 503:
                raise
            is_up = False
        return [*gauges({"engine_up": is_up}), *found.values()]

    async def run(self) -> None:
        while True:
            with contextlib.suppress(ArcherfishError):
                await self.sync()
            await asyncio.sleep(SHARE_S)
