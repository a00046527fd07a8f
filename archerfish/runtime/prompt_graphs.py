"""Passes over one prompt, recorded once for each size and repeated: a lone request waits for its first token, not for the host.

A prompt, or what of it is not in the cache, is filled up to the next recorded size. All that the pass needs of the host travels
in one copy (`kernels/decoding.py: Word`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Generic

import numpy as np

from archerfish.kernels.decoding import Word
from archerfish.kernels.ops import Ids, Ops, T
from archerfish.models.adapter import ModelAdapter
from archerfish.runtime.graphs import NUM_BUFFERS, Recorded
from archerfish.runtime.pool import MemoryPool

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # beyond the last, computing takes longer than the host


@dataclass(frozen=True)
class Prompt:
    """New tokens of the only sequence of a pass, up to its last one: the step waits for what is drawn behind it, and so for the
    copy out of the host's buffer."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class PromptGraphs(Generic[T]):
    """Runs passes over one prompt, on a backend that can record work."""

    def __init__(self, model: ModelAdapter[T], pool: MemoryPool[T]) -> None:
        self.ops: Ops[T] = model.ops
        self.model, self.pool = model, pool
        self.sizes = SIZES[: bisect_left(SIZES, model.max_len) + 1]
        self._num_blocks = -(-model.max_len // pool.block_size)
        self._recorded: dict[int, Recorded[T]] = {}
        self._missed: set[int] = set()  # sizes that were asked for once: recording takes longer than running
        self._buffers = cycle([self.ops.host_buffer(self._num_words(self.sizes[-1])) for _ in range(NUM_BUFFERS)])

    def takes(self, num_new: int) -> bool:
        """Whether a prompt of so many new tokens is run here: not a single one, which is a decode, nor the first of its size
        where that is not recorded yet."""
        if not 1 < num_new <= self.sizes[-1]:
            return False
        size = self._size_of(num_new)
        if size in self._recorded or size in self._missed:
            return True
        self._missed.add(size)
        return False

    def start(self, prompt: Prompt) -> T:
        """Queue a pass; gives the (1, vocabulary) logits behind its last token."""
        size = self._size_of(len(prompt.tokens))
        recorded = self._recorded.get(size) or self._record(size)
        self.ops.send(self._words(prompt, size), recorded.inputs)
        return self.ops.concat([recorded.repeat()])  # a copy: other recorded work has the same memory

    def record_next(self) -> bool:
        """Record one more size, in time that nobody needs, the largest first, whose memory the others use after it; False: all
        are recorded."""
        size = next((size for size in reversed(self.sizes) if size not in self._recorded), None)
        if size is not None:
            self._record(size)
        return size is not None

    def _size_of(self, num_new: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_new)]

    def _num_words(self, size: int) -> int:
        return Word.TOKENS + size + self._num_blocks

    def _words(self, prompt: Prompt, size: int) -> Ids:
        words = next(self._buffers)[: self._num_words(size)]
        words[:] = 0
        num_new, first_block = len(prompt.tokens), Word.TOKENS + size
        words[Word.NUM_NEW], words[Word.START] = num_new, prompt.start
        words[Word.TOKENS : Word.TOKENS + num_new] = prompt.tokens
        num_blocks = -(-(prompt.start + num_new) // self.pool.block_size)
        words[first_block : first_block + num_blocks] = prompt.blocks[:num_blocks]
        return words

    def _record(self, size: int) -> Recorded[T]:
        ops, model = self.ops, self.model
        inputs = ops.ids(np.zeros(self._num_words(size), dtype=np.int64))

        def step() -> T:
            batch = ops.prompt_batch(inputs, size, self.pool.block_size)
            hidden = model.forward(batch, self.pool.layers)
            if not model.gives_kept_rows and batch.kept_rows is not None:
                hidden = ops.rows(hidden, batch.kept_rows)
            return model.logits(hidden)

        recorded = self._recorded[size] = Recorded.of(ops, inputs, step)
        return recorded
