"""The meaning of the operations of `recurrent.py` in plain torch.

A head of RWKV-7 keeps a matrix S (values down, keys across). With a token's receptance r, decay w, removal key z (of
length 1), learning rate a, key k and value v it becomes, and the token gives:

    S' = S diag(w) - (S z) (z * a)^T + v k^T        y = S' r
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input
from archerfish.kernels.recurrent import (
    FIRST_SLOT,
    HeadInputs,
    HeadWeights,
    RecurrentBatch,
    RecurrentOps,
)
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.torch.sampling import sampling_batch

if TYPE_CHECKING:
    from archerfish.kernels.torch.reference import TorchOps

Tensor = torch.Tensor
DECAY_SCALE = -0.6065306597126334  # -exp(-0.5), times a number between 0 and 1: the logarithm of a decay
LEAST_LENGTH = 1e-12  # that a removal key is divided by


class WkvInputs(NamedTuple):
    """Float32 rows of tokens, (tokens, heads, head_dim) each."""

    receptance: Tensor
    log_decay: Tensor
    key: Tensor
    value: Tensor
    removal: Tensor  # z
    added: Tensor  # z * a


def wkv_in_turn(inputs: WkvInputs, states: Tensor, batch: RecurrentBatch[Tensor]) -> Tensor:
    """y of all tokens, one after the other. states: (slots, heads, head_dim, head_dim)."""
    out, decay = torch.empty_like(inputs.value), inputs.log_decay.exp()
    row = 0
    for source, target, length in zip(
        batch.sources.tolist(), batch.targets.tolist(), batch.piece_lens.tolist(), strict=True
    ):
        state = states[source]
        for t in range(row, row + length):
            removed = state @ inputs.removal[t].unsqueeze(-1)
            state = state * decay[t].unsqueeze(-2) - removed * inputs.added[t].unsqueeze(-2)
            state += inputs.value[t].unsqueeze(-1) * inputs.key[t].unsqueeze(-2)
            out[t] = (state @ inputs.receptance[t].unsqueeze(-1)).squeeze(-1)
        states[target] = state
        row += length
    return out


class TorchRecurrentOps(RecurrentOps[Tensor]):
    """The reference."""

    def __init__(self, ops: TorchOps) -> None:
        self.ops: TorchOps = ops

    def empty(self, shape: tuple[int, ...], *, is_input: bool) -> Tensor:
        dtype = self.ops.torch_dtype if is_input else torch.float32
        return torch.empty(shape, dtype=dtype, device=self.ops.device)  # pages come when they are written

    def shift(self, x: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor], factors: Tensor) -> tuple[Tensor, ...]:
        heads = batch.first_pieces[:-1]
        before = x.roll(1, 0).index_copy_(0, batch.starts[heads], inputs.index_select(0, batch.sources[heads]))
        inputs.index_copy_(0, batch.targets, x.index_select(0, batch.starts[1:] - 1))
        wide = x.float()
        mixed = torch.addcmul(wide, before.float() - wide, factors.view(-1, 1, x.shape[1]))
        return mixed.to(x.dtype).unbind(0)

    def mix_heads(
        self, inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], states: Tensor, batch: RecurrentBatch[Tensor]
    ) -> Tensor:
        num_tokens = batch.num_tokens
        num_heads = states.shape[1]
        head_dim = states.shape[2]
        if not num_tokens:
            return torch.zeros_like(inputs.value)
        prepared = prepare_heads(inputs, weights, num_tokens, num_heads, head_dim)
        y = wkv_in_turn(prepared, states, batch).reshape(num_tokens, -1)
        y = F.group_norm(y, num_heads, weights.norm, weights.norm_bias, weights.eps)
        bonus = (prepared.receptance * prepared.key * weights.bonus.view(num_heads, head_dim)).sum(-1, keepdim=True)
        y = (y + (bonus * prepared.value).view(num_tokens, -1)) * inputs.gate[:num_tokens].float()
        return F.pad(y.to(inputs.value.dtype), (0, 0, 0, inputs.value.shape[0] - num_tokens))

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor]
    ) -> tuple[RecurrentBatch[Tensor], SamplingBatch[Tensor]]:
        rows, positions = inputs[Input.ROW], inputs[Input.POSITION]
        num_real = int((positions >= 0).sum())  # they stand first
        every, ones = torch.arange(inputs.shape[1] + 1, device=inputs.device), np.ones(num_real, dtype=np.int64)
        sources = inputs[Input.SOURCE, :num_real] + FIRST_SLOT
        previous = torch.zeros_like(rows)
        previous[:num_real] = -1 - sources
        batch = RecurrentBatch(
            num_tokens=num_real,
            num_decodes=num_real,
            query_lens=ones,
            piece_counts=ones,
            piece_lens=ones,
            token_ids=torch.where(inputs[Input.TOKEN] == ON_DEVICE, state.last_tokens[rows], inputs[Input.TOKEN]),
            previous=previous,
            sources=sources,
            targets=inputs[Input.BLOCK, :num_real] + FIRST_SLOT,
            starts=every[: num_real + 1],
            first_pieces=every[: num_real + 1],
        )
        return batch, sampling_batch(inputs, positions + 1, every[:-1], state)


def prepare_heads(
    inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], num_tokens: int, num_heads: int, head_dim: int
) -> WkvInputs:
    """Float32 inputs of the recurrence from the products of a time mix."""

    def heads(x: Tensor) -> Tensor:
        return x[:num_tokens].float().view(num_tokens, num_heads, head_dim)

    key = heads(inputs.key)
    value = heads(inputs.value)
    rate = heads(inputs.rate).sigmoid()
    if inputs.first_value is not None and inputs.value_mix is not None:
        value = torch.lerp(value, heads(inputs.first_value), heads(inputs.value_mix).sigmoid())
    removal = F.normalize(key * weights.removal.view(num_heads, head_dim), dim=-1, eps=LEAST_LENGTH)
    key = key * (1.0 + (rate - 1.0) * weights.replacement.view(num_heads, head_dim))
    return WkvInputs(
        heads(inputs.receptance), DECAY_SCALE * heads(inputs.decay).sigmoid(), key, value, removal, removal * rate
    )
