"""The autoscaling policies that Ray's controller calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archerfish.route.scaling import desired_replicas


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
