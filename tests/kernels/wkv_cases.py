"""Random inputs of RWKV-7's mixes, over memory that is NaN wherever no sequence has a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from archerfish.kernels.recurrent import FIRST_SLOT, HeadInputs, HeadWeights, RecurrentBatch
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.wkv import WkvInputs, prepare_heads
from archerfish.runtime.batch import build_batch, pack_recurrent_batch

Tensor = torch.Tensor
NUM_SLOTS = 90
WHOLE = 1 << 20  # tokens of a block that no sequence comes to the end of


@dataclass(frozen=True)
class MixCase:
    inputs: HeadInputs[Tensor]
    weights: HeadWeights[Tensor]
    states: Tensor
    batch: RecurrentBatch[Tensor]

    @property
    def targets(self) -> list[int]:
        slots: list[int] = self.batch.targets.tolist()
        return slots

    def prepared(self) -> WkvInputs:
        return prepare_heads(
            self.inputs, self.weights, self.batch.num_tokens, self.states.shape[1], self.states.shape[2]
        )


def one_slot_batch(
    tokens: Sequence[Sequence[int]], slots: Sequence[int], ops: TorchOps | None = None, **options: Any
) -> RecurrentBatch[Tensor]:
    """Sequences that go on from the states in their slots, and leave them there."""
    blocks = [[slot - FIRST_SLOT] for slot in slots]
    batch: RecurrentBatch[Tensor] = build_batch(
        ops or TorchOps(),
        tokens=tokens,
        starts=[1] * len(slots),
        blocks=blocks,
        block_size=WHOLE,
        pack=pack_recurrent_batch,
        **options,
    )
    return batch


def make_case(
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_heads: int = 2,
    head_dim: int = 64,
    seed: int = 0,
    has_value_mix: bool = True,
    is_repeated: bool = False,
    decay: float = -1.0,
    num_filling: int = 0,
    block_size: int = WHOLE,
    is_new: bool = False,
) -> MixCase:
    """is_repeated: every token is the same one, hardly decays and replaces all that it removes. decay: mean of its
    input.

    block_size: where sequences are cut. They begin with their second token, or with their first: is_new.
    """
    torch.manual_seed(seed)
    ops = TorchOps(device, dtype)
    num_tokens, width = sum(lengths), num_heads * head_dim
    start = 0 if is_new else 1
    free = torch.randperm(NUM_SLOTS - FIRST_SLOT).tolist()
    blocks = [[free.pop() for _ in range(-(-(start + length) // block_size))] for length in lengths]

    def rows(scale: float = 1.0, plus: float = 0.0) -> Tensor:
        drawn = torch.randn(1 if is_repeated else num_tokens + num_filling, width) * scale + plus
        return drawn.expand(num_tokens + num_filling, width).contiguous().to(device, ops.torch_dtype)

    def vector(scale: float, plus: float = 0.0) -> Tensor:
        return (torch.randn(width) * scale + plus).to(device)

    inputs = HeadInputs(
        receptance=rows(),
        decay=rows(0.1, -12.0) if is_repeated else rows(2.0, decay),
        key=rows(),
        value=rows(),
        rate=rows(0.1, 12.0) if is_repeated else rows(2.0),
        gate=rows(),
        first_value=rows() if has_value_mix else None,
        value_mix=rows() if has_value_mix else None,
    )
    weights = HeadWeights(vector(0.2, 0.8), vector(0.2, 1.0), vector(0.3), vector(0.2, 1.0), vector(0.1), 64e-5)
    states = torch.full((NUM_SLOTS, num_heads, head_dim, head_dim), float("nan"), device=device)
    states[0] = 0
    for first, *_ in blocks:
        states[FIRST_SLOT + first] = torch.randn(num_heads, head_dim, head_dim).to(device)
    batch = build_batch(
        ops,
        tokens=[[1] * length for length in lengths],
        starts=[start] * len(lengths),
        blocks=blocks,
        block_size=block_size,
        num_rows=num_tokens + num_filling,
        pack=pack_recurrent_batch,
    )
    return MixCase(inputs, weights, states, batch)
