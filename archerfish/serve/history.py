"""What a generation model remembers for live views: figures of the last minute, and the last requests of each
tenant."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from archerfish.engine.outputs import RequestOutput
from archerfish.observe.metrics import OTHER_TENANTS
from archerfish.observe.recent import RecentFigures, figures

MAX_REQUESTS = 30  # of a tenant
MAX_TENANTS = 256  # whose requests are kept; those of the tenant that was quiet for longest go first


class History:
    """Figures are kept by the labels of tenants in metrics, requests by tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.recent: defaultdict[str, RecentFigures] = defaultdict(RecentFigures)
        self._ended: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._clock = clock

    def ended(self, tenant: str, result: RequestOutput) -> None:
        """Keep what is shown of a request that has ended, and none of its tokens."""
        times, hit = result.metrics, result.hit
        found = self._ended.setdefault(tenant, deque(maxlen=MAX_REQUESTS))
        found.append(
            {
                "ended_at": self._clock(),
                "reason": "" if hit is None else hit.reason,
                "why": "" if hit is None else hit.explain(),
                "prompt_tokens": times.num_prompt_tokens,
                "cached_tokens": result.num_cached_tokens,
                "output_tokens": times.num_output_tokens,
                "queue_ms": round(times.queue_ms, 2),
                "prefill_ms": round(times.prefill_ms, 2),
                "decode_ms": round(times.decode_ms, 2),
                "finish_reason": result.finish_reason or "",
                "draft_tokens": times.num_draft_tokens,
                "accepted_tokens": times.num_accepted_tokens,
            }
        )
        self._ended.move_to_end(tenant)
        while len(self._ended) > MAX_TENANTS:
            self._ended.popitem(last=False)

    def requests(self, tenant: str) -> list[dict[str, Any]]:
        """The last requests of a tenant, the newest first."""
        now, found = self._clock(), list(self._ended.get(tenant, ()))
        return [
            {"ended_s_ago": round(now - one["ended_at"], 1), **{name: one[name] for name in one if name != "ended_at"}}
            for one in reversed(found)
        ]

    def figures(self, tenant: str, *, sees_all: bool) -> dict[str, Any]:
        """Of a tenant, or of all. Those of tenants that share a label are mixed, so that none of them gets any."""
        now, is_mixed = self._clock(), tenant == OTHER_TENANTS
        labels = [one for one in [*self.recent] if sees_all or (one == tenant and not is_mixed)]
        slots = [slot for one in labels for slot in self.recent[one].since(now)]
        return figures(slots, now)
