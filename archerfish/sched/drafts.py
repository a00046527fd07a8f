"""Speculation: tokens that probably follow are proposed, and one step verifies them.

A sequence is sampled behind each proposed token, each time with the key of that position. So the tokens that come out are those
that would have come out one by one, whatever is proposed: a proposal is accepted while it is the token that was drawn.

Proposing needs the last token on the host, so that no step can be planned while one is in flight. A sequence waits only while
there is something to propose for it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from archerfish.sequence import Draft, Request, Sequence

LONGEST_MATCH, SHORTEST_MATCH = 5, 3  # tokens at the end of a sequence that are looked for further up
WORD = array("I").itemsize
NUM_MEASURED, ENOUGH_MEASURED = 8, 3  # steps of a size, of which the quickest counts: some wait for other things
GAIN = 1.1  # at least, of proposing tokens
MOST_DRAFTED = 64  # sequences of a step; looking for proposals would take longer than they save
PAUSE = 16  # tokens, after a step in which proposals would not have paid
FADING = 0.9  # of what was accepted before, with every draft
FIRST_ACCEPTED, FIRST_REJECTED = 2.7, 0.3  # assumed at first
FIRST_COUNT = 4  # tokens that are proposed at first
LONGEST_PAUSE = 6  # 2 to the power of this many tokens


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        """At most `count` tokens that probably follow; none is allowed too. is_bold: also on little evidence."""


class PromptLookup:
    """What followed when the last tokens stood in the sequence before: for summaries, edits of code, quotations."""

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        data, shortest = tokens.tobytes(), SHORTEST_MATCH if is_bold else LONGEST_MATCH
        for length in range(min(LONGEST_MATCH, len(tokens) - 1), shortest - 1, -1):
            place = find_last(data, data[-length * WORD :])
            if place >= 0:
                period = len(tokens) - length - place
                proposed = tokens[place + length : place + length + count].tolist()
                while len(proposed) < count:  # the match overlaps the end: it goes on as it began
                    proposed.append(proposed[-period])
                return proposed
        return []


def find_last(data: bytes, wanted: bytes) -> int:
    """The last place, in words, of some words that do not stand at the end of the data; -1: none."""
    end = len(data) - WORD
    while (at := data.rfind(wanted, 0, end)) >= 0:
        if at % WORD == 0:
            return at // WORD
        end = at + len(wanted) - 1
    return -1


class Speculation:
    """Decides for which sequences how many tokens are proposed: as many as make steps of these sizes, as fast as they were
    measured to be, give the most tokens a second."""

    def __init__(self, drafter: Drafter, max_tokens: int, max_sequences: int = MOST_DRAFTED) -> None:
        """max_sequences: of a step; larger ones verify nothing."""
        self.drafter, self.max_tokens, self.max_sequences = drafter, max_tokens, max_sequences
        self._measured: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_MEASURED))
        self._seconds: dict[int, float] = {}  # by the tokens of a step, where enough of them were measured

    def start(self, request: Request) -> Draft | None:
        """What a new sequence keeps; None: nothing is proposed for it, since the host must see each token of it first."""
        params = request.params
        is_bound = params.logits_processors or params.stages or request.needs_host_token
        return None if is_bound or not params.speculate else Draft(FIRST_ACCEPTED, FIRST_REJECTED, FIRST_COUNT)

    def look_ahead(self, seq: Sequence) -> None:
        """Propose tokens for a sequence that has got some, or have it wait for the one in flight if there is a proposal."""
        request, draft = seq.request, seq.draft
        assert draft is not None
        num_known, last = len(seq.tokens), seq.num_prompt + request.max_tokens - 1
        proposed: list[int] = []
        if num_known >= draft.pause_until and (room := last - num_known) > 0:
            count, is_bold = min(draft.count, self.max_tokens, room), draft.num_accepted > 0 and not draft.num_misses
            proposed = self.drafter.propose(seq.tokens, count, is_bold=is_bold)
        draft.tokens = [] if seq.num_pending else proposed
        seq.pending_limit = 0 if proposed else last

    def choose(self, num_others: int, sequences: SequenceOf[Sequence], room: int) -> int:
        """How many tokens to propose for each of these sequences, in a step with so many others and room for more tokens."""
        num = len(sequences)
        accepted = sum(seq.draft.accepted for seq in sequences if seq.draft is not None)
        rejected = sum(seq.draft.rejected for seq in sequences if seq.draft is not None)
        share, total = accepted / (accepted + rejected), num_others + num
        longest = max(len(seq.draft.tokens) for seq in sequences if seq.draft is not None)
        best, expected = 0, 0.0
        best_rate = GAIN * total / self._expect_seconds(total)
        for count in range(1, min(longest, room // num) + 1 if total <= self.max_sequences else 0):
            expected += share**count
            rate = (total + num * expected) / self._expect_seconds(total + num * count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def pause(self, seq: Sequence) -> None:
        """Nothing is proposed for a while, and steps need not wait for the tokens of a sequence."""
        assert seq.draft is not None
        seq.draft.tokens, seq.draft.pause_until = [], len(seq.tokens) + PAUSE
        seq.pending_limit = seq.num_prompt + seq.request.max_tokens - 1

    def verify(self, seq: Sequence, drawn: list[int]) -> list[int]:
        """The drawn tokens that count: those up to the first that was not proposed."""
        draft = seq.draft
        assert draft is not None
        num_accepted = next((i for i, (a, b) in enumerate(zip(draft.tokens, drawn, strict=False)) if a != b), len(draft.tokens))
        is_rejected = num_accepted < len(draft.tokens)
        draft.num_proposed += len(draft.tokens)
        draft.num_accepted += num_accepted
        draft.accepted = FADING * draft.accepted + num_accepted
        draft.rejected = FADING * draft.rejected + is_rejected
        draft.count = num_accepted + 1 if is_rejected else 2 * len(draft.tokens)  # a long draft that fails costs several steps
        draft.num_misses = 0 if num_accepted else draft.num_misses + 1
        draft.pause_until = len(seq.tokens) + num_accepted + (1 << min(draft.num_misses, LONGEST_PAUSE))
        return drawn[: num_accepted + 1]

    def measure(self, num_tokens: int, seconds: float) -> None:
        """A step of decodes, with so many tokens in all, took so long."""
        size = size_of(num_tokens)
        known = self._measured[size]
        known.append(max(seconds, 1e-9))
        if len(known) >= ENOUGH_MEASURED:
            self._seconds[size] = min(known)

    def _expect_seconds(self, num_tokens: int) -> float:
        """Of a step: between those of the nearest sizes that were measured; no more than the largest, so that more is tried."""
        size = size_of(num_tokens)
        below = max((known for known in self._seconds if known <= size), default=0)
        above = min((known for known in self._seconds if known >= size), default=0)
        if not below or not above:
            return self._seconds.get(below or above, 1.0)
        share = (size - below) / max(1, above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]


def size_of(num_tokens: int) -> int:
    """Steps of nearly the same size count as one."""
    return num_tokens if num_tokens <= 32 else -(-num_tokens // 16) * 16
