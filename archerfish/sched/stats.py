"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and gauges at the moment of asking. Seconds are sums over sequences."""

    total_requests: int = 0
    completed_requests: int = 0  # every sequence ended with "stop" or "length"
    failed_requests: int = 0  # one ended with "error" or "deadline"
    aborted_requests: int = 0
    refused_requests: int = 0  # for want of room in the queue; not in the total
    total_tokens_generated: int = 0
    prefill_tokens_computed: int = 0
    cached_logits_used: int = 0  # first tokens that cost no forward pass
    num_preemptions: int = 0
    num_steps: int = 0
    queue_seconds: float = 0.0  # arrival to first admission
    num_admitted: int = 0
    prefill_seconds: float = 0.0  # first admission to first token
    num_prefilled: int = 0
    decode_seconds: float = 0.0  # first token to end
    num_decoded: int = 0
    kv_utilization: float = 0.0  # tokens held / room in the blocks held by running sequences: mean over steps
    queue_size: int = 0  # requests of which nothing has been admitted
    queue_capacity: int = 0
    concurrent_requests: int = 0
    num_waiting: int = 0  # sequences
    num_running: int = 0

    @property
    def avg_queue_ms(self) -> float:
        return 1e3 * self.queue_seconds / max(1, self.num_admitted)

    @property
    def avg_prefill_ms(self) -> float:
        return 1e3 * self.prefill_seconds / max(1, self.num_prefilled)

    @property
    def avg_decode_ms(self) -> float:
        return 1e3 * self.decode_seconds / max(1, self.num_decoded)
