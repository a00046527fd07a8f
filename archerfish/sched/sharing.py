"""Sequences that wait a moment for another one that is computing the same prefix."""

from __future__ import annotations

from archerfish.sequence import Sequence

MAX_LEADERS = 16  # that a sequence is compared with
MAX_WAITS = 4  # how often one sequence waits


class PrefixSharing:
    """Of many prompts that begin alike and arrive together, one is computed and the others take its KV from the cache.

    A sequence waits if a leader (running, its prompt not yet in the tree) will have at least half of what it must compute.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._leaders: dict[Sequence, int] = {}  # -> tokens that it took from the cache
        self._behind: dict[Sequence, tuple[Sequence, int]] = {}  # whom a sequence waits for, and how often it has waited

    def start(self, seq: Sequence, num_cached: int) -> None:
        """An admitted sequence computes its prompt."""
        self._behind.pop(seq, None)
        if len(seq.tokens) - num_cached >= self._min_tokens:
            self._leaders[seq] = num_cached

    def stop(self, seq: Sequence) -> None:
        """Its prompt is in the tree, or it runs no longer."""
        self._leaders.pop(seq, None)

    def forget(self, seq: Sequence) -> None:
        self._behind.pop(seq, None)

    def must_wait(self, seq: Sequence) -> bool:
        if not self._leaders:
            return False
        leader, num_waits = self._behind.get(seq, (None, 0))
        if leader in self._leaders:
            return True
        if num_waits >= MAX_WAITS or (seq.request.params.prompt_logprobs is not None and seq.index == 0):
            return False
        for index, (candidate, num_cached) in enumerate(self._leaders.items()):
            if index == MAX_LEADERS:
                break
            if self._gains(seq, candidate, num_cached):
                self._behind[seq] = candidate, num_waits + 1
                return True
        return False

    def _gains(self, seq: Sequence, leader: Sequence, num_cached: int) -> bool:
        ours, theirs = seq.tokens, leader.tokens
        end = num_cached + max(self._min_tokens, (len(ours) - num_cached) // 2)
        if end >= len(ours) or end > leader.num_prompt or seq.request.namespace != leader.request.namespace:
            return False
        return ours[num_cached] == theirs[num_cached] and ours[:end] == theirs[:end]
