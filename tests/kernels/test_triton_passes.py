"""Batches that are made on the device: of prompts and decodes, recorded where there is a card, and of decodes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_llama import TINY
from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.triton.ops import TritonOps  # isort: skip (triton must interpret)
from archerfish.kernels.ops import KVLayer  # isort: skip
from archerfish.kernels.decoding import FIRST_FLOAT, NUM_INPUTS, ON_DEVICE, Input, PassSize  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.linear import RowsWeight  # isort: skip
from archerfish.kernels.triton.plan import find_plan  # isort: skip
from archerfish.kernels.triton.tiles import LinearTile  # isort: skip
from archerfish.layers.weights import Weights  # isort: skip
from archerfish.models.adapter import model_class  # isort: skip
from archerfish.models.config import Config  # isort: skip
from archerfish.runtime.batch import build_batch  # isort: skip

pytestmark = untraced
Tensor = torch.Tensor
BLOCK_SIZE = 4
NUM_BLOCKS = 100
MAX_BLOCKS = 30
NUM_SEQUENCES = 3
BLOCKS = np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS))[
    : NUM_SEQUENCES * MAX_BLOCKS
]  # 0 belongs to none
TABLES = BLOCKS.reshape(NUM_SEQUENCES, MAX_BLOCKS)
TOKENS = [[3 + (7 * i + i * i + 5 * row) % 90 for i in range(110)] for row in range(NUM_SEQUENCES)]
Spans = list[tuple[int, int, int]]  # row, begin and end of the new tokens of sequences, decodes first
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 1},
    "windowed": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 9,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 1,
    },
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(RowsWeight, "tile", LinearTile(64, 64, 4, 1))


class Passes:
    """Logits behind the last token of sequences, by either way, over memory that is NaN at first."""

    def __init__(self, changes: dict[str, Any], ops: TorchOps) -> None:
        self.ops, values = ops, Config({**TINY, **changes})
        weights = self.ops.random_weights(model_class(values).noted(values).shapes)
        self.model = model_class(values)(Weights(weights, self.ops), values, BLOCK_SIZE * MAX_BLOCKS)
        self.ops.prepare()
        shape: Any = self.model.memory_shape(values)
        self.layers: list[KVLayer[Tensor]] = []
        for _ in range(shape.num_layers):
            layer = self.ops.new_kv_layer(NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
            self.layers.append(layer)

    def of_host(self, spans: Spans, keeps_all: bool) -> Tensor:
        tokens, blocks = (
            [TOKENS[row][start:end] for row, start, end in spans],
            [TABLES[row].tolist() for row, _, _ in spans],
        )
        with torch.inference_mode():
            batch = build_batch(
                self.ops, tokens=tokens, starts=[start for _, start, _ in spans], blocks=blocks, block_size=BLOCK_SIZE
            )
            hidden, last = self.model.forward(batch, self.layers), np.cumsum([len(some) for some in tokens]) - 1
            found: Tensor = self.model.logits(hidden if keeps_all else self.ops.rows(hidden, last))
            return found

    def of_device(self, size: PassSize, steps: list[Spans], keeps_all: bool) -> list[Tensor]:
        """Passes of a size, one after the other."""
        inputs, state = (
            self.ops.tensor(np.zeros(size.num_words, dtype=np.int64)),
            self.ops.new_decode_state(3, MAX_BLOCKS),
        )
        self.ops.set_tables(state, np.arange(NUM_SEQUENCES), TABLES)

        def step() -> Tensor:
            batch, _, _ = self.ops.pass_batch(inputs, size, state, BLOCK_SIZE, keeps_all=keeps_all)
            found: Tensor = self.model.logits(self.model.forward(batch, self.layers))
            return found

        found = []
        with torch.inference_mode():
            repeat = self.ops.capture(step) or step
            for spans in steps:
                words = np.zeros(size.num_words, dtype=np.int64)
                columns = words[: NUM_INPUTS * size.num_columns].reshape(NUM_INPUTS, -1)
                tokens = words[NUM_INPUTS * size.num_columns :]
                columns[Input.ROW] = NUM_SEQUENCES
                columns[Input.POSITION] = -1
                columns[Input.COUNT, : size.num_decodes] = 1
                num_decodes, place = sum(end - start == 1 for _, start, end in spans), size.num_decodes
                own = [i if i < num_decodes else i - num_decodes + size.num_decodes for i in range(len(spans))]
                for column, (row, start, end) in zip(own, spans, strict=True):
                    columns[: Input.KEY, column] = 0, row, end - 1, end - start, 0, 0
                    if column < size.num_decodes:
                        tokens[column], state.last_tokens[row] = ON_DEVICE, TOKENS[row][start]
                    else:
                        tokens[place : place + end - start] = TOKENS[row][start:end]
                        place += end - start
                self.ops.send(words, inputs)
                kept = [*range(num_decodes), *range(size.num_decodes, place)] if keeps_all else own
                found.append(repeat()[kept].clone())
        return found


MIXED = [[(1, 0, 3), (0, 0, 5)], [(2, 0, 1), (1, 3, 4), (0, 5, 14)], [(0, 14, 15), (2, 1, 7)]]
CASES: list[tuple[str, str, PassSize, list[Spans]]] = [
    ("qwen3", "float32", PassSize(2, 2, 16), MIXED),
    ("windowed", "float32", PassSize(3, 4, 16), MIXED),
    ("llama", "float32", PassSize(0, 2, 40), [[(1, 0, 38), (2, 0, 2)], [(1, 38, 41)]]),  # more rows than a tile
]
if HAS_CUDA:  # bfloat16 is wrong in the interpreter
    CASES += [(name, "bfloat16", PassSize(2, 3, 64), [*MIXED, [(0, 15, 60), (1, 4, 20)]]) for name in VARIANTS]


@pytest.mark.parametrize(
    ("name", "dtype", "size", "steps", "keeps_all"),
    [*((*case, False) for case in CASES), (*CASES[0], True), *((*case, True) for case in CASES[3:])],
)
def test_logits_and_keys_are_those_of_a_batch_of_the_host(
    name: str, dtype: str, size: PassSize, steps: list[Spans], keeps_all: bool
) -> None:
    host = TritonOps if HAS_CUDA else TorchOps  # the interpreter takes long
    plain, recorded = (Passes(VARIANTS[name], kind(DEVICE, dtype)) for kind in (host, TritonOps))
    expected = [plain.of_host(spans, keeps_all) for spans in steps]
    error = 1e-4 if dtype == "float32" else 0.05
    for own, other in zip(recorded.of_device(size, steps, keeps_all), expected, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other, rtol=error, atol=0.4 * error)
    for layer, other_layer in zip(recorded.layers, plain.layers, strict=True):
        for memory, other in ((layer.keys, other_layer.keys), (layer.values, other_layer.values)):
            torch.testing.assert_close(memory, other, rtol=error, atol=error, equal_nan=True)  # fillings left nothing


def test_inputs_of_decodes_become_the_batch_of_the_reference() -> None:
    ops, reference = TritonOps(DEVICE, "float32"), TorchOps(DEVICE, "float32")
    words = np.zeros((NUM_INPUTS, 5), dtype=np.int64)
    words[Input.ROW], words[Input.POSITION] = [2, 0, 5, 6, 6], [1037, 0, 16, -1, -1]
    words[Input.TOKEN], words[Input.BLOCK] = [ON_DEVICE, 7, ON_DEVICE, 0, 0], [88, 77, 66, 0, 0]
    words[Input.NUM_SHARED, 0] = 32
    words[FIRST_FLOAT:].view(np.float64)[:] = 1.0
    tables = np.random.default_rng(0).integers(0, 99, (6, 600))
    inputs = ops.tensor(words)
    found = []
    for one in (ops, reference):
        state = one.new_decode_state(6, 600)
        one.set_tables(state, np.arange(6), tables)
        state.last_tokens.copy_(10 * torch.arange(7))
        batch, sampling = one.decode_batch(inputs, state, 2, is_shared=True)
        one.keep_tokens(inputs, state, torch.arange(5, device=DEVICE))
        found.append((state, batch, sampling))
    (state, batch, sampling), (other_state, other, other_sampling) = found
    assert batch.token_ids.tolist() == other.token_ids.tolist() == [20, 7, 50, 0, 0]
    assert batch.positions.tolist() == other.positions.tolist()
    assert batch.slots.tolist() == [*other.slots.tolist()[:3], -1, -1]
    assert batch.slots.tolist()[:3] == [2 * 88 + 1, 2 * 77, 2 * 66]
    for row, num_blocks in enumerate((519, 1, 9)):
        assert batch.block_tables[row, :num_blocks].tolist() == other.block_tables[row, :num_blocks].tolist()
    assert torch.equal(state.tables[:6], other_state.tables[:6])
    assert torch.equal(state.last_tokens[:6], other_state.last_tokens[:6])
    assert state.last_tokens.tolist()[:6] == [1, 10, 0, 30, 40, 2]
    assert sampling.positions is not None and other_sampling.positions is not None
    assert sampling.positions.tolist() == other_sampling.positions.tolist() == [1038, 1, 17, 0, 0]
    plan = find_plan(batch)
    assert plan.context_lens.tolist() == [1038, 1, 17, 0, 0]
    assert plan.shared_len is not None
    assert plan.shared_len.tolist() == [32]


def test_the_token_behind_the_last_row_of_a_sequence_is_remembered() -> None:
    """A decode, drafts of 3 and 2 tokens, and 3 rows of filling."""
    ops, size = TorchOps("cpu", "float32"), PassSize(1, 2, 8)
    state, words = ops.new_decode_state(3, MAX_BLOCKS), np.zeros(size.num_words, dtype=np.int64)
    columns = words[: NUM_INPUTS * 3].reshape(NUM_INPUTS, 3)
    columns[Input.ROW] = (2, 0, 1)
    columns[Input.POSITION] = (9, 5, 7)
    columns[Input.COUNT] = (1, 3, 2)
    columns[Input.KEY] = 10, 20, 30
    _, sampling, chosen = ops.pass_batch(ops.tensor(words), size, state, BLOCK_SIZE, keeps_all=True)
    assert sampling.keys is not None and sampling.positions is not None
    assert chosen[Input.ROW].tolist() == [2, 3, 3, 0, 3, 1, 3, 3, 3]
    assert sampling.positions.tolist() == [10, 4, 5, 6, 7, 8, 0, 0, 0]
    assert sampling.keys.tolist()[:6] == [10, 20, 20, 20, 30, 30]
