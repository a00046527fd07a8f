"""Tokens as the radix tree wants them: packed, compared at the speed of memcmp, hashed position by position."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import numpy as np

from archerfish.sequence import Namespace, pack_tokens

TOKEN_BYTES = array("I").itemsize
_DTYPE = np.dtype(f"u{TOKEN_BYTES}")
NO_NAMESPACE = Namespace()


def as_namespace(namespace: str | Namespace) -> Namespace:
    """A string is a tenant, without an adapter."""
    return Namespace(namespace) if isinstance(namespace, str) else namespace


class RadixKey:
    """A sequence's tokens and the namespace in which they are looked for; a snapshot of what it is given."""

    __slots__ = ("data", "namespace", "tokens")

    def __init__(self, tokens: Iterable[int], namespace: Namespace = NO_NAMESPACE) -> None:
        self.tokens = pack_tokens(tokens)
        self.data = self.tokens.tobytes()
        self.namespace = namespace

    @classmethod
    def with_namespace(cls, tokens: Iterable[int], namespace: str | Namespace) -> RadixKey:
        """Equal tokens in two namespaces share nothing. A string is a tenant."""
        return cls(tokens, as_namespace(namespace))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RadixKey) and self.data == other.data and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.data, self.namespace))

    def __repr__(self) -> str:
        return f"RadixKey({len(self)} tokens, {self.namespace!r})"


def common_length(data: bytes, start: int, edge: bytes, most: int) -> int:
    """How many of `most` tokens of `data` from token `start` on equal those of `edge`."""
    ours = np.frombuffer(data, _DTYPE, most, start * TOKEN_BYTES)
    differs = ours != np.frombuffer(edge, _DTYPE, most)
    first = int(differs.argmax()) if most else 0
    return first if most and differs[first] else most


def first_token(edge: bytes) -> int:
    return int.from_bytes(edge[:TOKEN_BYTES], sys.byteorder)


class PathHash:
    """A 64-bit hash of a path that can be extended and does not depend on how the path is cut into nodes.

    hash(tokens) = sum of (token + 1) * factor[position], modulo 2^64, with a random odd factor for every position.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0x6172636865726669)
        self._factors = self._draw(4096)

    def extend(self, path_hash: int, position: int, data: bytes, start: int, count: int) -> int:
        """The hash of a path of `position` tokens, then `count` tokens of `data` from token `start` on."""
        end = position + count
        while end > len(self._factors):
            self._factors = np.concatenate([self._factors, self._draw(len(self._factors))])
        tokens = np.frombuffer(data, _DTYPE, count, start * TOKEN_BYTES).astype(np.uint64)
        tokens += np.uint64(1)
        return (path_hash + int(tokens.dot(self._factors[position:end]))) & 0xFFFF_FFFF_FFFF_FFFF

    def _draw(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._random.integers(0, 2**64, count, dtype=np.uint64) | np.uint64(1)
