"""Texts whose token counts are known exactly, made of words that the tokenizer has as single tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from archerfish.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 20
MIN_WORDS = 200
SHORT_TEXT = "The quick brown fox jumps over the lazy dog."
PROBES = (
    "", "a", "Hello, world!", SHORT_TEXT, "今天天气很好，我们去公园散步吧。", "日本語の文章も混ざっています。",
    "🙂 🚀 emoji 👩‍👩‍👧‍👦 all the way 🎉", "Ünïcödé naïve café Straße", "x = [i ** 2 for i in range(10)]  # code",
    "UPPER lower MiXeD 1234567890 3.14159 -1e-9",
    "A man is eating food. " * 12, " ".join(f"word{i}" for i in range(600)), "the answer to every question " * 120,
)  # fmt: skip


class TextMaker:
    """Makes distinct texts of exact lengths, special tokens included; the same seed gives the same texts."""

    def __init__(self, tokenizer: Tokenizer, seed: int = SEED) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self.num_special = int(tokenizer.num_special_tokens_to_add(False))
        self.words = single_token_words(tokenizer)
        if len(self.words) < MIN_WORDS:
            raise UnsupportedModelError(f"The tokenizer has only {len(self.words)} whole words: too few to build texts from.")

    @classmethod
    def from_directory(cls, directory: Path) -> TextMaker:
        from tokenizers import Tokenizer

        places = (directory / "tokenizer.json", directory / "tokenizer" / "tokenizer.json")
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise UnsupportedModelError(f"{directory} has no tokenizer.json to build texts with.")
        return cls(Tokenizer.from_file(str(found)))

    def texts(self, lengths: list[int]) -> list[str]:
        """A text for each length in tokens."""
        seen: set[str] = set()
        made: list[str] = []
        for length in lengths:
            text = self._text(length)
            while text in seen:
                text = self._text(length)
            seen.add(text)
            made.append(text)
        self._check(made, lengths)
        return made

    def fixed(self, count: int, length: int) -> list[str]:
        return self.texts([length] * count)

    def mixed(self, count: int, shortest: int, longest: int) -> list[str]:
        return self.texts([self._random.randint(shortest, longest) for _ in range(count)])

    def _text(self, length: int) -> str:
        return " ".join(self._random.choices(self.words, k=length - self.num_special))

    def _check(self, texts: list[str], lengths: list[int]) -> None:
        for encoding, length in zip(self._tokenizer.encode_batch(texts), lengths, strict=True):
            if len(encoding.ids) != length:
                raise UnsupportedModelError(f"A text meant to have {length} tokens has {len(encoding.ids)}.")


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words of three or more ASCII letters that are one token each, also after another word."""
    pieces = {piece.lstrip("Ġ▁") for piece in tokenizer.get_vocab()}
    candidates = sorted(p for p in pieces if len(p) >= 3 and p.isascii() and p.isalpha() and p.islower())
    special = int(tokenizer.num_special_tokens_to_add(False))
    encodings = tokenizer.encode_batch([f"{word} {word}" for word in candidates])
    return [word for word, encoding in zip(candidates, encodings, strict=True) if len(encoding.ids) == special + 2]


def documents(count: int) -> list[str]:
    """Short ones: "Document 1", "Document 2" and so on."""
    return [f"Document {number}" for number in range(1, count + 1)]
