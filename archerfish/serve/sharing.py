"""What the front ends of a service tell each other, by way of the engine process: their figures, and options that were changed.

So /metrics says the same whichever of them answers, and a change of the result cache reaches all of them, within SHARE_S. Of
two changes that do not know of each other the one that the engine process hears of first is in force everywhere.
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
from archerfish.serve.figures import as_values, read_metrics
from archerfish.serve.result_cache import ResultCache
from archerfish.serve.wire import Query, Report

SHARE_S = 1.0  # between two messages of a front end, where there are several
ANSWER_S = 5.0  # who scrapes /metrics waits no longer than twice this
COUNTED = {"hits": "Answers out of it.", "misses": "Lookups without one.", "evictions": "Answers gone for room.",
           "expirations": "Answers gone for age.", "refusals": "Answers not kept."}  # fmt: skip
HELD = {"entries": "Answers in it.", "bytes": "What they take."}


class FrontShare:
    """One front end's side."""

    def __init__(self, catalog: Catalog, registry: MetricRegistry, results: ResultCache) -> None:
        self.source = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._catalog, self._registry, self._results = catalog, registry, results
        self._version = 0  # of the options: 0 are those of the configuration

    def own(self) -> list[Metric]:
        """What this front end has counted."""
        totals = self._results.totals()
        cache = [
            GivenMetric(kind, f"archerfish_result_cache_{name}", f"Result cache: {text}", (), [Sample((), float(totals[name]))])
            for kind, figures in (("counter", COUNTED), ("gauge", HELD)) for name, text in figures.items()
        ]  # fmt: skip
        return [*self._registry, *cache]

    async def ask(self, about: str) -> dict[str, Any]:
        """A report of the engine process, which learns our figures with the question."""
        values = {
            "metrics": {metric.name: as_values(metric) for metric in self.own()}, "version": self._version,
            "options": self._options(),
        }  # fmt: skip
        answer = await self._catalog.backend.ask(Query(
            request_id=self._catalog.new_id(), about=about, credentials=self._catalog.credentials, source=self.source,
            values=values,
        ))  # fmt: skip
        assert isinstance(answer, Report)
        return answer.values

    def _options(self) -> dict[str, Any]:
        return {"max_bytes": self._results.max_bytes, "ttl_seconds": self._results.ttl_seconds}

    async def tell(self) -> None:
        """Tell our figures and options, and take over those that the engine process has, unless ours are newer."""
        found = await self.ask("options")
        if found.get("version", 0) >= max(1, self._version):
            self._version = found["version"]
            if found["options"] != self._options():
                self._results.resize(**found["options"])

    async def tell_change(self) -> None:
        """Our options have been changed: all others are to have them."""
        self._version += 1
        with contextlib.suppress(ArcherfishError):  # the next message says it again
            await self.tell()

    async def all_metrics(self) -> list[Metric]:
        """Of the engine process and of all front ends; while it is away, what we know ourselves."""
        found: dict[str, Metric] = {metric.name: metric for metric in self.own()}
        is_up = True
        try:
            async with asyncio.timeout(ANSWER_S):
                found |= {metric.name: metric for metric in read_metrics(await self.ask("metrics"))}
        except TimeoutError:
            is_up = False
        except ArcherfishError as error:
            if error.status != 503:
                raise
            is_up = False
        up = GivenMetric("gauge", "archerfish_engine_up", "Whether the engine process answers.", (), [Sample((), float(is_up))])
        return [up, *found.values()]

    async def run(self) -> None:
        """Tell the others every SHARE_S."""
        while True:
            with contextlib.suppress(ArcherfishError):
                await self.tell()
            await asyncio.sleep(SHARE_S)
