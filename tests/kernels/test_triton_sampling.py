"""Sampling by the Triton kernels against the reference in torch and against plain numpy.

The last tests have rows that choose from a range of the vocabulary. In the interpreter a cut row takes a twentieth of a
second, so that there the tests have few rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, HAS_CUDA, captured, untraced

from archerfish.kernels.triton import sampling as triton_sampling  # isort: skip (triton must be told to interpret first)
from archerfish.kernels.torch.reference import TorchOps  # isort: skip
from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, TOP_K_OFF, Cuts, Entries, Masks, Penalties, Ranges  # isort: skip
from archerfish.kernels.sampling import SamplingBatch, stream_key, uniform  # isort: skip
from archerfish.kernels.triton.ops import TritonOps  # isort: skip
from archerfish.params import SamplingParams  # isort: skip
from archerfish.runtime.sampler import FastSampler  # isort: skip
from archerfish.sched.plan import entry_of  # isort: skip
from archerfish.sequence import Request, Sequence  # isort: skip
from tests.kernels.sampling_cases import BAD, CUTS, EQUAL, GRID, KEPT, MIXED, OFF, assert_drawn, spoil  # isort: skip
from tests.runtime.sampling_reference import probabilities, sample_sequences, token_at  # isort: skip

pytestmark = [untraced, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, where integers wrap around
Tensor = torch.Tensor
NUM_DRAWS = 60 if HAS_CUDA else 5


def batch_of(
    rows: list[dict[str, Any]], *, seeds: list[int] | None = None, position: int = 11
) -> SamplingBatch[Tensor]:
    """All parameters of all rows, as a captured graph has them."""
    full = [{**OFF, **row} for row in rows]
    seeds = seeds or list(range(len(rows)))

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return SamplingBatch(
        temperature=column([row["temperature"] or 1.0 for row in full], torch.float64),
        is_greedy=column([row["temperature"] == 0 for row in full], torch.int64),
        keys=column([stream_key(seed, 0) for seed in seeds], torch.int64),
        positions=column([position] * len(rows), torch.int64),
        min_p=column([row["min_p"] for row in full], torch.float64),
        cuts=Cuts(
            torch.arange(len(rows), device=DEVICE),
            column([row["top_k"] or TOP_K_OFF for row in full], torch.int64),
            column([row["top_p"] if row["top_p"] < 1 else math.inf for row in full], torch.float64),
        ),
    )


def random_logits(num_rows: int, vocab_size: int, scale: float, *, is_rounded: bool = False, seed: int = 0) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return (logits.bfloat16().float() if is_rounded else logits).to(DEVICE)


def assert_draws_are_right(logits: Tensor, rows: list[dict[str, Any]], *, position: int = 11) -> None:
    """Equal to the reference in torch, and to plain numpy, wherever float32 can tell."""
    batch = batch_of(rows, position=position)
    found = TritonOps(DEVICE, "float32").sample(logits, batch)
    expected = TorchOps(DEVICE).sample(logits, batch).tokens.tolist()
    tokens = found.tokens.tolist()
    assert found.report[0].tolist() == tokens and found.report[1].tolist() == [CHOSEN] * len(rows)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        assert_drawn(token, expected[i], logits[i].cpu().numpy(), row, uniform(stream_key(i, 0), position))


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("vocab_size", [37, 1000, 5003, 20_000] if HAS_CUDA else [0])
def test_every_combination_of_options(vocab_size: int, part: int) -> None:
    rows = GRID if HAS_CUDA else GRID[part::12]
    vocab_size = vocab_size or (37, 1000, 5003)[part % 3]
    logits = random_logits(len(rows), vocab_size, 2.5, is_rounded=part % 2 == 1, seed=part)
    assert_draws_are_right(logits, rows, position=part)


@pytest.mark.parametrize(
    ("vocab_size", "scale"),
    [(5003, 0.0), (5003, 0.2), (5003, 6.0), *([(151_936, 1.0), (151_936, 4.0)] if HAS_CUDA else [])],
)
def test_flat_and_steep_logits(vocab_size: int, scale: float) -> None:
    rows = CUTS if HAS_CUDA else CUTS[int(scale) % 4 :: 4]
    for position in range(8 if HAS_CUDA else 1):
        logits = random_logits(len(rows), vocab_size, scale, is_rounded=position % 2 == 1, seed=position)
        assert_draws_are_right(logits, rows, position=position)


@pytest.mark.parametrize("capacity", [16, 1000])
def test_rows_with_more_tokens_than_a_list_holds(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "CAPACITY", capacity)
    rows: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 15},
        {"top_k": 1800, "top_p": 0.6},
        {"min_p": 0.001},
        {"top_k": 17, "min_p": 0.1},
        {},
    ]
    assert_draws_are_right(random_logits(len(rows), 4100, 1.0, is_rounded=True), rows)


def test_equal_logits_are_kept_by_lowest_id() -> None:
    logits = torch.from_numpy(EQUAL).to(DEVICE)
    rows = [(options, kept) for options, kept in KEPT for _ in range(NUM_DRAWS)]
    batch = batch_of([options for options, _ in rows])
    tokens = TritonOps(DEVICE, "float32").sample(logits.repeat(len(rows), 1), batch).tokens.tolist()
    for i, (options, kept) in enumerate(KEPT):
        seen = set(tokens[i * NUM_DRAWS : (i + 1) * NUM_DRAWS])
        assert seen == kept if HAS_CUDA else seen <= kept, options


def test_failed_rows_do_not_touch_the_others() -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}]
    logits = random_logits(len(BAD) + 3, 2100, 2.0)
    outcomes = spoil(logits)
    for option in options:
        for batch in (batch_of([option] * len(logits)), SamplingBatch[Tensor]()):
            found = TritonOps(DEVICE, "float32").sample(logits, batch).report.tolist()
            assert found == TorchOps(DEVICE).sample(logits, batch).report.tolist()
            assert found[1] == outcomes and found[0][: len(BAD) + 2] == [0] * (len(BAD) + 2)


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = torch.full((NUM_DRAWS, 2500), -math.inf, device=DEVICE)
    logits[:, [3, 2049, 2400]] = 0.25
    for option in ({}, {"top_p": 0.99}, {"top_k": 2000}, {"temperature": 50.0, "top_k": 7}):
        tokens = TritonOps(DEVICE, "float32").sample(logits, batch_of([option] * NUM_DRAWS)).tokens.tolist()
        assert set(tokens) <= {3, 2049, 2400} and len(set(tokens)) > 1


def test_a_greedy_batch_takes_the_lowest_of_the_largest() -> None:
    logits = random_logits(5, 4500, 2.0)
    logits[1, [2047, 2048, 4499]] = 50.0
    logits[2, [4499]] = 50.0
    found = TritonOps(DEVICE, "float32").sample(logits, SamplingBatch())
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.tokens[1:3].tolist() == [2047, 4499] and found.report.dtype == torch.int64
    assert TritonOps(DEVICE, "float32").sample(logits[:0], SamplingBatch()).report.shape == (2, 0)


def test_a_row_does_not_depend_on_the_batch() -> None:
    rows = GRID[1::2] if HAS_CUDA else GRID[1:72:12]
    logits = random_logits(len(rows), 3000, 2.0)
    ops = TritonOps(DEVICE, "float32")
    together = ops.sample(logits, batch_of(rows)).tokens.tolist()
    alone = [ops.sample(logits[i : i + 1], batch_of([row], seeds=[i])).tokens.item() for i, row in enumerate(rows)]
    assert alone == together


def test_rows_of_a_wider_array_are_read_where_they_lie() -> None:
    logits = random_logits(4, 700, 2.0)
    rows: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 9}, {"top_p": 0.8}]
    ops = TritonOps(DEVICE, "float32")
    for view in (logits[:, 31:500], logits.T.contiguous().T[:, :469]):
        expected = ops.sample(view.contiguous(), batch_of(rows)).tokens
        assert ops.sample(view, batch_of(rows)).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [MIXED, MIXED[:2], MIXED[2:3], MIXED[2:4], MIXED[4:5], MIXED[6:], MIXED[1:2]])
def test_the_sampler_draws_as_with_the_reference(options: list[dict[str, Any]]) -> None:
    vocab_size = 641
    found = []
    for ops in (TritonOps(DEVICE, "float32"), TorchOps(DEVICE)):
        sampler: FastSampler[Tensor] = FastSampler(ops, vocab_size, len(options))
        sequences = []
        for row, kw in enumerate(options):
            params = SamplingParams(max_tokens=100, **kw)
            sequence = Sequence(Request(f"r{row}", [1, 2, 3], params, 100, stop_token_ids=frozenset({5}), seed=row), 0)
            sequence.row = row
            sequences.append(sequence)
            sampler.add(entry_of(sequence))
        tokens = []
        for step in range(6 if HAS_CUDA else 2):
            logits = random_logits(len(options), vocab_size, 2.0, seed=step)
            before = logits.clone()
            sampled = sample_sequences(sampler, logits, sequences, [3 + step] * len(options))
            assert sampled.errors == {} and torch.equal(logits, before)
            tokens.append(sampled.tokens)
        found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")
def test_a_captured_graph_follows_its_parameters() -> None:
    num_rows, vocab_size = 12, 32_003
    ops = TritonOps(DEVICE, "bfloat16")
    logits = random_logits(num_rows, vocab_size, 3.0)
    batch = batch_of([{}] * num_rows)
    graph, report = captured(lambda: ops.sample(logits, batch).report)
    random = np.random.default_rng(5)
    for step in range(9):
        new = batch_of([GRID[i] for i in random.integers(len(GRID), size=num_rows)], position=step)
        logits.copy_(random_logits(num_rows, vocab_size, 3.0, seed=step))
        for name in ("temperature", "is_greedy", "keys", "positions", "min_p"):
            getattr(batch, name).copy_(getattr(new, name))
        assert batch.cuts is not None and new.cuts is not None
        batch.cuts.top_k.copy_(new.cuts.top_k)
        batch.cuts.top_p.copy_(new.cuts.top_p)
        graph.replay()
        assert report[0].tolist() == TorchOps(DEVICE).sample(logits, new).tokens.tolist()
        assert report.tolist() == ops.sample(logits, replace(new)).report.tolist()


def test_masked_tokens_are_never_drawn() -> None:
    vocab_size = 2500
    rows: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {}]
    logits = random_logits(len(rows), vocab_size, 3.0)
    allowed = torch.zeros(len(rows) - 1, -(-vocab_size // 64) * 64, dtype=torch.bool)
    for row in range(len(allowed)):
        allowed[row, row::97] = True
    allowed[:, vocab_size:] = False
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int64))
    masks = Masks(torch.arange(len(allowed), device=DEVICE), bits.to(DEVICE))
    masked = logits.clone()
    masked[: len(allowed)].masked_fill_(~allowed[:, :vocab_size].to(DEVICE), -math.inf)
    ops, batch = TritonOps(DEVICE, "float32"), batch_of(rows)
    found = ops.sample(logits, replace(batch, masks=masks))
    assert found.report.tolist() == ops.sample(masked, batch).report.tolist()
    assert all(allowed[row, token] for row, token in enumerate(found.tokens.tolist()[:-1]))


VOCAB = 5003
RANGED: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({}, (0, VOCAB, 0)),
    ({}, (1020, 1030, 5)),
    ({"temperature": 0}, (2000, 4100, -2000)),
    ({"top_k": 20, "top_p": 0.95}, (0, 4096, 907)),
    ({"top_k": 80, "top_p": 0.95}, (0, 4097, 0)),
    ({}, (4998, 4999, 0)),
    ({"top_p": 0.8}, (1023, 1025, 0)),
    ({"min_p": 0.05}, (3000, VOCAB, 1)),
    ({"top_k": 5}, (1500, 1503, 0)),
    ({"top_k": 3000, "top_p": 0.7}, (1000, 4500, 9)),
]


def ranges_of(rows: list[tuple[int, int, int]]) -> Ranges[Tensor]:
    first, end, offset = (torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in zip(*rows, strict=True))
    return Ranges(first, end, offset)


@pytest.mark.parametrize("capacity", [16, 8192])
def test_draws_from_ranges_are_the_references(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "CAPACITY", capacity)
    batch = replace(batch_of([options for options, _ in RANGED]), ranges=ranges_of([limits for _, limits in RANGED]))
    for step in range(20 if HAS_CUDA else 1):
        logits = random_logits(len(RANGED), VOCAB, 2.0, seed=step + capacity)
        found = TritonOps(DEVICE, "float32").sample(logits, batch)
        assert found.report[0].tolist() == found.tokens.tolist() and found.report[1].tolist() == [CHOSEN] * len(RANGED)
        reference = TorchOps(DEVICE).sample(logits, batch).tokens.tolist()
        for i, (options, (first, end, offset)) in enumerate(RANGED):
            p = probabilities(logits[i, first:end].cpu().numpy(), SamplingParams(**{**OFF, **options}))
            own, is_unclear = token_at(p, uniform(stream_key(i, 0), 11)) if len(p) > 1 else (0, False)
            assert is_unclear or found.tokens[i].item() == own + first + offset == reference[i], i


def test_a_greedy_batch_stays_in_its_ranges() -> None:
    limits = [(0, 10, 100), (1024, 2048, 0), (2047, 2049, -7), (4999, VOCAB, 0)]
    logits = random_logits(len(limits), VOCAB, 2.0)
    found = TritonOps(DEVICE, "float32").sample(logits, SamplingBatch(ranges=ranges_of(limits)))
    expected = [int(logits[i, first:end].argmax()) + first + offset for i, (first, end, offset) in enumerate(limits)]
    assert found.tokens.tolist() == expected and not found.report[1].any()


def test_logits_beside_a_range_are_not_looked_at() -> None:
    logits = torch.zeros(3, VOCAB, device=DEVICE)
    logits[0, 20:] = math.nan
    logits[1, 20:] = math.inf
    logits[2, :20] = -math.inf
    ranges = ranges_of([(0, 20, 7)] * 3)
    for batch in (
        SamplingBatch(ranges=ranges),
        *(replace(batch_of([o] * 3), ranges=ranges) for o in ({}, {"top_k": 4})),
    ):
        report = TritonOps(DEVICE, "float32").sample(logits, batch).report.tolist()
        assert report[1] == [CHOSEN, CHOSEN, NONE_LEFT] and report[0][2] == 0
        assert all(7 <= token < 27 for token in report[0][:2])


def test_ranges_beside_a_mask() -> None:
    """What a mask or a penalty has changed still has its range."""
    logits = random_logits(2, VOCAB, 2.0)
    ranges = ranges_of([(0, 50, 0), (1000, 1100, 3)])
    plain = replace(batch_of([{}, {"top_k": 9}]), ranges=ranges)
    rows, token_ids = torch.tensor([0, 1], device=DEVICE), torch.tensor([5, 1050], device=DEVICE)
    biased = replace(plain, bias=Entries(rows, token_ids), bias_values=rows.double() * 0 + 60.0)
    assert TritonOps(DEVICE, "float32").sample(logits, biased).tokens.tolist() == [5, 1053]


@pytest.mark.parametrize("vocab_size", [3, 700, 4100])
def test_logprobs_are_the_references(vocab_size: int) -> None:
    for seed, num_top in enumerate((0, 1, 20)):
        logits = random_logits(7, vocab_size, 3.0, is_rounded=seed % 2 == 1, seed=seed)
        logits[2, : vocab_size // 2] = -math.inf
        logits[3] = -math.inf if seed == 1 else logits[3]
        rows = None if seed % 2 else np.array([6, 0, 2, 2])
        token_ids = torch.randint(0, vocab_size, (7 if rows is None else 4,), device=DEVICE)
        found, expected = (ops.token_logprobs(logits, token_ids, num_top, rows=rows) for ops in both_ops())
        for name in ("logprobs", "top_logprobs"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=2e-6, equal_nan=True)
        for name in ("ranks", "top_ids"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_penalties_and_masks_are_the_references() -> None:
    size, num = 2100, 4
    logits, slots = random_logits(num, size, 2.0), np.array([3, 0, 5])
    bits = np.random.default_rng(1).integers(-(1 << 63), 1 << 63, (2, size // 64 + 1), dtype=np.int64)
    drawn = []
    for ops in both_ops():
        counts = ops.new_counts(6, size)
        for row in slots.tolist():
            ops.set_counts(counts, row, np.arange(0, size, 2), np.array([5, 5, row, *range(row, size, 3)]))
        factors = [1.3, 1.0, 0.5], [0.0, 0.7, -0.2], [0.1, 0.0, 0.9]
        rows, *given = (ops.tensor(np.array(values)) for values in ([0, 2, 3], slots, *factors))
        penalties = Penalties(rows, counts, slots, *given)
        masks = Masks(ops.tensor(np.array([3, 1])), ops.tensor(bits))
        changed = (
            ops._sampling._adjusted(logits, SamplingBatch(masks=masks, penalties=penalties))[:, :size].cpu().clone()
        )
        tokens = ops.sample(logits, SamplingBatch(masks=masks, penalties=penalties)).tokens.tolist()
        drawn.append((changed, counts.counts.cpu(), tokens))
    torch.testing.assert_close(drawn[0][0], drawn[1][0], rtol=1e-6, atol=1e-6)
    assert torch.equal(drawn[0][1], drawn[1][1]) and drawn[0][2] == drawn[1][2]
    assert not torch.equal(drawn[0][0], logits.cpu())


def both_ops() -> tuple[TorchOps, TorchOps]:
    return TritonOps(DEVICE, "float32"), TorchOps(DEVICE)
