"""How many replicas a service needs, from what its replicas report. Ray's controller calls `ScalingPolicy`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from archerfish.route.router import USUAL_TOKEN_S, ReplicaLoad

ROOM = 1.1  # replicas are added only when more than this times the targets is reached
SPARE = 1.25  # replicas are removed only if those that stay could take so much more
MAX_GROWTH = 2  # times as many replicas in one decision


def replica_use(loads: Iterable[ReplicaLoad], kv_usages: Iterable[float]) -> dict[str, float]:
    """What a replica reports to the autoscaler: the expected wait of a new request, and the share of it that is in use."""
    waits, shares = [0.0], [0.0, *kv_usages]
    for load in loads:
        num_live = load.num_running + load.num_waiting
        num_over = max(0, num_live + 1 - load.max_running) if load.max_running else 0
        tokens_s = (load.prompt_token_s or USUAL_TOKEN_S) * sum(load.waiting_tokens.values())
        waits.append(load.step_s + num_over * load.slot_s + tokens_s)
        shares.append(num_live / load.max_running if load.max_running else 0.0)
    return {"wait_s": max(waits), "use": max(shares)}


def desired_replicas(pressures: Sequence[float], current: int) -> int:
    """How many replicas are needed.

    pressures: of each replica that reports, its load as a multiple of what a replica should have. current: the number of
    replicas that was decided last; some may still start.
    """
    total = sum(pressures)
    if not pressures or len(pressures) < current:  # replicas that start will take a part
        return current
    if total > ROOM * current:
        return min(math.ceil(total), MAX_GROWTH * current)
    return max(1, min(current, math.ceil(SPARE * total)))


class ScalingPolicy:
    """An autoscaling policy of Ray Serve. Ray applies the delays and the bounds of the deployment to its decisions."""

    def __init__(self, target_wait_s: float, target_use: float) -> None:
        self.target_wait_s, self.target_use = target_wait_s, target_use

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Ray's AutoscalingContext, whose `aggregated_metrics` are {name: {replica: value}}."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits, shares = metrics.get("wait_s", {}), metrics.get("use", {})
        replicas = [one for one in context.running_replicas if one in waits]
        pressures = [max(waits[one] / self.target_wait_s, shares.get(one, 0.0) / self.target_use) for one in replicas]
        return desired_replicas(pressures, context.target_num_replicas), {}


def nodes_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy of front ends: one on every node."""
    import ray

    return max(1, sum(node["Alive"] for node in ray.nodes())), {}
