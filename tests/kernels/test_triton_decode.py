"""The front of a recorded step of decodes against the reference."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.triton_support import DEVICE

from archerfish.kernels.decoding import FIRST_FLOAT, NUM_INPUTS, ON_DEVICE, Input  # isort: skip
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.kernels.triton.places import find_places  # isort: skip


def test_inputs_become_the_batch_of_the_reference() -> None:
    ops, reference = TritonOps(DEVICE, "float32"), TorchOps(DEVICE, "float32")
    words = np.zeros((NUM_INPUTS, 5), dtype=np.int64)
    words[Input.ROW], words[Input.POSITION] = [2, 0, 5, 6, 6], [1037, 0, 16, -1, -1]
    words[Input.TOKEN], words[Input.BLOCK] = [ON_DEVICE, 7, ON_DEVICE, 0, 0], [88, 77, 66, 0, 0]
    words[Input.NUM_SHARED, 0] = 32
    words[FIRST_FLOAT:].view(np.float64)[:] = 1.0
    tables = np.random.default_rng(0).integers(0, 99, (6, 600))
    inputs = ops.ids(words)
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
    places = find_places(batch)
    assert places.context_lens.tolist() == [1038, 1, 17, 0, 0]
    assert places.shared_len is not None
    assert places.shared_len.tolist() == [32]
