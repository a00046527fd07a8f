"""A plan that is being made."""

from __future__ import annotations

from archerfish.sequence import Plan, Sequence

Chunk = tuple[Sequence, int, int, bool]  # sequence, start, count, whether it gives a token


class Draft:
    """Decodes first, then chunks."""

    __slots__ = ("budget", "chunks", "copies", "is_pressed", "sequences", "stalled", "starts")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.sequences: list[Sequence] = []  # one token each, and they get the next one
        self.starts: list[int] = []
        self.chunks: list[Chunk] = []
        self.copies: list[tuple[int, int]] = []
        self.stalled: list[Sequence] = []  # decodes that found no block
        self.is_pressed = False  # memory is short: nobody is admitted

    def add_decode(self, seq: Sequence) -> None:
        self.sequences.append(seq)
        self.starts.append(seq.num_computed)
        seq.num_computed += 1
        seq.num_pending += 1
        seq.num_in_flight += 1
        self.budget -= 1

    def add_chunk(self, seq: Sequence, count: int) -> bool:
        """True if the sequence is caught up with this, and gets a token."""
        start = seq.num_computed
        samples = start + count == len(seq.tokens)
        self.chunks.append((seq, start, count, samples))
        seq.num_computed += count
        seq.num_pending += samples
        seq.num_in_flight += 1
        self.budget -= count
        return samples

    def seal(self, step: int, *, keeps_logits: bool) -> Plan | None:
        sequences, starts = self.sequences, self.starts
        num_decodes = len(sequences)
        counts, samples = [1] * num_decodes, [True] * num_decodes
        kept: list[int] = []
        for seq, start, count, gives_token in sorted(self.chunks, key=_place) if self.chunks else ():
            if (keeps_logits or seq.request.wants_logits) and gives_token and count and start + count == seq.num_prompt:
                kept.append(len(sequences))
            num_decodes += count == 1
            sequences.append(seq)
            starts.append(start)
            counts.append(count)
            samples.append(gives_token)
        if not sequences:
            return None
        return Plan(step, sequences, starts, counts, samples, kept, self.copies, num_decodes, sum(counts))


def _place(chunk: Chunk) -> int:
    """One new token first, then more, then none (a stable sort keeps the order of admission otherwise)."""
    count = chunk[2]
    return 0 if count == 1 else 1 if count else 2
