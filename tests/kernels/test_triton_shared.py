"""Decodes over keys that all of them share, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, batch_over, combine, in_float32, random, untraced

from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.plan import AttentionPlan, Tile, choose_shared_parts, find_plan  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
SMALL = Tile(16, 16, 4, 1)


def shared_batch(
    ops: TritonOps, owns: tuple[int, ...], num_blocks: int, block_size: int, heads: HeadShape
) -> tuple[PagedBatch[Tensor], KVLayer[Tensor]]:
    """Decodes with so many blocks in common and so many keys of their own."""
    batch, kv = batch_over(ops, tuple((1, num_blocks * block_size + own) for own in owns), block_size, heads)
    batch.block_tables[:, :num_blocks] = batch.block_tables[0, :num_blocks].clone()
    return batch, kv


def sharing(batch: PagedBatch[Tensor], kv: KVLayer[Tensor], shared_len: int, num_splits: int = 0) -> PagedBatch[Tensor]:
    """The batch with AttentionPlan of its own; what the tables of all but the first say of shared keys leads to NaN."""
    tables = batch.block_tables.clone()
    is_unused = kv.keys.isnan().flatten(1).all(1)
    tables[1:, : shared_len // batch.block_size] = int(is_unused.nonzero()[0])
    lengths = torch.from_numpy(batch.context_lens).to(DEVICE, torch.int32)
    num_shared = torch.tensor([shared_len], dtype=torch.int32, device=DEVICE)
    plan = AttentionPlan(lengths, lengths, lengths, shared_len=num_shared, num_splits=num_splits)
    shared = replace(batch, block_tables=tables)
    shared.notes["plan"] = plan
    return shared


def expect(q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape) -> Tensor:
    return TorchOps(DEVICE).paged_attention(q.float(), in_float32(kv), batch, heads)


def attend_anew(ops: TritonOps, q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape) -> Tensor:
    """A call before which all scratch memory becomes NaN."""
    scratch = find_plan(batch).scratch
    if not scratch:
        ops.paged_attention(q, kv, batch, heads)
    for pair in scratch.values():
        for memory in pair:
            memory.fill_(float("nan"))
    return ops.paged_attention(q, kv, batch, heads)


SHAPES = [  # heads, block size, shared blocks
    (HeadShape(2, 2, 64, 0.125), 16, 5),
    (HeadShape(4, 2, 128, 0.09), 16, 1),
    (HeadShape(4, 1, 64, 0.125), 1, 67),
    (HeadShape(8, 1, 128, 0.09), 64, 2),
    (HeadShape(2, 1, 64, 0.125), 64, 0),
    (HeadShape(6, 2, 80, 0.1, softcap=3.0), 16, 3),
]
if HAS_CUDA:
    SHAPES += [
        (HeadShape(group * 2, 2, head_dim, 0.1), block_size, num_tokens // block_size)
        for group in (1, 2, 4, 8, 40)
        for head_dim, block_size in ((64, 1), (64, 64), (128, 16), (128, 256), (256, 16))
        for num_tokens in (0, 256, 2560)
    ]


@pytest.mark.parametrize(("shape", "num_splits", "dtype"), combine(SHAPES, [1, 3], TYPES))
def test_shared_keys(shape: tuple[HeadShape, int, int], num_splits: int, dtype: str) -> None:
    heads, block_size, num_blocks = shape
    ops = TritonOps(DEVICE, dtype)
    owns = (37, 1, 90, 5) if not HAS_CUDA else tuple(1 + 37 * i % 230 for i in range(70))
    batch, kv = shared_batch(ops, owns, num_blocks, block_size, heads)
    q = random(len(owns), heads.num_heads * heads.head_dim, dtype=dtype)
    out = attend_anew(ops, q, kv, sharing(batch, kv, num_blocks * block_size, num_splits), heads)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.float(), expect(q, kv, batch, heads), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_splits", [1, 3])
def test_shared_length_is_read_from_the_device(num_splits: int) -> None:
    """More rows than a tile has; the last tile is filling alone, and none of it reads what was never written."""
    heads = HeadShape(8, 1, 32, 0.2)
    ops = TritonOps(DEVICE, "float32")
    ops.decode_tile = SMALL
    batch, kv = shared_batch(ops, (1, 20, 5, 3, 9, 2), 5, 8, heads)
    q = random(6, 256)
    q[3] = float("nan")
    shared = sharing(batch, kv, 0, num_splits)
    shared.block_tables.copy_(batch.block_tables)
    plan = find_plan(shared)
    plan.context_lens[3:] = 0
    expected = expect(q, kv, batch, heads)
    expected[3:] = 0
    assert plan.shared_len is not None
    for num_blocks in (5, 0, 1):
        plan.shared_len.fill_(num_blocks * 8)
        torch.testing.assert_close(attend_anew(ops, q, kv, shared, heads), expected, atol=2e-5, rtol=2e-5)
    plan.context_lens.fill_(0)
    assert not attend_anew(ops, q, kv, shared, heads).any()


@pytest.mark.parametrize(("window", "is_deterministic"), [(20, False), (0, True)])
def test_windows_and_deterministic_batches_share_nothing(window: int, is_deterministic: bool) -> None:
    heads = HeadShape(2, 1, 32, 0.2, window=window)
    ops = TritonOps(DEVICE, "float32")
    ops.decode_tile = SMALL
    batch, kv = shared_batch(ops, (3, 9), 4, 8, heads)
    q = random(2, 64)
    batch = replace(batch, is_deterministic=is_deterministic)
    shared = replace(sharing(batch, kv, 32), block_tables=batch.block_tables)
    assert torch.equal(ops.paged_attention(q, kv, shared, heads), ops.paged_attention(q, kv, batch, heads))
    assert [purpose for purpose, *_ in find_plan(shared).scratch] == ["parts"]


def test_the_host_may_say_what_decodes_beside_prefills_share() -> None:
    heads = HeadShape(2, 1, 32, 0.2)
    ops = TritonOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 40), (1, 33), (5, 21)), 8, heads)
    batch.block_tables[1, :4] = batch.block_tables[0, :4]
    q = random(7, 64)
    batch = replace(batch, num_shared=32)
    out = ops.paged_attention(q, kv, batch, heads)
    assert find_plan(batch).shared_len is not None
    torch.testing.assert_close(out, expect(q, kv, batch, heads), atol=2e-5, rtol=2e-5)


def test_shared_keys_are_cut_so_that_the_device_is_busy() -> None:
    assert [choose_shared_parts(num, 132) for num in (8, 32, 64, 96, 1000)] == [16, 4, 2, 1, 1]


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize("num", [9, 100])
def test_shared_decodes_can_be_captured(num: int) -> None:
    """One graph serves other lengths, also of what is shared."""
    heads = HeadShape(8, 2, 128, 0.1)
    ops = TritonOps(DEVICE, "bfloat16")
    batch, kv = shared_batch(ops, tuple(1 + 7 * i % 80 for i in range(num)), 40, 16, heads)
    q = random(num, 1024, dtype="bfloat16")
    nothing_shared = sharing(batch, kv, 0)
    shared = replace(nothing_shared, block_tables=batch.block_tables)
    shared.notes["plan"] = find_plan(nothing_shared)
    plan = find_plan(shared)
    lengths = plan.context_lens.clone()
    plan.context_lens.fill_(0)
    ops.paged_attention(q, kv, shared, heads)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(q, kv, shared, heads)
    expected = expect(q, kv, batch, heads)
    assert plan.shared_len is not None
    for num_blocks, num_real in ((40, num), (0, num), (17, num - 3), (1, 1)):
        plan.shared_len.fill_(16 * num_blocks)
        plan.context_lens.copy_(lengths)
        plan.context_lens[num_real:] = 0
        graph.replay()
        torch.testing.assert_close(out[:num_real].float(), expected[:num_real], atol=2e-2, rtol=2e-2)
        assert not out[num_real:].any()
