"""Attention over a given mask of blocks against the reference, which lays the mask out for every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TYPES, batch_over, combine, random, untraced

from tests.kernels.triton_support import assert_near, captured, expect_attention, small_ops  # isort: skip
from archerfish.errors import DeviceError, InvalidInputError  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.batches import BlockMask

from archerfish.kernels.ops import HeadShape  # isort: skip
from archerfish.kernels.torch.reference import visible  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.plan import AttentionPlan, Tile, find_plan, lay_mask  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
SMALL = Tile(16, 16, 4, 1)
WIDE = Tile(64, 32, 4, 1)  # its queries lie in several rows of a mask
MIXED = ((1, 60), (1, 33), (1, 1), (5, 41), (20, 20))  # (new tokens, context) of sequences


def random_mask(size: int, num_rows: int, num_columns: int, share: float = 0.3) -> BlockMask[Tensor]:
    random = torch.Generator().manual_seed(2)
    return BlockMask(size, (torch.rand(num_rows, num_columns, generator=random) < share).to(DEVICE))


CASES = [  # heads, size of a mask's blocks, rows and columns of the mask, parts of a decode
    (HeadShape(2, 2, 64, 0.125), 16, 6, 6, 1),
    (HeadShape(2, 2, 64, 0.125), 16, 2, 1, 3),  # shorter than the sequences
    (HeadShape(3, 1, 64, 0.125), 16, 3, 9, 3),
    (HeadShape(3, 1, 32, 0.125), 48, 2, 2, 1),
    (HeadShape(3, 1, 64, 0.125, window=25), 16, 6, 6, 1),
    (HeadShape(3, 1, 64, 0.125, window=25, softcap=3.0), 16, 6, 6, 3),
]


@pytest.mark.parametrize(("case", "tile", "dtype"), combine(CASES, [SMALL, WIDE], TYPES))
def test_block_mask(case: tuple[HeadShape, int, int, int, int], tile: Tile, dtype: str) -> None:
    heads, size, num_rows, num_columns, num_splits = case
    ops = TritonOps(DEVICE, dtype)
    ops.decode_tile = ops.prefill_tile = tile
    batch, kv = batch_over(ops, MIXED, 16, heads, num_rows=30)
    find_plan(batch).num_splits = num_splits
    q = random(30, heads.num_heads * heads.head_dim, dtype=dtype)
    mask = random_mask(size, num_rows, num_columns)
    out = ops.paged_attention(q, kv, batch, heads, mask=mask)
    expected = expect_attention(q, kv, batch, heads, mask)
    assert_near(out, expected, dtype)
    assert not torch.allclose(expected, expect_attention(q, kv, batch, heads), atol=0.01)


def test_keys_laid_side_by_side_and_many_steps() -> None:
    """More steps than are looked up at once."""
    heads = HeadShape(2, 1, 64, 0.125)
    ops = TritonOps(DEVICE, "float16")
    batch, kv = batch_over(ops, ((40, 50), (70, 70)), 16, heads)
    q, mask = random(110, 128, dtype="float16"), random_mask(32, 3, 3)
    assert_near(
        ops.paged_attention(q, kv, batch, heads, mask=mask), expect_attention(q, kv, batch, heads, mask), "float16"
    )
    assert find_plan(batch).gathering is not None
    heads, ops = HeadShape(2, 1, 16, 0.25), small_ops()
    batch, kv = batch_over(ops, ((1, 600), (2, 530)), 64, heads)
    find_plan(batch).num_splits = 1
    q, mask = random(3, 32), random_mask(16, 40, 40, share=0.1)
    assert_near(ops.paged_attention(q, kv, batch, heads, mask=mask), expect_attention(q, kv, batch, heads, mask))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_no_query_sees_is_not_loaded(num_splits: int) -> None:
    """An empty mask leaves every query its own block."""
    heads = HeadShape(2, 1, 16, 0.25)
    ops = small_ops(step=32)
    batch, kv = batch_over(ops, ((1, 90), (6, 88)), 16, heads)
    find_plan(batch).num_splits = num_splits
    q, mask = random(7, 32), BlockMask(16, torch.zeros(1, 1, dtype=torch.uint8, device=DEVICE))
    expected = expect_attention(q, kv, batch, heads, mask)
    for memory in (kv.keys, kv.values):
        memory[batch.block_tables[:, :5].flatten().long()] = float("nan")
    out = ops.paged_attention(q, kv, batch, heads, mask=mask)
    assert_near(out, expected)


def test_a_mask_may_be_of_integers_and_of_any_layout() -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops = small_ops()
    batch, kv = batch_over(ops, ((1, 60), (5, 50)), 8, heads)
    q, mask = random(6, 32), random_mask(16, 4, 4)
    expected = ops.paged_attention(q, kv, batch, heads, mask=mask)
    table = mask.visible.cpu().numpy()
    for other in (ops.tensor(table.astype(np.int64) * 256), ops.tensor(table.T.astype(np.int64).copy()).T):
        assert torch.equal(ops.paged_attention(q, kv, batch, heads, mask=BlockMask(16, other)), expected)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_lengths_and_mask_are_read_from_the_device(num_splits: int) -> None:
    """What a captured graph relies on."""
    heads = HeadShape(4, 2, 32, 0.2)
    ops = small_ops()
    batch, kv = batch_over(ops, ((1, 50), (1, 33), (1, 7)), 8, heads)
    q, mask = random(3, 128), random_mask(16, 4, 4)
    lengths = torch.tensor([50, 20, 0], dtype=torch.int32, device=DEVICE)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths, num_splits=num_splits), batch)
    shorter = replace(batch, context_lens=np.array([50, 20, 7]))
    for _ in range(2):
        expected = expect_attention(q, kv, shorter, heads, mask)
        expected[2] = 0
        assert_near(ops.paged_attention(q, kv, batch, heads, mask=mask), expected)
        mask.visible.logical_not_()


def test_a_mask_shares_nothing() -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops = small_ops()
    batch, kv = batch_over(ops, ((1, 40), (1, 37)), 8, heads)
    batch.block_tables[1, :4] = batch.block_tables[0, :4]
    batch = replace(batch, num_shared=32)
    q, mask = random(2, 32), random_mask(16, 3, 3)
    out = ops.paged_attention(q, kv, batch, heads, mask=mask)
    assert_near(out, expect_attention(q, kv, batch, heads, mask))
    assert [purpose for purpose, *_ in find_plan(batch).scratch] == ["parts"]


def test_a_step_never_spans_two_blocks_of_a_mask() -> None:
    nothing = torch.empty(0)
    laid = [lay_mask(random_mask(size, 2, 3), Tile(64, 64, 4, 2), 16, nothing) for size in (16, 48, 64, 192)]
    assert [tile.step for tile, _ in laid] == [16, 16, 64, 64]
    assert [mask.span for _, mask in laid] == [2, 2, 2, 2]
    assert lay_mask(random_mask(16, 2, 3), SMALL, 1, nothing)[1].span == 1
    assert lay_mask(None, SMALL, 64, nothing)[1].span == 0


@pytest.mark.skipif(HAS_CUDA, reason="batches of these tests lie on the GPU")
def test_the_native_backend_refuses_a_mask() -> None:
    from tests.kernels.native_support import native_ops

    heads, ops = HeadShape(2, 1, 16, 0.25), native_ops()
    batch, kv = batch_over(ops, ((1, 90), (9, 70)), 8, heads)
    with pytest.raises(DeviceError, match="no block masks"):
        ops.paged_attention(torch.randn(10, 32), kv, batch, heads, mask=random_mask(16, 6, 6))


def test_reference_sees_its_own_block_and_the_visible_ones() -> None:
    """The mask is shorter than the sequence: its last row and column hold for what lies behind."""
    mask = BlockMask(16, torch.tensor([[0, 1], [1, 0]]))
    seen = visible(20, 64, 0, torch.device("cpu"), mask=mask)
    blocks = [[1, 0, 1, 0], [1, 0, 0, 1]]  # of the queries from 44 on, and from 48 on
    dense = np.repeat(np.repeat(blocks, (4, 16), axis=0), 16, axis=1) * np.tri(20, 64, 44, dtype=int)
    assert np.array_equal(seen.numpy(), dense)


@pytest.mark.parametrize("size", [0, 24, -16])
def test_blocks_of_a_mask_have_a_multiple_of_16_tokens(size: int) -> None:
    with pytest.raises(InvalidInputError, match="multiple of 16"):
        BlockMask(size, torch.ones(1, 1))


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "heads", [HeadShape(8, 2, 128, 0.1), HeadShape(9, 3, 64, 0.1, window=700), HeadShape(4, 4, 64, 0.1)]
)
@pytest.mark.skipif(not HAS_CUDA, reason="slow in the interpreter")
def test_long_contexts(heads: HeadShape, size: int, is_gathered: bool) -> None:
    ops = TritonOps(DEVICE, "bfloat16")
    batch, kv = batch_over(ops, ((1, 8000), (1, 5000), (1, 70), (300, 2900), (1000, 1000), (3000, 3000)), 16, heads)
    find_plan(batch).is_gathered = is_gathered
    q = random(batch.num_tokens, heads.num_heads * heads.head_dim, dtype="bfloat16")
    mask = random_mask(size, 8000 // size, 8000 // size, share=0.125)
    out = ops.paged_attention(q, kv, batch, heads, mask=mask).float()
    assert_near(out, expect_attention(q, kv, batch, heads, mask), "bfloat16")


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize("num", [4, 100])
def test_masked_decodes_can_be_captured(num: int) -> None:
    """One graph serves other lengths and other masks."""
    heads = HeadShape(8, 2, 128, 0.1)
    ops = TritonOps(DEVICE, "bfloat16")
    batch, kv = batch_over(ops, tuple((1, 1 + 37 * i % 2000) for i in range(num)), 16, heads)
    q, mask = random(num, 1024, dtype="bfloat16"), random_mask(64, 40, 40, share=0.2)
    lengths = torch.zeros(num, dtype=torch.int32, device=DEVICE)
    static = replace(batch)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths), static)
    graph, out = captured(lambda: ops.paged_attention(q, kv, static, heads, mask=mask))
    lengths.copy_(torch.from_numpy(batch.context_lens))
    for _ in range(2):
        mask.visible.logical_not_()
        graph.replay()
        assert_near(out, expect_attention(q, kv, batch, heads, mask), "bfloat16")
