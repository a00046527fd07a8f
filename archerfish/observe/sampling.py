"""SamplingMetrics: counts of a sampler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SamplingMetrics:
    """Counts since a sampler was made. One thread writes them; reading is safe from any."""

    total_samples: int = 0
    fast_path_samples: int = 0  # in batches with greedy rows only, which need no distribution
    cache_hits: int = 0  # draws from cached logits
    sample_seconds: float = 0.0  # of the host; on a GPU the time of queueing the work
    num_timed: int = 0  # samples of those seconds; recorded steps of a GPU are not timed
    memory_allocations: int = 0  # parameter tables that were made because the batch changed

    @property
    def avg_sample_time(self) -> float:
        """Seconds for one sample; 0 before the first."""
        return self.sample_seconds / self.num_timed if self.num_timed else 0.0
