"""Logits processors of requests: functions of the caller that change a row of logits on the host before a token is
drawn."""

from __future__ import annotations

import contextlib
import inspect
from array import array
from collections.abc import Sequence
from typing import Any

from archerfish.errors import InvalidInputError
from archerfish.params import LogitsProcessor
from archerfish.runtime.host_sampling import Row, host_row


class RowProcessors:
    """The processors of one sequence and the tokens that they are given. tokens: prompt and output so far."""

    def __init__(self, processors: Sequence[LogitsProcessor], tokens: array[int], num_prompt: int) -> None:
        self._processors = [(processor, takes_prompt(processor)) for processor in processors]
        self._tokens, self._num_prompt = tokens, num_prompt

    def apply(self, logits: Row, position: int) -> Row:
        """The logits of the token at a position after all processors. What a processor raises comes with its name."""
        prompt, output = self._tokens[: self._num_prompt].tolist(), self._tokens[self._num_prompt : position].tolist()
        row: Any = logits.copy()
        with contextlib.suppress(ImportError):  # without torch they are given arrays
            import torch

            row = torch.from_numpy(row)
        for processor, wants_prompt in self._processors:
            name = getattr(processor, "__name__", type(processor).__name__)
            try:
                row = processor(prompt, output, row) if wants_prompt else processor(output, row)
                result = host_row(row)
            except Exception as error:
                raise InvalidInputError(
                    f"The logits processor {name} failed: {type(error).__name__}: {error}"
                ) from error
            if result.shape != logits.shape:
                raise InvalidInputError(f"The logits processor {name} gave {len(result):,} logits for {len(logits):,}.")
        return result

    def add(self, token_id: int, position: int) -> None:
        """The token that was drawn for a position; telling it again changes nothing."""
        self._tokens[position:] = array("I", [token_id])


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether a processor has three parameters: prompt, output and logits."""
    try:
        found = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return False
    return len([one for one in found if one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD]) == 3
