"""Logits changed by penalties and masks, and log-probabilities, in Triton. No `from __future__ import annotations`
here: see `triton/norm.py`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from archerfish.kernels.sampling import Logprobs, Masks, Penalties
from archerfish.kernels.triton.tiles import cdiv, next_power_of_2

Tensor = torch.Tensor
CHUNK = 2048  # tokens of a program
NO_ORDER = tl.constexpr(-(1 << 31))  # below that of any logit


@triton.jit
def order_of(values):
    """32-bit integers in the same order as the logits."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "repetition", "presence", "frequency"])
def penalise_kernel(
    logits,
    rows,
    slots,
    counts,
    repetition,
    presence,
    frequency,
    width,
    vocab_size,
    chunk: tl.constexpr,
    has_repetition: tl.constexpr,
    has_presence: tl.constexpr,
    has_frequency: tl.constexpr,
):
    """Logits of counted tokens, as `kernels/sampling.py` says. A row whose penalties are all off is left alone."""
    place = tl.program_id(0)
    if has_repetition and has_presence and has_frequency:
        is_off = (tl.load(repetition + place) == 1.0) & (tl.load(presence + place) == 0.0)
        if is_off & (tl.load(frequency + place) == 0.0):
            return
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    found = tl.load(counts + tl.load(slots + place) * vocab_size + ids, mask=ids < vocab_size, other=0)
    is_counted = found > 0
    at = logits + tl.load(rows + place) * width + ids
    values = tl.load(at, mask=is_counted, other=0.0)
    if has_repetition:
        factor = tl.load(repetition + place).to(tl.float32)
        values = tl.where(values > 0, values / factor, values * factor)
    num_output = found >> 1
    if has_presence:
        values -= tl.where(num_output > 0, tl.load(presence + place).to(tl.float32), 0.0)
    if has_frequency:
        values -= tl.load(frequency + place).to(tl.float32) * num_output.to(tl.float32)
    tl.store(at, values, mask=is_counted)


@triton.jit
def mask_kernel(logits, rows, bits, width, num_words, chunk: tl.constexpr):
    """-inf for tokens whose bit is 0."""
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    is_inside = ids < width
    words = tl.load(bits + place * num_words + ids // 64, mask=is_inside & (ids // 64 < num_words), other=0)
    is_ruled_out = ((words >> (ids % 64).to(tl.int64)) & 1) == 0
    at = logits + tl.load(rows + place) * width + ids
    tl.store(at, tl.full((chunk,), float("-inf"), tl.float32), mask=is_inside & is_ruled_out)


@triton.jit
def score_kernel(
    logits,
    rows,
    token_ids,
    tops,
    top_ids,
    sums,
    num_higher,
    vocab_size,
    stride,
    chunk: tl.constexpr,
    has_rows: tl.constexpr,
):
    """Of every chunk: the largest logit and its lowest id, the sum of weights relative to it, and how many logits are
    higher than that of the row's token."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place) if has_rows else place
    logits += row * stride
    ids = tl.program_id(1) * chunk + tl.arange(0, chunk)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    top = tl.max(values, 0)
    to = place * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + to, top)
    tl.store(top_ids + to, tl.min(tl.where(values == top, ids, vocab_size - 1), 0))
    tl.store(sums + to, tl.sum(tl.exp(values - tl.where(top == float("-inf"), 0.0, top)), 0))
    own = tl.load(logits + tl.load(token_ids + place))
    tl.store(num_higher + to, tl.sum((values > own).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_top"])
def rank_kernel(
    logits,
    rows,
    token_ids,
    tops,
    top_ids,
    sums,
    num_higher,
    logprobs,
    ranks,
    likeliest,
    likeliest_logprobs,
    vocab_size,
    stride,
    num_chunks,
    num_top,
    chunk: tl.constexpr,
    width: tl.constexpr,
    has_rows: tl.constexpr,
):
    """Put together what chunks have. The likeliest tokens come one by one: each from the chunk whose highest is
    highest, of which the next highest is then looked up."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place) if has_rows else place
    logits += row * stride
    chunks = tl.arange(0, width)
    is_inside = chunks < num_chunks
    at = place * num_chunks + chunks
    peaks = tl.load(tops + at, mask=is_inside, other=float("-inf"))
    ids = tl.load(top_ids + at, mask=is_inside, other=0)
    highest = tl.max(peaks, 0)
    parts = tl.load(sums + at, mask=is_inside, other=0.0).to(tl.float64) * tl.exp((peaks - highest).to(tl.float64))
    base = highest.to(tl.float64) + tl.log(tl.sum(parts, 0))
    tl.store(logprobs + place, tl.load(logits + tl.load(token_ids + place)).to(tl.float64) - base)
    tl.store(ranks + place, tl.sum(tl.load(num_higher + at, mask=is_inside, other=0), 0).to(tl.int64) + 1)
    orders = tl.where(is_inside, order_of(peaks), NO_ORDER)
    for i in range(num_top):
        best = tl.max(orders, 0)
        token = tl.min(tl.where(orders == best, ids, vocab_size - 1), 0)
        value = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(likeliest + place * num_top + i, token.to(tl.int64))
        tl.store(likeliest_logprobs + place * num_top + i, value.to(tl.float64) - base)
        own = token // chunk * chunk + tl.arange(0, chunk)
        others = order_of(tl.load(logits + own, mask=own < vocab_size, other=0.0))
        is_left = (own < vocab_size) & ((others < best) | ((others == best) & (own > token)))
        others = tl.where(is_left, others, NO_ORDER)
        next_best = tl.max(others, 0)
        is_own = chunks == token // chunk
        ids = tl.where(is_own, tl.min(tl.where(others == next_best, own, vocab_size - 1), 0), ids)
        orders = tl.where(is_own, next_best, orders)


def penalise(x: Tensor, penalties: Penalties[Tensor]) -> None:
    factors, counts = (penalties.repetition, penalties.presence, penalties.frequency), penalties.counts.counts
    has_repetition, has_presence, has_frequency = (factor is not None for factor in factors)
    penalise_kernel[(len(penalties.rows), cdiv(counts.shape[1], CHUNK))](
        x,
        penalties.rows,
        penalties.slots_on_device,
        counts,
        *factors,
        x.stride(0),
        counts.shape[1],
        chunk=CHUNK,
        has_repetition=has_repetition,
        has_presence=has_presence,
        has_frequency=has_frequency,
    )


def mask(x: Tensor, masks: Masks[Tensor]) -> None:
    rows, bits = masks
    mask_kernel[(len(rows), cdiv(x.shape[1], CHUNK))](x, rows, bits, x.stride(0), bits.shape[1], chunk=CHUNK)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor | None) -> Logprobs[Tensor]:
    """As `Ops.token_logprobs`."""
    num_rows = len(token_ids)
    vocab_size = logits.shape[1]
    device = logits.device
    num_chunks, num_top = cdiv(vocab_size, CHUNK), min(num_top, vocab_size)
    (tops, sums), (top_ids, num_higher) = (  # each with an address that kernels are compiled for
        [torch.empty((num_rows, num_chunks), dtype=dtype, device=device) for _ in range(2)]
        for dtype in (torch.float32, torch.int32)
    )
    (logprobs, top_logprobs), (ranks, likeliest) = (
        [torch.empty(shape, dtype=dtype, device=device) for shape in (num_rows, (num_rows, num_top))]
        for dtype in (torch.float64, torch.int64)
    )
    found: Logprobs[Tensor] = Logprobs(logprobs, ranks, likeliest, top_logprobs)
    if num_rows:
        given, sizes = (logits, rows, token_ids, tops, top_ids, sums, num_higher), (vocab_size, logits.stride(0))
        score_kernel[(num_rows, num_chunks)](*given, *sizes, chunk=CHUNK, has_rows=rows is not None)
        rank_kernel[(num_rows,)](
            *given,
            *found,
            *sizes,
            num_chunks,
            num_top,
            chunk=CHUNK,
            width=next_power_of_2(num_chunks),
            has_rows=rows is not None,
        )
    return found
