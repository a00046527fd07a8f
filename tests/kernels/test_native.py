"""The native backend against gguf, float64 and the reference, at every level of this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast, get_args

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from archerfish.kernels.batches import Segments
from archerfish.kernels.formats import FORMATS as MADE
from archerfish.kernels.ops import (
    KV_SCALE_BYTES,
    Activation,
    HeadShape,
    KVLayer,
    NormWeights,
    PagedBatch,
    Pooling,
    Rotary,
    Rotation,
)
from archerfish.kernels.pool import set_pass_threads
from archerfish.kernels.stored import StoredTensor, to_type, widened
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.adapter import TokenBatch
from archerfish.store.format import Quantization, TensorInfo, split_blocks
from tests.kernels.native_support import LEVELS, NativeOps, Translated, native_ops, to_arrays
from tests.kernels.paged import batch_over, random

from archerfish.kernels.native._native import Level, Tape, all_threads  # isort: skip (it is there if native_support is)
from archerfish.kernels.native.recorder import Replayer, StepArrays, TapeRunner  # isort: skip
from archerfish.kernels.native.weights import FORMATS as MULTIPLIED, INT8_ROWS, stack_parts  # isort: skip

Floats = npt.NDArray[np.float32]
PLAIN = ("float32", "float16", "bfloat16")
FORMATS = [name for name in MULTIPLIED if name != INT8_ROWS]  # that checkpoints are stored in
BLOCKS = [name for name in FORMATS if name not in PLAIN]
ROWS = (1, 3, 4, 5, 7, 130)
# Of the norm of a product. Those with blocks round activations to 15 bits, or, of many rows, are in 16 bits: see
# `tolerance`.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 6e-3} | dict.fromkeys(BLOCKS, 2e-4)
MADE_TOLERANCE = 0.012  # activations have 8 bits where rows are bytes, scales of int8 in blocks have 16


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tolerance(name: str, num_rows: int, level: str) -> float:
    if name in PLAIN or num_rows <= 12:
        return TOLERANCE[name]
    return 0.012 if level in ("bf16", "amx") else 3e-3


def make_matrix(name: str, num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[StoredTensor, Floats]:
    """A matrix as a checkpoint stores it, and the numbers that this means."""
    generator, shape = np.random.default_rng(seed), (num_outputs, num_inputs)
    weights = generator.standard_normal(shape, dtype=np.float32) * np.float32(num_inputs**-0.5)
    if name in PLAIN:
        data = to_type(weights, name)
        return StoredTensor(shape, name, data), widened(data).astype(np.float32)
    quant_type = gguf.GGMLQuantizationType[name]
    if name.endswith("K"):
        _, num_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        blocks = generator.integers(0, 256, (num_outputs * num_inputs // 256, num_bytes), dtype=np.uint8)
        scales = (generator.random((len(blocks), 2)) * 1e-3).astype(np.float16).view(np.uint8)
        if name == "Q6_K":
            blocks[:, -2:] = scales[:, :2]
        else:
            blocks[:, :4] = scales
        return StoredTensor(shape, "float32", blocks, name), gguf.quants.dequantize(blocks, quant_type).reshape(shape)
    blocks = gguf.quants.quantize(weights, quant_type)
    row = split_blocks(TensorInfo("w", "float32", shape, Quantization(name, 1)), blocks)
    stored = StoredTensor(shape, "float32", row.data, name, row.scales, row.zero_points)
    return stored, gguf.quants.dequantize(blocks, quant_type)


def assert_near(y: Any, expected: Any, most: float) -> None:
    y, expected = np.asarray(y, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert y.shape == expected.shape
    assert np.linalg.norm(y - expected) <= most * np.linalg.norm(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_packing_keeps_every_bit(name: str, level: str) -> None:
    """The second part begins inside of a group of outputs, and its last group is not full."""
    made = [make_matrix(name, num, 512, seed=num) for num in (37, 70)]
    runner = TapeRunner(Level(level), all_threads(2))
    [matrix] = stack_parts([stored for stored, _ in made], runner, "float32" if name not in PLAIN else name)
    runner.run(Tape(Level(level)), StepArrays(), [])
    found = np.full((107, 512), np.nan, dtype=np.float32)
    matrix.unpack(found, Level(level))
    assert np.array_equal(found, np.concatenate([wide for _, wide in made]))


SHAPES = (
    [(name, 512) for name in FORMATS]
    + [(name, 33) for name in PLAIN]
    + [(name, 96) for name in BLOCKS if "K" not in name]
)


@pytest.mark.parametrize(("name", "num_inputs"), SHAPES)
def test_products(name: str, num_inputs: int, level: str) -> None:
    ops = NativeOps("cpu", name if name in PLAIN else "float32", level)
    stored, wide = make_matrix(name, 53, num_inputs)
    weight = ops.linear_weight([stored], [None])
    for num_rows in ROWS:
        x = random(num_rows, num_inputs).numpy()
        assert_near(
            ops.linear(x, weight), x.astype(np.float64) @ wide.T.astype(np.float64), tolerance(name, num_rows, level)
        )


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(53, 96), (16, 32), (7, 512), (33, 50)])
@pytest.mark.parametrize("name", ["int8", INT8_ROWS, "int4"])
def test_products_with_weights_that_are_made(
    name: str, num_outputs: int, num_inputs: int, dtype: str, level: str
) -> None:
    """Of float weights in two parts, against the plain dequantisation of the format that is chosen for such a
    matrix."""
    ops, made = NativeOps("cpu", dtype, level), MADE[name.removesuffix(" rows")].chosen(num_inputs)
    ops.rounds_rows = name == INT8_ROWS
    parts = [make_matrix(dtype, num_outputs, num_inputs, seed)[0] for seed in range(2)]
    tensors = [torch.from_numpy(np.array(widened(each.data), dtype=np.float32)) for each in parts]
    wide = torch.cat([made.dequantise(made.load(each), torch.float32) for each in tensors]).numpy()
    weight = ops.linear_weight(parts, [None] * 2, made)
    for num_rows in ROWS:
        x = random(num_rows, num_inputs).numpy()
        assert_near(ops.linear(x, weight), x.astype(np.float64) @ wide.T.astype(np.float64), MADE_TOLERANCE)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_deterministic_product_does_not_depend_on_others(name: str, level: str) -> None:
    ops = NativeOps("cpu", name if name in PLAIN else "float32", level)
    ops.is_deterministic = True
    weight = ops.linear_weight([make_matrix(name, 53, 512)[0]], [None])
    x = random(130, 512).numpy()
    expected = ops.linear(x, weight)
    for num_rows in ROWS:
        assert np.array_equal(ops.linear(x[2 : 2 + num_rows], weight), expected[2 : 2 + num_rows])


def test_rows_of_bytes(level: str) -> None:
    """Rows of any size beside one another, rows that are not finite, and weights of any size."""
    ops = NativeOps(level=level)
    ops.rounds_rows = True
    rows, x = random(37, 100).numpy(), random(130, 100).numpy()
    rows[3] = 0
    rows[4] *= 1e-20
    rows[5, 7] = np.nan
    sizes = np.array([1e-10, 1, 1e10, 0, 3], dtype=np.float32)
    x[:5] *= sizes[:, None]
    x[5, 3] = np.nan
    x[6, 99] = np.inf
    x[7] = np.abs(x[7])
    weight = ops.linear_weight([rows], [None], MADE["int8"])
    found = ops.linear(x, weight)
    assert np.isnan(found[5:7]).all() and np.isnan(found[:, 5]).all()
    is_good = ~np.isin(np.arange(130), (5, 6))
    for row in (0, 1, 2, 3, 4, 7, 129):
        assert_near(np.delete(found[row], (4, 5)), np.delete(rows, (4, 5), axis=0) @ x[row], 0.02)
        assert abs(found[row, 4] - rows[4] @ x[row]) <= 0.01 * np.linalg.norm(rows[4]) * np.linalg.norm(x[row])
    blocks: Any = ops.linear_weight([make_matrix("Q4_1", 20, 96)[0]], [None], MADE["int8"])
    assert blocks.get().format_name == "Q4_1"  # they stay as they are
    for num_rows in ROWS:  # a row does not depend on others
        some = ops.linear(x[:num_rows], weight)
        assert np.array_equal(some[is_good[:num_rows]], found[:num_rows][is_good[:num_rows]], equal_nan=True)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "Q4_0", "Q4_K", "Q8_0"])
def test_parts_in_several_formats_stay_in_them(name: str) -> None:
    parts = [make_matrix(name, 20, 256), make_matrix("float32", 7, 256), make_matrix("Q6_K", 33, 256)]
    ops = NativeOps()
    weight: Any = ops.linear_weight([stored for stored, _ in parts], [None] * 3)
    x = random(6, 256).numpy()
    assert_near(ops.linear(x, weight), x @ np.concatenate([wide for _, wide in parts]).T, TOLERANCE["Q6_K"])
    assert weight.get().format_name == f"{name} + float32 + Q6_K"


@pytest.mark.parametrize("num_rows", [2, 21])
@pytest.mark.parametrize(
    ("name", "second"), [*((name, name) for name in ("float32", "bfloat16", "Q5_1", "Q6_K")), ("Q6_K", "Q4_K")]
)
def test_what_is_done_with_a_product(name: str, second: str, num_rows: int, level: str) -> None:
    """Stacked parts, one with a bias; activations, a residual, a gate, a cap, and a norm in front."""
    ops, reference = native_ops(dtype=name if name in PLAIN else "float32", level=level), TorchOps()
    bias, norm = random(32), random(256)
    x = random(num_rows, 256)
    before = random(num_rows, 256)
    residual = random(num_rows, 64)
    for sizes in ((32, 32), (32, 18)):  # a gate of the latter has outputs that are no multiple of 16
        made = [make_matrix(kind, num, 256, seed=num) for kind, num in zip((name, second), sizes, strict=True)]
        ours = ops.linear_weight([stored for stored, _ in made], [bias, None])
        theirs = reference.linear_weight([torch.from_numpy(wide) for _, wide in made], [bias, None])

        def check(method: str, *args: Any, ours: Any = ours, theirs: Any = theirs, **options: Any) -> None:
            found, expected = (
                getattr(each, method)(*args, weight, **options) for each, weight in ((ops, ours), (reference, theirs))
            )
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            for one, other in pairs:
                assert_near(one, other, 3 * tolerance(name, num_rows, level))

        for activation in get_args(Activation):
            check("linear", x, activation=activation)
            check("normed_linear", x, norm, 1e-2, residual=before, gate=activation)
        check("linear", x, residual=residual[:, : sum(sizes)].contiguous())
        check("logits", x, softcap=0.7)
        check("normed_linear", x, norm, 1e-2)
        check("normed_linear", x, norm, 1e-2, gate="silu")


@pytest.mark.parametrize("width", [1, 7, 33, 64, 130])
def test_work_on_rows(width: int, level: str) -> None:
    ops, reference = native_ops(level=level), TorchOps()
    x = random(9, width) + 1
    before = random(9, width)
    weight = random(width)
    bias = random(width)
    segments = Segments((1, 5, 3))
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("rms_norm", (x, weight, 1e-3), {}),
        ("rms_norm", (x, weight, 1e-3), {"residual": before}),
        ("layer_norm", (x, NormWeights(weight, bias, 1e-3)), {}),
        ("normalize", (x,), {}),
        *(("pool", (x, segments, mode), {}) for mode in get_args(Pooling)),
        *(("gated", (torch.cat((x, before), 1), activation), {}) for activation in get_args(Activation)),
    ]
    for method, args, options in calls:
        torch.testing.assert_close(
            getattr(ops, method)(*args, **options), getattr(reference, method)(*args, **options), atol=1e-5, rtol=1e-5
        )
    assert not ops.normalize(torch.zeros(2, width)).any()


@pytest.mark.parametrize("name", FORMATS)
def test_lookups(name: str, level: str) -> None:
    """Of a table in any format, alone and added to rows of others, some of which begin later; also recorded."""
    ops = NativeOps(level=level)
    width = 256 if name.endswith("K") else 96 if name in BLOCKS else 50
    made = [make_matrix(each, 40, width, seed) for seed, each in enumerate((name, "float16", name))]
    tables, wide = [ops.to_device(stored) for stored, _ in made], [each for _, each in made]
    segments = Segments((5, 1, 12))
    token_ids, type_ids = np.random.default_rng(1).integers(0, 40, (2, 18))
    batch = TokenBatch(token_ids, segments, type_ids)
    expected = wide[0][token_ids] + wide[1][segments.positions + 2] + wide[2][type_ids]
    ids = [token_ids, segments.positions + 2, type_ids]
    np.testing.assert_allclose(ops.embed(tables, ids), expected, atol=1e-6)
    np.testing.assert_array_equal(ops.lookup(tables[0], token_ids, scale=1.5), wide[0][token_ids] * np.float32(1.5))
    recorded = ops.replayed(
        lambda given: ops.embed(tables, [given.token_ids, given.segments.positions + 2, given.type_ids])
    )
    np.testing.assert_allclose(recorded(batch), expected, atol=1e-6)


KV_TYPES = (*PLAIN, "int8")
PRECISION = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # of stored keys and values


def wide_layer(kv: KVLayer[torch.Tensor]) -> KVLayer[torch.Tensor]:
    """A copy in float32."""

    def wide(memory: torch.Tensor) -> torch.Tensor:
        if memory.dtype != torch.int8:
            return memory.to(torch.float32, copy=True)
        return memory[..., :-KV_SCALE_BYTES] * memory[..., -KV_SCALE_BYTES:].contiguous().view(torch.float32)

    return KVLayer(wide(kv.keys), wide(kv.values))


def int8_memory(memory: torch.Tensor) -> torch.Tensor:
    scales = memory.abs().amax(-1, keepdim=True) / 127
    return torch.cat(((memory / scales).nan_to_num().round().to(torch.int8), scales.view(torch.int8)), -1)


def kv_case(
    dtype: str, level: str, sequences: list[tuple[int, int]], block_size: int, heads: HeadShape
) -> tuple[Any, PagedBatch[torch.Tensor], KVLayer[torch.Tensor]]:
    """The backend, a batch, and keys and values in a type."""
    is_int8 = dtype == "int8"
    ops = native_ops("cpu", "float32" if is_int8 else dtype, level)
    batch, kv = batch_over(ops, sequences, block_size, heads)
    return ops, batch, KVLayer(int8_memory(kv.keys), int8_memory(kv.values)) if is_int8 else kv


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("normed", ["", "heads", "all"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 0), (80, 20), (24, 24), (10, 6)])
def test_store_kv(head_dim: int, rotary_dim: int, normed: str, dtype: str, level: str) -> None:
    """With norms of all heads together, neighbours are rotated together."""
    heads, reference = HeadShape(6, 2, head_dim, 0.1), TorchOps()
    ops, batch, kv = kv_case(dtype, level, [(1, 5), (3, 9), (4, 4)], 4, heads)
    before, expected_kv = wide_layer(kv), wide_layer(kv)
    table = random(9, rotary_dim).numpy()
    rotary = reference.rotary(table, rotary_dim, is_interleaved=normed == "all") if rotary_dim else None
    q_norm, k_norm = (random(head_dim * (num if normed == "all" else 1)) if normed else None for num in heads[:2])
    qkv, rotation = random(8, 10 * head_dim), Rotation(rotary, q_norm, k_norm, 1e-3)
    unstored = ops.store_kv(qkv, kv, replace(batch, slots=torch.full_like(batch.slots, -1)), heads, rotation)
    found = wide_layer(kv)
    for ours, theirs in ((found.keys, before.keys), (found.values, before.values)):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
    q = ops.store_kv(qkv, kv, batch, heads, rotation)
    expected = reference.store_kv(qkv, expected_kv, batch, heads, rotation)
    assert torch.equal(q, unstored)
    torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-4)
    found = wide_layer(kv)
    for ours, theirs in ((found.keys, expected_kv.keys), (found.values, expected_kv.values)):
        if dtype == "int8":  # half a step, of the head's own scale
            assert bool(((ours - theirs).abs() <= theirs.abs().amax(-1, keepdim=True) / 253).eq(theirs == theirs).all())
        else:
            torch.testing.assert_close(ours, theirs, atol=PRECISION[dtype], rtol=PRECISION[dtype], equal_nan=True)


def test_int8_keys_of_any_size(level: str) -> None:
    """Zeros stay, small numbers are not lost, and NaN and infinity are not hidden."""
    heads, ops = HeadShape(4, 4, 16, 1.0), native_ops(level=level, kv_dtype="int8")
    qkv = random(1, 12, 16)
    for first in (4, 8):  # keys and values
        qkv[0, first] = 0.0
        qkv[0, first + 1] *= 1e-20
        qkv[0, first + 2, 3], qkv[0, first + 3, 15] = float("nan"), -float("inf")
    batch, _ = batch_over(TorchOps(), [(1, 1)], 4, heads)
    kv = ops.new_kv_layer(3, 4, 4, 16)
    ops.store_kv(qkv.view(1, -1), kv, batch, heads, Rotation())
    memory = wide_layer(kv)
    for stored, given in ((memory.keys, qkv[0, 4:8]), (memory.values, qkv[0, 8:])):
        row = stored.flatten(0, 1)[batch.slots[0]]
        assert not row[0].any() and row[2:].isnan().all()
        torch.testing.assert_close(row[1], given[1], atol=float(given[1].abs().amax()) / 253, rtol=0)


HEADS = [
    HeadShape(4, 4, 16, 0.25),
    HeadShape(6, 2, 64, 0.125, window=19),
    HeadShape(20, 1, 80, 0.11, softcap=3.0),
    HeadShape(3, 1, 80, 0.11, window=70, softcap=1.5),
    HeadShape(40, 1, 16, 0.25),
    HeadShape(4, 2, 10, 0.3, window=1),
]


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_blocks(heads: HeadShape, block_size: int, dtype: str, level: str) -> None:
    """Decodes, prompts from their beginning and behind other tokens, within a chunk of keys and over several."""
    sequences = [(1, 1), (1, 64), (1, 200), (9, 9), (65, 65), (40, 131), (2, 70)]
    ops, batch, kv = kv_case(dtype, level, sequences, block_size, heads)
    q = random(batch.num_tokens, heads.num_heads * heads.head_dim)
    options: dict[str, Any] = {"sinks": 3 * random(heads.num_heads) if block_size == 16 else None}
    expected = TorchOps().paged_attention(q, wide_layer(kv), batch, heads, **options)
    error = TOLERANCE["float32" if dtype == "float32" else "bfloat16"]
    assert_near(ops.paged_attention(q, kv, batch, heads, **options), expected, error)
    ops.inner.is_deterministic = True  # no products in 16 bits
    torch.testing.assert_close(ops.paged_attention(q, kv, batch, heads, **options), expected, atol=1e-5, rtol=1e-4)


def test_attention_over_long_contexts(level: str) -> None:
    heads = HeadShape(2, 1, 16, 0.25)
    ops, batch, kv = kv_case("float32", level, [(1, 131_072), (3, 131_072)], 16, heads)
    q = random(batch.num_tokens, 32)
    expected = TorchOps().paged_attention(q, wide_layer(kv), batch, heads)
    torch.testing.assert_close(ops.paged_attention(q, kv, batch, heads), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "heads",
    [
        HeadShape(4, 4, 16, 0.25, is_causal=False),
        HeadShape(1, 1, 80, 0.11, is_causal=False),
        HeadShape(3, 3, 10, 0.3),
        HeadShape(4, 2, 16, 0.25, window=20),
        HeadShape(6, 2, 16, 0.25, window=20, is_causal=False),
        HeadShape(2, 1, 64, 0.125, softcap=2.0),
        HeadShape(1, 1, 16, 0.25, window=1, is_causal=False),
    ],
)
def test_attention_of_whole_texts(heads: HeadShape, has_bias: bool, dtype: str, level: str) -> None:
    ops, segments = native_ops("cpu", dtype, level), Segments((7, 1, 70, 33, 129, 2))
    if has_bias and (heads.is_causal or heads.window):
        pytest.skip("no model has a bias and a mask")
    qkv = random(segments.num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    bias = random(heads.num_heads, 129, 129) if has_bias else None
    options: dict[str, Any] = {"bias": bias, "sinks": None if has_bias else 3 * random(heads.num_heads)}
    expected = TorchOps().attention(qkv, segments, heads, **options)
    most = TOLERANCE["float32" if dtype == "float32" else "bfloat16"]
    assert_near(ops.attention(qkv, segments, heads, **options), expected, most)
    ops.inner.is_deterministic = True
    torch.testing.assert_close(ops.attention(qkv, segments, heads, **options), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "rotary_dim", "has_norms"),
    [
        (HeadShape(4, 2, 16, 0.25), 16, True),
        (HeadShape(3, 1, 10, 0.25), 6, False),
        (HeadShape(2, 2, 64, 0.25), 0, True),
    ],
)
def test_rotated(heads: HeadShape, rotary_dim: int, has_norms: bool, level: str) -> None:
    positions = Segments((7, 1, 70)).positions
    qkv, norms = random(78, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim), random(2, heads.head_dim)
    rotary = Rotary(random(70, rotary_dim), rotary_dim) if rotary_dim else None
    rotation = Rotation(rotary, norms[0] if has_norms else None, norms[1] if has_norms else None, 1e-5)
    expected = TorchOps().rotated(qkv, torch.from_numpy(positions), heads, rotation)
    torch.testing.assert_close(native_ops(level=level).rotated(qkv, positions, heads, rotation), expected)


class Layer:
    """A layer of a decoder over KV blocks, with every operation that a tape can hold for one."""

    def __init__(self, ops: NativeOps, heads: HeadShape, kv: KVLayer[Any]) -> None:
        def linear(name: str, num_outputs: int, num_inputs: int) -> Any:
            return ops.linear_weight([make_matrix(name, num_outputs, num_inputs)[0]], [None])

        self.ops = ops
        self.heads = heads
        self.kv = kv
        self.table, self.norm = ops.to_device(make_matrix("Q8_0", 40, 64)[0]), random(64).numpy()
        self.qkv, self.out = linear("float32", 128, 64), linear("Q4_0", 64, 64)
        self.gate_up, self.down = linear("float16", 192, 64), linear("Q5_1", 64, 96)
        self.rotation = Rotation(ops.rotary(random(300, 16).numpy(), 16))

    def __call__(self, batch: PagedBatch[Any]) -> Any:
        ops, residual = self.ops, self.ops.lookup(self.table, batch.token_ids, scale=2.0)
        x, residual = ops.normed_linear(residual, self.norm, 1e-5, self.qkv)
        x = ops.linear(ops.store_and_attend(x, self.kv, batch, self.heads, self.rotation), self.out)
        if batch.kept_rows is not None:
            x, residual = ops.rows(x, batch.kept_rows), ops.rows(residual, batch.kept_rows)
        x, total = ops.normed_linear(x, self.norm, 1e-5, self.gate_up, residual=residual, gate="silu")
        return ops.rms_norm(ops.linear(x, self.down, residual=total), self.norm, 1e-5)[0]


def make_layer(level: str) -> tuple[Layer, list[PagedBatch[Any]]]:
    """And batches of many sizes over its memory."""
    ops, heads = NativeOps(level=level), HeadShape(4, 2, 16, 0.25)
    sequences = [[(1, 3)], [(1, 30), (1, 5), (6, 6)], [(140, 140), (1, 2)], [(1, 9)], [(3, 200), (1, 1), (2, 2)]]
    made = [batch_over(cast(Any, Translated(ops, "float32")), each, 16, heads) for each in sequences]
    num_blocks = max(len(kv.keys) for _, kv in made)
    layer = Layer(ops, heads, ops.new_kv_layer(num_blocks, 16, 2, 16))
    batches = [to_arrays(batch) for batch, _ in made]
    return layer, batches + [replace(batch, kept_rows=np.cumsum(batch.query_lens) - 1) for batch in batches]


def test_a_replayed_tape_gives_what_single_operations_give_and_allocates_once(level: str) -> None:
    layer, batches = make_layer(level)
    recorded = layer.ops.replayed(layer)
    assert isinstance(recorded, Replayer)
    for batch in batches:
        assert np.array_equal(recorded(batch), layer(batch))
    tapes = [tape for tape, _ in recorded._tapes.values()]
    assert [tape.num_replays for tape in tapes] == [5, 5]
    before = [tape.num_allocations for tape in tapes]
    for batch in reversed(batches):
        recorded(batch)
    assert [tape.num_allocations for tape in tapes] == before


def test_results_do_not_depend_on_threads_nor_on_passes_beside() -> None:
    """Red if two passes share memory, or if work that threads share out is lost or done twice."""
    layer, batches = make_layer(LEVELS[-1])
    recorded = layer.ops.replayed(layer)
    for batch in batches:
        results = list[Floats]()
        for num_threads in (1, 1, 0, 0):  # 0: all
            with ThreadPoolExecutor(4, initializer=set_pass_threads, initargs=(num_threads,)) as threads:
                results += threads.map(recorded, [batch] * 4)
        assert all(np.array_equal(found, results[0]) for found in results)
