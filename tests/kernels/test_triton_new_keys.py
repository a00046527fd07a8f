"""Decodes that store their own keys and values on the way, against storing them first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, TOLERANCE, TYPES, batch_over, combine, in_float32, random, untraced

from archerfish.kernels.ops import HeadShape  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.plan import AttentionPlan, Tile  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
DECODES = ((1, 37), (1, 17), (1, 1), (1, 16), (1, 2))  # a new key inside of a block, first in one, last in one, the only one


class WatchedOps(TritonOps):
    """Notes whether keys were stored by a kernel of their own."""

    num_stores = 0

    def store_kv(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.num_stores += 1
        return super().store_kv(*args, **kwargs)  # type: ignore[arg-type]


SHAPES = [  # heads, has_rotary, is_normed, block size
    (HeadShape(4, 2, 64, 0.125), True, True, 16), (HeadShape(6, 2, 32, 0.2), True, False, 1),
    (HeadShape(3, 1, 16, 0.25, window=5), False, True, 8), (HeadShape(4, 1, 64, 0.25, softcap=2.0), True, False, 4),
    (HeadShape(2, 1, 32, 0.25, window=10), True, False, 16),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "num_splits", "dtype"), combine(SHAPES, [1, 3], TYPES))
def test_new_keys(shape: tuple[HeadShape, bool, bool, int], num_splits: int, dtype: str) -> None:
    heads, has_rotary, is_normed, block_size = shape
    ops, reference = WatchedOps(DEVICE, dtype), TorchOps(DEVICE)
    ops.decode_tile = Tile(16, 16, 4, 2)
    batch, kv = batch_over(ops, DECODES, block_size, heads)
    for sequence, (_, context) in enumerate(DECODES):  # what is not stored yet must not be read
        slot = int(batch.slots[sequence])
        assert slot % block_size == (context - 1) % block_size
        kv.keys[slot // block_size, slot % block_size] = kv.values[slot // block_size, slot % block_size] = float("nan")
    wide = in_float32(kv)
    lengths = torch.tensor([context for _, context in DECODES], dtype=torch.int32, device=DEVICE)
    batch.notes["plan"] = AttentionPlan(lengths, lengths, lengths, num_splits=num_splits)
    table = np.random.default_rng(0).normal(size=(40, heads.head_dim)).astype(np.float32)
    rotary = ops.rotary(table, heads.head_dim) if has_rotary else None
    norms = (random(heads.head_dim), random(heads.head_dim)) if is_normed else (None, None)
    qkv = random(len(DECODES), (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype)
    out = ops.store_and_attend(qkv, kv, batch, heads, rotary, q_norm=norms[0], k_norm=norms[1], eps=1e-3)
    plain = replace(batch)
    expected = reference.store_and_attend(
        qkv.float(), wide, plain, heads, rotary, q_norm=norms[0], k_norm=norms[1], eps=1e-3
    )
    error = 2 * TOLERANCE[dtype]
    assert not ops.num_stores
    assert out.dtype == qkv.dtype
    torch.testing.assert_close(out.float(), expected, atol=error, rtol=error)
    for memory, other in ((kv.keys, wide.keys), (kv.values, wide.values)):
        torch.testing.assert_close(memory.float(), other, atol=error, rtol=error, equal_nan=True)


def test_filling_stores_nothing() -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops = TritonOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 5), (1, 3)), 4, heads)
    lengths = torch.tensor([5, 0], dtype=torch.int32, device=DEVICE)
    batch.notes["plan"] = AttentionPlan(lengths, lengths, lengths)
    qkv, before = random(2, 64), kv.values.clone()
    out = ops.store_and_attend(qkv, kv, batch, heads, None)
    slot = int(batch.slots[0])
    before[slot // 4, slot % 4] = qkv[0, 48:]
    torch.testing.assert_close(kv.values, before, atol=0, rtol=0, equal_nan=True)
    assert not out[1].any()


@pytest.mark.parametrize("kind", ["prefill", "shared", "head of 24", "half turned"])
def test_other_batches_are_stored_first(kind: str) -> None:
    heads = HeadShape(2, 1, 24 if kind == "head of 24" else 32, 0.2)
    ops = WatchedOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 9), (3 if kind == "prefill" else 1, 8)), 4, heads)
    if kind == "shared":
        length = torch.tensor([9, 8], dtype=torch.int32, device=DEVICE)
        batch.notes["plan"] = AttentionPlan(length, length, length, shared_len=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    rotary_dim = 16 if kind == "half turned" else heads.head_dim
    table = np.random.default_rng(0).normal(size=(9, rotary_dim)).astype(np.float32)
    rotary = ops.rotary(table, rotary_dim)
    wide, plain = in_float32(kv), replace(batch)
    qkv = random(batch.num_tokens, 4 * heads.head_dim)
    out = ops.store_and_attend(qkv, kv, batch, heads, rotary)
    expected = TorchOps(DEVICE).store_and_attend(qkv, wide, plain, heads, rotary)
    assert ops.num_stores == 1
    torch.testing.assert_close(out, expected, atol=4e-5, rtol=4e-5)
