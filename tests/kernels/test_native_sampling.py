"""Sampling by the native kernels against the reference in torch and against plain NumPy, at every level of this
machine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from archerfish.kernels.sampling import CHOSEN, NONE_LEFT, TOP_K_OFF, Cuts, Entries, Masks  # isort: skip
from archerfish.kernels.sampling import Penalties, Ranges, SamplingBatch, TokenCounts, stream_key, uniform  # isort: skip
from archerfish.kernels.torch.reference import TorchOps
from archerfish.runtime.sampler import FastSampler
from archerfish.sched.plan import entry_of
from tests.kernels.sampling_cases import BAD, CUTS, EQUAL, GRID, KEPT, MIXED, OFF, Options, assert_drawn, spoil
from tests.runtime.sampling_reference import sample_sequences, sequence_of

_native = pytest.importorskip("archerfish.kernels.native._native")
from archerfish.kernels.native.ops import NativeOps  # noqa: E402
from archerfish.kernels.native.recorder import TapeRunner  # noqa: E402
from archerfish.kernels.native.sampling import ListedCounts, NativeSampling  # noqa: E402

Array = npt.NDArray[Any]


@cache
def at_level(level: str) -> NativeSampling:
    return NativeSampling(TapeRunner(_native.Level(level), _native.all_threads(2)))


@pytest.fixture(scope="module", params=_native.levels())
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return at_level(request.param)


def batch_of(rows: list[Options], *, position: int = 11, **parts: Any) -> SamplingBatch[Array]:
    """The batch that FastSampler makes of these options; row i has the seed i."""
    full = [{**OFF, **row} for row in rows]
    top_k = np.array([row["top_k"] or TOP_K_OFF for row in full])
    top_p = np.array([row["top_p"] if row["top_p"] < 1 else math.inf for row in full])
    is_greedy = np.array([row["temperature"] == 0 for row in full])
    (some,) = (~is_greedy & ((top_k < TOP_K_OFF) | (top_p < 1))).nonzero()
    return SamplingBatch(
        temperature=np.array([row["temperature"] or 1.0 for row in full]),
        is_greedy=is_greedy.astype(np.int64),
        keys=np.array([stream_key(i, 0) for i in range(len(rows))]),
        positions=np.full(len(rows), position),
        min_p=np.array([row["min_p"] for row in full]),
        cuts=Cuts(some, top_k[some], top_p[some]) if len(some) else None,
        **parts,
    )


def in_torch(value: Any, name: str = "") -> Any:
    """A batch with tensors in place of arrays, all of them copies."""
    if isinstance(value, (SamplingBatch, TokenCounts)):
        return replace(value, **{f.name: in_torch(getattr(value, f.name), f.name) for f in dataclasses.fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return type(value)(**{name: in_torch(each, name) for name, each in value._asdict().items()})
    if isinstance(value, np.ndarray):
        return value.copy() if name in ("slots", "num_ids") else torch.from_numpy(value.copy())
    return value


def random_logits(num_rows: int, vocab_size: int, scale: float, *, is_rounded: bool = False, seed: int = 0) -> Array:
    logits = np.random.default_rng(seed).standard_normal((num_rows, vocab_size)).astype(np.float32) * np.float32(scale)
    return np.round(logits * 8) / np.float32(8) if is_rounded else logits


def assert_draws_are_right(logits: Array, rows: list[Options], *, position: int = 11) -> None:
    """At every level; the reference is slow, and levels draw the same tokens."""
    batch = batch_of(rows, position=position)
    before = logits.copy()
    drawn = set[tuple[int, int]]()
    for level in _native.levels():
        found = at_level(level).sample(logits, batch)
        assert np.array_equal(logits, before) and found.report.dtype == np.int64 and not found.report[1].any()
        assert np.array_equal(found.report[0], found.tokens)
        drawn |= set(enumerate(found.tokens.tolist()))
    expected = TorchOps().sample(torch.from_numpy(logits), in_torch(batch)).tokens.tolist()
    for i, token in drawn:
        assert_drawn(token, expected[i], logits[i], rows[i], uniform(stream_key(i, 0), position))


@pytest.mark.parametrize("vocab_size", [1, 37, 1000, 5003, 20_000])
def test_every_combination_of_options(vocab_size: int) -> None:
    for is_rounded in (False, True):
        logits = random_logits(len(GRID), vocab_size, 2.5, is_rounded=is_rounded, seed=vocab_size)
        assert_draws_are_right(logits, GRID, position=vocab_size)


@pytest.mark.parametrize(("vocab_size", "scale"), [(5003, 0.0), (5003, 0.2), (5003, 6.0), (50_001, 1.0), (50_001, 4.0)])
def test_flat_and_steep_logits(vocab_size: int, scale: float) -> None:
    rows = [
        *CUTS,
        {"temperature": 100.0, "top_p": 0.7},
        {"temperature": 1e-20, "top_k": 7},
        {"temperature": 1e-20, "top_p": 0.5},
        {"top_p": 1 - 1e-12},
        {"top_k": 5000, "top_p": 1 - 1e-12, "min_p": 0.001},
    ]
    for position in range(2):
        logits = random_logits(len(rows), vocab_size, scale, is_rounded=position == 1, seed=position)
        assert_draws_are_right(logits, rows, position=position)


def random_changes(random: np.random.Generator, num_rows: int, vocab_size: int, native: NativeSampling) -> Options:
    """Biases, bans, masks, ranges and penalties of some rows each."""

    def entries(share: float) -> Entries[Array]:
        rows, ids = np.nonzero(random.random((num_rows, vocab_size)) < share)
        order = random.permutation(len(rows))
        return Entries(rows[order], ids[order])

    def some_rows() -> Array:
        return np.sort(random.permutation(num_rows)[: num_rows // 2])

    parts: Options = {}
    if random.random() < 0.6:
        parts["bias"] = entries(0.02)
        parts["bias_values"] = random.normal(size=len(parts["bias"].rows)) * 3
    if random.random() < 0.6:
        parts["banned"] = entries(0.03)
    if random.random() < 0.6:
        rows = some_rows()
        bits = random.integers(-(2**63), 2**63, (len(rows), -(-vocab_size // 64)))
        parts["masks"] = Masks(rows, bits & random.integers(-(2**63), 2**63, bits.shape))
    if random.random() < 0.6:
        first = random.integers(0, vocab_size // 2, num_rows)
        end = first + 1 + random.integers(0, vocab_size // 2, num_rows)
        parts["ranges"] = Ranges(first, end, np.zeros(num_rows, dtype=np.int64))
    if random.random() < 0.6:
        rows, counts = some_rows(), native.new_counts(num_rows + 3, vocab_size)
        slots = random.permutation(num_rows + 3)[: len(rows)]
        for slot in slots.tolist():
            native.set_counts(
                counts, slot, *(random.integers(0, vocab_size, random.integers(0, 400)) for _ in range(2))
            )
        factors = 1 + random.random(len(rows)), random.normal(size=len(rows)), random.normal(size=len(rows)) / 3
        given = [factor if random.random() < 0.7 else None for factor in factors]
        parts["penalties"] = Penalties(rows, counts, slots, slots, *given)
    return parts


@pytest.mark.parametrize("vocab_size", [65, 700, 4999, 9001])
def test_changes_of_logits_are_the_references(native: NativeSampling, vocab_size: int) -> None:
    """Tokens, outcomes and counts, over a few steps each. A draw at a border may differ, which none of these seeds
    has."""
    torch_ops = TorchOps()
    for seed in range(12):
        random = np.random.default_rng([seed, vocab_size])
        rows = [GRID[i] for i in random.integers(len(GRID), size=9)]
        parts = random_changes(random, len(rows), vocab_size, native)
        batch = batch_of(rows, **parts)
        expected_batch = in_torch(batch)
        for step in range(3):
            logits = random_logits(len(rows), vocab_size, 2.0, is_rounded=seed % 3 == 0, seed=100 * seed + step)
            report = native.sample(logits, replace(batch, positions=np.full(len(rows), step))).report
            expected_batch = replace(expected_batch, positions=torch.full((len(rows),), step))
            expected = torch_ops.sample(torch.from_numpy(logits), expected_batch).report
            assert report.tolist() == expected.tolist(), (seed, step)
        if "penalties" in parts:
            assert_same_counts(parts["penalties"].counts, expected_batch.penalties.counts)


def assert_same_counts(found: ListedCounts, expected: TokenCounts[torch.Tensor]) -> None:
    assert np.array_equal(found.counts, expected.counts.numpy())
    for row, length in enumerate(found.num_ids.tolist()):
        assert set(found.token_ids[row, :length].tolist()) == set(np.flatnonzero(found.counts[row]).tolist())


def test_equal_logits_are_kept_by_lowest_id(native: NativeSampling) -> None:
    for options, kept in KEPT:
        tokens = native.sample(EQUAL.repeat(60, 0), batch_of([options] * 60)).tokens.tolist()
        assert set(tokens) == kept, options


@pytest.mark.parametrize("level", _native.levels())
@pytest.mark.parametrize("size", [7, 300, 5000, 30_001])
def test_a_cut_keeps_its_very_last_token_and_none_after_it(level: str, size: int) -> None:
    """The last token that is kept is the one at the highest number; among equal logits that is the one with the highest
    id."""
    draw = _native.Sampler(_native.Level(level)).draw
    flat = np.zeros(size, np.float32)
    last = 1 - 2.0**-53
    for top_k in (1, 2, 5, size // 3, size // 2, size - 1, size):
        assert draw(flat, 1.0, top_k, 1.0, last) == (max(1, top_k) - 1, CHOSEN)
        for top_p in (1e-9, 0.25, 0.5, 0.9, 0.9999):
            kept = math.ceil(top_p * max(1, top_k))
            assert draw(flat, 1.0, top_k, top_p, last) == (kept - 1, CHOSEN), (top_k, top_p)
            assert draw(flat, 1.0, top_k, top_p, (kept - 0.999) / kept) == (kept - 1, CHOSEN)
            assert draw(flat, 1.0, top_k, top_p, 0.0) == (0, CHOSEN)
    assert draw(np.linspace(0, 1e-3, size, dtype=np.float32)[::-1].copy(), 1.0, size // 2, 1.0, last) == (
        size // 2 - 1,
        CHOSEN,
    )


def test_failed_rows_do_not_touch_the_others(native: NativeSampling) -> None:
    logits = random_logits(len(BAD) + 3, 2100, 2.0)
    outcomes = spoil(logits)
    for option in ({}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}):
        for batch in (batch_of([option] * len(logits)), SamplingBatch[Array]()):
            found = native.sample(logits, batch).report.tolist()
            assert found == TorchOps().sample(torch.from_numpy(logits), in_torch(batch)).report.tolist()
            assert found[1] == outcomes and found[0][: len(BAD) + 2] == [0] * (len(BAD) + 2)


def test_tokens_that_are_ruled_out_are_never_drawn(native: NativeSampling) -> None:
    logits = np.full((60, 25_000), -math.inf, np.float32)
    logits[:, [3, 2049, 24_999]] = 0.25
    options: list[Options] = [{}, {"top_p": 0.99}, {"top_k": 2000}, {"top_k": 9000}, {"temperature": 1e300}]
    for option in [*options, {"temperature": 50.0, "top_k": 7}]:
        tokens = native.sample(logits, batch_of([option] * 60)).tokens.tolist()
        assert set(tokens) == {3, 2049, 24_999}, option


def test_a_greedy_batch_takes_the_lowest_of_the_largest(native: NativeSampling) -> None:
    logits = random_logits(5, 4500, 2.0)
    logits[1, [2047, 2048, 4499]] = 50.0
    logits[2, [4499]] = 50.0
    found = native.sample(logits, SamplingBatch())
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.tokens[1:3].tolist() == [2047, 4499]
    assert native.sample(logits[:0], SamplingBatch()).report.shape == (2, 0)
    for size in (*range(1, 70), 255, 256, 257):
        assert native.sample(logits[:, :size], SamplingBatch()).tokens.tolist() == logits[:, :size].argmax(-1).tolist()


def test_a_row_does_not_depend_on_the_batch(native: NativeSampling) -> None:
    logits, batch = random_logits(len(GRID), 3000, 2.0), batch_of(GRID)
    together = native.sample(logits, batch).tokens.tolist()
    for i in range(0, len(GRID), 7):
        alone = replace(batch_of([GRID[i]]), keys=np.array([stream_key(i, 0)]))
        assert native.sample(logits[i : i + 1], alone).tokens.tolist() == [together[i]]
    for view in (logits[:, 31:500], np.asfortranarray(logits)[:, :469], logits[::-1, :500]):
        assert native.sample(view, batch).tokens.tolist() == native.sample(view.copy(), batch).tokens.tolist()


def test_ranges_have_offsets_and_logits_beside_them_are_not_read(native: NativeSampling) -> None:
    logits = np.zeros((3, 5003), np.float32)
    logits[0, 20:] = math.nan
    logits[1, 20:] = math.inf
    logits[2, :20] = -math.inf
    ranges = Ranges(*np.repeat([[0], [20], [7]], 3, 1))
    options: list[Options] = [{}, {"top_k": 4}, {"top_p": 0.3}]
    for batch in (SamplingBatch(ranges=ranges), *(batch_of([option] * 3, ranges=ranges) for option in options)):
        report = native.sample(logits, batch).report.tolist()
        assert report[1] == [CHOSEN, CHOSEN, NONE_LEFT] and report[0][2] == 0
        assert all(7 <= token < 27 for token in report[0][:2])
    limits = [(0, 10, 100), (1024, 2048, 0), (2047, 2049, -7), (4999, 5003, 0), (4998, 4999, 5)]
    logits = random_logits(len(limits), 5003, 2.0)
    found = native.sample(logits, SamplingBatch(ranges=Ranges(*np.array(limits).T.copy()))).tokens.tolist()
    assert found == [
        int(logits[i, first:end].argmax()) + first + offset for i, (first, end, offset) in enumerate(limits)
    ]


@pytest.mark.parametrize("vocab_size", [3, 64, 700, 20_003])
def test_logprobs_are_the_references(native: NativeSampling, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    for seed, num_top in enumerate((0, 1, 5, 20, 300)):
        logits = random_logits(7, vocab_size, 3.0, is_rounded=seed % 2 == 1, seed=seed)
        logits[2, : vocab_size // 2] = -math.inf
        rows = None if seed % 2 else np.array([6, 0, 2, 2])
        token_ids = random.integers(0, vocab_size, 7 if rows is None else 4)
        found = native.token_logprobs(logits, token_ids, num_top, rows)
        expected = TorchOps().token_logprobs(torch.from_numpy(logits), torch.from_numpy(token_ids), num_top, rows=rows)
        for name in ("logprobs", "top_logprobs"):
            assert np.allclose(getattr(found, name), getattr(expected, name).numpy(), rtol=0, atol=2e-6)
        for name in ("ranks", "top_ids"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert found.logprobs.dtype == np.float64 and found.top_ids.dtype == np.int64


def test_memory_is_kept_from_call_to_call(native: NativeSampling) -> None:
    logits = random_logits(4, 20_000, 1.0)
    native.sample(logits, SamplingBatch())
    before = native.pool_stats()
    native.sample(logits, batch_of([{"top_p": 0.9}] * 4))
    after = native.pool_stats()
    assert after.cache_misses == before.cache_misses and after.total_gets == before.total_gets + 1


def test_the_sampler_draws_as_with_the_reference() -> None:
    found = []
    for ops in (NativeOps(), TorchOps()):
        sampler: FastSampler[Any] = FastSampler(ops, 641, len(MIXED))
        sequences = [sequence_of(row, seed=row, stops=[5], **kw) for row, kw in enumerate(MIXED)]
        for sequence in sequences:
            sampler.add(entry_of(sequence))
        tokens = []
        for step in range(6):
            logits = ops.tensor(random_logits(len(MIXED), 641, 2.0, seed=step))
            sampled = sample_sequences(sampler, logits, sequences, [3 + step] * len(MIXED))
            assert sampled.errors == {}
            tokens.append(sampled.tokens)
        found.append(tokens)
    assert found[0] == found[1]


def test_more_tokens_are_counted_as_by_the_reference(native: NativeSampling) -> None:
    counts, expected = native.new_counts(4, 60), TorchOps().new_counts(4, 60)
    native.set_counts(counts, 1, np.array([3, 4]), np.array([5, 5]))
    TorchOps().set_counts(expected, 1, np.array([3, 4]), np.array([5, 5]))
    many = np.arange(60).tolist() * 6
    for row, tokens, source in ((2, [7], 1), (3, [5], 2), (2, [7, 8, 7], None), (1, many, 3), (1, [], None)):
        native.add_counts(counts, row, np.array(tokens, dtype=np.int64), source)
        TorchOps().add_counts(expected, row, np.array(tokens, dtype=np.int64), source=source)
        assert_same_counts(counts, expected)
