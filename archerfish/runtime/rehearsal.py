"""Every kind of step that a request can lead to, run by a runner that nobody else uses: see `Ops.starting`.

A kernel is compiled anew for other types, constants and alignments of its arguments, which follow from few numbers:
sequences with one new token, tokens of a pass, sampled rows. So each of these is varied alone.
`tests/runtime/test_rehearsal.py` checks random requests against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from archerfish.kernels.batches import T
from archerfish.params import SamplingParams, Stage
from archerfish.runtime.batch import MIN_SHARED_SEQUENCES, MIN_SHARED_TOKENS
from archerfish.runtime.graphs import list_sizes
from archerfish.runtime.sampler import prompt_logprobs
from archerfish.step import RowEntry, StepInput

if TYPE_CHECKING:
    from archerfish.runtime.runner import ModelRunner

EVERY_NUMBER = 16  # of sequences, up to which each number is tried; beyond it those that are recorded
NUMBERS = sorted({2**power + more for power in range(9) for more in (0, 1)})  # of rows: no tile changes elsewhere
LONG = 2**11 + 1  # tokens of a pass: with more of them no tile of experts changes
SAMPLED = (1, 4, 17, 65)  # rows of logits: by a kernel or by cuBLAS, in any format of weights
CONTEXT = 40  # tokens before a decode's
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams()
CUT = SamplingParams(top_p=0.5)
Mix = tuple[SamplingParams, ...]  # of the rows of a batch, in turn


def rehearse(runner: ModelRunner[Any]) -> None:
    """Run all of it. What the runner computes means nothing, and the blocks that it writes must be free."""
    with runner.ops.computing():
        runner.run_first()
        for passes in (runner._graphs, runner._passes):
            if passes is not None:
                passes.run_each()
        runner._passes = None  # the first step of a kind is not recorded
        for step in list_steps(runner):
            for slot in (0,) if runner.ops.adapters is None else (0, 1):
                runner.launch(replace(step, adapters=step.adapters + slot)).result()
        rehearse_sampling(runner)
        for num in (1, 2) if runner.pool.has_keys else ():
            runner.ops.copy_blocks(runner.pool.layers, [(0, 0)] * num)
    runner.ops.free_unused()


def list_steps(runner: ModelRunner[Any]) -> Iterator[StepInput]:
    """Steps that are not recorded."""
    most, max_len = runner.sampler.max_rows, runner.model.max_len
    for num in sorted({*range(1, min(most, EVERY_NUMBER) + 1), *list_sizes(most)}):
        for start in (
            (CONTEXT, MIN_SHARED_TOKENS + runner.pool.block_size) if num >= MIN_SHARED_SEQUENCES else (CONTEXT,)
        ):
            decodes = [(1, min(start, max_len - 1))] * num
            yield make_step(runner, decodes, is_shared=start > CONTEXT, kept=[(0, 0)], dropped=[0])
            if num < most:
                yield make_step(runner, [*decodes, (min(2, max_len), 0)], is_shared=start > CONTEXT)
    for num in (num for num in NUMBERS[1:] if num <= max_len):
        for start in {0, min(3 * num, max_len - num)}:
            yield make_step(runner, [(num, start)], kept=[(0, 0)], dropped=[0])
        if num <= most:
            yield make_step(runner, [(min(2, max_len), min(8, max_len - 2))] * num)
    yield make_step(runner, [(min(LONG, max_len), 0)] * min(most, -(-LONG // max_len)))


def make_step(
    runner: ModelRunner[Any], sequences: Sequence[tuple[int, int]], *, is_shared: bool = False, **others: Any
) -> StepInput:
    """New tokens and start of each sequence, which all begin with the same blocks where is_shared."""
    counts, starts = np.asarray(sequences, dtype=np.int64).T.copy()
    rows, ones = np.arange(len(counts)), np.ones_like(counts)
    num_blocks = -(-(counts + starts) // runner.pool.block_size)
    places = np.concatenate([np.arange(num) for num in num_blocks])
    owners = np.repeat(rows, num_blocks)
    ids = (places if is_shared else places + owners) % runner.pool.num_blocks
    entries = [RowEntry(int(row), "rehearsal", GREEDY, num_prompt=1) for row in rows]
    return StepInput(
        step=0,
        rows=rows,
        starts=starts,
        counts=counts,
        samples=ones,
        adapters=0 * ones,
        num_decodes=int((counts == 1).sum()),
        tokens=np.zeros(int(counts.sum()), dtype=np.int64),
        block_rows=owners,
        block_places=places,
        block_ids=ids,
        entries=entries,
        **others,
    )


def rehearse_sampling(runner: ModelRunner[T]) -> None:
    """Logits of some rows, chosen from and scored in every way."""
    ops, sampler = runner.ops, runner.sampler
    if not ops.ranks.is_last:
        return
    hidden = runner.model.forward(runner.free_batch([(1, 1)]), runner.pool.layers)

    def logits(num: int) -> T:
        return runner.model.logits(ops.rows(hidden, np.zeros(num, dtype=np.int64)))

    bits = np.full((1, -(-sampler.vocab_size // 64)), -1, dtype=np.int64)
    for num in SAMPLED:
        rows = np.arange(min(num, sampler.max_rows))
        found = logits(len(rows))
        for mix in list_mixes(sampler.vocab_size):
            for row in rows.tolist():
                sampler.add(RowEntry(row, "rehearsal", mix[row % len(mix)], num_prompt=0))
            for masks in (None, (rows[:1], bits)):  # with a mask, logits are copied
                sampler.sample(found, rows, 0 * rows, masks)[1]()
    for num in NUMBERS:
        prompt_logprobs(ops, logits(num), [0] * num, 1)()


def list_mixes(vocab_size: int) -> Iterator[Mix]:
    """Parameters of rows that are chosen together."""
    plain = (GREEDY, DRAWN, CUT)
    stages = [
        Stage(first=0, end=vocab_size, num_tokens=1, temperature=one.temperature, top_p=one.top_p) for one in plain
    ]
    for greedy, drawn, cut in (plain, [replace(DRAWN, stages=(stage,)) for stage in stages]):
        yield from ((greedy,), (drawn,), (cut,), (greedy, drawn), (greedy, cut))
    for repetition, presence, frequency in product((1.0, 1.5), (0.0, 0.5), (0.0, 0.5)):
        yield (replace(GREEDY, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency),)
    yield (replace(GREEDY, logprobs=1),)
    yield (replace(GREEDY, logprobs=1), GREEDY)
