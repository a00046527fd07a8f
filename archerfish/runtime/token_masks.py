"""Which tokens the grammars of sequences allow next, as packed bits.

They are found in threads of their own, from the moment at which the token before is known: mostly while the device computes.
The scheduler leaves out a sequence whose mask is not there yet, so that a slow grammar holds up nobody but itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache

import numpy as np
import numpy.typing as npt

from archerfish.kernels.ops import Ids
from archerfish.sequence import Sequence

NUM_THREADS = 8  # also where there are fewer cores: they are shared out between slow grammars and quick ones


class PendingMask:
    """The mask of a sequence's next token, on its way."""

    __slots__ = ("_bits", "_future", "num_output")

    def __init__(self, sequence: Sequence, output: list[int], vocab_size: int, before: PendingMask | None) -> None:
        self.num_output = len(output)
        self._bits = np.zeros(-(-vocab_size // 64), dtype=np.int64)
        self._future: Future[BaseException | None] = threads().submit(
            fill, sequence, output, self._bits.view(np.int32)[: -(-vocab_size // 32)], before
        )

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> tuple[Ids, BaseException | None]:
        """The bits, or why the sequence cannot go on; waits for them."""
        error = self._future.result()
        return self._bits, error


class MaskFinder:
    """Begins masks, and knows which are on their way. wake: called in another thread whenever one is there."""

    def __init__(self, vocab_size: int, wake: Callable[[], None] | None = None) -> None:
        self.vocab_size = vocab_size
        self._wake = wake
        self._open: set[Future[BaseException | None]] = set()

    def begin(self, sequence: Sequence, token: int | None = None) -> None:
        """Find what may follow all tokens of a sequence, and one that it is about to get."""
        before: PendingMask | None = sequence.mask
        if before is not None and before.num_output == len(sequence.tokens) - sequence.num_prompt + (token is not None):
            return
        output = sequence.tokens[sequence.num_prompt :].tolist()
        if token is not None:
            output.append(token)
        sequence.mask = mask = PendingMask(sequence, output, self.vocab_size, before)
        self._open.add(mask._future)
        mask._future.add_done_callback(self._end)

    def _end(self, future: Future[BaseException | None]) -> None:
        self._open.discard(future)
        if self._wake is not None:
            self._wake()

    def wait(self) -> None:
        """Until one of those on their way is there; not at all if none is."""
        found = list(self._open)
        if found:
            wait(found, return_when=FIRST_COMPLETED)


def find_masks(sequences: list[Sequence], vocab_size: int) -> tuple[Ids, dict[int, BaseException]]:
    """The `bits` of `Masks` for sequences with a grammar; and, by index, why one cannot go on, which then may choose anything.

    All tokens of these sequences must be on the host. Masks that were not begun before are begun now, all at once.
    """
    finder = MaskFinder(vocab_size)
    for sequence in sequences:
        finder.begin(sequence)
    found = [sequence.mask.result() for sequence in sequences]
    bits = np.stack([one for one, _ in found])
    errors = {index: error for index, (_, error) in enumerate(found) if error is not None}
    bits[list(errors)] = -1
    return bits, errors


def fill(
    sequence: Sequence, output: list[int], bits: npt.NDArray[np.int32], before: PendingMask | None
) -> BaseException | None:
    """Whatever goes wrong with one sequence's grammar is its own affair."""
    try:
        if before is not None:
            before.result()  # one at a time has the matcher
        if sequence.matcher is None:
            assert sequence.request.grammar is not None
            sequence.matcher = sequence.request.grammar.start()
        sequence.matcher.fill(output, bits)
    except Exception as error:
        return error
    return None


@cache
def threads() -> ThreadPoolExecutor:
    """For matchers that leave Python alone while they work."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="archerfish-grammar")
