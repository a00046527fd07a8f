"""Which replicas have which prefixes cached, as a router knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from archerfish.cache.digest import read_changes

EXPECTED_S = (
    10.0  # a prompt that was sent to a replica counts as cached there for so long, unless the replica publishes it
)


class PrefixMap:
    """Hashes of prefixes, each with a bit for every replica that has it."""

    def __init__(self) -> None:
        self._published: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._expiring: deque[tuple[float, int, Sequence[int]]] = deque()  # when, which replica, which hashes

    def __len__(self) -> int:
        return len(self._published)

    def apply(self, replica: int, changes: bytes, *, begins_anew: bool = False) -> None:
        """Take over what a replica has published (`PrefixDigest.changes`)."""
        if begins_anew:
            self.forget(replica)
        bit, published = 1 << replica, self._published
        for one, is_added in read_changes(changes):
            if is_added:
                published[one] = published.get(one, 0) | bit
            else:
                clear_bit(published, one, bit)

    def forget(self, replica: int) -> None:
        """The replica has nothing cached any more."""
        bit = 1 << replica
        for table in (self._published, self._expected):
            for one in [one for one, bits in table.items() if bits & bit]:
                clear_bit(table, one, bit)

    def expect(self, replica: int, hashes: Sequence[int], now: float) -> None:
        """A prompt was sent to a replica, which will have it before it can publish that."""
        bit = 1 << replica
        for one in hashes:
            self._expected[one] = self._expected.get(one, 0) | bit
        if hashes:
            self._expiring.append((now + EXPECTED_S, replica, hashes))

    def expect_no_more(self, replica: int, hashes: Sequence[int]) -> None:
        """What the replica has of these is published by now."""
        for one in hashes:
            clear_bit(self._expected, one, 1 << replica)

    def lengths(self, hashes: Sequence[int], num_replicas: int, now: float) -> npt.NDArray[np.float64]:
        """How many of the hashes each replica has, from the first one on without a gap."""
        while self._expiring and self._expiring[0][0] <= now:
            _, replica, old = self._expiring.popleft()
            for one in old:
                clear_bit(self._expected, one, 1 << replica)
        published = self._published
        expected = self._expected
        found = np.zeros(num_replicas)
        having = everyone = (1 << num_replicas) - 1
        for length, one in enumerate(hashes):
            still = (published.get(one, 0) | expected.get(one, 0)) & having
            if still != having:
                if length:
                    found[bits_of(having ^ still)] = length
                having = still
                if not still:
                    return found
        if hashes and having:
            found[... if having == everyone else bits_of(having)] = len(hashes)
        return found


def bits_of(number: int) -> list[int]:
    """The places of the bits that are set."""
    found = []
    while number:
        found.append(number.bit_length() - 1)
        number ^= 1 << found[-1]
    return found


def clear_bit(table: dict[int, int], key: int, bit: int) -> None:
    bits = table.get(key, 0) & ~bit
    if bits:
        table[key] = bits
    else:
        table.pop(key, None)
