"""Triton kernels of RWKV-7's mixes. What they compute stands in `wkv.py`.

A program has one head of one sequence and keeps its state in registers, storing it behind each piece of the sequence. It does
all that lies between a time mix's products: decay, rate, keys, recurrence, norm of the head, bonus and gate touch nothing but
the head's own columns. `mix_decodes_kernel` has one token of each sequence, `mix_tokens_kernel` takes one after the other,
`mix_chunks_kernel` a chunk of them at once, as `wkv.py` says.

No `from __future__ import annotations` here: see `triton/norm.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import numpy as np
import torch
import triton
import triton.language as tl

from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input
from archerfish.kernels.recurrent import FIRST_SLOT, NO_SLOT, HeadInputs, HeadWeights, RecurrentBatch
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.torch.reference import TorchOps
from archerfish.kernels.torch.sampling import sampling_batch
from archerfish.kernels.torch.wkv import Ends, TorchRecurrentOps
from archerfish.kernels.triton.launch import early_start, follow
from archerfish.kernels.triton.products import append
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
SHIFT_BLOCK = 1024  # columns of a program
CHUNK = 16  # tokens: the least that a product of tiles takes
WARPS = 8  # of a head: with 4, a state and what is made of it fill all registers and more
DECODE_HEIGHT, DECODE_WARPS = 32, 1  # of a piece of a state, and of a head with one token: a single warp waits for no other
MIN_CHUNKED = 16  # tokens of the longest sequence from which on chunks are used


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def shift_kernel(
    x, inputs, previous, targets, factors, out, num_rows, inputs_stride,
    width: tl.constexpr, block: tl.constexpr, num_factors: tl.constexpr, stores: tl.constexpr,
):
    """stores: every row is a sequence's only new one, and becomes its last input where it has a target."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < width
    place = tl.load(previous + row)
    own = tl.load(x + row * width + columns, mask=is_inside, other=0.0)
    wide = own.to(tl.float32)
    if place >= 0:
        delta = tl.load(x + place * width + columns, mask=is_inside, other=0.0).to(tl.float32) - wide
    else:
        kept = inputs + (-1 - place) * inputs_stride + columns
        delta = tl.load(kept, mask=is_inside, other=0.0).to(tl.float32) - wide
        if stores:
            target = tl.load(targets + row)
            tl.store(inputs + target * inputs_stride + columns, own, mask=is_inside & (target >= 0))
    for number in tl.static_range(num_factors):
        factor = tl.load(factors + number * width + columns, mask=is_inside, other=0.0)
        target = out + (number * num_rows + row) * width + columns
        tl.store(target, (wide + delta * factor).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def prepare_heads(decay, rate, key, removal, replacement, axis: tl.constexpr):
    """Logarithm of the decay, key, removal key and what it adds, from products of a head in float32."""
    log_decay = -0.6065306597126334 * sigmoid(decay)
    own_rate = sigmoid(rate)
    removed = key * removal
    length = tl.sqrt(tl.sum(removed * removed, axis, keep_dims=True))
    removed = removed / tl.maximum(length, 1e-12)
    return log_decay, key * (1.0 + (own_rate - 1.0) * replacement), removed, removed * own_rate


@triton.jit
def load_heads(
    decay, key, value, rate, first_value, value_mix, removal, replacement, place, weight_place, is_inside,
    has_value_mix: tl.constexpr, axis: tl.constexpr,
):
    """Logarithm of the decay, key, value, removal key and what it adds, of the tokens at some places, in float32."""
    own_decay = tl.load(decay + place, mask=is_inside, other=0.0).to(tl.float32)
    own_rate = tl.load(rate + place, mask=is_inside, other=0.0).to(tl.float32)
    own_key = tl.load(key + place, mask=is_inside, other=0.0).to(tl.float32)
    own_value = tl.load(value + place, mask=is_inside, other=0.0).to(tl.float32)
    if has_value_mix:
        share = sigmoid(tl.load(value_mix + place, mask=is_inside, other=0.0).to(tl.float32))
        own_value += (tl.load(first_value + place, mask=is_inside, other=0.0).to(tl.float32) - own_value) * share
    log_decay, own_key, removed, added = prepare_heads(
        own_decay, own_rate, own_key, tl.load(removal + weight_place), tl.load(replacement + weight_place), axis
    )
    return tl.where(is_inside, log_decay, 0.0), own_key, own_value, removed, added


@triton.jit
def norm_heads(y, receptance, key, value, bonus, norm, norm_bias, eps, dim: tl.constexpr, axis: tl.constexpr):
    """Norm of the head, and bonus."""
    y -= tl.sum(y, axis, keep_dims=True) / dim
    y *= tl.rsqrt(tl.sum(y * y, axis, keep_dims=True) / dim + eps)
    return y * norm + norm_bias + tl.sum(receptance * key * bonus, axis, keep_dims=True) * value


@triton.jit
def finish_heads(
    y, receptance, key, value, gate, bonus, norm, norm_bias, eps, place, weight_place, is_inside,
    dim: tl.constexpr, axis: tl.constexpr,
):
    """Norm of the head, bonus and gate."""
    y = norm_heads(
        y, receptance, key, value, tl.load(bonus + weight_place), tl.load(norm + weight_place),
        tl.load(norm_bias + weight_place), eps, dim, axis,
    )
    return y * tl.load(gate + place, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def next_state(state, log_decay, key, value, removed, added):
    """Behind a token; values down, keys across."""
    taken = tl.sum(state * removed[None, :], 1)
    return state * tl.exp(log_decay)[None, :] - taken[:, None] * added[None, :] + value[:, None] * key[None, :]


@triton.jit
def mix_token(
    state, row, receptance, decay, key, value, rate, gate, first_value, value_mix, removal, replacement, bonus, norm, norm_bias,
    eps, out, width, weight_place, dim: tl.constexpr, has_value_mix: tl.constexpr,
):
    """The state behind a token, whose output is stored."""
    place = tl.cast(row, tl.int64) * width + weight_place
    is_inside = tl.arange(0, dim) < dim
    log_decay, own_key, own_value, removed, added = load_heads(
        decay, key, value, rate, first_value, value_mix, removal, replacement, place, weight_place, is_inside, has_value_mix, 0
    )
    own = tl.load(receptance + place).to(tl.float32)
    state = next_state(state, log_decay, own_key, own_value, removed, added)
    y = tl.sum(state * own[None, :], 1)
    y = finish_heads(y, own, own_key, own_value, gate, bonus, norm, norm_bias, eps, place, weight_place, is_inside, dim, 0)
    tl.store(out + place, y.to(out.dtype.element_ty))
    return state


@triton.jit
def mix_tokens_kernel(
    receptance, decay, key, value, rate, gate, first_value, value_mix,
    removal, replacement, bonus, norm, norm_bias, eps, states, sources, targets, starts, first_pieces, out, state_stride, width,
    dim: tl.constexpr, has_value_mix: tl.constexpr,
):
    """One token after the other."""
    sequence = tl.program_id(0)
    columns = tl.arange(0, dim)
    weight_place = tl.program_id(1) * dim + columns
    matrix = states + tl.program_id(1) * dim * dim + columns[:, None] * dim + columns[None, :]
    first = tl.load(first_pieces + sequence).to(tl.int32)
    state = tl.load(matrix + tl.load(sources + first).to(tl.int64) * state_stride)
    for piece in range(first, tl.load(first_pieces + sequence + 1).to(tl.int32)):
        for row in range(tl.load(starts + piece).to(tl.int32), tl.load(starts + piece + 1).to(tl.int32)):
            state = mix_token(
                state, row, receptance, decay, key, value, rate, gate, first_value, value_mix, removal, replacement,
                bonus, norm, norm_bias, eps, out, width, weight_place, dim, has_value_mix,
            )
        tl.store(matrix + tl.load(targets + piece).to(tl.int64) * state_stride, state)


@triton.jit
def mix_decodes_kernel(
    receptance, decay, key, value, rate, gate, first_value, value_mix,
    removal, replacement, bonus, norm, norm_bias, eps, states, sources, targets, out, state_stride, width,
    dim: tl.constexpr, height: tl.constexpr, has_value_mix: tl.constexpr, is_early: tl.constexpr,
):
    """One token of each sequence, in the row of its number. height: of a piece of the state, which has values down.

    A row without a sequence goes on from the empty state, and leaves nothing but what it gives. States are read and
    written once a step, and take no room in caches that others could use.
    """
    sequence = tl.program_id(0)
    columns = tl.arange(0, dim)
    lines = tl.arange(0, height)
    first = tl.program_id(1) * dim
    source = tl.load(sources + sequence).to(tl.int64)
    target = tl.maximum(tl.load(targets + sequence).to(tl.int64), 0)
    matrix = states + first * dim + lines[:, None] * dim + columns[None, :]
    pieces = ()
    for start in tl.static_range(0, dim, height):
        pieces = append(pieces, tl.load(matrix + tl.maximum(source, 0) * state_stride + start * dim, cache_modifier=".cg"))
    own_removal = tl.load(removal + first + columns)
    own_replacement = tl.load(replacement + first + columns)
    own_bonus = tl.load(bonus + first + columns)
    scales = ()
    shifts = ()
    for start in tl.static_range(0, dim, height):
        scales = append(scales, tl.load(norm + first + start + lines))
        shifts = append(shifts, tl.load(norm_bias + first + start + lines))
    follow(is_early)
    row = sequence.to(tl.int64) * width + first
    own = tl.load(receptance + row + columns).to(tl.float32)
    own_decay = tl.load(decay + row + columns).to(tl.float32)
    own_rate = tl.load(rate + row + columns).to(tl.float32)
    own_key = tl.load(key + row + columns).to(tl.float32)
    values = ()
    gates = ()
    for start in tl.static_range(0, dim, height):
        place = row + start + lines
        own_value = tl.load(value + place).to(tl.float32)
        if has_value_mix:
            share = sigmoid(tl.load(value_mix + place).to(tl.float32))
            own_value += (tl.load(first_value + place).to(tl.float32) - own_value) * share
        values = append(values, own_value)
        gates = append(gates, tl.load(gate + place).to(tl.float32))
    log_decay, own_key, removed, added = prepare_heads(own_decay, own_rate, own_key, own_removal, own_replacement, 0)
    kept = tl.exp(log_decay)
    extra = tl.sum(own * own_key * own_bonus, 0)
    results = ()
    total = 0.0
    for piece in tl.static_range(0, dim // height):
        taken = tl.sum(pieces[piece] * removed[None, :], 1)
        state = pieces[piece] * kept[None, :] - taken[:, None] * added[None, :] + values[piece][:, None] * own_key[None, :]
        target_piece = matrix + target * state_stride + piece * height * dim
        tl.store(target_piece, state, mask=source >= 0, cache_modifier=".cs")
        y = tl.sum(state * own[None, :], 1)
        total += tl.sum(y, 0)
        results = append(results, y)
    squares = 0.0
    for piece in tl.static_range(0, dim // height):
        centred = results[piece] - total / dim
        squares += tl.sum(centred * centred, 0)
    scale = tl.rsqrt(squares / dim + eps)
    for piece in tl.static_range(0, dim // height):
        y = (results[piece] - total / dim) * scale * scales[piece] + shifts[piece] + extra * values[piece]
        tl.store(out + row + piece * height + lines, (y * gates[piece]).to(out.dtype.element_ty))


@triton.jit
def multiply(left, right):
    """On tensor cores, in three parts that add up to float32's precision."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def inverse_of_lower(lower, chunk: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower matrix, row by row: powers of it would cancel badly where tokens repeat."""
    rows = tl.arange(0, chunk)
    found = -lower
    for row in range(1, chunk):
        is_row = (rows == row)[:, None]
        own = tl.sum(tl.where(is_row, found, 0.0), 0)
        own += tl.sum(own[:, None] * found, 0)
        found = tl.where(is_row, own[None, :], found)
    return found + (rows[:, None] == rows[None, :]).to(tl.float32)


@triton.jit
def mix_chunks_kernel(
    receptance, decay, key, value, rate, gate, first_value, value_mix,
    removal, replacement, bonus, norm, norm_bias, eps, states, sources, targets, starts, first_pieces, out, state_stride, width,
    dim: tl.constexpr, has_value_mix: tl.constexpr, chunk: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    columns = tl.arange(0, dim)
    rows = tl.arange(0, chunk)
    weight_place = head * dim + columns[None, :]
    # Keys down, values across: the state turned over, as the products below take it.
    matrix = states + head * dim * dim + columns[None, :] * dim + columns[:, None]
    first = tl.load(first_pieces + sequence).to(tl.int32)
    state = tl.load(matrix + tl.load(sources + first).to(tl.int64) * state_stride)
    before = rows[:, None] > rows[None, :]
    until = rows[:, None] >= rows[None, :]
    for piece in range(first, tl.load(first_pieces + sequence + 1).to(tl.int32)):
        end = tl.load(starts + piece + 1).to(tl.int32)
        for start in range(tl.load(starts + piece).to(tl.int32), end, chunk):
            place = (start + rows).to(tl.int64)[:, None] * width + weight_place
            is_inside = (start + rows < end)[:, None] & (columns < dim)[None, :]
            log_decay, own_key, own_value, removed, added = load_heads(
                decay, key, value, rate, first_value, value_mix, removal, replacement, place, weight_place, is_inside,
                has_value_mix, 1,
            )
            own = tl.load(receptance + place, mask=is_inside, other=0.0).to(tl.float32)
            total = tl.cumsum(log_decay, 0)
            last = tl.sum(log_decay, 0)
            reads = removed * tl.exp(total - log_decay)
            asks = own * tl.exp(total)
            adds = tl.trans(added * tl.exp(-total))
            keys = tl.trans(own_key * tl.exp(-total))
            among = tl.where(before, multiply(reads, adds), 0.0)
            from_keys = tl.where(before, multiply(reads, keys), 0.0)
            right = -multiply(reads, state) - multiply(from_keys, own_value)
            written = multiply(inverse_of_lower(among, chunk), right)
            y = multiply(asks, state)
            y += multiply(tl.where(until, multiply(asks, adds), 0.0), written)
            y += multiply(tl.where(until, multiply(asks, keys), 0.0), own_value)
            state = (state + multiply(adds, written) + multiply(keys, own_value)) * tl.exp(last)[:, None]
            y = finish_heads(
                y, own, own_key, own_value, gate, bonus, norm, norm_bias, eps, place, weight_place, is_inside, dim, 1
            )
            tl.store(out + place, y.to(out.dtype.element_ty), mask=is_inside)
        tl.store(matrix + tl.load(targets + piece).to(tl.int64) * state_stride, state)


@triton.jit(do_not_specialize=["num_rows"])
def stage_states_kernel(
    token_words, row_words, position_words, block_words, source_words, last_tokens, places, num_rows,
    on_device: tl.constexpr, first_slot: tl.constexpr, no_slot: tl.constexpr,
):
    """places: token ids, previous rows, sources, targets and next positions."""
    sequence = tl.program_id(0)
    token = tl.load(token_words + sequence)
    position = tl.load(position_words + sequence)
    is_real = position >= 0
    source = tl.where(is_real, tl.load(source_words + sequence) + first_slot, no_slot)
    last = tl.load(last_tokens + tl.load(row_words + sequence))
    tl.store(places + sequence, tl.where(token == on_device, last, token))
    tl.store(places + num_rows + sequence, tl.where(is_real, -1 - source, 0))
    tl.store(places + 2 * num_rows + sequence, source)
    tl.store(places + 3 * num_rows + sequence, tl.where(is_real, tl.load(block_words + sequence) + first_slot, no_slot))
    tl.store(places + 4 * num_rows + sequence, position + 1)


class TritonRecurrentOps(TorchRecurrentOps):
    """Shift and heads in one kernel each; longer inputs in chunks where one has at least `min_chunked` tokens."""

    def __init__(self, ops: TorchOps, min_chunked: int = MIN_CHUNKED) -> None:
        super().__init__(ops)
        self.min_chunked = min_chunked
        self._counting: dict[int, Tensor] = {}  # 0, 1, 2 ... by how many

    def shift(self, x: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor], factors: Tensor) -> tuple[Tensor, ...]:
        num_rows, width = x.shape
        num_factors = factors.numel() // width
        x = x.contiguous()
        out = torch.empty((num_factors, num_rows, width), dtype=x.dtype, device=x.device)
        stores = batch.num_decodes == batch.num_sequences
        block = min(next_power_of_2(width), SHIFT_BLOCK)
        shift_kernel[(num_rows, cdiv(width, block))](
            x, inputs, batch.previous, batch.targets, factors, out, num_rows, inputs.stride(0),
            width=width, block=block, num_factors=num_factors, stores=stores, num_warps=max(1, min(8, block // 256)),
        )
        if not stores:
            inputs.index_copy_(0, batch.targets, x.index_select(0, Ends.of(batch).last_rows))
        return out.unbind(0)

    def mix_heads(
        self, inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], states: Tensor, batch: RecurrentBatch[Tensor]
    ) -> Tensor:
        num_heads, dim = states.shape[1], states.shape[2]
        out = torch.empty_like(inputs.value)
        has_value_mix = inputs.first_value is not None and inputs.value_mix is not None
        tensors = [
            each.contiguous() for each in (
                inputs.receptance, inputs.decay, inputs.key, inputs.value, inputs.rate, inputs.gate,
                inputs.value if inputs.first_value is None else inputs.first_value,
                inputs.value if inputs.value_mix is None else inputs.value_mix,
            )
        ]
        vectors = (weights.removal, weights.replacement, weights.bonus, weights.norm, weights.norm_bias, weights.eps)
        pieces = (states, batch.sources, batch.targets, batch.starts)
        num_decodes, num_sequences = batch.num_decodes, batch.num_sequences
        last = (out, states.stride(0), out.shape[1])
        if num_decodes:
            mix_decodes_kernel[(num_decodes, num_heads)](
                *tensors, *vectors, *pieces[:3], *last, dim=dim, height=min(dim, DECODE_HEIGHT),
                has_value_mix=has_value_mix, num_warps=DECODE_WARPS, **early_start(out.device),
            )
        if num_decodes == num_sequences:
            return out
        grid, rest = (num_sequences - num_decodes, num_heads), (*pieces, batch.first_pieces[num_decodes:], *last)
        if int(batch.query_lens.max()) < self.min_chunked or batch.is_deterministic:
            mix_tokens_kernel[grid](
                *tensors, *vectors, *rest, dim=dim, has_value_mix=has_value_mix, num_warps=WARPS
            )
        else:
            mix_chunks_kernel[grid](
                *tensors, *vectors, *rest, dim=dim, has_value_mix=has_value_mix, chunk=CHUNK, num_warps=WARPS
            )
        return out

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor]
    ) -> tuple[RecurrentBatch[Tensor], SamplingBatch[Tensor]]:
        num = inputs.shape[1]
        if num not in self._counting:
            self._counting[num] = torch.arange(num + 1, device=inputs.device)
        every, ones = self._counting[num], np.ones(num, dtype=np.int64)
        places = torch.empty((5, num), dtype=torch.int64, device=inputs.device)
        stage_states_kernel[(num,)](
            inputs[Input.TOKEN], inputs[Input.ROW], inputs[Input.POSITION], inputs[Input.BLOCK], inputs[Input.SOURCE],
            state.last_tokens, places, num, on_device=ON_DEVICE, first_slot=FIRST_SLOT, no_slot=NO_SLOT, num_warps=1,
        )
        token_ids, previous, sources, targets, positions = places
        batch = RecurrentBatch(
            num_tokens=num, num_decodes=num, query_lens=ones, piece_counts=ones, piece_lens=ones, token_ids=token_ids,
            previous=previous, sources=sources, targets=targets, starts=every, first_pieces=every,
        )
        return batch, sampling_batch(inputs, positions, every[:-1])
