"""A model on the card whose tokens are given: the logits of its passes, and of decodes recorded as in the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from archerfish.kernels.decoding import FILLING_POSITION, NUM_INPUTS, Input
from archerfish.kernels.torch.reference import TorchOps
from archerfish.layers.weights import Weights
from archerfish.models.adapter import KVShape, model_class
from archerfish.models.config import Config
from archerfish.runtime.batch import build_batch, pad_tables

Tensor = torch.Tensor
DEVICE, DTYPE = "cuda", "bfloat16"
BLOCK_SIZE = 16
MIB = 1 << 20
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")


def random_weights(config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    values = Config(config)
    return TorchOps(DEVICE, DTYPE).random_weights(model_class(values).noted(values).shapes)


class GivenTokens:
    """Sequences over shuffled blocks, in memory that is NaN wherever nothing has been written.

    The keys of the first num_shared tokens, which all sequences must have in common, are computed once, by the first.
    slots: of the adapter of each sequence.
    """

    def __init__(
        self,
        ops: TorchOps,
        weights: Mapping[str, Tensor],
        config: Mapping[str, Any],
        tokens: Sequence[Sequence[int]],
        *,
        num_shared: int = 0,
        slots: Sequence[int] | None = None,
    ) -> None:
        self.ops = ops
        self.tokens = tokens
        self.num_shared = num_shared
        self.slots = slots
        values = Config(config)
        self.model = model_class(values)(Weights(weights, ops), values, max(map(len, tokens)))
        ops.prepare()
        needed = [-(-len(own) // BLOCK_SIZE) for own in tokens]
        order = np.random.default_rng(5).permutation(sum(needed) + 2).tolist()
        shape = self.model.memory_shape(values)
        assert isinstance(shape, KVShape)
        self.kv = [
            ops.new_kv_layer(len(order), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
            for _ in range(shape.num_layers)
        ]
        for layer in self.kv:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        self.blocks = [[order.pop() for _ in range(num)] for num in needed]
        for own in self.blocks:
            own[: num_shared // BLOCK_SIZE] = self.blocks[0][: num_shared // BLOCK_SIZE]
        self.num_computed = [num_shared if i else 0 for i in range(len(tokens))]
        self._decode: Callable[[], Tensor] | None = None
        self._state: Any = None  # which the recorded step reads

    def compute(self, work: Sequence[tuple[int, int]], *, has_logits: bool = True) -> Tensor | None:
        """One pass over (sequence, number of tokens), those with one token first: logits of all its tokens, in
        order."""
        starts = [self.num_computed[i] for i, _ in work]
        new = [self.tokens[i][start : start + count] for (i, count), start in zip(work, starts, strict=True)]
        for i, count in work:
            self.num_computed[i] += count
        blocks = [self.blocks[i][: -(-self.num_computed[i] // BLOCK_SIZE)] for i, _ in work]
        with torch.inference_mode():
            adapters = None if self.slots is None else np.array([self.slots[i] for i, _ in work])
            batch = build_batch(
                self.ops, tokens=new, starts=starts, blocks=blocks, block_size=BLOCK_SIZE, adapters=adapters
            )
            if self.ops.adapters is not None:
                self.ops.adapters.rows = batch.adapters
            hidden = self.model.forward(batch, self.kv)
            return self.model.logits(hidden[: batch.num_tokens]) if has_logits else None

    def fill(self, lengths: Sequence[int]) -> None:
        """Compute the first tokens of all sequences, the first sequence's, which others may share, before the
        others'."""
        self.compute([(0, lengths[0])], has_logits=False)
        rest = [(i, length - self.num_computed[i]) for i, length in enumerate(lengths) if i]
        if rest:
            self.compute(sorted(rest, key=lambda item: item[1] != 1), has_logits=False)

    def decode(self, size: int) -> Tensor:
        """One token of every sequence by a recorded step of `size` rows: logits, (sequences, vocabulary)."""
        with torch.inference_mode():
            if self._decode is None:
                self._decode = self._record(size)
            return self._decode().clone()

    def _record(self, size: int) -> Callable[[], Tensor]:
        ops, num = self.ops, len(self.tokens)
        tables = pad_tables(self.blocks)
        state = self._state = ops.new_decode_state(num, tables.shape[1])
        ops.set_tables(state, np.arange(num), tables)
        words = ops.host_buffer(NUM_INPUTS * size).reshape(NUM_INPUTS, size)
        words[Input.ROW], words[Input.POSITION] = num, FILLING_POSITION
        words[Input.ADAPTER, :num] = self.slots or 0
        inputs = ops.tensor(words.copy())

        def step() -> Tensor:
            batch, _ = ops.decode_batch(inputs, state, BLOCK_SIZE, is_shared=self.num_shared > 0)
            if ops.adapters is not None:
                ops.adapters.read_rows(inputs, None)
            logits: Tensor = self.model.logits(self.model.forward(batch, self.kv))
            return logits

        repeat = ops.capture(step) or step

        def decode() -> Tensor:
            positions = np.asarray(self.num_computed)
            words[Input.TOKEN, :num] = [own[at] for own, at in zip(self.tokens, positions.tolist(), strict=True)]
            words[Input.ROW, :num], words[Input.POSITION, :num] = np.arange(num), positions
            words[Input.BLOCK, :num] = tables[np.arange(num), positions // BLOCK_SIZE]
            words[Input.NUM_SHARED, 0] = self.num_shared
            ops.send(words, inputs)
            self.num_computed = (positions + 1).tolist()
            logits = repeat()[:num]
            if DEVICE == "cuda":
                torch.cuda.synchronize()  # the words are written anew by the next step
            return logits

        return decode


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def unused_pieces() -> list[int]:
    """Bytes of what torch holds and can give away again, the largest piece first; small tensors have a pool of their
    own."""
    blocks = [block for segment in torch.cuda.memory._snapshot()["segments"] for block in segment["blocks"]]
    return sorted(
        (block["size"] for block in blocks if block["state"] == "inactive" and block["size"] > MIB), reverse=True
    )


@contextmanager
def card_filled(left_bytes: int) -> Iterator[None]:
    """Take all of the card's memory but some, and what torch has left between the tensors of others."""
    gc.collect()  # or what others have left behind is given back when it is least wanted
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in unused_pieces()]
    free, _ = torch.cuda.mem_get_info()
    taken.append(torch.empty(max(0, free - left_bytes), dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.empty_cache()
