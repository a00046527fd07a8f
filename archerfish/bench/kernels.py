"""The Triton kernels against what the card can do and against PyTorch: `python -m archerfish.bench.kernels` on a GPU.

Every figure is the median of at least 20 calls with nothing of their input in the card's cache: it is emptied before each, or,
for decodes, which run in a captured graph as in the engine, each call has a layer of its own. Bytes are the fewest that the
work must move, operations the fewest that it must do. "PyTorch" is the formula that transformers runs, and for attention
torch's fused kernel, with the blocks gathered first where it decodes; for decodes that share keys, our kernel without sharing,
for block masks, ours without a mask. "compiled" is the same formula by torch.compile, where that is one kernel or a few; the
time that it takes to compile is not counted (some 30 s in all; TORCH_COMPILE_DISABLE=1 does without).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from archerfish.kernels.ops import HeadShape, KVLayer, PagedBatch
    from archerfish.kernels.sampling import SamplingBatch
    from archerfish.kernels.triton.ops import TritonOps

    Tensor = torch.Tensor

COPY_BYTES_PER_S, BF16_FLOPS = 4.26e12, 785e12  # measured on an H200
TOKENS, WIDTH, FEED_FORWARD = 8192, 4096, 14336
BLOCK_SIZE = 16
DECODES = tuple((num, context) for num in (1, 32, 256) for context in (512, 4096))
SHARED_HEADS, SHARED_DECODES = ((16, 8), (32, 8)), (256, 3072, 160)  # sequences, keys in common, keys of each beside them
PREFILL = (8, 2048)
MASK_SIZE, MASK_SHARE, MASKED_DECODES, MASKED_CONTEXT = 64, 8, 32, 8192  # every MASK_SHAREth block of keys is visible
SAMPLES, VOCAB_SIZE, LOGIT_SPREAD = (1, 32, 256), 151_936, 3.0
WARMUP_MS, REPEAT_MS, SLOW_MS = 10, 60, 400
MIN_CALLS = 20
CACHE_BYTES, MAX_LAYERS = 200_000_000, 40  # layers of a decode: more than the card's cache holds, but not too many


@dataclass(frozen=True)
class KernelRow:
    """One kernel on one shape."""

    name: str
    shape: str
    microseconds: float
    rate: float
    unit: str  # of rate: GB/s or TFLOP/s
    share: float  # of what the card can do
    ratio: float  # to PyTorch: how many times as long that takes
    compiled_ratio: float | None = None  # to torch.compile of the same formula


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median of at least MIN_CALLS, with the cache emptied before each."""
    from triton.testing import do_bench

    times = do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="all")
    if len(times) < MIN_CALLS:
        times = do_bench(call, warmup=WARMUP_MS, rep=int(1.3 * MIN_CALLS * max(times)) + SLOW_MS, return_mode="all")
    return float(np.median(times)) * 1000


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of several calls captured as a graph: the median of MIN_CALLS replays."""
    import torch

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(MIN_CALLS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times[1:])) * 1000 / len(calls)


def compiled_us(measure: Callable[[list[Callable[[], object]]], float], peers: list[partial[Any]]) -> float | None:
    """What calls of one function take when torch.compile has made it over; None where it cannot."""
    import torch

    function = torch.compile(peers[0].func, dynamic=False)
    try:
        return measure([partial(function, *peer.args) for peer in peers])
    except Exception:  # a compiler that is not there, or does not know something, is no reason to measure nothing else
        return None


def row(
    name: str, shape: str, call: Callable[[], object], peer: Callable[[], object], *, num_bytes: float = 0, flops: float = 0
) -> KernelRow:
    """A peer that is a partial is measured compiled, too."""
    compiled = compiled_us(lambda calls: median_us(calls[0]), [peer]) if isinstance(peer, partial) else None
    return as_row(name, shape, median_us(call), median_us(peer), compiled, num_bytes=num_bytes, flops=flops)


def as_row(
    name: str, shape: str, us: float, peer_us: float, compiled: float | None = None, *, num_bytes: float = 0, flops: float = 0
) -> KernelRow:
    """Times in microseconds: ours, PyTorch's, and that of its formula compiled."""
    ratios = peer_us / us, None if compiled is None else compiled / us
    if flops:
        return KernelRow(name, shape, us, flops / us / 1e6, "TFLOP/s", flops / us * 1e6 / BF16_FLOPS, *ratios)
    return KernelRow(name, shape, us, num_bytes / us / 1e3, "GB/s", num_bytes / us * 1e6 / COPY_BYTES_PER_S, *ratios)


def measure_kernels() -> list[KernelRow]:
    """All rows, on the current CUDA device in bfloat16."""
    import torch

    from archerfish.kernels.triton.ops import TritonOps

    torch.manual_seed(0)
    ops = TritonOps("cuda", "bfloat16")
    with torch.inference_mode():
        return [
            *norm_rows(ops), *store_rows(ops), *decode_rows(ops), *shared_rows(ops), prefill_row(ops), *masked_rows(ops),
            gated_row(ops), *sample_rows(ops),
        ]  # fmt: skip


def random(*shape: int) -> Tensor:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def norm_rows(ops: TritonOps) -> Iterator[KernelRow]:
    x, residual, weight = random(TOKENS, WIDTH), random(TOKENS, WIDTH), random(WIDTH)
    factors, num_bytes, shape = weight.float(), 2 * x.nbytes, f"{TOKENS} x {WIDTH}"
    yield row(
        "rms_norm", shape, lambda: ops.rms_norm(x, factors, 1e-5), partial(eager_norm, x, weight), num_bytes=num_bytes
    )
    yield row(
        "rms_norm + residual", shape, lambda: ops.rms_norm(x, factors, 1e-5, residual=residual),
        partial(eager_norm_of_sum, x, residual, weight), num_bytes=2 * num_bytes,
    )


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    import torch

    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def eager_norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_norm(total, weight), total


def store_rows(ops: TritonOps) -> Iterator[KernelRow]:
    """The peer only rotates; ours also splits, norms in the second row, and writes keys and values."""
    from archerfish.kernels.ops import HeadShape

    heads = HeadShape(32, 8, 128, 128**-0.5)
    batch, kv = blocks_of(ops, heads, [(2048, 2048)] * (TOKENS // 2048))
    rotary = ops.rotary(np.random.default_rng(0).normal(size=(2048, 128)).astype(np.float32), 128)
    qkv, norm = random(TOKENS, 48 * 128), random(128).float()
    q, k = random(1, 32, TOKENS, 128), random(1, 8, TOKENS, 128)
    cos, sin = random(1, TOKENS, 128), random(1, TOKENS, 128)
    shape, num_bytes = f"{TOKENS} x (32 + 2 * 8) x 128", 2 * qkv.nbytes
    yield row(
        "rope + store", shape, lambda: ops.store_kv(qkv, kv, batch, heads, rotary), partial(eager_rope, q, k, cos, sin),
        num_bytes=num_bytes,
    )
    yield row(
        "qk-norm + rope + store", shape,
        lambda: ops.store_kv(qkv, kv, batch, heads, rotary, q_norm=norm, k_norm=norm, eps=1e-6),
        partial(eager_normed_rope, q, k, norm.bfloat16(), cos, sin), num_bytes=num_bytes,
    )


def eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    def half_turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def eager_normed_rope(q: Tensor, k: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return eager_rope(eager_norm(q, norm), eager_norm(k, norm), cos, sin)


def blocks_of(
    ops: TritonOps, heads: HeadShape, sequences: list[tuple[int, int]]
) -> tuple[PagedBatch[Tensor], KVLayer[Tensor]]:
    """A batch of (new tokens, context) over shuffled blocks of random numbers."""
    from archerfish.runtime.batch import build_batch

    needed = [-(-context // BLOCK_SIZE) for _, context in sequences]
    order = iter(np.random.default_rng(0).permutation(sum(needed)).tolist())
    kv = ops.new_kv_layer(sum(needed), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    kv.keys.normal_()
    kv.values.normal_()
    batch = build_batch(
        ops, tokens=[[7] * new for new, _ in sequences], starts=[context - new for new, context in sequences],
        blocks=[[next(order) for _ in range(num)] for num in needed], block_size=BLOCK_SIZE,
    )
    return batch, kv


def decode_rows(ops: TritonOps) -> Iterator[KernelRow]:
    from archerfish.kernels.ops import HeadShape

    heads = HeadShape(32, 8, 128, 128**-0.5)
    for num, context in DECODES:
        batch, kv = blocks_of(ops, heads, [(1, context)] * num)
        num_layers = max(2, min(MAX_LAYERS, CACHE_BYTES // (2 * kv.keys.nbytes)))
        layers = [kv, *(type(kv)(kv.keys.clone(), kv.values.clone()) for _ in range(num_layers - 1))]
        q = random(num, 32 * 128)
        us = graph_us([partial(ops.paged_attention, q, layer, batch, heads) for layer in layers])
        peer_us = graph_us([partial(gathered_attention, q, layer, batch, heads) for layer in layers])
        shape, num_bytes = f"batch {num}, context {context}", 2 * kv.keys.nbytes + 2 * q.nbytes
        yield as_row("decode attention", shape, us, peer_us, num_bytes=num_bytes)
        del kv, layers


def shared_rows(ops: TritonOps) -> Iterator[KernelRow]:
    from archerfish.kernels.ops import HeadShape

    for num_heads, num_kv_heads in SHARED_HEADS:
        heads = HeadShape(num_heads, num_kv_heads, 128, 128**-0.5)
        num, shared, _ = SHARED_DECODES
        batch, plain, kv = sharing_blocks(ops, heads, *SHARED_DECODES)
        layers = [kv, *(type(kv)(kv.keys.clone(), kv.values.clone()) for _ in range(2))]
        q = random(num, num_heads * 128)
        us, peer_us = (
            graph_us([partial(ops.paged_attention, q, layer, one, heads) for layer in layers]) for one in (batch, plain)
        )
        shape, num_bytes = f"{num} of {num_heads}/{num_kv_heads}, shared {shared}", 2 * kv.keys.nbytes + 2 * q.nbytes
        yield as_row("decode, shared keys", shape, us, peer_us, num_bytes=num_bytes)


def sharing_blocks(
    ops: TritonOps, heads: HeadShape, num: int, shared: int, own: int
) -> tuple[PagedBatch[Tensor], PagedBatch[Tensor], KVLayer[Tensor]]:
    """Decodes whose first keys lie in the same blocks: a batch that says so, one that does not, the blocks."""
    from archerfish.runtime.batch import build_batch

    num_shared, num_own = shared // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(num_shared + num * num_own).tolist()
    kv = ops.new_kv_layer(len(order), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    kv.keys.normal_()
    kv.values.normal_()
    firsts = range(num_shared, len(order), num_own)
    batch, plain = (
        build_batch(
            ops, tokens=[[7]] * num, starts=[shared + own - 1] * num,
            blocks=[order[:num_shared] + order[first : first + num_own] for first in firsts], block_size=BLOCK_SIZE,
            num_shared=told,
        )
        for told in (shared, 0)
    )
    return batch, plain, kv


def gathered_attention(q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape) -> Tensor:
    """Decodes of one length by torch's fused kernel."""
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = (memory[batch.block_tables].flatten(1, 2).transpose(1, 2) for memory in (kv.keys, kv.values))
    queries = q.view(len(q), heads.num_kv_heads, -1, heads.head_dim)  # a group's heads in place of query positions
    return scaled_dot_product_attention(queries, keys, values, scale=heads.scale)


def prefill_row(ops: TritonOps) -> KernelRow:
    from torch.nn.functional import scaled_dot_product_attention

    from archerfish.kernels.ops import HeadShape

    heads = HeadShape(32, 8, 128, 128**-0.5)
    num, length = PREFILL
    batch, kv = blocks_of(ops, heads, [(length, length)] * num)
    q = random(num * length, 32 * 128)
    queries = q.view(num, length, 32, 128).transpose(1, 2)
    keys, values = (random(num, length, 8, 128).transpose(1, 2) for _ in range(2))
    return row(
        "prefill attention", f"{num} x {length}", lambda: ops.paged_attention(q, kv, batch, heads),
        lambda: scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True),
        flops=num * 32 * 4 * 128 * length * (length + 1) / 2,
    )


def masked_rows(ops: TritonOps) -> Iterator[KernelRow]:
    """Every block of queries sees its own block of keys, the MASK_SHAREth before it, and so on."""
    from archerfish.kernels.ops import BlockMask, HeadShape

    heads, length = HeadShape(32, 8, 128, 128**-0.5), MASKED_CONTEXT
    blocks = np.arange(length // MASK_SIZE)
    visible = (blocks[:, None] - blocks) % MASK_SHARE == 0
    mask = BlockMask(MASK_SIZE, ops.ids(visible.astype(np.int64)))
    shape = f"{length}, 1/{MASK_SHARE} of {MASK_SIZE}s"
    batch, kv = blocks_of(ops, heads, [(1, length)] * MASKED_DECODES)
    layers = [kv, type(kv)(kv.keys.clone(), kv.values.clone())]
    q = random(MASKED_DECODES, 32 * 128)
    us, peer_us = (
        graph_us([partial(ops.paged_attention, q, layer, batch, heads, mask=one) for layer in layers]) for one in (mask, None)
    )
    num_bytes = 2 * kv.keys.nbytes / MASK_SHARE + 2 * q.nbytes
    yield as_row("masked decode", f"{MASKED_DECODES} x {shape}", us, peer_us, num_bytes=num_bytes)
    prompt, prompt_kv = blocks_of(ops, heads, [(length, length)])
    queries = random(length, 32 * 128)
    num_pairs = np.tril(visible, -1).sum() * MASK_SIZE**2 + length * (MASK_SIZE + 1) / 2
    yield row(
        "masked prefill", f"1 x {shape}", lambda: ops.paged_attention(queries, prompt_kv, prompt, heads, mask=mask),
        lambda: ops.paged_attention(queries, prompt_kv, prompt, heads), flops=32 * 4 * 128 * float(num_pairs),
    )


def gated_row(ops: TritonOps) -> KernelRow:
    x = random(TOKENS, 2 * FEED_FORWARD)
    return row(
        "gated silu", f"{TOKENS} x {FEED_FORWARD}", lambda: ops.gated(x, "silu"), partial(eager_gated, x),
        num_bytes=1.5 * x.nbytes,
    )


def eager_gated(x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    width = x.shape[1] // 2
    return silu(x[:, :width]) * x[:, width:]


def sample_rows(ops: TritonOps) -> Iterator[KernelRow]:
    """Draws in a captured graph that takes every parameter from the device, as in the engine."""
    import torch

    for num in SAMPLES:
        logits = [torch.randn(num, VOCAB_SIZE, device="cuda") * LOGIT_SPREAD for _ in range(4)]
        for name, temperature, top_k, top_p in (
            ("sample greedily", 0.0, 0, 1.0), ("sample", 0.8, 0, 1.0), ("sample, top_p", 0.8, 0, 0.9),
            ("sample, top_k, top_p", 0.8, 50, 0.9),
        ):
            batch = sampling_of(num, temperature, top_k, top_p)
            us = graph_us([partial(ops.sample, x, batch) for x in logits])
            peers = [partial(eager_sample, x, temperature, top_k, top_p) for x in logits]
            compiled = compiled_us(graph_us, peers) if num == SAMPLES[-1] else None  # which is slow to compile
            yield as_row(name, f"{num} x {VOCAB_SIZE}", us, graph_us([*peers]), compiled, num_bytes=logits[0].nbytes)


def sampling_of(num: int, temperature: float, top_k: int, top_p: float) -> SamplingBatch[Tensor]:
    """Rows of the same parameters; 0 and 1 leave out a top_k and a top_p."""
    import torch

    from archerfish.kernels.sampling import TOP_K_OFF, Cuts, SamplingBatch

    numbers = torch.arange(num, device="cuda")
    ones = torch.ones(num, dtype=torch.float64, device="cuda")
    cuts = Cuts(numbers, torch.full_like(numbers, top_k or TOP_K_OFF), ones * (top_p if top_p < 1 else np.inf), TOP_K_OFF)
    return SamplingBatch(
        temperature=ones * (temperature or 1.0), is_greedy=torch.full_like(numbers, temperature == 0), keys=numbers * 7919,
        positions=numbers, min_p=ones * 0, long_cuts=cuts, has_uncut=True,
    )


def eager_sample(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    import torch

    if temperature == 0:
        return logits.argmax(-1)
    scores = logits / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        rising, order = scores.sort()
        is_left_out = rising.softmax(-1).cumsum(-1) <= 1 - top_p
        scores = scores.masked_fill(is_left_out.scatter(1, order, is_left_out), -torch.inf)
    weights = scores.softmax(-1)
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def as_table(rows: list[KernelRow]) -> str:
    """For people to read."""
    lines = [f"{'kernel':24} {'shape':28} {'us':>8} {'rate':>16} {'of limit':>8} {'x PyTorch':>9} {'x compiled':>10}"]
    for r in rows:
        compiled = "" if r.compiled_ratio is None else f"{r.compiled_ratio:.2f}"
        figures = f"{r.microseconds:8.1f} {r.rate:8.0f} {r.unit:7} {r.share:8.0%} {r.ratio:9.2f} {compiled:>10}"
        lines.append(f"{r.name:24} {r.shape:28} {figures}".rstrip())
    return "\n".join(lines)


def as_json(rows: list[KernelRow]) -> str:
    found: list[dict[str, Any]] = [asdict(r) for r in rows]
    return json.dumps({"bench": "kernels", "rows": found}, indent=1)


if __name__ == "__main__":
    print(as_table(measure_kernels()))
