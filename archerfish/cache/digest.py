"""What a replica tells routers of its prefix cache: a keyed hash for each cached prefix of a multiple of DIGEST_TOKENS
tokens.

A hash depends on a secret of the service, and on model, tenant and adapter. So nobody without the secret can tell
whether a text is cached, and equal texts of two tenants have nothing in common.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from random import Random

import numpy as np
import numpy.typing as npt

from archerfish.cache.tree import TOKEN_BYTES, TOKEN_TYPE
from archerfish.sequence import Namespace

Hashes = npt.NDArray[np.uint64]
DIGEST_TOKENS = 64  # prefixes are published at multiples of so many tokens
HASH_BYTES = 8
LEAST_COMPACTED = 4096  # changes, below which a log is never shortened
ONE, HALF_WORD = np.uint64(1), np.uint64(32)
NO_HASHES: Hashes = np.zeros(0, np.uint64)


class PathHash:
    """A 64-bit hash of a path that can be extended and does not depend on how the path is cut into nodes.

    hash(tokens) = sum of (token + 1) * factor[position], modulo 2^64, with a random odd factor for every position.
    """

    def __init__(self) -> None:
        self._random = Random(0x6172636865726669)
        self._factors = self._draw(4096)

    def extend(self, path_hash: int, position: int, data: bytes, start: int, count: int) -> int:
        """The hash of a path of `position` tokens, then `count` tokens of `data` from token `start` on."""
        terms = self._terms(position, data, start, count)
        return (path_hash + int(terms.sum())) & 0xFFFF_FFFF_FFFF_FFFF

    def prefixes(self, path_hash: int, position: int, data: bytes, start: int, count: int) -> Hashes:
        """The hashes of all prefixes of the extended path that end behind `position` at a multiple of DIGEST_TOKENS."""
        first = DIGEST_TOKENS - position % DIGEST_TOKENS
        if count < first:
            return NO_HASHES
        return self._terms(position, data, start, count).cumsum()[first - 1 :: DIGEST_TOKENS] + np.uint64(path_hash)

    def _terms(self, position: int, data: bytes, start: int, count: int) -> Hashes:
        end = position + count
        while end > len(self._factors):
            self._factors = np.concatenate([self._factors, self._draw(len(self._factors))])
        terms: Hashes = np.add(np.frombuffer(data, TOKEN_TYPE, count, start * TOKEN_BYTES), ONE, dtype=np.uint64)
        terms *= self._factors[position:end]
        return terms

    def _draw(self, count: int) -> Hashes:
        return np.frombuffer(self._random.randbytes(8 * count), np.uint64) | np.uint64(1)


@lru_cache(maxsize=4096)
def salts(secret: bytes, model: str, namespace: Namespace) -> tuple[np.uint64, np.uint64]:
    """Two random numbers of a namespace of a model; the second is odd."""
    text = "\0".join((model, *namespace)).encode()
    first, second = np.frombuffer(blake2b(text, key=secret[:64], digest_size=16).digest(), np.uint64)
    return first, second | np.uint64(1)


def keyed(hashes: Hashes, secret: bytes, model: str, namespace: Namespace) -> Hashes:
    """What is published for hashes of paths. The lowest bit is set."""
    first, second = salts(secret, model, namespace)
    mixed = (hashes ^ first) * second
    mixed ^= mixed >> HALF_WORD
    mixed |= ONE
    return mixed


class PromptHashes:
    """Computes for prompts what replicas publish, for one router."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._path_hash = secret, PathHash()

    def __call__(self, tokens: array[int], model: str, namespace: Namespace) -> list[int]:
        """One hash for each multiple of DIGEST_TOKENS, shortest prefix first."""
        found = self._path_hash.prefixes(0, 0, tokens.tobytes(), 0, len(tokens))
        return keyed(found, self._secret, model, namespace).tolist()  # type: ignore[no-any-return]


class PrefixDigest:
    """The published prefixes of all models of a replica, as a log of changes. Any thread may use it.

    A change is a hash with its lowest bit set where the prefix was added, and clear where it was removed.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._present: dict[int, None] = {}
        self._log = array("Q")
        self._first = 1 + secrets.randbits(
            48
        )  # version before the first change: one of another process is not known here
        self._old_first, self._old_log = 0, array("Q")  # before the log became a list of what is present
        self._num_listed = 0  # by that list

    def __len__(self) -> int:
        return len(self._present)

    def add(self, hashes: Hashes, model: str, namespace: Namespace) -> None:
        with self._lock:
            for one in keyed(hashes, self._secret, model, namespace).tolist():
                if one not in self._present:
                    self._present[one] = None
                    self._log.append(one)

    def remove(self, hashes: Hashes, model: str, namespace: Namespace) -> None:
        with self._lock:
            for one in keyed(hashes, self._secret, model, namespace).tolist():
                if one in self._present:
                    del self._present[one]
                    self._log.append(one - 1)
            if len(self._log) > max(LEAST_COMPACTED, 2 * len(self._present)):
                self._old_first = self._first
                self._old_log = self._log
                self._log = array("Q", self._present)
                self._first, self._num_listed = self._old_first + len(self._old_log) + 1, len(self._log)

    def changes(self, since: int, max_bytes: int) -> tuple[int, bytes, bool]:
        """Changes after the version `since`: the version that they lead to, the changes, and whether they begin from
        nothing.

        A version that is not known, such as 0, gets all that is present.
        """
        with self._lock:
            first, log = self._first, self._log
            if 0 <= since - self._old_first < len(self._old_log):
                first, log = self._old_first, self._old_log
            elif self._old_log and since == self._old_first + len(self._old_log):
                since = first + self._num_listed
            begins_anew = not first <= since <= first + len(log)
            start = 0 if begins_anew else since - first
            found = log[start : start + max_bytes // HASH_BYTES]
            return first + start + len(found), found.tobytes(), begins_anew


class ModelDigest:
    """The part of a digest that the prefix cache of one model writes."""

    def __init__(self, digest: PrefixDigest, model: str) -> None:
        self._digest, self._model = digest, model

    def add(self, namespace: Namespace, hashes: Hashes) -> None:
        self._digest.add(hashes, self._model, namespace)

    def remove(self, namespace: Namespace, hashes: Hashes) -> None:
        self._digest.remove(hashes, self._model, namespace)


def read_changes(data: bytes) -> Iterable[tuple[int, bool]]:
    """The hashes of `PrefixDigest.changes`, each with whether it was added."""
    return ((value | 1, bool(value & 1)) for value in array("Q", data))
