"""How long a step takes, fitted to the steps so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
KEPT = 0.99  # weight of the steps so far after one more step of the same kind, with or without prompt tokens
MAX_SLOWNESS = 2.5  # beyond this ratio of a step's time to its expected time, the step counts less
NUM_UNSURE = 8  # steps of a kind; the first may have compiled kernels, and later ones that are much quicker count fully
RECENT = 1 / 16  # weight of the last step in the mean time of recent steps
RIDGE = np.array([1e-4, 1e-7, 1e-5, 1e-6])  # parts that always occur together: the one with the least ridge is charged


class StepCost:
    """The time of a step: fixed_s + prompt_token_s * prompt tokens + output_token_s * output tokens + pair_s * pairs.

    A pair is a prompt token and a token before it. The four coefficients are fitted by least squares of relative
    errors. Steps without prompt tokens do not displace the steps with prompt tokens.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, 4, 5))  # without and with prompt tokens: products of parts, and of parts and times
        self._counts = [0, 0]
        self._fitted: tuple[float, ...] | None = (0.0, 0.0, 0.0, 0.0)
        self.recent_s = 0.0  # mean time of the recent steps
        self.single_step_s = 0.0  # a step that brings one token to one sequence; 0: not measured

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float, num_pairs: float = 0.0) -> None:
        if seconds <= 0 or not (num_prompt_tokens or num_output_tokens):
            return
        parts = np.array([1.0, num_prompt_tokens, num_output_tokens, num_pairs])
        expected = float(parts @ self.coefficients)
        kind = int(num_prompt_tokens > 0)
        scale = max(expected, seconds / MAX_SLOWNESS) if expected else seconds
        if self._counts[kind] < NUM_UNSURE:
            scale = min(scale, MAX_SLOWNESS * seconds)
        self._counts[kind] += 1
        sums = self._sums[kind]
        sums *= KEPT
        sums += np.outer(parts, np.append(parts, seconds)) / scale**2
        self._fitted = None
        self.recent_s += (seconds - self.recent_s) * (RECENT if self.recent_s else 1.0)
        if not num_prompt_tokens and num_output_tokens == 1:
            self.single_step_s += (seconds - self.single_step_s) * (RECENT if self.single_step_s else 1.0)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """fixed_s, prompt_token_s, output_token_s and pair_s; zeros before the first step. For any thread."""
        found = self._fitted
        if found is None:
            sums = self._sums.sum(axis=0)
            found = self._fitted = tuple(solve(sums[:, :4], sums[:, 4]).tolist())
        return found

    def step_s(self, num_output_tokens: float) -> float:
        """A step without prompt tokens."""
        fixed_s, _, output_token_s, _ = self.coefficients
        return fixed_s + output_token_s * num_output_tokens

    def prompt_s(self, num_tokens: float, start: float = 0.0) -> float:
        """Prompt tokens from position `start` on, without the fixed cost of their steps."""
        _, prompt_token_s, _, pair_s = self.coefficients
        return num_tokens * (prompt_token_s + pair_s * (start + num_tokens / 2))


def solve(products: Array, wanted: Array) -> Array:
    """Non-negative x for which products @ x is about `wanted`."""
    scale = np.sqrt(np.maximum(products.diagonal(), 1e-30))
    scaled, right = products / np.outer(scale, scale) + np.diag(RIDGE), wanted / scale
    found, active = np.zeros(len(wanted)), list(range(len(wanted)))
    while True:
        solved = np.linalg.solve(scaled[np.ix_(active, active)], right[active])
        if solved.min() >= 0:
            found[active] = solved / scale[active]
            return found
        del active[int(solved.argmin())]
