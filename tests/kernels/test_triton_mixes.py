"""Whole layers of RWKV-7 in few kernels, for steps of decodes, against the equations of the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.calls import spy_on
from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.decoding import FILLING_POSITION, NO_BLOCK, NUM_INPUTS, Input  # isort: skip (triton must interpret)
from archerfish.kernels.formats import PLAIN, Int8Rows, WeightFormat  # isort: skip
from archerfish.kernels.ops import LinearWeight  # isort: skip
from archerfish.kernels.recurrent import RecurrentOps, StateMemory  # isort: skip
from archerfish.kernels.torch.reference import TorchOps, TorchWeight  # isort: skip
from archerfish.kernels.triton.linear import Int8RowsWeight, PlainRowsWeight, RowsWeight  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton import recurrent  # isort: skip
from archerfish.kernels.triton.recurrent import FEW_ROWS, PART_ROWS, TritonRecurrentOps, choose_part_tile  # isort: skip
from archerfish.kernels.torch.wkv import TorchRecurrentOps  # isort: skip
from archerfish.kernels.triton.tiles import SHARED_BYTES, LinearTile  # isort: skip
from archerfish.layers.weights import Weights  # isort: skip
from archerfish.models.config import Config  # isort: skip
from archerfish.models.rwkv7 import Rwkv7Block, Rwkv7Model  # isort: skip
from tests.models import recurring  # isort: skip
from tests.models.decoding import Driver, make, random_tokens  # isort: skip
from tests.models.recurring import GOLDEN, SIZES, RecurrentDriver, Size, StepDriver, use_recurrent  # isort: skip

pytestmark = [
    untraced,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy's, where the interpreter meets infinity
Tensor = torch.Tensor
Model = tuple[Mapping[str, Any], Mapping[str, Tensor]]
INT8 = Int8Rows()
NUM_BLOCKS = 40
BOUNDED = 1e-5  # of logits and states in float32
MAX_ROWS = PlainRowsWeight.max_rows
DTYPE = "bfloat16" if HAS_CUDA else "float16"
NUM_STEPS = 4 if HAS_CUDA else 2  # a few rows of one step are too few to compare errors by
STEPS = [[(0, 5)], [(0, 1), (1, MAX_ROWS)], [(0, 1), (1, 1)]]  # (sequence, new tokens): many rows, and few
ODD = Size(2, 192, 72, 35, {"w": 8, "a": 6, "v": 5, "g": 17})  # sizes that fill no tile


class MixPlainWeight(PlainRowsWeight):
    multiply = TorchWeight.multiply


class MixInt8Weight(Int8RowsWeight):
    multiply = TorchWeight.multiply


class MixOps(TorchOps):
    """Nothing is in Triton but the mixes."""

    products: ClassVar[Mapping[str, type[TorchWeight]]] = {"plain": MixPlainWeight, "int8": MixInt8Weight}


class UnfusedOps(TritonRecurrentOps):
    fused_block = RecurrentOps.fused_block


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    directory = tmp_path_factory.mktemp("rwkv7")
    sizes = {"tiny": SIZES["tiny"], "odd": ODD, "small": SIZES["small"]}
    written = {name: recurring.write_checkpoint(size, directory / f"{name}.pth") for name, size in sizes.items()}
    return {name: recurring.read_rwkv7(path) for name, path in written.items()}


@pytest.fixture
def _fused_only(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rwkv7Block.mix_time

    def refuse(self: Rwkv7Block[Tensor], *args: Any) -> Any:
        assert not isinstance(self.recurrent, TritonRecurrentOps), "a layer was not computed in kernels of its own"
        return original(self, *args)

    monkeypatch.setattr(Rwkv7Block, "mix_time", refuse)


@pytest.fixture
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, the time is that of the programs, not of what each computes."""
    monkeypatch.setattr(RowsWeight, "tile", LinearTile(64, 64, 4, 1))
    if not HAS_CUDA:
        monkeypatch.setattr(recurrent, "HELD_ELEMENTS", 8192)


class Decodes:
    """One step of decodes, as recorded steps are staged, over states that are NaN in all other slots.

    Every third sequence goes on in place, in another block, or from the empty state.
    """

    def __init__(
        self,
        ops: TorchOps,
        model: Model,
        num_rows: int,
        num_real: int,
        recurrent: RecurrentOps[Tensor] | None = None,
        *,
        weight_format: WeightFormat = PLAIN,
    ) -> None:
        self.ops, self.num_real = ops, num_real
        self.model = Rwkv7Model(Weights(model[1], ops, weight_format=weight_format), Config(model[0]), 64)
        self.recurrent = recurrent or ops.recurrent()
        use_recurrent(self.model, self.recurrent)
        shape = Rwkv7Model.memory_shape(Config(model[0]))
        self.memory: StateMemory[Tensor] = self.recurrent.new_states(NUM_BLOCKS + 1, shape)
        self.memory.wkv[1:], self.memory.inputs[1:] = float("nan"), float("nan")
        torch.manual_seed(5)
        words = torch.zeros((NUM_INPUTS, num_rows), dtype=torch.int64)
        words[Input.POSITION] = FILLING_POSITION
        blocks = np.random.default_rng(num_rows).permutation(NUM_BLOCKS).tolist()
        for row in range(num_real):
            source = blocks.pop()
            other = blocks.pop()
            kind = row % 3
            for memory in (self.memory.wkv, self.memory.inputs):
                memory[1 + source] = torch.randn(memory.shape[1:]).to(memory)
            words[Input.TOKEN, row], words[Input.POSITION, row] = 7 + row, 0 if kind == 2 else 9
            words[Input.SOURCE, row] = NO_BLOCK if kind == 2 else source
            words[Input.BLOCK, row] = source if kind == 0 else other
        self.words, self.decode_state = words.to(DEVICE), ops.new_decode_state(num_rows, 1)

    def step(self) -> Tensor:
        batch, _ = self.recurrent.decode_batch(self.words, self.decode_state)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(batch, self.memory.layers))[: self.num_real]


def decodes_of(
    model: Model,
    num_rows: int,
    num_real: int = 0,
    *,
    dtype: str = "float32",
    parts_rows: int = 64,
    weight_format: WeightFormat = PLAIN,
) -> Decodes:
    ops = MixOps(DEVICE, dtype)
    recurrent = TritonRecurrentOps(ops)
    recurrent.parts_rows = parts_rows
    return Decodes(ops, model, num_rows, num_real or num_rows, recurrent, weight_format=weight_format)


def reference_of(model: Model, num_rows: int, num_real: int = 0, weight_format: WeightFormat = PLAIN) -> Decodes:
    return Decodes(TorchOps(DEVICE), model, num_rows, num_real or num_rows, weight_format=weight_format)


def check(decodes: Decodes, reference: Decodes, tolerance: float) -> None:
    expected = reference.step()
    pairs = [(decodes.step(), expected)]
    pairs += [(decodes.memory.wkv, reference.memory.wkv), (decodes.memory.inputs, reference.memory.inputs)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.float(), theirs.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_real", "parts_rows", "weight_format"),
    [
        ("tiny", 1, 1, 64, PLAIN),
        ("tiny", 2, 1, 64, PLAIN),
        ("odd", 4, 4, 64, PLAIN),
        ("odd", 1, 1, 64, INT8),
        ("tiny", 3, 3, 64, INT8),
        ("tiny", 9, 7, 64, PLAIN),
        ("tiny", 9, 9, 8, PLAIN),
        ("odd", 9, 9, 64, PLAIN),
        ("odd", 9, 9, 8, INT8),
        ("tiny", 9, 9, 64, INT8),
        *(pytest.param("tiny", *case, 64, PLAIN, marks=pytest.mark.slow) for case in ((3, 3), (4, 2))),
        pytest.param("odd", 1, 1, 64, PLAIN, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_fused_only", "_few_programs")
def test_decodes(
    name: str, num_rows: int, num_real: int, parts_rows: int, weight_format: WeightFormat, models: dict[str, Model]
) -> None:
    """parts_rows: up to which one kernel has all products."""
    ours = decodes_of(models[name], num_rows, num_real, parts_rows=parts_rows, weight_format=weight_format)
    check(ours, reference_of(models[name], num_rows, num_real, weight_format), BOUNDED)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize(("num_rows", "num_kernels"), [(2, 5), (FEW_ROWS + 1, 8)])
@pytest.mark.usefixtures("_fused_only")
def test_kernels_of_a_layer(
    num_rows: int, num_kernels: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = spy_on(monkeypatch, executor, "__call__")
    ours = Decodes(TritonOps(DEVICE, "float32"), models["tiny"], num_rows, num_rows)
    check(ours, reference_of(models["tiny"], num_rows), BOUNDED)
    assert launch.call_count == 2 * num_kernels + 4  # and staging, the lookup, the last norm and the logits


@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.01), *([("bfloat16", 0.06)] if HAS_CUDA else [])])
@pytest.mark.parametrize(
    ("num_rows", "weight_format"),
    [(3, PLAIN), (FEW_ROWS + 1, INT8), *(pytest.param(num, PLAIN, marks=pytest.mark.slow) for num in (1, FEW_ROWS))],
)
@pytest.mark.usefixtures("_fused_only", "_few_programs")
def test_half_precision_is_close(
    num_rows: int, weight_format: WeightFormat, dtype: str, error: float, models: dict[str, Model]
) -> None:
    config, weights = models["tiny"]
    half = config, {name: each.to(getattr(torch, dtype)) for name, each in weights.items()}
    ours = decodes_of(half, num_rows, dtype=dtype, weight_format=weight_format)
    reference = reference_of(half, num_rows, num_rows, weight_format)
    reference.memory.inputs.copy_(ours.memory.inputs)
    expected, logits = reference.step(), ours.step()
    assert float((logits - expected).norm() / expected.norm()) < error
    is_state = ~reference.memory.wkv.isnan()
    assert torch.equal(is_state, ~ours.memory.wkv.isnan())
    difference = (ours.memory.wkv - reference.memory.wkv)[is_state]
    assert float(difference.norm() / reference.memory.wkv[is_state].norm()) < error


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize("num_rows", [2, FEW_ROWS + 1])
def test_a_row_does_not_depend_on_the_others(num_rows: int, models: dict[str, Model]) -> None:
    """The first row's logits and state are the same if the states of all other rows are NaN."""
    plain, broken = (decodes_of(models["tiny"], num_rows) for _ in range(2))
    others = broken.words[Input.SOURCE, 1:]
    broken.memory.wkv[1 + others[others >= 0]] = float("nan")
    broken.memory.inputs[1 + others[others >= 0]] = float("inf")
    assert torch.equal(plain.step()[0], broken.step()[0])
    target = 1 + int(plain.words[Input.BLOCK, 0])
    assert torch.equal(plain.memory.wkv[target], broken.memory.wkv[target])
    assert torch.equal(plain.memory.inputs[target], broken.memory.inputs[target])


@pytest.mark.usefixtures("_few_programs")
def test_decodes_among_other_steps(models: dict[str, Model]) -> None:
    """Golden logits of the package rwkv: a prompt, decodes over the ends of blocks, decodes beside a prompt, wanted
    rows."""
    config, weights = models["tiny"]
    golden = torch.from_numpy(np.load(GOLDEN))
    ops, tokens = MixOps(DEVICE), recurring.random_tokens(SIZES["tiny"], 3, 100)
    driver = RecurrentDriver(ops, weights, config, tokens, recurrent=TritonRecurrentOps(ops), block_size=4)
    driver.check(([(0, 19)], [(0, 1)], [(0, 1), (1, 3)], [(1, 1), (0, 1)]), golden, 2e-4)
    (logits,) = driver.step([(0, 1)], keeps_last=True)
    place = driver.num_computed[0] - 1
    torch.testing.assert_close(logits.cpu(), golden[0, place : place + 1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "weight_format"),
    [("time.key", INT8), ("channel.key", INT8), ("time.decay.up", PLAIN), ("time.decay.up", INT8)],
)
def test_layers_whose_weights_differ_are_not_fused(
    name: str, weight_format: WeightFormat, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one matrix of a mix has another format than the others, or a bias that the kernels do not expect."""
    mix_time = spy_on(monkeypatch, Rwkv7Block, "mix_time")
    ours, reference = (decodes_of(models["tiny"], 2), reference_of(models["tiny"], 2))
    names = name.split(".")
    tensor = {"time.key": "attn.k_proj", "channel.key": "ffn.key", "time.decay.up": "attn.w_lora.lora.2"}[name]
    weight = models["tiny"][1][f"model.layers.1.{tensor}.weight"].to(DEVICE)
    for decodes in (ours, reference):
        owners: list[Any] = [decodes.model.blocks[1].weights]
        for part in names[:-1]:
            owners.append(getattr(owners[-1], part))
        changed: Any = decodes.ops.linear_weight([weight], [None], weight_format)
        for owner, part in zip(owners[:0:-1], names[:0:-1], strict=True):
            changed = owner._replace(**{part: changed})
        object.__setattr__(owners[0], names[0], changed)
    check(ours, reference, BOUNDED)
    is_fused = name == "channel.key"  # all matrices of a mix have one format, but the two mixes may have different ones
    assert mix_time.call_count == (2 if is_fused else 3)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tile_fits_the_shared_memory(element_bytes: int) -> None:
    tile = choose_part_tile(element_bytes, torch.device("cpu"))
    assert tile.num_stages * (PART_ROWS + tile.outputs) * tile.columns * element_bytes <= SHARED_BYTES


@pytest.mark.skipif(not HAS_CUDA, reason="graphs are CUDA's")
@pytest.mark.parametrize(("num_rows", "parts_rows"), [(1, 64), (4, 64), (8, 64), (20, 64), (20, 8)])
def test_steps_can_be_captured(num_rows: int, parts_rows: int, models: dict[str, Model]) -> None:
    """Many steps, whose kernels may start before the kernel in front has ended, against kernels that do not."""
    captured, plain = (Decodes(TritonOps(DEVICE, "float32"), models["small"], num_rows, num_rows) for _ in range(2))
    recurrent = TritonRecurrentOps(TritonOps(DEVICE, "float32"))
    recurrent.parts_rows = parts_rows
    use_recurrent(captured.model, recurrent)
    use_recurrent(plain.model, UnfusedOps(TritonOps(DEVICE, "float32")))
    for decodes in (captured, plain):
        decodes.words[Input.SOURCE] = decodes.words[Input.BLOCK]
        decodes.memory.wkv.nan_to_num_(0.0)
        decodes.memory.inputs.nan_to_num_(0.0)
    repeat = captured.ops.capture(captured.step)
    assert repeat is not None
    plain.step()  # as capturing has done
    for _ in range(20):
        torch.testing.assert_close(repeat(), plain.step(), atol=1e-3, rtol=1e-3)


# Models in half precision, whose layers are added up in float32


class WatchedOps(TritonOps):
    """Notes the types of what products are added to, of the sums, and of what is normalised.

    Attention, which takes the interpreter long, is torch's.
    """

    store_kv = TorchOps.store_kv
    paged_attention = TorchOps.paged_attention
    store_and_attend = TorchOps.store_and_attend

    def __init__(self) -> None:
        super().__init__(DEVICE, DTYPE)
        self.sums: list[torch.dtype] = []
        self.normed: list[torch.dtype] = []

    def linear(self, x: Tensor, weight: LinearWeight[Tensor], **options: Any) -> Tensor:
        y = super().linear(x, weight, **options)
        if options.get("residual") is not None:
            self.sums += [options["residual"].dtype, y.dtype]
        return y

    def normed_linear(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, total = super().normed_linear(x, *args, **options)
        self.sums.append(total.dtype)
        self.normed.append(y.dtype)
        return y, total


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.to(DEVICE, getattr(torch, DTYPE)) for name, each in weights.items()}


def distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).square().mean().sqrt())


def backends(ours: TorchOps) -> list[TorchOps]:
    return [TorchOps(DEVICE), TorchOps(DEVICE, DTYPE), ours]


def check_nearer(drivers: Sequence[StepDriver], *, keeps_last: bool = True) -> None:
    """drivers: the reference in float32, torch's in half precision, and ours."""
    found = [[torch.cat(driver.step(work, keeps_last=keeps_last)) for driver in drivers] for work in STEPS]
    expected, theirs, mine = (torch.cat(each) for each in zip(*found, strict=True))
    assert distance(mine, expected) < distance(theirs, expected)


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize(
    ("kind", "keeps_last"),
    [("llama", True), ("llama", False), ("llama-biases", True), ("qwen3", True), ("gemma2", True)],
)
def test_decoders_are_nearer_to_float32_than_with_rounded_sums(kind: str, keeps_last: bool) -> None:
    model, config = make(kind)
    weights, ours = rounded(model.state_dict()), WatchedOps()
    config = {**config, "num_hidden_layers": 2, "layer_types": None}
    check_nearer([Driver(ops, weights, config, random_tokens(2)) for ops in backends(ours)], keeps_last=keeps_last)
    assert set(ours.sums) == {torch.float32}
    assert set(ours.normed) == {getattr(torch, DTYPE)}


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1])
@pytest.mark.usefixtures("_fused_only", "_few_programs")
def test_decodes_of_rwkv7(num_rows: int, models: dict[str, Model]) -> None:
    config, weights = models["tiny"][0], rounded(models["tiny"][1])
    ours, ops = Decodes(WatchedOps(), (config, weights), num_rows, num_rows), TorchOps(DEVICE, DTYPE)
    halves = Decodes(ops, (config, weights), num_rows, num_rows)
    reference = Decodes(TorchOps(DEVICE), (config, weights), num_rows, num_rows)
    reference.memory.inputs.copy_(ours.memory.inputs)
    expected, theirs, mine = (torch.cat([each.step() for _ in range(NUM_STEPS)]) for each in (reference, halves, ours))
    assert distance(mine, expected) < distance(theirs, expected)
    assert isinstance(ours.ops, WatchedOps)
    assert set(ours.ops.sums) == {torch.float32}


@pytest.mark.usefixtures("_few_programs")
def test_other_steps_of_rwkv7(models: dict[str, Model]) -> None:
    config, weights = models["tiny"][0], rounded(models["tiny"][1])
    tokens, ours = recurring.random_tokens(SIZES["tiny"], 2, 40), WatchedOps()
    check_nearer(
        [RecurrentDriver(ops, weights, config, tokens, recurrent=TorchRecurrentOps(ops)) for ops in backends(ours)]
    )
    assert set(ours.sums) == {torch.float32}
