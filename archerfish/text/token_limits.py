"""Tokens that a request rules out, as a grammar: bad_words and allowed_token_ids, alone or beside a real grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError
from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from archerfish.sequence import TokenGrammar, TokenMatcher


class TokenLimits:
    """The TokenGrammar of a request. allowed: None stands for all tokens. banned: token sequences that must not be written.

    A sequence of several tokens is ruled out at its last token, where the others stand before it.
    """

    def __init__(
        self, grammar: TokenGrammar | None, vocab_size: int, allowed: Iterable[int] | None, banned: Sequence[Sequence[int]]
    ) -> None:
        self._grammar = grammar
        banned = [ids for ids in banned if max(ids) < vocab_size]  # the model cannot write the others
        is_allowed = np.full(-(-vocab_size // 32) * 32, allowed is None)
        is_allowed[vocab_size:] = False
        is_allowed[[] if allowed is None else list(allowed)] = True
        self.longer = [list(ids) for ids in banned if len(ids) > 1]
        is_allowed[[ids[0] for ids in banned if len(ids) == 1]] = False
        self.bits: npt.NDArray[np.uint32] = np.packbits(is_allowed, bitorder="little").view(np.uint32)

    def start(self) -> LimitedMatcher:
        return LimitedMatcher(self, None if self._grammar is None else self._grammar.start())


class LimitedMatcher:
    """The TokenMatcher of one sequence."""

    def __init__(self, limits: TokenLimits, inner: TokenMatcher | None) -> None:
        self._limits, self._inner = limits, inner

    def copy(self) -> LimitedMatcher:
        return LimitedMatcher(self._limits, None if self._inner is None else self._inner.copy())

    def forced(self) -> list[int]:
        return []

    def fill(self, output: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        if self._inner is None:
            bits[:] = -1
        else:
            self._inner.fill(output, bits)
        words: npt.NDArray[Any] = bits.view(np.uint32)
        words &= self._limits.bits
        for *before, last in self._limits.longer:
            if list(output[-len(before) :]) == before:
                words[last // 32] &= ~np.uint32(1 << last % 32)
        if not words.any():
            raise InvalidInputError(
                f"No token may follow after {len(output)} tokens: allowed_token_ids, bad_words and grammar rule them all out."
            )


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token ids of words, as a text begins with them and as they stand behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.strip(), f" {word.strip()}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False, plain=True))] = None
    return [list(ids) for ids in found if ids]
