"""Speculation: tokens that probably follow are proposed, and one step verifies them.

A sequence is sampled behind each proposed token, each time with the key of that position. So the tokens that come out
are those that would have come out one by one, whatever is proposed: a proposal is accepted while it is the token that
was drawn.

Proposing needs the last token on the host, so that no step can be planned while one is in flight. A sequence waits only
while there is something to propose for it. On a GPU the scheduler also waits for the proposals of a draft model.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from archerfish.sequence import Draft, DraftJob, Request, Sequence

LONGEST_MATCH, SHORTEST_MATCH = 5, 3  # tokens at the end of a sequence that are looked for further up
WORD = array("I").itemsize
NUM_MEASURED, ENOUGH_MEASURED = 8, 3  # steps of a size, of which the quickest counts: some wait for other things
GAIN = 1.1  # at least, of proposing tokens
MOST_DRAFTED = 64  # sequences of a step; looking for proposals would take longer than they save
PAUSE = 16  # tokens, after a step in which proposals would not have paid
FADING = 0.9  # of what was accepted before, with every draft
FORGETTING = (
    0.8  # of what was rejected, with every pause of a draft model: bad luck must not end its proposals for good
)
FIRST_ACCEPTED, FIRST_REJECTED = 2.7, 0.3  # assumed at first
FIRST_COUNT = 4  # tokens that are proposed at first
LONGEST_PAUSE = 6  # 2 to the power of this many tokens


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, tokens: array[int], count: int, *, is_bold: bool) -> list[int]:
        """At most `count` tokens that probably follow; none is allowed too. is_bold: also on little evidence."""


class DraftModel(Protocol):
    """Proposes tokens by computing them, for several sequences together."""

    def takes(self, seq: Sequence, count: int) -> bool:
        """Whether it has room for a sequence with so many tokens more."""

    def begin(self, sequences: SequenceOf[Sequence], count: int) -> DraftJob:
        """Propose so many tokens for each."""

    def expect_seconds(self, num_sequences: int, count: int) -> float:
        """How long that takes, as far as it was measured."""

    def close(self) -> None:
        """Give its memory back."""


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


class StepTimes:
    """How long steps take, by their size."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_MEASURED))
        self._seconds: dict[int, float] = {}  # by size, where enough steps were measured

    def add(self, size: int, seconds: float) -> None:
        size = rounded(size)
        known = self._measured[size]
        known.append(max(seconds, 1e-9))
        if len(known) >= ENOUGH_MEASURED:
            self._seconds[size] = min(known)

    def knows(self, size: int) -> bool:
        return rounded(size) in self._seconds

    def expect(self, size: int, default: float) -> float:
        """Between those of the nearest sizes that were measured; no more than the largest, so that more is tried."""
        size = rounded(size)
        below = max((known for known in self._seconds if known <= size), default=0)
        above = min((known for known in self._seconds if known >= size), default=0)
        if not below or not above:
            return self._seconds.get(below or above, default)
        share = (size - below) / max(1, above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]


def rounded(size: int) -> int:
    """Steps of nearly the same size count as one."""
    return size if size <= 32 else -(-size // 16) * 16


class Speculation:
    """Decides for which sequences how many tokens are proposed: as many as make steps of these sizes, as fast as they
    were measured to be, give the most tokens a second."""

    def __init__(
        self,
        drafter: Drafter,
        max_tokens: int,
        max_sequences: int = MOST_DRAFTED,
        model: DraftModel | None = None,
        *,
        is_flat: bool = False,
    ) -> None:
        """max_sequences: of a step; larger ones verify nothing. model: proposes in place of the drafter. is_flat: a
        step of a few tokens takes as long as one of a few more."""
        self.drafter = drafter
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.model = model
        self.least_count = max_tokens if is_flat else 0  # tokens that may be proposed, whatever came before
        self.times = StepTimes()  # by the tokens of a step of decodes

    def start(self, request: Request) -> Draft | None:
        """What a new sequence keeps; None: nothing is proposed for it. A logits processor sees tokens one by one."""
        params = request.params
        is_bound = params.logits_processors or params.stages or not params.speculate
        return None if is_bound else Draft(FIRST_ACCEPTED, FIRST_REJECTED, max(FIRST_COUNT, self.least_count))

    def room(self, seq: Sequence) -> int:
        """How many tokens may be proposed for a sequence: nothing follows its last one."""
        return min(self.max_tokens, last_position(seq) - len(seq.tokens))

    def look_ahead(self, sequences: SequenceOf[Sequence], num_others: int) -> None:
        """Propose tokens for sequences that have got some, in a step with so many others.

        One with a token in flight waits for it if there is something to propose.
        """
        computed: list[Sequence] = []  # by the draft model
        for seq in sequences:
            draft = seq.draft
            room = self.room(seq)
            proposed = list[int]()
            assert draft is not None
            if len(seq.tokens) >= draft.pause_until and room > 0:
                if self.model is not None:
                    computed += [seq] if self.model.takes(seq, room) else []
                else:
                    count, is_bold = min(draft.count, room), draft.num_accepted > 0 and not draft.num_misses
                    proposed = self.drafter.propose(seq.tokens, count, is_bold=is_bold)
                    if proposed and not self.choose(num_others + len(sequences) - 1, [seq], count, count):
                        proposed, draft.pause_until = [], len(seq.tokens) + PAUSE
            draft.job = None
            draft.is_forced = False
            draft.tokens = [] if seq.num_pending else proposed
            seq.pending_limit = 0 if proposed or seq.request.needs_host_token else last_position(seq)
        if computed and self.model is not None:
            self._compute(self.model, computed, num_others + len(sequences) - len(computed))

    def _compute(self, model: DraftModel, sequences: list[Sequence], num_others: int) -> None:
        """Have the draft model propose tokens, if that pays."""
        if not self.times.knows(num_others + len(sequences)):
            return  # whether proposals pay can be told when some steps without them were measured
        longest = max(min(seq.draft.count, self.room(seq)) for seq in sequences if seq.draft is not None)
        count = self.choose(num_others, sequences, longest * len(sequences), longest)
        ready = [seq for seq in sequences if count and not seq.num_pending]
        job = model.begin(ready, count) if ready else None
        for seq in sequences:
            assert seq.draft is not None
            if count:
                seq.draft.job, seq.pending_limit = None if seq.num_pending else job, 0
            else:
                seq.draft.rejected *= FORGETTING
                self.pause(seq)

    def is_proposing(self, seq: Sequence) -> bool:
        """Whether a draft model still computes proposals for a sequence; takes them if they are there."""
        draft = seq.draft
        if draft is None or draft.job is None:
            return False
        if not draft.job.done():
            return True
        draft.tokens = draft.job.tokens(seq)[: self.room(seq)]
        draft.job = None
        return False

    def choose(self, num_others: int, sequences: SequenceOf[Sequence], room: int, longest: int = 0) -> int:
        """How many tokens to propose for each of these sequences, in a step with so many others and room for more
        tokens.

        longest: of what the draft model may propose; 0: proposals are there, and cost no more time.
        """
        num = len(sequences)
        drafts = [seq.draft for seq in sequences if seq.draft is not None]
        num_forced = sum(draft.is_forced for draft in drafts)
        accepted, rejected = sum(draft.accepted for draft in drafts), sum(draft.rejected for draft in drafts)
        share = accepted / (accepted + rejected)
        total = num_others + num
        is_computed = longest > 0
        longest = longest or max(len(draft.tokens) for draft in drafts)
        best, expected = 0, 0.0
        best_rate = GAIN * total / self.times.expect(total, 1.0)
        for count in range(1, min(longest, room // num) + 1 if total <= self.max_sequences else 0):
            expected += share**count
            seconds = self.times.expect(total + num * count, 1.0)
            if is_computed and self.model is not None:
                seconds += self.model.expect_seconds(num, count)
            rate = (total + num_forced * count + (num - num_forced) * expected) / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def pause(self, seq: Sequence) -> None:
        """Nothing is proposed for a while, and steps need not wait for the tokens of a sequence."""
        assert seq.draft is not None
        seq.draft.tokens = []
        seq.draft.job = None
        seq.draft.pause_until = len(seq.tokens) + PAUSE
        seq.pending_limit = 0 if seq.request.needs_host_token else last_position(seq)

    def verify(self, seq: Sequence, drawn: list[int]) -> list[int]:
        """The drawn tokens that count: those up to the first that was not proposed."""
        draft = seq.draft
        assert draft is not None
        num_accepted = next(
            (i for i, (a, b) in enumerate(zip(draft.tokens, drawn, strict=False)) if a != b), len(draft.tokens)
        )
        is_rejected = num_accepted < len(draft.tokens)
        draft.num_proposed += len(draft.tokens)
        draft.num_accepted += num_accepted
        if draft.is_forced:  # says nothing of other proposals
            return drawn[: num_accepted + 1]
        draft.accepted = FADING * draft.accepted + num_accepted
        draft.rejected = FADING * draft.rejected + is_rejected
        draft.num_misses = 0 if num_accepted else draft.num_misses + 1
        shortest = FIRST_COUNT
        if self.model is None:  # what is looked up is right for long, or not at all
            shortest = num_accepted + 1
            draft.pause_until = len(seq.tokens) + num_accepted + (1 << min(draft.num_misses, LONGEST_PAUSE))
        draft.count = max(shortest, self.least_count, 0 if is_rejected else 2 * len(draft.tokens))
        return drawn[: num_accepted + 1]


def last_position(seq: Sequence) -> int:
    """Of the last token that may come."""
    return seq.num_prompt + seq.request.max_tokens - 1
