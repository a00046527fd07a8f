"""Engines without a model, for tests of code that uses archerfish.

Their vectors depend only on the words of a text, so that texts with common words are similar.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from archerfish.errors import InputTooLargeError, InvalidInputError

Text = str | list[int]
Array = npt.NDArray[np.float32]


class FakeEngine:
    """An embedding engine of hashed words.

    `batches` records the inputs of each call. A text that contains `poison` makes the whole call fail, as an error deep
    inside a model would. While `gate` is not set, calls block; `entered` is set when one begins.
    """

    is_cross_encoder = False

    def __init__(
        self, model_name: str = "fake/engine", *, dimension: int = 8, max_length: int = 512, max_text_bytes: int = 1_000_000,
        poison: str = "",
    ) -> None:
        self.model_name = model_name
        self.dimension = dimension
        self.max_length = max_length
        self.max_text_bytes = max_text_bytes
        self.poison = poison
        self.batches: list[list[object]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def encode_batch(self, texts: Sequence[Text], normalize: bool | None = None) -> Array:
        self._enter(list(texts))
        self.check_texts(texts)
        if self.poison and any(isinstance(text, str) and self.poison in text for text in texts):
            raise RuntimeError("the fake engine was poisoned")
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        rows = np.stack([self._vector(text) for text in texts])
        if normalize is False:
            return rows
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    def count_tokens(self, texts: Sequence[Text | tuple[str, str]]) -> list[int]:
        """Words and two special tokens, three for a pair; ids as they are."""
        return [min(num_tokens(text), self.max_length) for text in texts]

    def check_texts(self, texts: Sequence[Text]) -> None:
        for index, text in enumerate(texts):
            if isinstance(text, str):
                if len(text.encode("utf-8", "surrogatepass")) > self.max_text_bytes:
                    raise InputTooLargeError(f"Text {index} has more than {self.max_text_bytes} bytes.")
            elif not isinstance(text, list):
                raise InvalidInputError(f"Text {index} must be a string or a list of ids, not {type(text).__name__}.")

    def rerank(self, query: str, documents: Sequence[str]) -> Array:
        return self.score_pairs([(query, document) for document in documents])

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> Array:
        left = self.encode_batch([query for query, _ in pairs], normalize=True)
        right = self.encode_batch([document for _, document in pairs], normalize=True)
        return np.asarray((left * right).sum(axis=1), np.float32)

    def get_embedding_dimension(self) -> int:
        return self.dimension

    def get_max_seq_length(self) -> int:
        return self.max_length

    def _enter(self, inputs: list[object]) -> None:
        self.batches.append(inputs)
        self.entered.set()
        self.gate.wait()

    def _vector(self, text: Text) -> Array:
        vectors = [word_vector(word, self.dimension) for word in words(text)[: self.max_length] or [""]]
        return np.asarray(np.sum(vectors, axis=0), np.float32)


def num_tokens(text: Text | tuple[str, str]) -> int:
    if isinstance(text, tuple):
        return len(words(text[0])) + len(words(text[1])) + 3
    return len(words(text)) + 2 * isinstance(text, str)


def words(text: Text) -> list[str]:
    return text.lower().split() if isinstance(text, str) else [f"#{token_id}" for token_id in text]


def word_vector(word: str, dimension: int) -> Array:
    seed = int.from_bytes(hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)
