"""Which tokens the grammars of sequences allow next, as packed bits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from archerfish.kernels.ops import Ids
from archerfish.sequence import Sequence

MOST_THREADS = 8
FEW = 2  # sequences that are not worth other threads


def find_masks(sequences: list[Sequence], vocab_size: int) -> tuple[Ids, dict[int, BaseException]]:
    """The `bits` of `Masks` for sequences with a grammar; and, by index, why one cannot go on, which then may choose anything.

    All tokens of these sequences must be on the host.
    """
    bits = np.zeros((len(sequences), -(-vocab_size // 64)), dtype=np.int64)
    rows = [row[: -(-vocab_size // 32)] for row in bits.view(np.int32)]
    found = map(fill, sequences, rows) if len(sequences) <= FEW else threads().map(fill, sequences, rows)
    errors = {index: error for index, error in enumerate(found) if error is not None}
    bits[list(errors)] = -1
    return bits, errors


def fill(sequence: Sequence, bits: npt.NDArray[np.int32]) -> BaseException | None:
    """Whatever goes wrong with one sequence's grammar is its own affair."""
    try:
        if sequence.matcher is None:
            assert sequence.request.grammar is not None
            sequence.matcher = sequence.request.grammar.start()
        sequence.matcher.fill(sequence.tokens[sequence.num_prompt :], bits)
    except Exception as error:
        return error
    return None


@cache
def threads() -> ThreadPoolExecutor:
    """For matchers that leave Python alone while they work."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="archerfish-grammar")
