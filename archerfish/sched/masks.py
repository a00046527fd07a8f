"""Which tokens the grammars of sequences allow next, as packed bits.

Threads compute them as soon as the token before is known. The scheduler leaves a sequence out of a step while its mask
is not there, so that a slow grammar holds up only its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache

import numpy as np

from archerfish.errors import InvalidInputError
from archerfish.sequence import Sequence, TokenMatcher

NUM_THREADS = 8  # also where there are fewer cores: they are shared out between slow grammars and quick ones


class PendingMask:
    """The mask of a sequence's next token, and of those behind proposed ones, computed in a thread. Read it when it is
    done.

    most: how many forced tokens to propose, unless the proposed ones begin with them.
    """

    __slots__ = ("_future", "bits", "error", "is_forced", "num_output", "proposed")

    def __init__(
        self, sequence: Sequence, vocab_size: int, before: PendingMask | None, proposed: SequenceOf[int], most: int
    ) -> None:
        output = sequence.tokens[sequence.num_prompt :].tolist()
        self.num_output = len(output)
        self.bits = np.zeros((1, -(-vocab_size // 64)), dtype=np.int64)
        self.proposed: list[int] = []
        self.is_forced = False
        self.error: BaseException | None = None
        self._future: Future[None] = threads().submit(
            self._fill, sequence, output, -(-vocab_size // 32), before, list(proposed), most
        )

    def _fill(
        self,
        sequence: Sequence,
        output: list[int],
        num_words: int,
        before: PendingMask | None,
        proposed: list[int],
        most: int,
    ) -> None:
        try:
            if before is not None:
                wait([before._future])  # a matcher is used by one thread at a time
            if sequence.matcher is None:
                assert sequence.request.grammar is not None
                sequence.matcher = sequence.request.grammar.start()
            sequence.matcher.fill(output, self.bits[0].view(np.int32)[:num_words])
            forced = sequence.matcher.forced()[:most] if most else []
            if proposed[: len(forced)] != forced:
                proposed, self.is_forced = forced, True
            if proposed:
                self._look_ahead(sequence.matcher.copy(), output, proposed, num_words)
        except Exception as error:  # whatever fails in a grammar ends its own sequence only
            self.error = error

    def _look_ahead(self, matcher: TokenMatcher, output: list[int], proposed: list[int], num_words: int) -> None:
        """The masks behind proposed tokens, up to the first that the grammar forbids."""
        masks = [self.bits[0]]
        for num, token in enumerate(proposed, 1):
            if token // 64 >= len(masks[-1]) or not int(masks[-1][token // 64]) >> token % 64 & 1:
                break
            masks.append(np.zeros_like(masks[0]))
            try:
                matcher.fill(output + proposed[:num], masks[-1].view(np.int32)[:num_words])
            except InvalidInputError:
                masks.pop()
                break
        self.bits, self.proposed = np.stack(masks), proposed[: len(masks) - 1]

    def done(self) -> bool:
        return self._future.done()


class MaskFinder:
    """Starts the computation of masks. wake: called in another thread whenever one is done."""

    def __init__(self, vocab_size: int, wake: Callable[[], None] | None = None) -> None:
        self.vocab_size = vocab_size
        self._wake = wake
        self._open: set[Future[None]] = set()

    def begin(self, sequence: Sequence, proposed: SequenceOf[int] = (), most: int = 0) -> None:
        """Find the tokens that may follow all known tokens of a sequence, and proposed ones. most: as in
        PendingMask."""
        before = sequence.mask
        assert before is None or isinstance(before, PendingMask)
        if before is not None and before.num_output == len(sequence.tokens) - sequence.num_prompt:
            return
        sequence.mask = mask = PendingMask(sequence, self.vocab_size, before, proposed, most)
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
