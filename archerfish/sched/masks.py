"""Which tokens the grammars of sequences allow next, as packed bits.

Threads compute them as soon as the token before is known. The scheduler leaves a sequence out of a step while its mask is not
there, so that a slow grammar holds up only its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache

import numpy as np

from archerfish.sequence import Sequence

NUM_THREADS = 8  # also where there are fewer cores: they are shared out between slow grammars and quick ones


class PendingMask:
    """The mask of a sequence's next token, computed in a thread. Read `bits` and `error` when it is done."""

    __slots__ = ("_future", "bits", "error", "num_output")

    def __init__(self, sequence: Sequence, vocab_size: int, before: PendingMask | None) -> None:
        output = sequence.tokens[sequence.num_prompt :].tolist()
        self.num_output = len(output)
        self.bits = np.zeros(-(-vocab_size // 64), dtype=np.int64)
        self.error: BaseException | None = None
        self._future: Future[None] = threads().submit(self._fill, sequence, output, -(-vocab_size // 32), before)

    def _fill(self, sequence: Sequence, output: list[int], num_words: int, before: PendingMask | None) -> None:
        try:
            if before is not None:
                wait([before._future])  # a matcher is used by one thread at a time
            if sequence.matcher is None:
                assert sequence.request.grammar is not None
                sequence.matcher = sequence.request.grammar.start()
            sequence.matcher.fill(output, self.bits.view(np.int32)[:num_words])
        except Exception as error:  # whatever fails in a grammar ends its own sequence only
            self.error = error

    def done(self) -> bool:
        return self._future.done()


class MaskFinder:
    """Starts the computation of masks. wake: called in another thread whenever one is done."""

    def __init__(self, vocab_size: int, wake: Callable[[], None] | None = None) -> None:
        self.vocab_size = vocab_size
        self._wake = wake
        self._open: set[Future[None]] = set()

    def begin(self, sequence: Sequence) -> None:
        """Find the tokens that may follow all known tokens of a sequence."""
        before = sequence.mask
        assert before is None or isinstance(before, PendingMask)
        if before is not None and before.num_output == len(sequence.tokens) - sequence.num_prompt:
            return
        sequence.mask = mask = PendingMask(sequence, self.vocab_size, before)
        self._open.add(mask._future)
        mask._future.add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        self._open.discard(future)
        if self._wake is not None:
            self._wake()

    def wait(self) -> None:
        """Wait until one of the open masks is done; return at once if none is open."""
        found = list(self._open)
        if found:
            wait(found, return_when=FIRST_COMPLETED)


@cache
def threads() -> ThreadPoolExecutor:
    """Matchers release the interpreter lock while they work."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="archerfish-grammar")
