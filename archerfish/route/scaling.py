"""How many replicas a model needs, from what they report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from archerfish.route.router import ReplicaLoad


@dataclass
class Autoscaler:
    """So many replicas that, at the present load, each has `busy` of its places for sequences taken and no request waits longer
    than target_wait_s for the prompts in front of it. More replicas start at once; fewer stay only after the need for more has
    been absent for down_after_s.
    """

    least: int
    most: int
    busy: float = 0.25  # of max_running: a step of a full replica takes several times as long as one of a single sequence
    target_wait_s: float = 0.5
    down_after_s: float = 60.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)  # decisions of the last down_after_s

    def desired(self, now: float, loads: Sequence[ReplicaLoad], num_coming: int = 0) -> int:
        """loads: of the replicas that run. num_coming: those that start, and take their share soon."""
        places = sum((load.num_running + load.num_waiting) / (load.max_running or 1) for load in loads) / self.busy
        waits = sum(sum(load.waiting_tokens.values()) * load.prompt_token_s for load in loads) / self.target_wait_s
        most = max(2 * len(loads), len(loads) + num_coming)  # the queue of a short time says little: at most twice as many
        now_wanted = min(math.ceil(max(places, waits)), most)
        self._wanted.append((now, now_wanted))
        while self._wanted[0][0] < now - self.down_after_s:
            self._wanted.popleft()
        return min(self.most, max(self.least, *(count for _, count in self._wanted), 1))
