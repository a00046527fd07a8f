"""How long a request that came now would wait, by the scheduler's own order and its measured costs."""

from __future__ import annotations

from archerfish.sched.live import LiveSequences
from archerfish.sched.plan import PromptPlanner, num_left
from archerfish.sequence import Request, Sequence


class Forecast:
    """Estimates for admission. Zeros before the first step was measured."""

    def __init__(self, live: LiveSequences, prompts: PromptPlanner) -> None:
        self._live = live
        self._prompts = prompts
        self._cost = prompts.cost

    def expect(self, request: Request, num_tokens: int, unread: list[int]) -> tuple[float, float]:
        """Seconds that a request waits while others are served, and seconds of its own service.

        num_tokens: of its prompt, which may not be tokenised yet. unread: tokens of the prompts that were admitted
        before the request and have not reached the scheduler; they come before the request in its order.
        """
        live, cost = self._live, self._cost
        running = [(num_left(seq), seq.num_computed) for seq in list(live.prefilling)]
        waiting = live.queue.ahead(request)
        prompts = [*running, *((seq.num_new, 0) for seq in waiting), *((num, 0) for num in unread)]
        own_s, in_order_s = cost.prompt_s(num_tokens), sum(cost.prompt_s(*prompt) for prompt in prompts)
        missing_rows = len(waiting) + len(unread) + request.params.n - len(live.rows)
        if missing_rows <= 0:  # every other step begins with the shortest prompt
            shorter_s = sum(cost.prompt_s(*prompt) for prompt in prompts if prompt[0] <= num_tokens)
            in_order_s = min(in_order_s, 2 * shorter_s + own_s)
        outputs = self._outputs(waiting)
        output_s = cost.step_s(sum(outputs)) if in_order_s else 0.0
        decode_s = min(in_order_s, output_s)  # a step gives prompts at least half of its time
        if missing_rows > 0:
            decode_s = max(decode_s, missing_rows * self.row_s(outputs))
        wait_s = in_order_s + decode_s
        rest_s, share_s = cost.step_s(len(live.decoding)), self._prompts.prompt_share_s(len(live.decoding))
        step_s = cost.step_s(min(live.num_rows, live.num_running + len(waiting) + request.params.n))
        if live.num_running:
            step_s = max(step_s, cost.recent_s)  # prompts of later requests slow down the steps as before
        return wait_s, own_s + max(1.0, own_s / share_s) * rest_s + live.used_share * request.most_output * step_s

    def row_s(self, outputs: list[float] | None = None) -> float:
        """Seconds between two ends of sequences while all rows are taken."""
        outputs, num_rows = outputs or self._outputs([]), self._live.num_rows
        return sum(outputs) / max(1, len(outputs)) * self._cost.step_s(num_rows) / num_rows

    def _outputs(self, waiting: list[Sequence]) -> list[float]:
        """Tokens that are still expected of each sequence that runs or waits."""
        sequences, share = [*self._live.prefilling, *self._live.decoding, *waiting], self._live.used_share
        return [max(0.0, share * seq.request.most_output - seq.num_emitted) for seq in sequences]

    def alone_s(self, max_tokens: int | None) -> float:
        """The shortest service of a request whose prompt is cached."""
        num_tokens = 1 if max_tokens is None else max(1, round(max_tokens * self._live.used_share))
        return num_tokens * self._cost.single_step_s
