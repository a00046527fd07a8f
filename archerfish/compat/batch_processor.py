"""BatchProcessor: a buffer of texts that is encoded whenever it is full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError, InvalidOptionError, ModelError


class BatchEncoder(Protocol):
    """An engine with the method that a BatchProcessor calls."""

    def encode_batch(self, texts: Sequence[str], /) -> npt.NDArray[Any]: ...


class BatchProcessor:
    """Collects texts and encodes `max_batch_size` of them at a time.

    Results are in the order of the texts. `add` refuses a text that the engine would refuse. If the engine fails, all
    texts stay in the buffer: `flush` tries again, `clear` returns them. Several threads may use it; the call that fills
    the buffer gets all its results.
    """

    def __init__(self, engine: BatchEncoder, max_batch_size: int = 32) -> None:
        if max_batch_size < 1:
            raise InvalidOptionError(f"max_batch_size must be at least 1, not {max_batch_size}.")
        self.engine = engine
        self.max_batch_size = max_batch_size
        self._check_texts: Callable[[Sequence[str]], None] | None = getattr(engine, "check_texts", None)
        self._buffer: list[str] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of waiting texts."""
        return len(self._buffer)

    def add(self, text: str) -> list[npt.NDArray[Any]] | None:
        """Add a text. Gives the vectors of all waiting texts if the buffer is now full, else None."""
        if not isinstance(text, str):
            raise InvalidInputError(f"A text must be a string, not {type(text).__name__}.")
        if self._check_texts is not None:
            self._check_texts([text])
        with self._lock:
            self._buffer.append(text)
            return self._encode() if len(self._buffer) >= self.max_batch_size else None

    def flush(self) -> list[npt.NDArray[Any]]:
        """The vectors of all waiting texts; an empty list if there are none."""
        with self._lock:
            return self._encode()

    def clear(self) -> list[str]:
        """Empty the buffer and return its texts."""
        with self._lock:
            texts, self._buffer = self._buffer, []
            return texts

    def _encode(self) -> list[npt.NDArray[Any]]:
        vectors: list[npt.NDArray[Any]] = []
        for start in range(0, len(self._buffer), self.max_batch_size):
            texts = self._buffer[start : start + self.max_batch_size]
            rows = np.asarray(self.engine.encode_batch(texts))
            if len(rows) != len(texts):
                raise ModelError(f"The engine gave {len(rows)} vectors for {len(texts)} texts.")
            vectors.extend(rows)
        self._buffer.clear()
        return vectors
