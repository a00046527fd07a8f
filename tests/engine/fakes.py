"""An embedding engine without a model: its vectors depend only on the words of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from archerfish.errors import InputTooLargeError

Array = npt.NDArray[np.float32]


class FakeEngine:
    """`batches` records the inputs of each call. A text that contains `poison` makes the whole call fail."""

    model_name, dimension = "fake/engine", 8

    def __init__(self, *, max_text_bytes: int = 1_000_000, poison: str = "") -> None:
        self.max_text_bytes, self.poison = max_text_bytes, poison
        self.batches: list[list[str]] = []

    def encode_batch(self, texts: Sequence[str], normalize: bool | None = None) -> Array:
        self.batches.append(list(texts))
        if self.poison and any(self.poison in text for text in texts):
            raise RuntimeError("the fake engine was poisoned")
        vectors = [
            np.sum([word_vector(word, self.dimension) for word in text.split() or [""]], axis=0) for text in texts
        ]
        rows = np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)
        return (
            rows if normalize is False else np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)
        )

    def check_texts(self, texts: Sequence[str]) -> None:
        if any(len(text) > self.max_text_bytes for text in texts):
            raise InputTooLargeError(f"A text has more than {self.max_text_bytes} bytes.")

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Words and two special tokens."""
        return [len(text.split()) + 2 for text in texts]

    def get_embedding_dimension(self) -> int:
        return self.dimension


def word_vector(word: str, dimension: int) -> Array:
    seed = int.from_bytes(hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)
