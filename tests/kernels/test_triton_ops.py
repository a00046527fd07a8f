"""The Triton backend against the reference: norms, rotary embedding, attention and copies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, TOLERANCE, TYPES, batch_over, in_float32, random, untraced

from archerfish.kernels.ops import Activation, HeadShape  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.plan import AttentionPlan, Tile, choose_splits, find_plan, send_pieces  # isort: skip
from archerfish.kernels.triton.ops import FLOAT32_WIDTH, TritonOps  # isort: skip
from archerfish.runtime.batch import build_batch  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
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
            (32, 8, 128, 16), (16, 8, 128, 16), (9, 3, 64, 16), (8, 1, 128, 1), (4, 4, 96, 64), (8, 4, 256, 16),
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
    if case.tile is not None and dtype != "float32":
        ops.decode_tile = ops.prefill_tile = case.tile
    elif case.tile is not None:
        ops.decode_tile = ops.prefill_tile = replace(case.tile, num_stages=1)
    batch, kv = batch_over(ops, case.sequences, case.block_size, heads, num_rows=60 if case.sequences == MIXED else 0)
    q = random(len(batch.token_ids), heads.num_heads * heads.head_dim, dtype=dtype)
    out = ops.paged_attention(q, kv, batch, heads)
    assert out.dtype == q.dtype
    expected = TorchOps(DEVICE).paged_attention(q.float(), in_float32(kv), batch, heads)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_deterministic_decode_does_not_depend_on_the_batch() -> None:
    heads = HeadShape(2, 1, 32, 0.2)
    ops = TritonOps(DEVICE, "float16")
    ops.decode_tile = SMALL
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
    ops = TritonOps(DEVICE, "float32")
    ops.decode_tile = SMALL
    batch, kv = batch_over(ops, ((1, 50), (1, 33), (1, 7)), 8, heads)
    q = random(3, 128)
    lengths = torch.tensor([50, 20, 0], dtype=torch.int32, device=DEVICE)
    batch.notes["plan"] = AttentionPlan(lengths, lengths, lengths, num_splits=num_splits)
    out = ops.paged_attention(q, kv, batch, heads)
    shorter = replace(batch, context_lens=np.array([50, 20, 7]))
    expected = TorchOps(DEVICE).paged_attention(q, in_float32(kv), shorter, heads)
    expected[2] = 0
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_the_device_is_kept_busy_by_parts_of_decodes() -> None:
    assert [choose_splits(num, 8, 132) for num in (1, 8, 16, 24, 256, 10_000)] == [64, 8, 2, 1, 1, 1]


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
    ops = TritonOps(DEVICE, "float32")
    ops.decode_tile = ops.prefill_tile = replace(SMALL, num_stages=1)
    batch, kv = batch_over(ops, ((1, 5), (3, 9)), 4, heads)
    q = random(4, 32)
    ops.paged_attention(q, kv, batch, heads)
    plan = find_plan(batch)
    before = [id(x) for pair in (*plan.tiles.values(), *plan.scratch.values()) for x in pair]
    ops.paged_attention(q, kv, batch, replace(heads, window=2))
    assert find_plan(batch) is plan
    assert [id(x) for pair in (*plan.tiles.values(), *plan.scratch.values()) for x in pair] == before


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "is_normed", "block_size"),
    [
        (4, 2, 64, 64, False, 16), (6, 2, 128, 128, True, 1), (3, 3, 96, 96, True, 4), (8, 1, 64, 16, False, 64),
        (4, 4, 80, 20, True, 16), (9, 3, 64, 0, True, 16), (2, 1, 16, 0, False, 256),
    ],
)
def test_store_kv(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, is_normed: bool, block_size: int, dtype: str
) -> None:
    heads = HeadShape(num_heads, num_kv_heads, head_dim, 1.0)
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    batch, kv = batch_over(ops, ((1, 5), (1, 30), (3, 9), (4, 4)), block_size, heads, num_rows=11)
    wide = in_float32(kv)
    table = np.random.default_rng(0).normal(size=(30, max(rotary_dim, 1))).astype(np.float32)
    rotary = ops.rotary(table, rotary_dim) if rotary_dim else None
    q_norm, k_norm = (random(head_dim), random(head_dim)) if is_normed else (None, None)
    qkv = random(11, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q = ops.store_kv(qkv, kv, batch, heads, rotary, q_norm=q_norm, k_norm=k_norm, eps=1e-3)
    expected = reference.store_kv(qkv.float(), wide, batch, heads, rotary, q_norm=q_norm, k_norm=k_norm, eps=1e-3)
    assert q.dtype == qkv.dtype
    error, num = TOLERANCE[dtype], batch.num_tokens
    torch.testing.assert_close(q[:num].float(), expected[:num], atol=error, rtol=error)
    for memory, other in ((kv.keys, wide.keys), (kv.values, wide.values)):
        torch.testing.assert_close(memory.float(), other, atol=error, rtol=error, equal_nan=True)


def test_a_negative_slot_is_not_stored() -> None:
    heads = HeadShape(2, 1, 16, 1.0)
    ops = TritonOps(DEVICE, "float32")
    batch, kv = batch_over(ops, ((1, 5), (1, 3)), 4, heads)
    batch.slots[1] = -1
    before = kv.values.clone()
    qkv = random(2, 64)
    ops.store_kv(qkv, kv, batch, heads, None)
    slot = int(batch.slots[0])
    before[slot // 4, slot % 4] = qkv[0, 48:]
    torch.testing.assert_close(kv.values, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [48, 576, 4096, 16384])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rms_norm(dtype: str, width: int, has_residual: bool) -> None:
    torch.manual_seed(0)
    x, weight = random(7, 2 * width, dtype=dtype)[:5, :width] * 3, random(width)
    residual = random(5, width, dtype=dtype) if has_residual else None
    normed, total = TritonOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    expected, expected_total = TorchOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    assert normed.dtype == total.dtype == x.dtype
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype != "float32"])
@pytest.mark.parametrize("x_type", ["float32", "half"])
@pytest.mark.parametrize("residual_type", ["float32", "half", None])
def test_rms_norm_of_sums_in_float32(
    x_type: str, residual_type: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is not rounded, what is normalised has the compute type."""
    torch.manual_seed(0)
    x, weight = random(3, 2 * 300, dtype=dtype if x_type == "half" else x_type)[:, :300] * 3, random(300)
    residual = None if residual_type is None else random(3, 300, dtype=dtype if residual_type == "half" else residual_type)
    expected, expected_total = TorchOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    monkeypatch.setattr(TorchOps, "rms_norm", None)
    normed, total = TritonOps(DEVICE, dtype).rms_norm(x, weight, 1e-2, residual=residual)
    assert normed.dtype == getattr(torch, dtype)
    assert total.dtype == expected_total.dtype
    assert total is x if residual is None else torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_narrow_models_look_up_in_float32(num_rows: int, stored: str, dtype: str) -> None:
    """Nothing is rounded, not even what is stored in a wider type than the compute type."""
    table, ids = random(9, 100, dtype=stored), torch.tensor([8, 0, 3, 3, 1], device=DEVICE)[:num_rows]
    ops = TritonOps(DEVICE, dtype)
    found = ops.lookup(table, ids)
    assert found.dtype == torch.float32
    assert torch.equal(found, table.float()[ids])
    torch.testing.assert_close(ops.lookup(table, ids, scale=1152**0.5), table.float()[ids] * 1152**0.5)


def test_wide_models_look_up_in_the_compute_type() -> None:
    table, ids = random(4, FLOAT32_WIDTH + 8), torch.tensor([3, 1], device=DEVICE)
    found = TritonOps(DEVICE, "float16").lookup(table, ids)
    assert torch.equal(found, table[ids].half())


def test_wider_rows_and_other_types_are_left_to_torch() -> None:
    x = random(2, 16400)
    ops = TritonOps(DEVICE, "float32")
    torch.testing.assert_close(
        ops.rms_norm(x, torch.ones(16400, device=DEVICE), 1e-5)[0], x / x.square().mean(-1, keepdim=True).sqrt(),
        atol=1e-4, rtol=1e-4,
    )
    double = ops.rms_norm(x[:, :64].double(), torch.ones(64, device=DEVICE), 1e-5, residual=x[:, :64])[1]
    assert double.dtype == torch.float64


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [12, 5000])
def test_gated(activation: Activation, dtype: str, width: int) -> None:
    torch.manual_seed(0)
    x = random(3, 2 * width, dtype=dtype) * 4
    x[0, 0], x[0, 1] = 60, -60
    out = TritonOps(DEVICE, dtype).gated(x, activation)
    assert out.dtype == x.dtype
    expected = TorchOps(DEVICE).gated(x.float(), activation)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_copied_blocks_are_equal_in_every_layer_and_others_stay(dtype: str) -> None:
    torch.manual_seed(0)
    ops = TritonOps(DEVICE, dtype)
    layers = [ops.new_kv_layer(6, 4, 3, 176) for _ in range(2)]
    for layer in layers:
        layer.keys.normal_()
        layer.values.normal_()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    for _ in range(2):
        ops.copy_blocks(layers, [(0, 3), (0, 5), (2, 1)])
    for layer, olds in zip(layers, before, strict=True):
        for memory, old in zip((layer.keys, layer.values), olds, strict=True):
            assert torch.equal(memory, old[[0, 2, 2, 0, 4, 0]])


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
def test_decodes_can_be_captured() -> None:
    """One graph over static buffers serves other lengths, other tokens and filling."""
    heads = HeadShape(8, 2, 64, 0.125)
    ops = TritonOps(DEVICE, "bfloat16")
    sequences = ((1, 500), (1, 33), (1, 7), (1, 1200))
    batch, kv = batch_over(ops, sequences, 16, heads)
    lengths = torch.tensor([10, 10, 0, 10], dtype=torch.int32, device=DEVICE)
    static = replace(batch)
    static.notes["plan"] = AttentionPlan(lengths, lengths, lengths)
    rotary = ops.rotary(np.random.default_rng(0).normal(size=(1200, 64)).astype(np.float32), 64)
    qkv, weight = random(4, 12 * 64, dtype="bfloat16"), random(512)

    def step() -> Tensor:
        out = ops.paged_attention(ops.store_kv(qkv, kv, static, heads, rotary), kv, static, heads)
        return ops.gated(ops.rms_norm(out, weight, 1e-5, residual=out)[0], "silu")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    qkv.normal_()
    lengths.copy_(torch.tensor([context for _, context in sequences], dtype=torch.int32))
    graph.replay()
    captured = out.clone()
    static = batch
    torch.testing.assert_close(captured, step())
