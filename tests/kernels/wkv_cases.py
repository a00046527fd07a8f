"""Random inputs of RWKV-7's mixes, over memory that is NaN wherever no sequence has a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from archerfish.kernels.recurrent import HeadInputs, HeadWeights, RecurrentBatch, build_recurrent_batch
from archerfish.kernels.reference import TorchOps
from archerfish.kernels.wkv import WkvInputs, prepare_heads

Tensor = torch.Tensor
NUM_SLOTS = 12


@dataclass(frozen=True)
class MixCase:
    inputs: HeadInputs[Tensor]
    weights: HeadWeights[Tensor]
    states: Tensor
    batch: RecurrentBatch[Tensor]
    slots: tuple[int, ...]

    def prepared(self) -> WkvInputs:
        return prepare_heads(self.inputs, self.weights, self.batch.num_tokens, self.states.shape[1], self.states.shape[2])


def slots_of(num: int) -> tuple[int, ...]:
    return tuple(torch.randperm(NUM_SLOTS - 1)[:num].add(1).tolist())


def make_case(
    lengths: Sequence[int], *, device: str = "cpu", dtype: str = "float32", num_heads: int = 2, head_dim: int = 64,
    seed: int = 0, has_value_mix: bool = True, is_repeated: bool = False, decay: float = -1.0, num_filling: int = 0,
) -> MixCase:
    """is_repeated: every token is the same one, hardly decays and replaces all that it removes. decay: mean of its input."""
    torch.manual_seed(seed)
    ops = TorchOps(device, dtype)
    num_tokens, width = sum(lengths), num_heads * head_dim
    slots = slots_of(len(lengths))

    def rows(scale: float = 1.0, plus: float = 0.0) -> Tensor:
        drawn = torch.randn(1 if is_repeated else num_tokens + num_filling, width) * scale + plus
        return drawn.expand(num_tokens + num_filling, width).contiguous().to(device, ops.torch_dtype)

    def vector(scale: float, plus: float = 0.0) -> Tensor:
        return (torch.randn(width) * scale + plus).to(device)

    inputs = HeadInputs(
        receptance=rows(), decay=rows(0.1, -12.0) if is_repeated else rows(2.0, decay), key=rows(), value=rows(),
        rate=rows(0.1, 12.0) if is_repeated else rows(2.0), gate=rows(), first_value=rows() if has_value_mix else None,
        value_mix=rows() if has_value_mix else None,
    )
    weights = HeadWeights(vector(0.2, 0.8), vector(0.2, 1.0), vector(0.3), vector(0.2, 1.0), vector(0.1), 64e-5)
    states = torch.full((NUM_SLOTS, num_heads, head_dim, head_dim), float("nan"), device=device)
    states[0] = 0
    states[list(slots)] = torch.randn(len(slots), num_heads, head_dim, head_dim).to(device)
    tokens = [[1] * length for length in lengths]
    batch = build_recurrent_batch(ops, tokens=tokens, slots=slots, num_rows=num_tokens + num_filling)
    return MixCase(inputs, weights, states, batch, slots)
