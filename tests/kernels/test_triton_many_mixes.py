"""RWKV-7's mixes of many decodes in few kernels against the operations that they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_triton_mixes import (  # noqa: F401 (models: a fixture)
    BOUNDED,
    Decodes,
    Model,
    check,
    check_alone,
    check_captured,
    models,
)
from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.recurrent import Stream  # isort: skip (triton must interpret)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.many_mixes import DecodingRecurrentOps, choose_part_tile  # isort: skip
from archerfish.kernels.triton.mixes import FEW_ROWS, PART_ROWS  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import SHARED_BYTES  # isort: skip
from tests.models.recurring import SIZES, use_recurrent  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity


def many(model: Model, num_rows: int, num_real: int, parts_rows: int) -> Decodes:
    ops = TorchOps(DEVICE)
    recurrent = DecodingRecurrentOps(ops)
    recurrent.parts_rows = parts_rows
    return Decodes(ops, model, num_rows, num_real, recurrent)


@pytest.mark.parametrize(
    ("name", "num_real", "parts_rows"), [("tiny", 7, 64), ("tiny", 9, 8), ("odd", 9, 64), ("odd", 9, 8)]
)
def test_logits_and_states_are_those_of_the_reference(
    name: str, num_real: int, parts_rows: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("left to operations for all steps")

    monkeypatch.setattr(DecodingRecurrentOps, "shift", refuse)
    num_rows = FEW_ROWS + 1
    reference = Decodes(TorchOps(DEVICE), models[name], num_rows, num_real)
    check(many(models[name], num_rows, num_real, parts_rows), reference, BOUNDED)


@pytest.mark.parametrize(("name", "parts_rows"), [("odd", 64), ("wide", 64), ("tiny", 8)])
def test_shares_of_a_last_product_end_in_the_stream(
    name: str, parts_rows: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Between layers, where the next norm adds them, and behind the last one."""
    monkeypatch.setattr("archerfish.kernels.triton.tiles.MIN_SHARES_WIDTH", 150)
    shapes: list[tuple[int, ...]] = []
    add_shares_of = DecodingRecurrentOps.add_shares_of

    def noted(self: DecodingRecurrentOps, *args: Any) -> Any:
        stream = add_shares_of(self, *args)
        shapes.append(() if stream.shares is None else tuple(stream.shares.shape))
        return stream

    monkeypatch.setattr(DecodingRecurrentOps, "add_shares_of", noted)
    num_rows, (config, _) = FEW_ROWS + 3, models[name]
    reference = Decodes(TorchOps(DEVICE), models[name], num_rows, num_rows)
    check(many(models[name], num_rows, num_rows, parts_rows), reference, BOUNDED)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    expected = [(-(-size // 512), num_rows, width) if size >= 150 else () for size in (width, hidden)]
    assert shapes == expected * config["num_hidden_layers"]


def test_a_row_does_not_depend_on_the_others(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("archerfish.kernels.triton.tiles.MIN_SHARES_WIDTH", 150)
    check_alone(*(many(models["tiny"], FEW_ROWS + 1, FEW_ROWS + 1, 64) for _ in range(2)))


@pytest.mark.parametrize("name", ["attn.r_proj", "ffn.key"])
def test_operations_for_all_steps_add_up_what_was_left(
    name: str, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Where a layer has a weight that is not as kernels read it."""
    monkeypatch.setattr("archerfish.kernels.triton.tiles.MIN_SHARES_WIDTH", 100)
    totals: list[bool] = []
    total = DecodingRecurrentOps.total

    def noted(self: DecodingRecurrentOps, stream: Stream[torch.Tensor]) -> torch.Tensor:
        totals.append(stream.shares is not None)
        return total(self, stream)

    monkeypatch.setattr(DecodingRecurrentOps, "total", noted)
    (config, weights), key = models["odd"], f"model.layers.1.{name}.weight"
    model, num_rows = (config, {**weights, key: weights[key].double()}), FEW_ROWS + 1
    check(many(model, num_rows, num_rows, 64), Decodes(TorchOps(DEVICE), model, num_rows, num_rows), BOUNDED)
    assert totals[0] and totals[-1] == (name == "attn.r_proj")  # behind operations for all there is nothing left


def test_stages_of_a_tile_fit() -> None:
    for element_bytes in (2, 4):
        tile = choose_part_tile(element_bytes, torch.device("cpu"))
        assert tile.num_stages * (PART_ROWS + tile.outputs) * tile.columns * element_bytes <= SHARED_BYTES


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize(("num_rows", "parts_rows"), [(20, 64), (20, 8)])
def test_steps_can_be_captured(
    num_rows: int, parts_rows: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """With last products added to the stream and in shares, whose kernels follow one another in different ways."""
    monkeypatch.setattr("archerfish.kernels.triton.tiles.MIN_SHARES_WIDTH", SIZES["small"].feed_forward)
    captured, plain = (Decodes(TritonOps(DEVICE, "float32"), models["small"], num_rows, num_rows) for _ in range(2))
    recurrent = DecodingRecurrentOps(TritonOps(DEVICE, "float32"))
    recurrent.parts_rows = parts_rows
    use_recurrent(captured.model, recurrent)
    check_captured(captured, plain)
