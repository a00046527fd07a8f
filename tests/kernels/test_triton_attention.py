"""Attention of the Triton backend against the reference, also over shared keys and with keys that are stored on the
way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TYPES, batch_over, combine, in_float32, random, untraced

from tests.kernels.triton_support import assert_near, captured, expect_attention, small_ops  # isort: skip
from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch, Rotation  # isort: skip (triton must interpret)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.plan import AttentionPlan, Tile, choose_shared_parts, choose_splits  # isort: skip
from archerfish.kernels.triton.plan import find_plan, send_pieces  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.runtime.batch import build_batch  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
SMALL = Tile(16, 16, 4, 2)
MIXED = ((1, 37), (1, 5), (1, 1), (9, 30), (17, 17))  # (new tokens, context) of sequences
LONG = ((1, 1000), (1, 4099), (1, 64), (1, 16), (2, 300), (130, 700), (300, 300))


@dataclass(frozen=True)
class Case:
    """Attention of one shape."""

    heads: HeadShape
    block_size: int = 16
    sequences: tuple[tuple[int, int], ...] = MIXED
    tile: Tile | None = SMALL


ATTENTION = [
    Case(HeadShape(2, 2, 64, 0.125)),
    Case(HeadShape(6, 2, 32, 0.2), block_size=1),
    Case(HeadShape(4, 2, 8, 0.3), block_size=4),  # narrower than what a product of tiles takes
    Case(HeadShape(8, 2, 96, 0.1), block_size=64),
    Case(HeadShape(8, 1, 128, 0.09)),
    Case(HeadShape(3, 1, 16, 0.25, window=1), block_size=24),
    Case(HeadShape(3, 1, 80, 0.25, window=10), block_size=16),
    Case(HeadShape(4, 1, 64, 0.25, softcap=2.0), block_size=8),
    Case(HeadShape(4, 2, 32, 0.25, window=20, softcap=3.0), block_size=256),
    Case(HeadShape(40, 2, 16, 0.25), sequences=((1, 20), (5, 21)), tile=None),  # a group larger than the least tile
    Case(HeadShape(4, 1, 256, 0.06), sequences=((1, 70), (40, 70)), tile=None),
    Case(HeadShape(4, 1, 64, 0.125, window=40), sequences=((1, 200), (1, 130), (33, 190)), tile=None),
    Case(HeadShape(4, 1, 64, 0.125), sequences=((50, 50),), tile=None),
    Case(HeadShape(2, 1, 128, 0.1, window=30), sequences=((1, 9), (70, 130)), tile=None),
    Case(HeadShape(2, 1, 128, 0.1, softcap=5.0), sequences=((70, 130), (3, 3)), tile=None, block_size=32),
    Case(HeadShape(2, 1, 64, 0.1), sequences=((2, 130),), tile=None),  # few new tokens: keys are read where they lie
    Case(HeadShape(2, 1, 64, 0.125), sequences=tuple((1, 3 + 11 * i) for i in range(12))),
]
if HAS_CUDA:
    ATTENTION += [
        Case(HeadShape(num_heads, num_kv_heads, head_dim, 0.1, window=window, softcap=softcap), block_size, LONG, None)
        for num_heads, num_kv_heads, head_dim, block_size in (
            (32, 8, 128, 16),
            (16, 8, 128, 16),
            (9, 3, 64, 16),
            (8, 1, 128, 1),
            (4, 4, 96, 64),
            (8, 4, 256, 16),
            (64, 8, 128, 256),
        )
        for window, softcap in ((0, 0.0), (128, 0.0), (0, 20.0))
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: Case, dtype: str) -> None:
    heads = case.heads
    if not HAS_CUDA and dtype == "float16" and heads.head_dim not in (16, 64, 128):
        pytest.skip("other sizes take the same way in float32")
    ops = TritonOps(DEVICE, dtype)
    if case.tile is not None:
        ops.decode_tile = ops.prefill_tile = replace(case.tile, num_stages=1 if dtype == "float32" else 2)
    batch, kv = batch_over(ops, case.sequences, case.block_size, heads, num_rows=60 if case.sequences == MIXED else 0)
    q = random(len(batch.token_ids), heads.num_heads * heads.head_dim, dtype=dtype)
    out = ops.paged_attention(q, kv, batch, heads)
    assert out.dtype == q.dtype
    assert_near(out, expect_attention(q, kv, batch, heads), dtype)


def test_long_contexts() -> None:
    """131,072 tokens, of which one or a few are new."""
    heads, ops = HeadShape(2, 1, 16, 0.25), TritonOps(DEVICE, "float32")
    if not HAS_CUDA:
        ops.decode_tile = ops.prefill_tile = Tile(16, 2048, 4, 1)  # the interpreter takes long for each step
    batch, kv = batch_over(ops, ((1, 131_072), (1, 70_001), (5, 131_072)), 64, heads)
    q = random(7, 32)
    assert_near(ops.paged_attention(q, kv, batch, heads), expect_attention(q, kv, batch, heads))


def test_a_deterministic_decode_does_not_depend_on_the_batch() -> None:
    heads = HeadShape(2, 1, 32, 0.2)
    ops = small_ops("float16")
    sequences = ((1, 90), (1, 2), (1, 41))
    batch, kv = batch_over(ops, sequences, 8, heads, is_deterministic=True)
    q = random(3, 64, dtype="float16")
    together = ops.paged_attention(q, kv, batch, heads)
    for row, (_, context) in enumerate(sequences):
        blocks = batch.block_tables[row].tolist()
        alone = build_batch(
            ops, tokens=[[7]], starts=[context - 1], blocks=[blocks], block_size=8, is_deterministic=True
        )
        assert torch.equal(ops.paged_attention(q[row : row + 1], kv, alone, heads)[0], together[row])


@pytest.mark.parametrize("num_splits", [1, 3])
def test_lengths_are_read_from_the_device(num_splits: int) -> None:
    """What a captured graph relies on."""
    heads = HeadShape(4, 2, 32, 0.2)
    ops = small_ops()
    batch, kv = batch_over(ops, ((1, 50), (1, 33), (1, 7)), 8, heads)
    q = random(3, 128)
    lengths = torch.tensor([50, 20, 0], dtype=torch.int32, device=DEVICE)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths, num_splits=num_splits), batch)
    out = ops.paged_attention(q, kv, batch, heads)
    shorter = replace(batch, context_lens=np.array([50, 20, 7]))
    expected = expect_attention(q, kv, shorter, heads)
    expected[2] = 0
    assert_near(out, expected)


def test_the_device_is_kept_busy_by_parts() -> None:
    assert [choose_splits(num, 8, 132) for num in (1, 8, 16, 24, 256, 10_000)] == [64, 8, 2, 1, 1, 1]
    assert [choose_shared_parts(num, 132) for num in (8, 32, 64, 96, 1000)] == [16, 4, 2, 1, 1]


def test_pieces_are_aligned_wherever_they_lie() -> None:
    """Or a kernel is compiled anew, for a second, when a batch has another number of sequences."""
    pieces = [np.arange(5), np.arange(0), np.array([7]), np.arange(6)]
    for found, piece in zip(send_pieces(pieces, torch.device(DEVICE)), pieces, strict=True):
        assert found.dtype == torch.int32 and found.tolist() == piece.tolist()
        assert found.data_ptr() % 16 == 0


def test_a_neighbour_full_of_nan_does_not_spread() -> None:
    """Not even where the keys of two sequences are laid side by side."""
    heads = HeadShape(2, 1, 64, 0.125)
    ops = TritonOps(DEVICE, "float16")
    batch, kv = batch_over(ops, ((20, 20), (30, 30)), 16, heads)
    q = random(50, 128, dtype="float16")
    expected = ops.paged_attention(q, kv, batch, heads)[:20]
    for block in batch.block_tables[1].tolist():
        kv.keys[block], kv.values[block] = float("nan"), float("nan")
    out = ops.paged_attention(q, kv, batch, heads)
    assert torch.equal(out[:20], expected)
    assert out[20:].isnan().all()


def test_layers_share_what_is_found_of_a_batch() -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops = small_ops()
    batch, kv = batch_over(ops, ((1, 5), (3, 9)), 4, heads)
    q = random(4, 32)
    ops.paged_attention(q, kv, batch, heads)
    plan = find_plan(batch)
    before = [id(x) for pair in (*plan.tiles.values(), *plan.scratch.values()) for x in pair]
    ops.paged_attention(q, kv, batch, heads._replace(window=2))
    assert find_plan(batch) is plan
    assert [id(x) for pair in (*plan.tiles.values(), *plan.scratch.values()) for x in pair] == before


# Keys that all decodes share


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
    find_plan.keep(plan, shared)
    return shared


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
    assert_near(out, expect_attention(q, kv, batch, heads), dtype)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_shared_length_is_read_from_the_device(num_splits: int) -> None:
    """More rows than a tile has; the last tile is filling alone, and none of it reads what was never written."""
    heads = HeadShape(8, 1, 32, 0.2)
    ops = small_ops()
    batch, kv = shared_batch(ops, (1, 20, 5, 3, 9, 2), 5, 8, heads)
    q = random(6, 256)
    q[3] = float("nan")
    shared = sharing(batch, kv, 0, num_splits)
    shared.block_tables.copy_(batch.block_tables)
    plan = find_plan(shared)
    plan.context_lens[3:] = 0
    expected = expect_attention(q, kv, batch, heads)
    expected[3:] = 0
    assert plan.shared_len is not None
    for num_blocks in (5, 0, 1):
        plan.shared_len.fill_(num_blocks * 8)
        assert_near(attend_anew(ops, q, kv, shared, heads), expected)
    plan.context_lens.fill_(0)
    assert not attend_anew(ops, q, kv, shared, heads).any()


@pytest.mark.parametrize(("window", "is_deterministic"), [(20, False), (0, True)])
def test_windows_and_deterministic_batches_share_nothing(window: int, is_deterministic: bool) -> None:
    heads = HeadShape(2, 1, 32, 0.2, window=window)
    ops = small_ops()
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
    assert_near(out, expect_attention(q, kv, batch, heads))


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
    find_plan.keep(find_plan(nothing_shared), shared)
    plan = find_plan(shared)
    lengths = plan.context_lens.clone()
    plan.context_lens.fill_(0)
    graph, out = captured(lambda: ops.paged_attention(q, kv, shared, heads))
    expected = expect_attention(q, kv, batch, heads)
    assert plan.shared_len is not None
    for num_blocks, num_real in ((40, num), (0, num), (17, num - 3), (1, 1)):
        plan.shared_len.fill_(16 * num_blocks)
        plan.context_lens.copy_(lengths)
        plan.context_lens[num_real:] = 0
        graph.replay()
        assert_near(out[:num_real], expected[:num_real], "bfloat16")
        assert not out[num_real:].any()


# Keys that decodes store on the way

STORING = (
    (1, 37),
    (1, 17),
    (1, 1),
    (1, 16),
    (1, 2),
)  # a new key inside of a block, first in one, last in one, the only one


class WatchedOps(TritonOps):
    """Notes whether keys were stored by a kernel of their own."""

    num_stores = 0

    def store_kv(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.num_stores += 1
        return super().store_kv(*args, **kwargs)  # type: ignore[arg-type]


STORED = [  # heads, has_rotary, is_normed, block size
    (HeadShape(4, 2, 64, 0.125), True, True, 16),
    (HeadShape(6, 2, 32, 0.2), True, False, 1),
    (HeadShape(3, 1, 16, 0.25, window=5), False, True, 8),
    (HeadShape(4, 1, 64, 0.25, softcap=2.0), True, False, 4),
    (HeadShape(2, 1, 32, 0.25, window=10), True, False, 16),
]


@pytest.mark.parametrize(("shape", "num_splits", "dtype"), combine(STORED, [1, 3], TYPES))
def test_new_keys(shape: tuple[HeadShape, bool, bool, int], num_splits: int, dtype: str) -> None:
    heads, has_rotary, is_normed, block_size = shape
    ops, reference = WatchedOps(DEVICE, dtype), TorchOps(DEVICE)
    ops.decode_tile = Tile(16, 16, 4, 2)
    batch, kv = batch_over(ops, STORING, block_size, heads)
    for sequence, (_, context) in enumerate(STORING):  # what is not stored yet must not be read
        slot = int(batch.slots[sequence])
        assert slot % block_size == (context - 1) % block_size
        kv.keys[slot // block_size, slot % block_size] = kv.values[slot // block_size, slot % block_size] = float("nan")
    wide = in_float32(kv)
    lengths = torch.tensor([context for _, context in STORING], dtype=torch.int32, device=DEVICE)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths, num_splits=num_splits), batch)
    table = np.random.default_rng(0).normal(size=(40, heads.head_dim)).astype(np.float32)
    norms = (random(heads.head_dim), random(heads.head_dim)) if is_normed else (None, None)
    rotation = Rotation(ops.rotary(table, heads.head_dim) if has_rotary else None, norms[0], norms[1], 1e-3)
    qkv = random(len(STORING), (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype)
    out = ops.store_and_attend(qkv, kv, batch, heads, rotation)
    plain = replace(batch)
    expected = reference.store_and_attend(qkv.float(), wide, plain, heads, rotation)
    assert not ops.num_stores
    assert out.dtype == qkv.dtype
    for found, wanted in ((out, expected), (kv.keys, wide.keys), (kv.values, wide.values)):
        assert_near(found, wanted, dtype, factor=2)


@pytest.mark.parametrize(
    ("heads", "num_splits", "dtype"),
    combine(
        [
            HeadShape(6, 2, 32, 0.2),
            HeadShape(4, 1, 64, 0.125, window=10),
            HeadShape(3, 1, 16, 0.25, softcap=2.0),
        ],
        [1, 3],
        TYPES,
    ),
)
def test_sinks(heads: HeadShape, num_splits: int, dtype: str) -> None:
    """Beside prompts, over shared keys, and with keys that are stored on the way."""
    ops = small_ops(dtype)
    sinks = 3 * random(heads.num_heads)
    width = heads.num_heads * heads.head_dim
    batch, kv = batch_over(ops, MIXED, 16, heads)
    q = random(len(batch.token_ids), width, dtype=dtype)
    expected = expect_attention(q, kv, batch, heads, sinks=sinks)
    assert_near(ops.paged_attention(q, kv, batch, heads, sinks=sinks), expected, dtype)
    batch, kv = shared_batch(ops, (37, 1, 90), 3, 8, heads)
    expected = expect_attention(q[:3], kv, batch, heads, sinks=sinks)
    for num_shared in (0, 0 if heads.window else 24):
        shared = sharing(batch, kv, num_shared, num_splits)
        assert_near(ops.paged_attention(q[:3], kv, shared, heads, sinks=sinks), expected, dtype)
    qkv = random(3, width + 2 * heads.num_kv_heads * heads.head_dim, dtype=dtype)
    lengths = torch.from_numpy(batch.context_lens).to(DEVICE, torch.int32)
    expected = TorchOps(DEVICE).store_and_attend(
        qkv.float(), in_float32(kv), replace(batch), heads, Rotation(), sinks=sinks
    )
    find_plan.keep(AttentionPlan(lengths, lengths, lengths, num_splits=num_splits), batch)
    assert_near(ops.store_and_attend(qkv, kv, batch, heads, Rotation(), sinks=sinks), expected, dtype)


def test_filling_stores_nothing() -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops = TritonOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 5), (1, 3)), 4, heads)
    lengths = torch.tensor([5, 0], dtype=torch.int32, device=DEVICE)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths), batch)
    qkv, before = random(2, 64), kv.values.clone()
    out = ops.store_and_attend(qkv, kv, batch, heads, Rotation())
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
        nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        find_plan.keep(AttentionPlan(length, length, length, shared_len=nothing), batch)
    rotary_dim = 16 if kind == "half turned" else heads.head_dim
    table = np.random.default_rng(0).normal(size=(9, rotary_dim)).astype(np.float32)
    rotation = Rotation(ops.rotary(table, rotary_dim))
    wide, plain = in_float32(kv), replace(batch)
    qkv = random(batch.num_tokens, 4 * heads.head_dim)
    out = ops.store_and_attend(qkv, kv, batch, heads, rotation)
    expected = TorchOps(DEVICE).store_and_attend(qkv, wide, plain, heads, rotation)
    assert ops.num_stores == 1
    assert_near(out, expected, factor=2)


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
def test_decodes_can_be_captured() -> None:
    """One graph over static buffers serves other lengths, other tokens and filling."""
    heads = HeadShape(8, 2, 64, 0.125)
    ops = TritonOps(DEVICE, "bfloat16")
    sequences = ((1, 500), (1, 33), (1, 7), (1, 1200))
    batch, kv = batch_over(ops, sequences, 16, heads)
    lengths = torch.tensor([10, 10, 0, 10], dtype=torch.int32, device=DEVICE)
    static = replace(batch)
    find_plan.keep(AttentionPlan(lengths, lengths, lengths), static)
    rotary = ops.rotary(np.random.default_rng(0).normal(size=(1200, 64)).astype(np.float32), 64)
    qkv, weight = random(4, 12 * 64, dtype="bfloat16"), random(512)

    def step() -> Tensor:
        out = ops.paged_attention(ops.store_kv(qkv, kv, static, heads, Rotation(rotary)), kv, static, heads)
        return ops.gated(ops.rms_norm(out, weight, 1e-5, residual=out)[0], "silu")

    graph, out = captured(step)
    qkv.normal_()
    lengths.copy_(torch.tensor([context for _, context in sequences], dtype=torch.int32))
    graph.replay()
    found = out.clone()
    static = batch
    torch.testing.assert_close(found, step())


def scaled(kv: KVLayer[Tensor]) -> KVLayer[Tensor]:
    """The same keys and values in a narrow type, with a scale for each head. The interpreter has no FP8."""
    scales = torch.rand(2, kv.keys.shape[2], device=DEVICE) / 8 + 0.03
    kind = torch.float8_e4m3fn if HAS_CUDA else torch.float16
    keys, values = ((memory.float() / scale[:, None]).to(kind) for memory, scale in zip(kv[:2], scales, strict=True))
    return KVLayer(keys, values, scales)


def widened(kv: KVLayer[Tensor]) -> KVLayer[Tensor]:
    assert kv.scales is not None
    keys, values = (memory.float() * scale[:, None] for memory, scale in zip(kv[:2], kv.scales, strict=True))
    return KVLayer(keys, values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", [ATTENTION[0], ATTENTION[3], ATTENTION[7], ATTENTION[12], ATTENTION[16]])
def test_scaled_keys_and_values(case: Case, dtype: str) -> None:
    ops = small_ops(dtype)
    batch, kv = batch_over(ops, case.sequences, case.block_size, case.heads)
    kv = scaled(kv)
    q = random(len(batch.token_ids), case.heads.num_heads * case.heads.head_dim, dtype=dtype)
    expected = TorchOps(DEVICE).paged_attention(q.float(), widened(kv), batch, case.heads)
    assert_near(ops.paged_attention(q, kv, batch, case.heads), expected, dtype)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_scaled_shared_keys(num_splits: int) -> None:
    heads, ops = HeadShape(4, 2, 32, 0.2), small_ops()
    batch, kv = shared_batch(ops, (1, 20, 5, 3), 3, 8, heads)
    kv = scaled(kv)
    q = random(4, 128)
    expected = TorchOps(DEVICE).paged_attention(q, widened(kv), batch, heads)
    assert_near(ops.paged_attention(q, kv, sharing(batch, kv, 24, num_splits), heads), expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("new", [1, 3])
def test_new_keys_are_scaled(num_splits: int, new: int) -> None:
    """By the kernel of decodes, or by the one before attention."""
    heads, ops = HeadShape(4, 2, 32, 0.2), small_ops()
    sequences = ((1, 37), (new, 9))
    batch, kv = batch_over(ops, sequences, 8, heads)
    kv = scaled(kv)
    wide = widened(kv)
    if new == 1:
        lengths = torch.tensor([37, 9], dtype=torch.int32, device=DEVICE)
        find_plan.keep(AttentionPlan(lengths, lengths, lengths, num_splits=num_splits), batch)
    rotation = Rotation(ops.rotary(np.random.default_rng(0).normal(size=(40, 32)).astype(np.float32), 32))
    qkv = random(1 + new, 256)
    out = ops.store_and_attend(qkv, kv, batch, heads, rotation)
    expected = TorchOps(DEVICE).store_and_attend(qkv, wide, replace(batch), heads, rotation)
    error = 40.0 if HAS_CUDA else 1.0
    for found, wanted in ((out, expected), *zip(widened(kv)[:2], wide[:2], strict=True)):
        assert_near(found, wanted, "float16", factor=error)


@pytest.mark.skipif(not HAS_CUDA, reason="the interpreter has no FP8")
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("num", [1, 3, 8, 64, 110, 140, 256])
def test_nothing_is_taken_that_other_kernels_left(num: int, is_new: bool) -> None:
    """All tiles of decodes in FP8, after a product of NaN has filled the memory that warps share."""
    heads, ops = HeadShape(32, 8, 128, 0.1), TritonOps(DEVICE, "bfloat16")
    batch, kv = batch_over(ops, [(1, 131)] * num, 16, heads)
    kv = scaled(kv)
    rotation = Rotation(ops.rotary(np.random.default_rng(0).normal(size=(131, 128)).astype(np.float32), 128))
    qkv = random(num, 48 * 128, dtype="bfloat16")
    work = (qkv if is_new else qkv[:, : 32 * 128].contiguous(), kv, batch, heads)
    run = partial(ops.store_and_attend, *work, rotation) if is_new else partial(ops.paged_attention, *work)
    nothing = torch.full((4096, 4096), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    expected = run()
    for _ in range(3):
        _ = nothing @ nothing
        torch.testing.assert_close(run(), expected)
    assert expected.isfinite().all()
