"""`archerfish bench scheduler`: what planning a step and keeping the prefix cache cost, without a model.

Evicting and allocating must cost the same however many nodes the tree has; matching and inserting must cost the same
per token however long a prompt is. Python's garbage collector is off meanwhile, because its pauses grow with all
objects.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import numpy as np

from archerfish.bench.report import Found, Measurement
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache, RadixKey
from archerfish.errors import InvalidOptionError
from archerfish.observe.summary import percentile
from archerfish.params import SamplingParams
from archerfish.sched.plan import Plan
from archerfish.sched.scheduler import Scheduler
from archerfish.sequence import Request
from archerfish.step import StepResult

BLOCK_SIZE, TOKEN = 16, 7
NUM_NODES = (10**3, 10**4, 10**5, 10**6)
LENGTHS = (256, 1024, 4096, 16384, 65536)
PROMPT_TOKENS = 1024
NUM_PROMPTS = 50
NUM_SAMPLES = 1000


def measure(options: Namespace) -> Found:
    sizes = [size for size in NUM_NODES if size <= options.nodes]
    if not sizes:
        raise InvalidOptionError(f"--nodes is {options.nodes}; the smallest tree has {NUM_NODES[0]:,}.")
    plans, commits = step_times_us(options.sequences, options.steps)
    both = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    for name, samples in (("plan", plans), ("commit", commits), ("plan and commit", both)):
        for share in (50, 99):
            yield Measurement(f"{name} p{share}, us", percentile(samples, share / 100))
    gc.disable()
    try:
        list(tree_costs(NUM_NODES[0]))  # warms up
        for num_nodes in sizes:
            yield from tree_costs(num_nodes)
        for length in LENGTHS:
            cache = filled_cache(NUM_NODES[0], NUM_PROMPTS * (length // BLOCK_SIZE + 1))
            yield from prompt_costs(cache, length, f"prompt of {length:,} tokens")
            gc.collect()
    finally:
        gc.enable()


def step_times_us(
    num_sequences: int, num_steps: int, *, num_waiting: int = 0, prompt_tokens: int = 100
) -> tuple[list[float], list[float]]:
    """Microseconds of plan and of commit, over steps in which all sequences decode and some requests wait."""
    max_tokens = num_steps + 1000
    blocks = BlockManager(num_sequences * (-(-(prompt_tokens + max_tokens) // BLOCK_SIZE) + 1), BLOCK_SIZE)
    scheduler = Scheduler(
        blocks=blocks,
        cache=RadixCache(blocks),
        policy="fcfs",
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192 + num_sequences,
        max_queue_size=num_sequences + num_waiting,
        max_model_len=prompt_tokens + max_tokens,
    )
    params = SamplingParams(max_tokens=max_tokens)
    for number in range(num_sequences + num_waiting):
        # Lengths differ, so that sequences take blocks in different steps. First tokens differ: no prefix is shared.
        prompt = [number] * (prompt_tokens - number % BLOCK_SIZE)
        scheduler.add(Request(str(number), prompt, params, max_tokens, stop_token_ids=frozenset((1, 2))))
    in_flight: list[Plan] = []
    plans: list[float] = []
    commits: list[float] = []
    while len(plans) < num_steps:
        began = time.perf_counter()
        plan = scheduler.plan()
        plan_us = (time.perf_counter() - began) * 1e6
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) == 1:
            continue
        done = in_flight.pop(0)
        result = StepResult(np.full((len(done.sequences), 1), TOKEN))
        began = time.perf_counter()
        scheduler.commit(done, result)
        commit_us = (time.perf_counter() - began) * 1e6
        scheduler.take_deltas()
        if plan.input.num_decodes == done.input.num_decodes == num_sequences:
            plans.append(plan_us)
            commits.append(commit_us)
    return plans, commits


def tree_costs(num_nodes: int) -> Iterator[Measurement]:
    """Evicting a leaf of one block, allocating and freeing a block, matching and inserting, in a tree of so many
    nodes."""
    cache = filled_cache(num_nodes, NUM_PROMPTS * (PROMPT_TOKENS // BLOCK_SIZE) + NUM_SAMPLES)
    title, blocks = f"tree of {num_nodes:,} nodes", cache.blocks
    yield Measurement(f"{title}, allocate and free, ns", median_ns(lambda: blocks.free(blocks.allocate(1)), 20, 50))
    yield from prompt_costs(cache, PROMPT_TOKENS, title)
    yield Measurement(
        f"{title}, evict, ns", median_ns(lambda: cache.evict(1), 20, min(NUM_SAMPLES, num_nodes // 2) // 20)
    )


def prompt_costs(cache: RadixCache, length: int, title: str) -> Iterator[Measurement]:
    """Nanoseconds per token of inserting new prompts, and of matching all but their last token."""
    prompts = [[2**31 + number, *range(1, length)] for number in range(NUM_PROMPTS)]
    tables = [cache.blocks.allocate(-(-length // BLOCK_SIZE)) for _ in prompts]
    pairs, keys = iter(list(zip(prompts, tables, strict=True))), iter(prompts)

    def insert() -> None:
        prompt, table = next(pairs)
        cache.insert(RadixKey(prompt), table)

    yield Measurement(f"{title}, insert a token, ns", median_ns(insert, NUM_PROMPTS) / length)
    match_ns = median_ns(lambda: cache.match_prefix(RadixKey(next(keys)), limit=length - 1), NUM_PROMPTS)
    yield Measurement(f"{title}, match a token, ns", match_ns / length)
    for table in tables:
        cache.blocks.free(table)


def filled_cache(num_nodes: int, num_spare: int) -> RadixCache:
    """A tree of so many nodes of one block each, with up to 999 leaves below every inner node, and spare blocks."""
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


def median_ns(operation: Callable[[], object], rounds: int, batch: int = 1) -> float:
    """The median over rounds of the mean over a batch, so that work that an operation defers counts too."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(batch):
            operation()
        samples.append((time.perf_counter_ns() - began) / batch)
    return statistics.median(samples)
