"""`archerfish bench kernels`: the Triton kernels against what the card can do, in bfloat16.

Figures are medians with nothing of a call's input in the card's cache. It is emptied before each call; calls that last
a few microseconds run in a captured graph, as in the engine, and each has inputs of its own. The limit is the fewest
bytes that the work must move, or the fewest operations, at the card's rate.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from archerfish.bench.report import Found, Measurement
from archerfish.kernels.adapters import LowRank
from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import PLAIN
from archerfish.kernels.ops import HeadShape, KVLayer, Ops, PagedBatch, Rotation
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.select import choose_device
from archerfish.runtime.batch import build_batch

if TYPE_CHECKING:
    from archerfish.kernels.triton.ops import TritonOps

Tensor = torch.Tensor
COPY_BYTES_PER_S, BF16_FLOPS = 4.26e12, 785e12  # measured on an H200
TOKENS = 8192
WIDTH = 4096
FEED_FORWARD = 14336
BLOCK_SIZE = 16
NUM_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
EXPERT_WIDTH = 2048
EXPERT_UNITS = 768
NUM_ADAPTERS = 32
RANK = 16
SAMPLES = 256
VOCAB_SIZE = 151936
TEMPERATURE = 0.8
CACHE_BYTES, MAX_LAYERS = 200_000_000, 40  # layers of a decode: together more than the card's cache holds
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel on one shape. Several calls are measured in a graph, one by itself."""

    name: str
    calls: Sequence[Call]
    num_bytes: float = 0
    flops: float = 0
    peer: Call | None = None  # the same work as unfused operations of PyTorch


def measure(options: Namespace) -> Found:
    from archerfish.kernels.triton.ops import TritonOps

    choose_device("cuda")
    torch.manual_seed(0)
    ops = TritonOps("cuda", "bfloat16")
    with torch.inference_mode():
        for cases in (elementwise, stores, decodes, prefills, experts, additions, draws):
            for case in cases(ops):
                us = median_us(case.calls)
                yield Measurement(f"{case.name}, us", us)
                limit_us = 1e6 * max(case.num_bytes / COPY_BYTES_PER_S, case.flops / BF16_FLOPS)
                yield Measurement(f"{case.name}, share of the limit", limit_us / us)
                if case.peer is not None:
                    yield Measurement(f"{case.name}, times as fast as PyTorch", median_us([case.peer]) / us)


def median_us(calls: Sequence[Call]) -> float:
    """Microseconds of one call."""
    from triton.testing import do_bench, do_bench_cudagraph

    if len(calls) == 1:
        return float(do_bench(calls[0], warmup=10, rep=200, return_mode="median")) * 1000

    def run_all() -> None:
        for call in calls:
            call()

    return float(do_bench_cudagraph(run_all, rep=200, return_mode="median")) * 1000 / len(calls)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def elementwise(ops: TritonOps) -> Iterator[Case]:
    x = random(TOKENS, WIDTH)
    residual = random(TOKENS, WIDTH)
    factors = random(WIDTH).float()
    normed = partial(ops.rms_norm, x, factors, 1e-5)
    peer = partial(unfused_norm, x, factors)
    yield Case(f"rms_norm {TOKENS} x {WIDTH}", [normed], num_bytes=2 * x.nbytes, peer=peer)
    yield Case(f"rms_norm of a sum {TOKENS} x {WIDTH}", [partial(normed, residual=residual)], num_bytes=4 * x.nbytes)
    wide = random(TOKENS, 2 * FEED_FORWARD)
    yield Case(f"gated silu {TOKENS} x {FEED_FORWARD}", [partial(ops.gated, wide, "silu")], num_bytes=1.5 * wide.nbytes)


def stores(ops: TritonOps) -> Iterator[Case]:
    heads = head_shape()
    batch, kv = block_batch(ops, heads, [(2048, 2048)] * (TOKENS // 2048))
    rotary = ops.rotary(np.random.default_rng(0).normal(size=(2048, HEAD_DIM)).astype(np.float32), HEAD_DIM)
    qkv, norm = random(TOKENS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), random(HEAD_DIM).float()
    plain = partial(ops.store_kv, qkv, kv, batch, heads, Rotation(rotary))
    q, k = random(1, NUM_HEADS, TOKENS, HEAD_DIM), random(1, NUM_KV_HEADS, TOKENS, HEAD_DIM)
    peer = partial(unfused_rotary, q, k, random(1, 1, TOKENS, HEAD_DIM), random(1, 1, TOKENS, HEAD_DIM))
    yield Case("rotary and store", [plain], num_bytes=2 * qkv.nbytes, peer=peer)
    normed = partial(ops.store_kv, qkv, kv, batch, heads, Rotation(rotary, norm, norm, 1e-6))
    yield Case("rotary and store, q and k normed", [normed], num_bytes=2 * qkv.nbytes)


def unfused_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def unfused_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates only; ours also splits the product and writes keys and values into their blocks."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def head_shape(num_heads: int = NUM_HEADS) -> HeadShape:
    return HeadShape(num_heads, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)


def block_batch(
    ops: Ops[Tensor], heads: HeadShape, sequences: list[tuple[int, int]], num_shared: int = 0
) -> tuple[PagedBatch[Tensor], KVLayer[Tensor]]:
    """A batch of sequences (new tokens, context) over shuffled blocks of random keys, the first of which they may
    share."""
    num_common = num_shared // BLOCK_SIZE
    needed = [-(-context // BLOCK_SIZE) - num_common for _, context in sequences]
    order = np.random.default_rng(0).permutation(num_common + sum(needed)).tolist()
    own = iter(order[num_common:])
    kv = ops.new_kv_layer(len(order), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    kv.keys.normal_()
    kv.values.normal_()
    batch = build_batch(
        ops,
        tokens=[[7] * new for new, _ in sequences],
        starts=[context - new for new, context in sequences],
        blocks=[order[:num_common] + [next(own) for _ in range(num)] for num in needed],
        block_size=BLOCK_SIZE,
    )
    return batch, kv


def decodes(ops: TritonOps) -> Iterator[Case]:
    """Each call has a layer of its own; together they are more than the card's cache holds."""
    shapes = [(num, context, 0, NUM_HEADS) for num in (1, 32, 256) for context in (512, 4096)]
    for num, context, shared, num_heads in [*shapes, *((256, 3232, 3072, num_heads) for num_heads in (16, 32))]:
        heads = head_shape(num_heads)
        batch, kv = block_batch(ops, heads, [(1, context)] * num, shared)
        num_layers = max(2, min(MAX_LAYERS, CACHE_BYTES // (2 * kv.keys.nbytes)))
        layers = [kv, *(type(kv)(kv.keys.clone(), kv.values.clone()) for _ in range(num_layers - 1))]
        q = random(num, num_heads * HEAD_DIM)
        name = f"decode attention, {num} x {context}" + (f", {shared} keys shared, {num_heads} heads" if shared else "")
        calls = [partial(ops.paged_attention, q, layer, batch, heads) for layer in layers]
        yield Case(name, calls, num_bytes=2 * kv.keys.nbytes + 2 * q.nbytes)


def prefills(ops: TritonOps) -> Iterator[Case]:
    heads = head_shape()
    num = 8
    length = 2048
    batch, kv = block_batch(ops, heads, [(length, length)] * num)
    q = random(num * length, NUM_HEADS * HEAD_DIM)
    flops = num * NUM_HEADS * 4 * HEAD_DIM * length * (length + 1) / 2
    yield Case(f"prefill attention, {num} x {length}", [partial(ops.paged_attention, q, kv, batch, heads)], flops=flops)


def experts(ops: TritonOps) -> Iterator[Case]:
    """Those of a layer of Qwen3-30B-A3B, more than the card's cache holds."""
    routing: Routing[Tensor] = Routing(128, 8, is_normed=True)
    gate_up, down = (
        ops.linear_weight([random(routing.num_experts * outputs, width) / 64], [None], PLAIN)
        for outputs, width in ((2 * EXPERT_UNITS, EXPERT_WIDTH), (EXPERT_WIDTH, EXPERT_UNITS))
    )
    for num in (1, 16, 64, 256, 2048, TOKENS):
        inputs = [(random(num, EXPERT_WIDTH), random(num, routing.num_experts)) for _ in range(4)]
        chosen = [logits.topk(routing.num_chosen).indices.flatten().tolist() for _, logits in inputs]
        num_used = sum(len(set(each)) for each in chosen) / len(chosen)
        calls = [partial(ops.experts, x, logits, routing, gate_up, down, "silu") for x, logits in inputs]
        numbers = 3 * EXPERT_UNITS * EXPERT_WIDTH  # of an expert
        yield Case(
            f"{routing.num_chosen} of {routing.num_experts} experts, {num} rows",
            calls,
            num_bytes=2 * num_used * numbers + 2 * inputs[0][0].nbytes,
            flops=2 * num * routing.num_chosen * numbers,
        )


def additions(ops: TritonOps) -> Iterator[Case]:
    """What 32 adapters of rank 16 add to the products of a layer of Llama-3.1-8B."""
    adapters = ops.new_adapters(NUM_ADAPTERS, RANK)
    kv = NUM_KV_HEADS * HEAD_DIM
    products = {
        "qkv": ((WIDTH, kv, kv), WIDTH),
        "out": ((WIDTH,), WIDTH),
        "gate and up": ((FEED_FORWARD,) * 2, WIDTH),
        "down": ((WIDTH,), FEED_FORWARD),
    }
    tables = {
        name: adapters.add_product([f"{name}.{i}" for i in range(len(sizes))], sizes, inputs)
        for name, (sizes, inputs) in products.items()
    }
    for slot in range(1, NUM_ADAPTERS + 1):
        shapes = {name: ((RANK, one.inputs.size), (one.outputs.size, RANK)) for name, [one] in adapters.maps.items()}
        adapters.fill(
            slot,
            {name: LowRank(np.ones(down, np.float32), np.ones(up, np.float32)) for name, (down, up) in shapes.items()},
        )
    for num in (32, SAMPLES, TOKENS):
        adapters.rows = torch.arange(num, device="cuda") % NUM_ADAPTERS + 1
        for name, (sizes, width) in products.items():
            x = random(num, width)
            y = random(num, sum(sizes))
            table = tables[name]
            yield Case(
                f"adapters of {name}, {num} rows",
                [partial(adapters.add, y, x, table)] * 4,
                num_bytes=x.nbytes + 2 * y.nbytes + table.down.nbytes + table.up.nbytes,
            )


def draws(ops: TritonOps) -> Iterator[Case]:
    logits, numbers = 4 * random(SAMPLES, VOCAB_SIZE).float(), torch.arange(SAMPLES, device="cuda")
    batch = SamplingBatch(
        temperature=torch.full_like(numbers, TEMPERATURE, dtype=torch.float64), keys=numbers, positions=numbers
    )
    yield Case(
        f"sample {SAMPLES} x {VOCAB_SIZE}",
        [partial(ops.sample, logits, batch)],
        num_bytes=logits.nbytes,
        peer=lambda: torch.multinomial((logits / TEMPERATURE).softmax(-1), 1),
    )
