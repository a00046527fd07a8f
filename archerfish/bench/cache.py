"""What the book-keeping of the prefix cache costs, and how it grows.

Evicting and allocating must cost the same however many nodes there are; matching and inserting must cost the same per
token however long the prompt is. Python's garbage collector is off while measuring, as its pauses grow with all objects
of a process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache, RadixKey
from archerfish.engine.arrow_engine import no_collection

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024  # of the prompts that are matched and inserted in trees of growing size
NUM_SAMPLES = 1_000


@dataclass(frozen=True)
class CacheCost:
    """Nanoseconds in a tree of so many nodes: of one eviction (a leaf of one block), of one block allocated and freed,
    and per token of a prompt of PROMPT_TOKENS, packing its tokens included."""

    num_nodes: int
    evict_ns: float
    alloc_ns: float
    match_ns_per_token: float
    insert_ns_per_token: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class LengthCost:
    """Nanoseconds per token of matching and inserting a prompt of so many tokens, packing them included."""

    num_tokens: int
    match_ns_per_token: float
    insert_ns_per_token: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_cache(sizes: Sequence[int] = (10**3, 10**4, 10**5, 10**6)) -> list[CacheCost]:
    """The costs in trees of these numbers of nodes."""
    gc.collect()
    with no_collection():
        _measure_size(1_000)  # warms up the processor and numpy
        return [_measure_size(size) for size in sizes]


def measure_lengths(lengths: Sequence[int] = (256, 1024, 4096, 16384, 65536)) -> list[LengthCost]:
    """The costs of prompts of these lengths, in a tree of a thousand nodes."""
    rows = []
    with no_collection():
        for length in lengths:
            cache = _filled(1_000, 64 * (length // BLOCK_SIZE + 1))
            match_ns, insert_ns = _match_and_insert(cache, length, 50)
            rows.append(LengthCost(length, match_ns / length, insert_ns / length))
            gc.collect()
    return rows


def _measure_size(num_nodes: int) -> CacheCost:
    cache = _filled(num_nodes, 60 * (PROMPT_TOKENS // BLOCK_SIZE) + NUM_SAMPLES)
    blocks = cache.blocks
    alloc_ns = _median_ns(lambda: blocks.free(blocks.allocate(1)), 20, NUM_SAMPLES // 20)
    match_ns, insert_ns = _match_and_insert(cache, PROMPT_TOKENS, 50)
    evict_ns = _median_ns(lambda: cache.evict(1), 20, min(NUM_SAMPLES, num_nodes // 2) // 20)
    return CacheCost(num_nodes, evict_ns, alloc_ns, match_ns / PROMPT_TOKENS, insert_ns / PROMPT_TOKENS)


def _filled(num_nodes: int, num_spare: int) -> RadixCache:
    """A tree of that many nodes of one block each, a thousand leaves below each inner node, and spare blocks."""
    blocks = BlockManager(num_nodes + num_spare, BLOCK_SIZE)
    cache = RadixCache(blocks)
    tail = list(range(1, BLOCK_SIZE))
    for group in range(-(-num_nodes // 1000)):
        head = blocks.allocate(1)
        prefix = [group, *tail]
        cache.insert(RadixKey(prefix), head)
        for leaf in range(min(999, num_nodes - 1 - group * 1000)):
            own = blocks.allocate(1)
            cache.insert(RadixKey([*prefix, leaf, *tail]), head + own)
            blocks.free(own)
        blocks.free(head)
    return cache


def _match_and_insert(cache: RadixCache, length: int, num_prompts: int) -> tuple[float, float]:
    """Median nanoseconds of inserting new prompts, and of matching them, all but the last token."""
    blocks = cache.blocks
    prompts = [[2**31 + number, *range(1, length)] for number in range(num_prompts)]
    tables = [blocks.allocate(-(-length // BLOCK_SIZE)) for _ in prompts]
    turns = iter(range(num_prompts))

    def insert() -> None:
        turn = next(turns)
        cache.insert(RadixKey(prompts[turn]), tables[turn])

    insert_ns = _median_ns(insert, num_prompts)
    turns = iter(range(num_prompts))
    match_ns = _median_ns(lambda: cache.match_prefix(RadixKey(prompts[next(turns)]), limit=length - 1), num_prompts)
    for table in tables:
        blocks.free(table)
    return match_ns, insert_ns


def _median_ns(operation: Callable[[], object], rounds: int, batch: int = 1) -> float:
    """The median over rounds of the mean over a batch, so that what an operation puts off is counted too."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(batch):
            operation()
        samples.append((time.perf_counter_ns() - began) / batch)
    return statistics.median(samples)
