"""Triton kernel at the front of a recorded step of decodes: from what the host sent (`decoding.py`) to what models read."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import numpy as np
import torch
import triton
import triton.language as tl

from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input
from archerfish.kernels.ops import PagedBatch
from archerfish.kernels.triton.places import Places, find_places

Tensor = torch.Tensor
TABLE_STEP = 256  # blocks of a list that are moved at a time


@triton.jit(do_not_specialize=["num_rows"])
def stage_kernel(
    token_words, row_words, position_words, block_words, shared_words, last_tokens, tables, token_ids, places, table_copies,
    lengths, num_rows, table_stride, block_size: tl.constexpr, on_device: tl.constexpr, step: tl.constexpr,
):
    """places: positions, slots and next positions; lengths: contexts, and behind them how many tokens are shared."""
    sequence = tl.program_id(0)
    token = tl.load(token_words + sequence)
    row = tl.load(row_words + sequence)
    position = tl.load(position_words + sequence)
    block = tl.load(block_words + sequence)
    is_real = position >= 0
    tl.store(token_ids + sequence, tl.where(token == on_device, tl.load(last_tokens + row), token))
    tl.store(places + sequence, tl.maximum(position, 0))
    tl.store(places + num_rows + sequence, tl.where(is_real, block * block_size + position % block_size, -1))
    tl.store(places + 2 * num_rows + sequence, position + 1)
    tl.store(lengths + sequence, (position + 1).to(tl.int32))
    tl.store(lengths + num_rows, tl.load(shared_words).to(tl.int32), mask=sequence == 0)
    own = tl.where(is_real, position // block_size, -1).to(tl.int32)
    source = tables + row * table_stride
    target = table_copies + sequence.to(tl.int64) * table_stride
    for start in range(0, own + 1, step):
        entries = start + tl.arange(0, step)
        known = tl.load(source + entries, mask=entries < own, other=0)
        tl.store(target + entries, tl.where(entries == own, block.to(tl.int32), known), mask=entries <= own)
    tl.store(source + own, block.to(tl.int32), mask=is_real)


def decode_batch(
    inputs: Tensor, state: DecodeState[Tensor], block_size: int, is_shared: bool
) -> tuple[PagedBatch[Tensor], Tensor]:
    """The batch for a model, and the positions of the tokens to choose."""
    num = inputs.shape[1]
    token_ids = torch.empty(num, dtype=torch.int64, device=inputs.device)
    places = torch.empty((3, num), dtype=torch.int64, device=inputs.device)
    lengths = torch.empty(num + 1, dtype=torch.int32, device=inputs.device)
    tables = torch.empty((num, state.tables.shape[1]), dtype=torch.int32, device=inputs.device)
    stage_kernel[(num,)](
        inputs[Input.TOKEN], inputs[Input.ROW], inputs[Input.POSITION], inputs[Input.BLOCK], inputs[Input.NUM_SHARED],
        state.last_tokens, state.tables, token_ids, places, tables, lengths, num, state.tables.stride(0),
        block_size=block_size, on_device=ON_DEVICE, step=TABLE_STEP, num_warps=2,
    )
    contexts = lengths[:num]
    known = Places(contexts, contexts, contexts, shared_len=lengths[num:] if is_shared else None)
    ones = np.ones(num, dtype=np.int64)
    batch = PagedBatch(
        num_tokens=num, num_decodes=num, query_lens=ones, context_lens=ones, token_ids=token_ids, positions=places[0],
        slots=places[1], block_tables=tables, block_size=block_size,
    )
    find_places.set(batch, known)
    return batch, places[2]
