"""How many replicas a service needs, from what its replicas report: for Ray and for the simulator."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from archerfish.route.router import USUAL_TOKEN_S, ReplicaLoad

ROOM = 1.1  # replicas are added only when more than this times the targets is reached
SPARE = 1.25  # replicas are removed only if those that stay could take so much more
MAX_GROWTH = 2  # times as many replicas in one decision


def replica_use(loads: Iterable[ReplicaLoad], kv_usages: Iterable[float] = ()) -> dict[str, float]:
    """The expected wait of a new request at a replica, whose models take turns, and the share of the replica that is in
    use.

    kv_usages: shares of the KV memory of its models that running sequences hold.
    """
    wait_s, shares = 0.0, [0.0, *kv_usages]
    for load in loads:
        if (
            load.num_live
        ):  # an idle model has a step to wait for only if it must be loaded, which more replicas do not change
            num_over = max(0, load.num_live + 1 - load.max_running) if load.max_running else 0
            tokens_s = (load.prompt_token_s or USUAL_TOKEN_S) * sum(load.waiting_tokens.values())
            wait_s += load.step_s + num_over * load.slot_s + tokens_s
            shares.append(load.num_live / load.max_running if load.max_running else 0.0)
    return {"wait_s": wait_s, "use": max(shares)}


def desired_replicas(pressures: Sequence[float], current: int) -> int:
    """How many replicas are needed.

    pressures: of each replica that reports, its load as a multiple of what a replica should have. current: the number
    of replicas that was decided last; some may still start.
    """
    total = sum(pressures)
    if not pressures:
        return current
    if total > ROOM * current:  # replicas that start will take a part
        return current if len(pressures) < current else min(math.ceil(total), MAX_GROWTH * current)
    return max(1, min(current, math.ceil(SPARE * total)))


@dataclass
class Autoscaler:
    """Decides as Ray does: more replicas at once, fewer after no more were needed for down_after_s."""

    least: int
    most: int
    target_wait_s: float = 1.0
    target_use: float = 0.8
    down_after_s: float = 60.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)  # decisions of the last down_after_s

    def desired(self, now: float, loads: Sequence[ReplicaLoad], num_coming: int = 0) -> int:
        """loads: of the replicas that run. num_coming: those that start."""
        uses = [replica_use([load]) for load in loads]
        pressures = [max(one["wait_s"] / self.target_wait_s, one["use"] / self.target_use) for one in uses]
        self._wanted.append((now, desired_replicas(pressures, len(loads) + num_coming)))
        while self._wanted[0][0] < now - self.down_after_s:
            self._wanted.popleft()
        return min(self.most, max(self.least, *(count for _, count in self._wanted), 1))
