"""Products with few rows in Triton against the reference, in every form in which a decoder asks for them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tests.calls import spy_on
from tests.kernels.triton_support import DEVICE, HAS_CUDA, TYPES, assert_near, captured, combine, random, untraced

from archerfish.kernels.ops import Activation, LinearWeight  # isort: skip
from archerfish.kernels.formats import PLAIN, Int8Rows, WeightFormat  # isort: skip
from archerfish.kernels.torch.reference import TorchOps, TorchWeight  # isort: skip
from archerfish.kernels.triton import linear as triton_linear  # isort: skip
from archerfish.kernels.triton.linear import Int8RowsWeight, PlainRowsWeight, RowsWeight, expand_queries  # isort: skip
from archerfish.kernels.triton.tiles import MAX_ADDED_ROWS, SHARED_BYTES, LinearTile, add_tile, tile_of  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
ROWS = [1, 2, 3, 4, 5, 8, 16, 32]
FORMATS = [PLAIN, Int8Rows()]
MAX_ROWS = PlainRowsWeight.max_rows
TILES = [
    LinearTile(4, 64, 4, 1),
    LinearTile(2, 32, 2, 3),
    LinearTile(8, 512, 4, 1),
    LinearTile(16, 64, 4, 2, is_dot=True),
    LinearTile(16, 128, 8, 3, is_dot=True),
]
HALVES = [dtype for dtype in TYPES if dtype != "float32"]
STREAMS = [
    LinearTile(4, 0, 1, 2, num_programs=3),
    LinearTile(1, 0, 2, 3, num_programs=5),
    LinearTile(2, 0, 1, 1, num_programs=100),
]


def weights(
    num_outputs: int, width: int, dtype: str, *, has_bias: bool = False, weight_format: WeightFormat = PLAIN
) -> tuple[LinearWeight[Tensor], LinearWeight[Tensor]]:
    """Of a linear map for Triton in a type, and of the same numbers for the reference in float32."""
    weight = random(num_outputs, width, dtype=dtype) * width**-0.5
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    wide = TorchOps(DEVICE).linear_weight([weight], [None if bias is None else bias.float()], weight_format)
    return TritonOps(DEVICE, dtype).linear_weight([weight], [bias], weight_format), wide


@pytest.fixture
def _no_torch_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("left to torch")

    monkeypatch.setattr(TorchWeight, "multiply", refuse)


@pytest.mark.parametrize(
    ("num_rows", "size", "dtype", "weight_format"),
    combine([*ROWS, 17, 64, 65], [(48, 64), (37, 100), (3, 515)], TYPES, FORMATS),
)
def test_linear(num_rows: int, size: tuple[int, int], dtype: str, weight_format: WeightFormat) -> None:
    x, residual = random(num_rows, 2 * size[1], dtype=dtype)[:, : size[1]], random(num_rows, size[0], dtype=dtype)
    weight, wide = weights(*size, dtype, has_bias=True, weight_format=weight_format)
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    y, added = ops.linear(x, weight), ops.linear(x, weight, residual=residual)
    assert y.dtype == added.dtype == x.dtype
    assert_near(y, reference.linear(x.float(), wide), dtype)
    assert_near(added, reference.linear(x.float(), wide, residual=residual.float()), dtype)


@pytest.mark.parametrize(
    ("tile", "width", "gate", "dtype", "weight_format"),
    combine([*TILES, *STREAMS], [128, 200], [None, "silu"], TYPES, FORMATS),
)
def test_every_tile_gives_the_same(
    tile: LinearTile,
    width: int,
    gate: Activation | None,
    dtype: str,
    weight_format: WeightFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs that fill the last tile, and outputs that do not. Streams read several tiles in one program."""
    ops = TritonOps(DEVICE, dtype)
    reference = TorchOps(DEVICE)
    num_rows = 1 if tile.num_programs else 3
    monkeypatch.setattr(RowsWeight, "tile", tile)
    x = random(num_rows, width, dtype=dtype)
    other = random(num_rows, width, dtype=dtype)
    norm = random(width)
    for num_outputs in (16, 22):
        weight, wide = weights(num_outputs, width, dtype, has_bias=True, weight_format=weight_format)
        residual = random(num_rows, num_outputs, dtype=dtype)
        assert_near(ops.linear(x, weight), reference.linear(x.float(), wide), dtype)
        added = ops.linear(x, weight, residual=residual)
        assert_near(added, reference.linear(x.float(), wide, residual=residual.float()), dtype)
        for before in (None, other):
            y, total = ops.normed_linear(x, norm, 1e-3, weight, residual=before, gate=gate)
            expected = x if before is None else x + before
            assert torch.equal(total, expected)
            assert_near(y, reference.normed_linear(expected.float(), norm, 1e-3, wide, gate=gate)[0], dtype)


@pytest.mark.parametrize("tile", [*TILES, *STREAMS])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("_no_torch_products")
def test_every_tile_takes_rows_in_float32(tile: LinearTile, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the layers is normalised for a product, and a product is added to it, unrounded."""
    ops = TritonOps(DEVICE, dtype)
    reference = TorchOps(DEVICE)
    num_rows = 1 if tile.num_programs else 3
    monkeypatch.setattr(RowsWeight, "tile", tile)
    gates: list[Activation | None] = [None, "silu"]
    residual, norm = random(num_rows, 100), random(100)
    up, wide_up = weights(22, 100, dtype, has_bias=True)
    down, wide_down = weights(100, 40, dtype)
    x = random(num_rows, 40, dtype=dtype)
    normed = [ops.normed_linear(residual, norm, 1e-3, up, gate=gate) for gate in gates]
    y = ops.linear(x, down, residual=residual)
    monkeypatch.undo()
    for (found, total), gate in zip(normed, gates, strict=True):
        assert found.dtype == getattr(torch, dtype)
        assert total is residual
        assert_near(found, reference.normed_linear(residual, norm, 1e-3, wide_up, gate=gate)[0], dtype)
    assert y.dtype == torch.float32
    assert_near(y, reference.linear(x.float(), wide_down, residual=residual), "float32")


@pytest.mark.parametrize(
    ("num_rows", "has_bias", "weight_format"),
    [(num, bias, each) for num in (1, 5, -1) for bias in (True, False) for each in FORMATS],
)
def test_sums_in_float32_stay_so(num_rows: int, has_bias: bool, weight_format: WeightFormat) -> None:
    """Many rows are added in place; with a bias, only few are added before they are rounded. -1: one more than few."""
    most = MAX_ROWS if weight_format is PLAIN else Int8RowsWeight.max_rows
    num_rows = most + 1 if num_rows == -1 else num_rows
    x, residual = random(num_rows, 64, dtype="float16"), random(num_rows, 48)[:, :24]
    before = residual.clone()
    weight, wide = weights(24, 64, "float16", has_bias=has_bias, weight_format=weight_format)
    y = TritonOps(DEVICE, "float16").linear(x, weight, residual=residual)
    expected = TorchOps(DEVICE).linear(x.float(), wide, residual=before)
    assert y.dtype == torch.float32
    is_many = num_rows > most
    assert_near(y, expected, "float16" if is_many and has_bias else "float32")
    assert (y.data_ptr() == residual.data_ptr()) == (is_many and not has_bias)


@pytest.mark.parametrize(
    ("activation", "has_residual", "num_rows"), combine(get_args(Activation), [True, False], [2, 6])
)
@pytest.mark.usefixtures("_no_torch_products")
def test_bias_activation_and_residual(
    activation: Activation, has_residual: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual = random(num_rows, 40), random(num_rows, 21) if has_residual else None
    weight, wide = weights(21, 40, "float32", has_bias=True)
    y = TritonOps(DEVICE, "float32").linear(x * 5, weight, activation=activation, residual=residual)
    monkeypatch.undo()
    assert_near(y, TorchOps(DEVICE).linear(x * 5, wide, activation=activation, residual=residual), "float32")


@pytest.mark.parametrize(
    ("num_rows", "gate", "has_residual", "dtype"), combine(ROWS, [None, "silu", "gelu_tanh"], [True, False], TYPES)
)
def test_normed_linear(num_rows: int, gate: Activation | None, has_residual: bool, dtype: str) -> None:
    """The sum is the reference's, bit by bit: it runs on through all layers."""
    width = 100
    x, norm = random(num_rows, width, dtype=dtype) * 3, random(width)
    residual = random(num_rows, 2 * width, dtype=dtype)[:, width:] if has_residual else None
    weight, wide = weights(46, width, dtype, has_bias=gate is None)
    before = x.clone()
    y, total = TritonOps(DEVICE, dtype).normed_linear(x, norm, 1e-2, weight, residual=residual, gate=gate)
    _, expected_total = TorchOps(DEVICE, dtype).rms_norm(x, norm, 1e-2, residual=residual)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before)
    assert y.dtype == total.dtype == x.dtype
    assert_near(y, TorchOps(DEVICE).normed_linear(total.float(), norm, 1e-2, wide, gate=gate)[0], dtype)


def test_the_norm_sees_the_rounded_sum() -> None:
    """In float16, 2048 + 1 is 2048: the halves of the row are equal after it, and cancel."""
    signs = torch.tensor([1.0] * 16 + [-1.0] * 16, device=DEVICE)
    ops, ones = TritonOps(DEVICE, "float16"), torch.ones(32, device=DEVICE)
    weight = ops.linear_weight([signs.expand(8, 32).half().contiguous()], [None])
    x, residual = (2048 * ones[None]).half(), (signs[None] > 0).half()
    y, total = ops.normed_linear(x, ones, 0.0, weight, residual=residual)
    assert torch.equal(total, x)
    assert not y.any()


@pytest.mark.parametrize(
    ("num_rows", "softcap", "dtype", "weight_format"), combine([1, 2, 17, 33, 64, 65], [0.0, 2.0], TYPES, FORMATS)
)
def test_logits_are_float32(num_rows: int, softcap: float, dtype: str, weight_format: WeightFormat) -> None:
    """Those of few rows are not rounded on the way."""
    x = random(num_rows, 64, dtype=dtype)
    head, wide = weights(50, 64, dtype, weight_format=weight_format)
    scores = TritonOps(DEVICE, dtype).logits(x, head, softcap=softcap)
    assert scores.dtype == torch.float32
    is_exact = not softcap and num_rows <= (MAX_ROWS if weight_format is PLAIN else Int8RowsWeight.max_rows)
    assert_near(scores, TorchOps(DEVICE).logits(x.float(), wide, softcap=softcap), "float32" if is_exact else dtype)


def test_odd_numbers_of_outputs_are_padded() -> None:
    matrix = random(50, 64, dtype="float16")
    kept = packed_matrix(matrix)
    assert torch.equal(kept, matrix)
    assert expand_queries(kept).shape == (64, 64)
    assert torch.equal(expand_queries(kept)[:50], matrix)
    assert expand_queries(matrix) is matrix
    even = random(128, 64, dtype="float16")
    assert packed_matrix(even) is even


def packed_matrix(matrix: Tensor) -> Tensor:
    packed = TritonOps(DEVICE, "float16").linear_weight([matrix], [None]).get()
    assert isinstance(packed, RowsWeight)
    return packed.matrix


@pytest.mark.parametrize("num_rows", [4, 16])
def test_a_row_does_not_depend_on_the_others(num_rows: int) -> None:
    ops = TritonOps(DEVICE, "float16")
    x = random(num_rows, 96, dtype="float16")
    residual = random(num_rows, 96, dtype="float16")
    norm = random(96)
    weight, _ = weights(40, 96, "float16")
    y, _ = ops.normed_linear(x, norm, 1e-5, weight, residual=residual, gate="silu")
    x[1:], residual[1:] = float("nan"), float("inf")
    assert torch.equal(ops.normed_linear(x, norm, 1e-5, weight, residual=residual, gate="silu")[0][0], y[0])


@pytest.mark.parametrize("num_rows", [0, MAX_ROWS + 1])
def test_other_numbers_of_rows_are_left_to_torch(num_rows: int) -> None:
    ops, reference = TritonOps(DEVICE, "float32"), TorchOps(DEVICE)
    x, norm = random(num_rows, 32), random(32)
    weight, wide = weights(10, 32, "float32")
    assert torch.equal(ops.linear(x, weight), reference.linear(x, wide))
    y, total = ops.normed_linear(x, norm, 1e-5, weight, gate="silu")
    assert_near(y, reference.normed_linear(x, norm, 1e-5, wide, gate="silu")[0], "float32")
    assert total is x


def test_other_types_are_left_to_torch() -> None:
    ops, reference = TritonOps(DEVICE, "float16"), TorchOps(DEVICE, "float16")
    weight, wide = weights(10, 32, "float16")
    x = random(2, 32, dtype="float16")
    assert_near(ops.linear(x.float(), weight), reference.linear(x.float(), wide).float(), "float16")
    residual = random(2, 32)
    assert ops.normed_linear(x, random(32), 1e-5, weight, residual=residual)[1].dtype == torch.float32
    assert ops.linear(x, weight, residual=random(2, 10)).dtype == torch.float32


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype", "weight_format"),
    [
        *combine([17, 32, 33, 64, 65, 128] if HAS_CUDA else [17, 70], [128, 300], TYPES, FORMATS),
        *combine([70], [3100], TYPES, FORMATS),  # each warp has its own part of the columns
    ],
)
def test_product_is_added_in_place(num_rows: int, width: int, dtype: str, weight_format: WeightFormat) -> None:
    weight, wide = weights(40, width, dtype, weight_format=weight_format)
    x, packed = random(num_rows, width + 8, dtype=dtype)[:, :width], weight.get()
    assert isinstance(packed, RowsWeight)
    tile = add_tile(num_rows, packed.matrix, x.element_size(), SHARED_BYTES)
    assert tile is not None
    for type_of_total in {dtype, "float32"}:
        total = random(num_rows, 43, dtype=type_of_total)
        expected = total.float()
        expected[:, :40] += TorchOps(DEVICE).linear(x.float(), wide)
        found = triton_linear.add_rows(total[:, :40], x, packed, tile)
        assert found.data_ptr() == total.data_ptr()
        assert_near(total, expected, dtype)


def test_more_rows_or_outputs_are_added_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rows = spy_on(monkeypatch, triton_linear, "add_rows")
    ops, (weight, wide) = TritonOps(DEVICE, "float32"), weights(24, 64, "float32")
    for num_rows in (4, 20, MAX_ADDED_ROWS, MAX_ADDED_ROWS + 1):
        x, total = random(num_rows, 64), random(num_rows, 24)
        expected = TorchOps(DEVICE).linear(x, wide, residual=total)
        assert_near(ops.linear(x, weight, residual=total), expected, "float32")
    assert [len(call.args[1]) for call in add_rows.call_args_list] == [20, MAX_ADDED_ROWS]
    for num_rows in (17, 32, 33, 128):
        for element_bytes, most in [(size, room) for size in (2, 4) for room in (SHARED_BYTES, 86_000, 1)]:
            tile = add_tile(num_rows, torch.empty(1024, 3072, device="meta"), element_bytes, most)
            assert tile is not None
            stage_bytes = (tile.rows + tile.outputs) * tile.columns * element_bytes
            assert tile.num_stages == 1 or tile.num_stages * stage_bytes <= most
        assert add_tile(num_rows, torch.empty(4096, 4096, device="meta"), 2, SHARED_BYTES) is None


def test_tiles_fit_the_card() -> None:
    """227 KiB of shared memory, or 99 on other cards; parts of the columns that a tensor core takes."""
    for num_rows in range(1, Int8RowsWeight.max_rows + 1):
        for num_weights, width in ((1, 1), (1024, 3072), (4096, 1024), (28672, 4096), (4096, 14336), (151936, 1024)):
            for is_gated in (True, False):
                for element_bytes, room in ((2, 227), (4, 227), (2, 99), (4, 99)):
                    most = SHARED_BYTES if room == 227 else room * 1024 * 7 // 8
                    tile = tile_of(num_rows, num_weights, width, is_gated, element_bytes, most)
                    rows = max(8, 1 << (num_rows - 1).bit_length()) + tile.outputs * (2 if is_gated else 1)
                    assert tile.num_stages == 1 or tile.num_stages * rows * tile.columns * element_bytes <= room * 1024
                    assert not tile.is_dot or tile.columns // tile.num_warps >= 16


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize("num_rows", [1, 3, 16, 40])
@pytest.mark.parametrize("adds", [True, False])
def test_products_can_be_captured(num_rows: int, adds: bool) -> None:
    """A chain of products as decoders ask for them, whose kernels may start before the one in front has ended.

    adds: layers are added up in float32, in one memory if there are many rows; else the next norm adds.
    """
    ops = TritonOps(DEVICE, "bfloat16")
    norm = 1 + 0.1 * random(512)
    table = random(100, 512, dtype="bfloat16")
    up, down = weights(4096, 512, "bfloat16")[0], weights(512, 2048, "bfloat16")[0]
    head, ids = weights(3000, 512, "bfloat16")[0], torch.arange(num_rows, device=DEVICE)

    def step(ops: TorchOps) -> Tensor:
        x, residual = ops.lookup(table, ids), None
        for _ in range(20):
            y, total = ops.normed_linear(x, norm, 1e-5, up, residual=residual, gate="silu")
            x, residual = (ops.linear(y, down, residual=total), None) if adds else (ops.linear(y, down), total)
        return ops.logits(ops.rms_norm(x, norm, 1e-5, residual=residual)[0], head)

    graph, out = captured(lambda: step(ops))
    for _ in range(3):
        ids.random_(100)
        graph.replay()
        found, expected = out.clone(), step(TorchOps(DEVICE, "bfloat16"))
        assert torch.equal(found, step(ops))
        assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.skipif(not HAS_CUDA, reason="too slow in the interpreter")
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("num_outputs", "width"),
    [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (28672, 4096), (50000, 1024)],
)
def test_shapes_of_models(num_outputs: int, width: int, num_rows: int) -> None:
    ops, reference = TritonOps(DEVICE, "bfloat16"), TorchOps(DEVICE)
    x, residual = random(num_rows, width, dtype="bfloat16"), random(num_rows, width, dtype="bfloat16")
    weight, wide = weights(num_outputs, width, "bfloat16")
    norm, plain = 1 + 0.1 * random(width), reference.linear(x.float(), wide)
    total = random(num_rows, num_outputs)
    found = [(ops.linear(x, weight), plain), (ops.logits(x, weight), plain)]
    found += [(ops.linear(x, weight, residual=total.clone()), plain + total)]
    gates: tuple[Activation | None, ...] = (None, "silu")
    for gate in gates:
        y, total = ops.normed_linear(x, norm, 1e-5, weight, residual=residual, gate=gate)
        found.append((y, reference.normed_linear(total.float(), norm, 1e-5, wide, gate=gate)[0]))
        y, _ = ops.normed_linear(residual.float(), norm, 1e-5, weight, gate=gate)
        found.append((y, reference.normed_linear(residual.float(), norm, 1e-5, wide, gate=gate)[0]))
    for y, expected in found:
        assert float((y - expected).norm() / expected.norm()) < 0.01


@pytest.mark.skipif(not HAS_CUDA, reason="streams are CUDA's")
def test_an_upload_waits_for_work_that_reads_the_same_memory() -> None:
    """The allocator gives out memory of freed tensors that queued work still reads."""
    before = torch.ones(1 << 20, device=DEVICE)
    uploads = triton_linear.Uploads("cuda")
    try:
        sleep: Any = torch.cuda._sleep
        sleep(1 << 30)  # half a second of the card
        copied, place = before.clone(), before.data_ptr()
        del before
        sent = uploads.send(torch.zeros(1 << 20))
    finally:
        uploads.close()
    assert sent.data_ptr() == place
    assert bool((copied == 1).all()) and bool((sent == 0).all())
