"""How prompts share the tokens of a step."""

from __future__ import annotations

from archerfish.sequence import Sequence

LONE_STEP_S = 1.0  # about how long a step may take while one prompt is all there is to compute
SHARED_STEP_S = 0.25  # the same while other sequences wait for the step
MIN_STEP_TOKENS = 64  # of prompts, however slow the machine is; fewer waste its time


class PromptShares:
    """Orders the prompts that compete for a step, and bounds the step by the speed measured so far.

    While not all prompts fit into a step, every other step begins with those that have the fewest tokens left; the others go in
    order. So a short prompt waits two steps behind a long one, and a long one gets at least every other step.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of prompts; 0: not measured yet
        self._is_shortest_next = True

    def max_tokens(self, *, is_shared: bool) -> int | None:
        """How many prompt tokens a step should have at most; None: not known yet."""
        if not self.tokens_per_s:
            return None
        return max(MIN_STEP_TOKENS, int(self.tokens_per_s * (SHARED_STEP_S if is_shared else LONE_STEP_S)))

    def order(self, sequences: list[Sequence], num_runnable: int, budget: int) -> list[Sequence]:
        """Sequences in the order in which they get their tokens. num_runnable: how many of them there are rows for.

        No sequence overtakes another while the budget is enough for all that can run.
        """
        if len(sequences) < 2 or sum(map(num_left, sequences[:num_runnable])) <= budget:
            return sequences
        is_shortest, self._is_shortest_next = self._is_shortest_next, not self._is_shortest_next
        return sorted(sequences, key=lambda seq: (-seq.request.priority, num_left(seq))) if is_shortest else sequences

    def measure(self, num_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            found = num_tokens / seconds
            self.tokens_per_s = (self.tokens_per_s + found) / 2 if self.tokens_per_s else found


def num_left(seq: Sequence) -> int:
    """Tokens to compute until the sequence is caught up; of a waiting one, without regard to the cache."""
    return len(seq.tokens) - seq.num_computed
