"""int8 weights in Triton's kernels against the reference, which widens them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.triton_support import DEVICE, TYPES, combine, random, untraced

from archerfish.kernels.ops import Activation, LinearWeight  # isort: skip (triton must interpret)
from archerfish.kernels.recurrent import RecurrentOps  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.many_mixes import DecodingRecurrentOps  # isort: skip
from archerfish.kernels.triton.mixes import FewRowsRecurrentOps  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import HOPPER_BYTES, MAX_INT8_ROWS, MAX_ROWS, LinearTile, tile_of  # isort: skip
from archerfish.store.rwkv_source import read_rwkv7  # isort: skip
from archerfish.types import INT8  # isort: skip
from tests.kernels.test_triton_linear import STREAMS, TILES, check  # isort: skip
from tests.kernels.test_triton_mixes import BOUNDED, ODD, Decodes, Model  # isort: skip
from tests.kernels.test_triton_mixes import TILES as MIX_TILES  # isort: skip
from tests.kernels.test_triton_mixes import check as check_mixes  # isort: skip
from tests.models.recurring import SIZES, write_checkpoint  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor


def weights(
    num_outputs: int, width: int, dtype: str, *, has_bias: bool = False
) -> tuple[LinearWeight[Tensor], LinearWeight[Tensor]]:
    """For Triton in a type, and for the reference in float32: the same integers."""
    weight = random(num_outputs, width, dtype=dtype) * width**-0.5
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    wide = TorchOps(DEVICE).linear_weight([weight], [None if bias is None else bias.float()], weight_format=INT8)
    return TritonOps(DEVICE, dtype).linear_weight([weight], [bias], weight_format=INT8), wide


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    directory = tmp_path_factory.mktemp("rwkv7")
    sizes = {"tiny": SIZES["tiny"], "odd": ODD}
    return {name: read_rwkv7(write_checkpoint(size, directory / f"{name}.pth")) for name, size in sizes.items()}


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("left to operations for all")


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width", "dtype"),
    [
        (num_rows, *size, dtype)
        for num_rows, size, dtype in combine([1, 2, 5, 16, 17, 64, 65], [(48, 64), (37, 100), (3, 515)], TYPES)
    ],
)
def test_linear(num_rows: int, num_outputs: int, width: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = random(num_rows, 2 * width, dtype=dtype)[:, :width], random(num_rows, num_outputs, dtype=dtype)
    weight, wide = weights(num_outputs, width, dtype, has_bias=True)
    ops, reference, given = TritonOps(DEVICE, dtype), TorchOps(DEVICE), residual.float()
    expected = reference.linear(x.float(), wide), reference.linear(x.float(), wide, residual=given)
    if num_rows <= MAX_INT8_ROWS:
        monkeypatch.setattr(TorchOps, "linear", refuse)
    y, added = ops.linear(x, weight), ops.linear(x, weight, residual=residual)
    assert y.dtype == added.dtype == x.dtype
    check(y, expected[0], dtype)
    check(added, expected[1], dtype)


@pytest.mark.parametrize(
    ("tile", "width", "gate", "dtype"), combine([*TILES, *STREAMS], [128, 300], [None, "silu"], TYPES)
)
def test_every_tile_scales_the_finished_sum(tile: LinearTile, width: int, gate: Activation | None, dtype: str) -> None:
    """Before bias, activation, gate and residual; behind the norm's factor."""
    ops, reference, num_rows = TritonOps(DEVICE, dtype), TorchOps(DEVICE), 1 if tile.num_programs else 3
    ops.linear_tile = tile
    x, norm, residual = random(num_rows, width, dtype=dtype), random(width), random(num_rows, 38, dtype=dtype)
    weight, wide = weights(38, width, dtype, has_bias=True)
    y, _ = ops.normed_linear(x, norm, 1e-3, weight, gate=gate)
    check(y, reference.normed_linear(x.float(), norm, 1e-3, wide, gate=gate)[0], dtype)
    check(ops.linear(x, weight, activation="relu"), reference.linear(x.float(), wide, activation="relu"), dtype)
    y = ops.linear(x, weight, residual=residual)
    check(y, reference.linear(x.float(), wide, residual=residual.float()), dtype)


@pytest.mark.parametrize("num_rows", [2, MAX_ROWS + 1, MAX_INT8_ROWS])
def test_logits_are_not_rounded(num_rows: int) -> None:
    x = random(num_rows, 64, dtype="float16")
    head, wide = weights(50, 64, "float16")
    check(TritonOps(DEVICE, "float16").logits(x, head), TorchOps(DEVICE).logits(x.float(), wide), "float32")


def test_many_rows_are_added_to_the_residual_before_they_are_rounded() -> None:
    x, residual = random(MAX_INT8_ROWS + 1, 64, dtype="float16"), 100 * random(MAX_INT8_ROWS + 1, 24, dtype="float16")
    weight, wide = weights(24, 64, "float16")
    expected = TorchOps(DEVICE).linear(x.float(), wide, residual=residual.float())
    y = TritonOps(DEVICE, "float16").linear(x, weight, residual=residual)
    assert float((y - expected.half()).float().norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize("num_rows", [1, 5, MAX_INT8_ROWS + 1])
def test_sums_in_float32(num_rows: int) -> None:
    """Rows that run past the layers are normalised for a product, and a product is added to them, unrounded."""
    ops, reference, norm = TritonOps(DEVICE, "float16"), TorchOps(DEVICE), random(64)
    weight, wide = weights(24, 64, "float16")
    x, rows, residual = random(num_rows, 64, dtype="float16"), random(num_rows, 64), random(num_rows, 24)
    expected = reference.linear(x.float(), wide, residual=residual)
    y, _ = ops.normed_linear(rows, norm, 1e-3, weight, gate="silu")
    assert y.dtype == torch.float16
    check(y, reference.normed_linear(rows, norm, 1e-3, wide, gate="silu")[0], "float16")
    y = ops.linear(x, weight, residual=residual)
    assert y.dtype == torch.float32
    check(y, expected, "float32" if num_rows <= MAX_INT8_ROWS else "float16")  # of many, weights are widened to float16


def test_tiles_of_all_rows_fit_the_card() -> None:
    for num_rows in range(1, MAX_INT8_ROWS + 1):
        for num_outputs in (1024, 4096, 65536):
            for width in (768, 1024, 4096):
                for element_bytes in (2, 4):
                    tile = tile_of(num_rows, num_outputs, width, False, element_bytes)
                    taken = (max(8, num_rows) + tile.outputs) * tile.columns * element_bytes * tile.num_stages
                    assert not tile.is_dot or taken <= HOPPER_BYTES


def decodes_of(
    model: Model, num_rows: int, recurrent: type[FewRowsRecurrentOps] = FewRowsRecurrentOps, *, dtype: str = "float32",
    tile: LinearTile | None = None,
) -> Decodes:
    """With nothing in Triton but the mixes."""
    ops = TorchOps(DEVICE, dtype)
    mixes = recurrent(ops)
    mixes.mix_tile = tile
    return Decodes(ops, model, num_rows, num_rows, mixes, weight_format=INT8)


def reference_of(model: Model, num_rows: int) -> Decodes:
    return Decodes(TorchOps(DEVICE), model, num_rows, num_rows, weight_format=INT8)


@pytest.mark.parametrize(("name", "num_rows"), [("tiny", 1), ("odd", 1), ("tiny", 3), ("tiny", 5), ("odd", 5)])
def test_mixes_of_few_rows(name: str, num_rows: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    reference, ours = reference_of(models[name], num_rows), decodes_of(models[name], num_rows)
    for method in ("shift", "mix_heads"):
        monkeypatch.setattr(FewRowsRecurrentOps, method, refuse)
    check_mixes(ours, reference, BOUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("tile", MIX_TILES)
def test_every_tile_of_the_mixes(tile: LinearTile, models: dict[str, Model]) -> None:
    check_mixes(decodes_of(models["tiny"], 2, tile=tile), reference_of(models["tiny"], 2), BOUNDED)


@pytest.mark.parametrize(("parts_rows", "name"), [(64, "tiny"), (16, "odd")])
def test_mixes_of_many_rows(parts_rows: int, name: str, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """All products in one kernel, and the wide ones left to torch, for which weights are widened."""
    monkeypatch.setattr(DecodingRecurrentOps, "parts_rows", parts_rows)
    reference, ours = reference_of(models[name], 18), decodes_of(models[name], 18, DecodingRecurrentOps)
    for method in ("mix_time", "mix_channels"):
        monkeypatch.setattr(RecurrentOps, method, noted_reference(reference, getattr(RecurrentOps, method)))
    check_mixes(ours, reference, BOUNDED)


def noted_reference(reference: Decodes, original: Any) -> Any:
    """The operations for all steps, for the reference alone."""

    def call(self: Any, *args: Any) -> Any:
        assert self is not None and self.ops is reference.ops, "left to operations for all"
        return original(self, *args)

    return call


@pytest.mark.parametrize("num_rows", [1, 18])
def test_a_whole_step_in_half_precision_is_close(num_rows: int, models: dict[str, Model]) -> None:
    config, stored = models["tiny"]
    half = config, {name: each.half() for name, each in stored.items()}
    ours = Decodes(TritonOps(DEVICE, "float16"), half, num_rows, num_rows, weight_format=INT8)
    reference = reference_of(half, num_rows)
    reference.memory.inputs.copy_(ours.memory.inputs)
    expected, logits = reference.step(), ours.step()
    assert float((logits - expected).norm() / expected.norm()) < 0.01


def test_weights_that_are_int8_in_part_are_left_to_the_operations_for_all(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = RecurrentOps.mix_time

    def note(*args: Any) -> Any:
        calls.append("mix_time")
        return original(*args)

    monkeypatch.setattr(RecurrentOps, "mix_time", note)
    ours, reference = decodes_of(models["tiny"], 2), reference_of(models["tiny"], 2)
    for decodes in (ours, reference):
        mix = decodes.model.blocks[1].time_mix
        key = models["tiny"][1]["model.layers.1.attn.k_proj.weight"].to(DEVICE)
        object.__setattr__(mix.weights, "key", decodes.ops.linear_weight([key], [None]))
    check_mixes(ours, reference, BOUNDED)
    assert len(calls) == 3  # both layers of the reference, and one of ours
