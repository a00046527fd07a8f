"""What the scheduler itself costs: plan and commit without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from archerfish.bench.stats import percentile
from archerfish.bench.targets import Bar
from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import RadixCache
from archerfish.params import SamplingParams
from archerfish.sched.plan import Plan
from archerfish.sched.scheduler import Scheduler
from archerfish.sequence import Request
from archerfish.step import StepResult

TOKEN = 7
STEP_TARGET = Bar("plan and commit p99, us", 1000)  # of 256 sequences


@dataclass(frozen=True)
class BookkeepingReport:
    """Microseconds per step with all sequences decoding."""

    num_sequences: int
    steps: int
    num_waiting: int
    pipeline_depth: int
    plan_p50_us: float
    plan_p99_us: float
    commit_p50_us: float
    commit_p99_us: float
    both_p50_us: float
    both_p99_us: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_bookkeeping(
    num_sequences: int = 256,
    steps: int = 2000,
    *,
    num_waiting: int = 0,
    pipeline_depth: int = 1,
    policy: str = "fcfs",
    prompt_tokens: int = 100,
    block_size: int = 16,
    clock: Callable[[], float] = time.perf_counter,
) -> BookkeepingReport:
    """p50 and p99 of plan, commit and both, over steps in which `num_sequences` decode and `num_waiting` requests wait.

    With `clock=time.thread_time` what other processes take from this one does not count.
    """
    max_tokens = steps + 1000
    blocks = BlockManager(num_sequences * (-(-(prompt_tokens + max_tokens) // block_size) + 1), block_size)
    scheduler = Scheduler(
        blocks=blocks,
        cache=RadixCache(blocks),
        policy=policy,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192 + num_sequences,
        max_queue_size=num_sequences + num_waiting,
        max_model_len=prompt_tokens + max_tokens,
    )
    params = SamplingParams(max_tokens=max_tokens)
    for number in range(num_sequences + num_waiting):
        # Lengths differ, so that sequences take their blocks in different steps; so does the first token: no prefix is shared.
        prompt = [number] * (prompt_tokens - number % block_size)
        scheduler.add(Request(str(number), prompt, params, max_tokens, stop_token_ids=frozenset((1, 2))))
    in_flight: list[Plan] = []
    plans: list[float] = []
    commits: list[float] = []
    while len(plans) < steps:
        started = clock()
        plan = scheduler.plan()
        plan_us = (clock() - started) * 1e6
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) <= pipeline_depth:
            continue
        done = in_flight.pop(0)
        result = StepResult(np.full((len(done.sequences), 1), TOKEN))
        started = clock()
        scheduler.commit(done, result)
        commit_us = (clock() - started) * 1e6
        scheduler.take_deltas()
        if plan.input.num_decodes == done.input.num_decodes == num_sequences:
            plans.append(plan_us)
            commits.append(commit_us)
    both = [plan_us + commit_us for plan_us, commit_us in zip(plans, commits, strict=True)]
    return BookkeepingReport(
        num_sequences, steps, num_waiting, pipeline_depth,
        *(percentile(samples, share) for samples in (plans, commits, both) for share in (0.5, 0.99)),
    )  # fmt: skip
