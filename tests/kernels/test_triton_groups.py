"""Products with weights in groups in Triton against the reference, in every form in which a decoder asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_from_store import random_stored
from tests.kernels.triton_support import DEVICE, HAS_CUDA, TYPES, assert_near, random, untraced
from tests.models.decoding import Driver, make
from tests.models.recurring import SIZES, RecurrentDriver, read_rwkv7, write_checkpoint

from archerfish.errors import InvalidOptionError  # isort: skip
from archerfish.kernels.formats import PLAIN  # isort: skip
from archerfish.kernels.ops import Activation, LinearWeight  # isort: skip
from archerfish.kernels.stored import GPU_TYPES, StoredTensor  # isort: skip
from archerfish.kernels.torch.from_store import stored_parts  # isort: skip
from archerfish.kernels.torch.reference import TorchOps, TorchWeight  # isort: skip
from archerfish.kernels.triton.group_products import few_tile, many_tile  # isort: skip
from archerfish.kernels.triton.linear import MANY_ROWS, ByteRowsWeight, GroupsWeight, Int8RowsWeight  # isort: skip
from archerfish.kernels.triton.norm import quantise_rows  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import SHARED_BYTES  # isort: skip
from archerfish.store.format import Quantization, TensorInfo  # isort: skip
from archerfish.store.quantiser import find_grid, make_row  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
Tensor = torch.Tensor
KINDS = [
    ("Q4_0", 32),
    ("Q4_0", 128),
    ("Q4_1", 64),
    ("Q4_K", 32),
    ("Q8_0", 32),
    ("Q6_K", 16),
    ("INT8", 128),
    ("Q4_0", 256),
]
KINDS += [("INT8", 512), ("MXFP4", 32)]
if HAS_CUDA:  # the interpreter does not have FP8
    KINDS += [("FP8", 128), ("FP8", 512)]


def weights(
    kind: tuple[str, int], num_outputs: int, dtype: str, num_parts: int = 1, width: int = 512
) -> tuple[LinearWeight[Tensor], LinearWeight[Tensor]]:
    """A linear map for Triton in a type, and for the reference in float32."""
    stored = [random_stored(kind[0], num_outputs, width, kind[1]) for _ in range(num_parts)]
    parts: list[Any] = list(stored)
    biases = [random(num_outputs, dtype=dtype) for _ in stored]
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    return ops.linear_weight(parts, biases), reference.linear_weight(parts, [bias.float() for bias in biases])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("dtype", "num_rows"), [(dtype, num) for dtype in TYPES for num in (1, 3, 64)])
def test_linear(kind: tuple[str, int], dtype: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "float32" and num_rows > 3:
        pytest.skip("the tiles are those of other types")
    ops, reference = TritonOps(DEVICE, dtype), TorchOps(DEVICE)
    width = 512 if kind[1] == 512 else 576 if kind == ("Q4_0", 32) else 768  # programs take 128 or 512 at a time
    weight, wide = weights(kind, 22, dtype, width=width)
    packed = weight.get()
    assert isinstance(packed, GroupsWeight | Int8RowsWeight)
    num_rows = min(num_rows, packed.max_rows)
    x, residual = random(num_rows, 1024, dtype=dtype)[:, :width] / 16, random(num_rows, 22)
    expected = reference.linear(x.float(), wide), reference.linear(x.float(), wide, residual=residual)
    with monkeypatch.context() as patch:
        patch.setattr(TorchWeight, "multiply", None)  # nothing is left to torch
        found = ops.linear(x, weight), ops.linear(x, weight, residual=residual)
    assert found[0].dtype == x.dtype and found[1].dtype == torch.float32
    for own, other in zip(found, expected, strict=True):
        assert_near(own, other, dtype)


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_normed_and_gated(num_rows: int, kind: tuple[str, int], gate: Activation | None) -> None:
    ops, reference = TritonOps(DEVICE, "float16"), TorchOps(DEVICE)
    weight, wide = weights(kind, 24, "float16", num_parts=2)
    x = random(num_rows, 512)
    other = random(num_rows, 512)
    norm = random(512) / 8
    for before in (None, other):
        y, total = ops.normed_linear(x, norm, 1e-3, weight, residual=before, gate=gate)
        assert y.dtype == torch.float16 and y.shape == (num_rows, 24 if gate else 48)
        assert torch.equal(total, x if before is None else x + before)
        assert_near(y, reference.normed_linear(total, norm, 1e-3, wide, gate=gate)[0], "float16")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_rows", [Int8RowsWeight.max_rows + 1, MANY_ROWS + 1])
def test_many_rows(num_rows: int, kind: tuple[str, int]) -> None:
    """By our kernels, or by torch with the matrix that a kernel has dequantised."""
    ops, reference = TritonOps(DEVICE, "float16"), TorchOps(DEVICE)
    weight, wide = weights(kind, 22, "float16")
    x, residual = random(num_rows, 512, dtype="float16") / 64, random(num_rows, 22, dtype="float16")
    assert_near(ops.linear(x, weight), reference.linear(x.float(), wide), "float16")
    added = ops.linear(x, weight, residual=residual)
    assert_near(added, reference.linear(x.float(), wide, residual=residual.float()), "float16")


@pytest.mark.parametrize("num_rows", [2, 65])
def test_logits(num_rows: int) -> None:
    ops, reference = TritonOps(DEVICE, "float16"), TorchOps(DEVICE)
    parts: list[Any] = [random_stored("Q6_K", 40)]
    x = random(num_rows, 512, dtype="float16") / 80
    found = ops.logits(x, ops.linear_weight(parts, [None]))
    assert found.dtype == torch.float32
    assert_near(found, reference.logits(x.float(), reference.linear_weight(parts, [None])), "float16")


BYTES = [pytest.param("FP8", marks=pytest.mark.skipif(not HAS_CUDA, reason="the interpreter has no FP8")), "INT8"]


def bytes_weight(kind: str, num_outputs: int, num_parts: int = 1) -> tuple[TritonOps, LinearWeight[Tensor], Tensor]:
    """A linear map of bytes for rows of bytes, and its matrix."""
    ops, stored = TritonOps(DEVICE, "bfloat16"), [random_stored(kind, num_outputs, 512, 512) for _ in range(num_parts)]
    ops.rounds_rows = True
    parts: list[Any] = list(stored)
    weight = ops.linear_weight(parts, [None] * num_parts)
    assert isinstance(weight.get(), ByteRowsWeight)
    return ops, weight, torch.cat([torch.from_numpy(each.as_floats()) for each in stored]).to(DEVICE)


@pytest.mark.parametrize("kind", ["FP8", "INT8"])
@pytest.mark.parametrize("num_outputs", [32, 22])
def test_many_rows_become_bytes(kind: str, num_outputs: int) -> None:
    """Where the library multiplies with such a matrix; else the weights are widened."""
    ops, weight, matrix = bytes_weight(kind, num_outputs)
    x, residual = random(20, 512, dtype="bfloat16"), random(20, num_outputs)
    codes, scales = quantise_rows(x, torch.int8 if kind == "INT8" else torch.float8_e4m3fn)
    rows = codes.float() * scales if num_outputs % 16 == 0 else x.float()
    assert_near(codes.float() * scales, x.float(), "bfloat16", factor=16)
    assert_near(ops.linear(x, weight), rows @ matrix.t(), "bfloat16", factor=4)
    assert_near(ops.linear(x, weight, residual=residual), rows @ matrix.t() + residual, "bfloat16", factor=4)


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_norms_of_many_rows_give_bytes(gate: Activation | None, kind: str) -> None:
    ops, weight, matrix = bytes_weight(kind, 64, num_parts=2)
    x = random(40, 512)
    other = random(40, 512)
    norm = random(512) / 8
    y, total = ops.normed_linear(x, norm, 1e-3, weight, residual=other, gate=gate)
    assert torch.equal(total, x + other) and y.dtype == torch.bfloat16
    normed = TorchOps(DEVICE).rms_norm(total, norm, 1e-3)[0]
    codes, scales = quantise_rows(normed, torch.int8 if kind == "INT8" else torch.float8_e4m3fn)
    expected = codes.float() * scales @ matrix.t()
    assert_near(y, TorchOps(DEVICE).gated(expected, gate) if gate else expected, "bfloat16", factor=4)


def test_tiles_fit_into_a_card() -> None:
    """Of the memory of a Hopper, and of a card with less than half of it."""
    assert few_tile(16, 4096, 128, 2, SHARED_BYTES, is_gated=False).num_warps == 8
    assert few_tile(16, 4096, 128, 4, SHARED_BYTES, is_gated=True).num_warps == 4
    assert few_tile(16, 4096, 128, 2, 87_000, is_gated=False).num_warps == 4
    assert many_tile(512, 28672, 256, SHARED_BYTES).rows == 256 and many_tile(512, 28672, 256, 87_000).rows == 64


def stored_weights(weights: dict[str, Tensor], quant_type: str, group_size: int) -> dict[str, Any]:
    """Weights of a model whose matrices in layers are quantised, where they can be."""
    found: dict[str, Any] = dict(weights)
    for name, tensor in weights.items():
        width = tensor.shape[-1]
        if tensor.dim() == 2 and ("layers." in name or "blocks." in name) and width % group_size == 0:
            kind = Quantization(quant_type, 1, group_size if quant_type.startswith("Q4") else width)
            matrix = tensor.float().numpy()
            row = make_row(TensorInfo(name, "float32", tuple(matrix.shape), kind), matrix, find_grid(matrix, kind))
            found[name] = StoredTensor(row.info.shape, "float32", row.data, quant_type, row.scales, row.zero_points)
    return found


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("decoder", ("Q4_1", 32)),
        ("rwkv7", ("Q4_0", 64)),
        *[
            pytest.param(model, kind, marks=pytest.mark.slow)
            for model, kind in (("decoder", ("Q4_0", 64)), ("decoder", ("INT8", 32)), ("rwkv7", ("INT8", 32)))
        ],
    ],
)
def test_models(model: str, kind: tuple[str, int], tmp_path: Path) -> None:
    """Prompts, parts of prompts, decodes, and both beside one another."""
    make_driver: Any = Driver if model == "decoder" else RecurrentDriver
    if model == "decoder":
        theirs, config = make("qwen3")
        config = {**config, "num_hidden_layers": 2, "layer_types": None}
        weights = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    else:
        config, weights = read_rwkv7(write_checkpoint(SIZES["tiny"], tmp_path / "tiny.pth"))
    tokens = np.random.default_rng(3).integers(3, 60, (2, 40)).tolist()
    given = stored_weights(weights, *kind)
    assert sum(isinstance(each, StoredTensor) for each in given.values()) >= 4
    expected, ours = (
        make_driver(ops, given, config, tokens) for ops in (TorchOps(DEVICE), TritonOps(DEVICE, "float32"))
    )
    for work in ([(0, 20)], [(0, 1), (1, 5)], [(1, 1), (0, 2)]):
        for found, right in zip(ours.step(work), expected.step(work), strict=True):
            torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)


def test_a_card_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ops = TritonOps("cuda", "bfloat16")
    assert ops.kept_types == GPU_TYPES - {"FP8"}
    assert stored_parts([random_stored("FP8")], ops.kept_types)[0] is PLAIN
    ops.kv_dtype = "fp8"
    with pytest.raises(InvalidOptionError, match="this card does not have"):
        ops.new_kv_layer(2, 16, 1, 16)
