"""RWKV-7's mixes of a few decodes in few kernels against the operations that they are made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, Input  # isort: skip (triton must interpret)
from archerfish.kernels.recurrent import RecurrentOps, StateMemory  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.mixes import FEW_ROWS, FewRowsRecurrentOps, choose_mix_tile  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.tiles import LinearTile  # isort: skip
from archerfish.kernels.triton.wkv import TritonRecurrentOps  # isort: skip
from archerfish.layers.weights import Weights  # isort: skip
from archerfish.models.config import Config  # isort: skip
from archerfish.models.rwkv7 import Rwkv7Model  # isort: skip
from archerfish.store.rwkv_source import read_rwkv7  # isort: skip
from tests.models.recurring import (  # isort: skip
    GOLDEN,
    SIZES,
    RecurrentDriver,
    Size,
    random_tokens,
    use_recurrent,
    write_checkpoint,
)

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
Model = tuple[Mapping[str, Any], Mapping[str, Tensor]]
NUM_BLOCKS = 40
BOUNDED = 1e-5  # of logits and states in float32
ODD = Size(2, 192, 200, 67, {"w": 8, "a": 6, "v": 5, "g": 17})  # sizes that fill no tile
WIDE = Size(2, 128, 1100, 67, SIZES["tiny"].ranks)  # a feed-forward of some shares
TILES = [
    LinearTile(16, 0, 1, 1), LinearTile(4, 0, 2, 1), LinearTile(16, 64, 2, 2, is_dot=True),
    LinearTile(32, 128, 4, 1, is_dot=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    directory = tmp_path_factory.mktemp("rwkv7")
    sizes = {"tiny": SIZES["tiny"], "odd": ODD, "wide": WIDE, "small": SIZES["small"]}
    return {name: read_rwkv7(write_checkpoint(size, directory / f"{name}.pth")) for name, size in sizes.items()}


@pytest.fixture
def _few_only(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*args: Any) -> None:
        raise AssertionError("left to operations for all steps")

    for name in ("shift", "mix_heads"):
        monkeypatch.setattr(FewRowsRecurrentOps, name, refuse)


class Decodes:
    """One step of decodes, as recorded steps are staged, over states that are NaN in all other slots.

    Sequences go on in place, in a block behind that of their state, or from the empty state, in turns.
    """

    def __init__(
        self, ops: TorchOps, model: Model, num_rows: int, num_real: int, recurrent: RecurrentOps[Tensor] | None = None, *,
        weight_format: str = "auto",
    ) -> None:
        self.ops, self.num_real = ops, num_real
        self.model = Rwkv7Model(Weights(model[1], ops, weight_format=weight_format), Config(model[0]), 64)
        if recurrent is not None:
            use_recurrent(self.model, recurrent)
        self.memory: StateMemory[Tensor] = self.model.recurrent.new_states(
            NUM_BLOCKS + 1, Rwkv7Model.memory_shape(Config(model[0]))
        )
        self.memory.wkv[1:], self.memory.inputs[1:] = float("nan"), float("nan")
        torch.manual_seed(5)
        words = torch.zeros((NUM_INPUTS, num_rows), dtype=torch.int64)
        words[Input.POSITION] = FILLING_POSITION
        blocks = np.random.default_rng(num_rows).permutation(NUM_BLOCKS).tolist()
        for row in range(num_real):
            source, other, kind = blocks.pop(), blocks.pop(), row % 3
            for memory in (self.memory.wkv, self.memory.inputs):
                memory[1 + source] = torch.randn(memory.shape[1:]).to(memory)
            words[Input.TOKEN, row], words[Input.POSITION, row] = 7 + row, 0 if kind == 2 else 9
            words[Input.SOURCE, row] = NO_BLOCK if kind == 2 else source
            words[Input.BLOCK, row] = source if kind == 0 else other
        self.words, self.decode_state = words.to(DEVICE), ops.new_decode_state(num_rows, 1)

    def step(self) -> Tensor:
        batch, _ = self.model.recurrent.decode_batch(self.words, self.decode_state)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(batch, self.memory.layers))[: self.num_real]


def decodes_of(
    model: Model, num_rows: int, num_real: int = 0, *, dtype: str = "float32", tile: LinearTile | None = None
) -> Decodes:
    """With nothing in Triton but the mixes."""
    ops = TorchOps(DEVICE, dtype)
    recurrent = FewRowsRecurrentOps(ops)
    recurrent.mix_tile = tile
    return Decodes(ops, model, num_rows, num_real or num_rows, recurrent)


def noting(name: str, original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return call


def check(decodes: Decodes, reference: Decodes, tolerance: float) -> None:
    expected = reference.step()
    pairs = [(decodes.step(), expected)]
    pairs += [(decodes.memory.wkv, reference.memory.wkv), (decodes.memory.inputs, reference.memory.inputs)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.float(), theirs.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


def check_alone(plain: Decodes, broken: Decodes) -> None:
    """Two of the same: what the first row gives and leaves is the same beside others whose states are no numbers."""
    others = broken.words[Input.SOURCE, 1:]
    broken.memory.wkv[1 + others[others >= 0]] = float("nan")
    broken.memory.inputs[1 + others[others >= 0]] = float("inf")
    assert torch.equal(plain.step()[0], broken.step()[0])
    target = 1 + int(plain.words[Input.BLOCK, 0])
    assert torch.equal(plain.memory.wkv[target], broken.memory.wkv[target])
    assert torch.equal(plain.memory.inputs[target], broken.memory.inputs[target])


def check_captured(captured: Decodes, plain: Decodes) -> None:
    """Many steps, whose kernels may start before the one in front has ended, against such that do not."""
    use_recurrent(plain.model, TritonRecurrentOps(TritonOps(DEVICE, "float32")))
    for decodes in (captured, plain):
        decodes.words[Input.SOURCE] = decodes.words[Input.BLOCK]
        decodes.memory.wkv.nan_to_num_(0.0)
        decodes.memory.inputs.nan_to_num_(0.0)
    repeat = captured.ops.capture(captured.step)
    assert repeat is not None
    plain.step()  # as capturing has done
    for _ in range(20):
        torch.testing.assert_close(repeat(), plain.step(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_filling"),
    [
        ("tiny", 1, 0), ("tiny", 2, 1), ("tiny", 5, 1), ("odd", 8, 0),
        *(pytest.param("tiny", *case, marks=pytest.mark.slow) for case in ((3, 0), (4, 0), (8, 3))),
        pytest.param("odd", 1, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_few_only")
def test_logits_and_states_are_those_of_the_reference(
    name: str, num_rows: int, num_filling: int, models: dict[str, Model]
) -> None:
    num_real = num_rows - num_filling
    reference = Decodes(TorchOps(DEVICE), models[name], num_rows, num_real)
    check(decodes_of(models[name], num_rows, num_real), reference, BOUNDED)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize(("num_rows", "num_kernels"), [(2, 5), (5, 7)])
@pytest.mark.usefixtures("_few_only")
def test_kernels_of_a_layer(
    num_rows: int, num_kernels: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launches: list[str] = []
    monkeypatch.setattr(executor, "__call__", noting("launch", executor.__call__, launches))
    ours = Decodes(TritonOps(DEVICE, "float32"), models["tiny"], num_rows, num_rows)
    check(ours, Decodes(TorchOps(DEVICE), models["tiny"], num_rows, num_rows), BOUNDED)
    assert len(launches) == 2 * num_kernels + 4  # and staging, the lookup, the last norm and the logits


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.usefixtures("_few_only")
def test_every_tile_gives_the_same(tile: LinearTile, models: dict[str, Model]) -> None:
    check(decodes_of(models["odd"], 2, tile=tile), Decodes(TorchOps(DEVICE), models["odd"], 2, 2), BOUNDED)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.01), *([("bfloat16", 0.06)] if HAS_CUDA else [])])
@pytest.mark.parametrize("num_rows", [3, *(pytest.param(num, marks=pytest.mark.slow) for num in (1, 8))])
@pytest.mark.usefixtures("_few_only")
def test_half_precision_is_close(num_rows: int, dtype: str, error: float, models: dict[str, Model]) -> None:
    config, weights = models["tiny"]
    half = config, {name: each.to(getattr(torch, dtype)) for name, each in weights.items()}
    ours, reference = decodes_of(half, num_rows, dtype=dtype), Decodes(TorchOps(DEVICE), half, num_rows, num_rows)
    reference.memory.inputs.copy_(ours.memory.inputs)
    expected, logits = reference.step(), ours.step()
    assert float((logits - expected).norm() / expected.norm()) < error
    is_state = ~reference.memory.wkv.isnan()
    assert torch.equal(is_state, ~ours.memory.wkv.isnan())
    difference = (ours.memory.wkv - reference.memory.wkv)[is_state]
    assert float(difference.norm() / reference.memory.wkv[is_state].norm()) < error


@pytest.mark.parametrize("num_rows", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_the_others(num_rows: int, models: dict[str, Model]) -> None:
    check_alone(*(decodes_of(models["tiny"], num_rows) for _ in range(2)))


def test_decodes_among_other_steps(models: dict[str, Model]) -> None:
    """Golden logits of the package rwkv: a prompt, decodes over the ends of blocks, decodes beside a prompt, wanted rows."""
    config, weights = models["tiny"]
    golden = torch.from_numpy(np.load(GOLDEN))
    ops, tokens = TorchOps(DEVICE), random_tokens(SIZES["tiny"], 3, 100)
    driver = RecurrentDriver(ops, weights, config, tokens, recurrent=FewRowsRecurrentOps(ops), block_size=4)
    for work in ([(0, 3)], [(0, 1)], [(0, 1)], [(0, 1), (1, 3)], [(1, 1), (0, 1)]):
        before = list(driver.num_computed)
        for (i, count), logits in zip(work, driver.step(work), strict=True):
            torch.testing.assert_close(logits.cpu(), golden[i, before[i] : before[i] + count], atol=2e-4, rtol=2e-4)
    (logits,) = driver.step([(0, 1)], keeps_last=True)
    place = driver.num_computed[0] - 1
    torch.testing.assert_close(logits.cpu(), golden[0, place : place + 1], atol=2e-4, rtol=2e-4)


def test_many_decodes_and_other_types_are_left_to_the_operations_for_all_steps(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("mix_time", "mix_channels"):
        original = getattr(RecurrentOps, name)
        monkeypatch.setattr(RecurrentOps, name, noting(name, original, calls))
    decodes_of(models["tiny"], FEW_ROWS + 1).step()
    assert calls == ["mix_time", "mix_channels"] * 2
    config, weights = models["tiny"]
    decodes_of((config, weights), 1).step()
    assert len(calls) == 4
    key = "model.layers.1.ffn.key.weight"
    decodes_of((config, {**weights, key: weights[key].double()}), 1).step()
    assert calls[4:] == ["mix_channels"]


def test_tiles_fit_the_registers() -> None:
    for width in (64, 128, 192, 768, 1024, 2048, 2560, 4096, 8192):
        for num_rows in range(1, FEW_ROWS + 1):
            for element_bytes in (2, 4):
                tile = choose_mix_tile(num_rows, 3 * width, width, element_bytes, torch.device("cpu"))
                assert tile.is_dot == (num_rows > 4 or width > 4096)
                assert tile.is_dot or tile.outputs * tile.columns <= 64 * 32 * tile.num_warps
                assert tile.outputs & (tile.outputs - 1) == 0
                assert not tile.is_dot or tile.outputs >= 16


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_steps_can_be_captured(num_rows: int, models: dict[str, Model]) -> None:
    captured, plain = (Decodes(TritonOps(DEVICE, "float32"), models["small"], num_rows, num_rows) for _ in range(2))
    check_captured(captured, plain)
