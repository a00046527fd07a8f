"""Batches that are made on the device: of a prompt, recorded where there is a card, and of a step of decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_llama import TINY
from tests.kernels.triton_support import DEVICE, HAS_CUDA, untraced

from archerfish.kernels.triton.ops import TritonOps  # isort: skip (triton must interpret)
from archerfish.kernels.ops import KVLayer  # isort: skip
from archerfish.kernels.decoding import FIRST_FLOAT, NUM_INPUTS, ON_DEVICE, Input, Word  # isort: skip
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
BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 40, 30
BLOCKS = np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS))[:MAX_BLOCKS].tolist()  # block 0 belongs to no sequence
TOKENS = [3 + (7 * i + i * i) % 90 for i in range(110)]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "windowed": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(RowsWeight, "tile", LinearTile(64, 64, 4, 1))


class Passes:
    """Logits behind the last token of passes over one sequence, by either way, over memory that is NaN at first."""

    def __init__(self, changes: dict[str, Any], ops: TorchOps) -> None:
        self.ops, values = ops, Config({**TINY, **changes})
        weights = self.ops.random_weights(model_class(values).dummy_shapes(values))
        self.model = model_class(values)(Weights(weights, self.ops), values, BLOCK_SIZE * MAX_BLOCKS)
        self.ops.prepare()
        shape: Any = self.model.memory_shape(values)
        self.layers: list[KVLayer[Tensor]] = []
        for _ in range(shape.num_layers):
            layer = self.ops.new_kv_layer(NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
            self.layers.append(layer)

    def of_host(self, start: int, end: int) -> Tensor:
        with torch.inference_mode():
            batch = build_batch(
                self.ops, tokens=[TOKENS[start:end]], starts=[start], blocks=[BLOCKS[: -(-end // BLOCK_SIZE)]],
                block_size=BLOCK_SIZE,
            )
            hidden = self.model.forward(batch, self.layers)
            found: Tensor = self.model.logits(self.ops.rows(hidden, np.array([end - start - 1])))
            return found

    def of_device(self, size: int, spans: list[tuple[int, int]]) -> list[Tensor]:
        """Passes of a size over some spans of tokens, one after the other."""
        inputs = self.ops.tensor(np.zeros(Word.TOKENS + size + MAX_BLOCKS, dtype=np.int64))

        def step() -> Tensor:
            batch = self.ops.prompt_batch(inputs, size, BLOCK_SIZE)
            found: Tensor = self.model.logits(self.model.forward(batch, self.layers))
            return found

        found = []
        with torch.inference_mode():
            repeat = self.ops.capture(step) or step
            for start, end in spans:
                words = np.zeros(len(inputs), dtype=np.int64)
                words[Word.NUM_NEW], words[Word.START] = end - start, start
                words[Word.TOKENS : Word.TOKENS + end - start] = TOKENS[start:end]
                num_blocks = -(-end // BLOCK_SIZE)
                words[Word.TOKENS + size :][:num_blocks] = BLOCKS[:num_blocks]
                self.ops.send(words, inputs)
                found.append(repeat().clone())
        return found


SPANS: list[tuple[str, str, int, list[tuple[int, int]]]] = [
    ("llama", "float32", 16, [(0, 2), (2, 18)]), ("qwen3", "float32", 16, [(0, 16), (16, 21)]),
    ("windowed", "float32", 16, [(0, 14), (14, 30)]), ("llama", "float32", 40, [(0, 40), (40, 43)]),  # more rows than a tile
]
if HAS_CUDA:  # bfloat16 is wrong in the interpreter
    SPANS += [(name, "bfloat16", 64, [(0, 64), (64, 100)]) for name in VARIANTS]


@pytest.mark.parametrize(("name", "dtype", "size", "spans"), SPANS)
def test_logits_and_keys_are_those_of_a_batch_of_the_host(
    name: str, dtype: str, size: int, spans: list[tuple[int, int]]
) -> None:
    host = TritonOps if HAS_CUDA else TorchOps  # the interpreter takes long
    plain, recorded = (Passes(VARIANTS[name], kind(DEVICE, dtype)) for kind in (host, TritonOps))
    expected = [plain.of_host(*span) for span in spans]
    error = 1e-4 if dtype == "float32" else 0.05
    for own, other in zip(recorded.of_device(size, spans), expected, strict=True):
        assert own.shape == other.shape == (1, TINY["vocab_size"])
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
