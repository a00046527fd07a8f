"""RegressionDetector: direction, three in a row, and noise that never flags."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archerfish.observe.regression import Direction, RegressionDetector, worse_when
from archerfish.observe.summary import Summary, summarize

DIRECTED: list[tuple[str, Direction]] = [
    ("offline256_tok_s", "lower"),
    ("shared_prefix_req_s", "lower"),
    ("hit_ratio", "lower"),
    ("archerfish: tokens/s", "lower"),
    ("ttft_p99_ms", "higher"),
    ("first token, ms", "higher"),
    ("plan_p50_us", "higher"),
    ("load_s", "higher"),
    ("memory_bytes", "higher"),
]
values = st.floats(0.1, 1e6)
rounds = st.lists(values, min_size=1, max_size=5)


def steady(value: float) -> Summary:
    return Summary(value, value, value, 3)


@pytest.mark.parametrize(("metric", "direction"), DIRECTED)
def test_the_ending_of_a_name_tells_which_way_is_bad(metric: str, direction: Direction) -> None:
    assert worse_when(metric, {}) == direction
    detector = RegressionDetector({metric: steady(100)}, num_in_a_row=1)
    worse, better = (80.0, 120.0) if direction == "lower" else (120.0, 80.0)
    assert detector.check_regression({metric: steady(better)}) == []
    (found,) = detector.check_regression({metric: steady(worse)})
    assert found.change == pytest.approx(0.2)
    assert str(found) == f"{metric}: 100 -> {worse:g} (20.0% worse, 1 in a row)"


def test_unknown_direction_must_be_stated() -> None:
    with pytest.raises(ValueError, match="which 'warmth' is worse is unknown"):
        RegressionDetector({"warmth": steady(1)})
    detector = RegressionDetector({}, directions={"warmth": "lower"})
    with pytest.raises(ValueError, match="which 'colour' is worse is unknown"):
        detector.check_regression({"colour": steady(1)})
    stated: dict[str, Direction] = {"requests_s": "lower", "window_*": "neither"}
    assert worse_when("requests_s", stated) == "lower"  # its ending alone would say the opposite
    detector = RegressionDetector({"window_s": steady(1)}, directions=stated, num_in_a_row=1)
    assert detector.check_regression({"window_s": steady(99)}) == detector.comparisons == []


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.sampled_from(DIRECTED))
def test_only_breaches_in_a_row_are_a_regression(
    breaches: list[bool], needed: int, which: tuple[str, Direction]
) -> None:
    metric, direction = which
    detector = RegressionDetector({metric: steady(100), "other_ms": steady(1)}, num_in_a_row=needed)
    in_a_row = 0
    for is_breach in breaches:
        in_a_row = in_a_row + 1 if is_breach else 0
        value = (50.0 if direction == "lower" else 200.0) if is_breach else 100.0
        found = detector.check_regression({metric: steady(value), "other_ms": steady(1)})
        assert [one.metric for one in found] == ([metric] if in_a_row >= needed else [])
        assert detector.consecutive_failures == ({metric: in_a_row} if in_a_row else {})
        # Kept in a file and taken up by the next process, it goes on the same.
        detector = RegressionDetector(
            detector.baseline_metrics, num_in_a_row=needed, consecutive_failures=detector.consecutive_failures
        )


def test_a_breach_of_one_metric_does_not_end_the_row_of_another() -> None:
    detector = RegressionDetector({"a_ms": steady(1), "b_ms": steady(1), "c_ms": steady(1)})
    for now in ({"a_ms": 2, "b_ms": 1}, {"a_ms": 2, "b_ms": 2}, {"b_ms": 2}):
        assert detector.check_regression({name: steady(value) for name, value in now.items()}) == []
    assert detector.consecutive_failures == {"a_ms": 2, "b_ms": 2}  # what is not measured stays as it was
    assert [one.metric for one in detector.check_regression({"a_ms": steady(2)})] == ["a_ms"]


def test_plain_numbers_are_measurements_without_a_spread() -> None:
    detector = RegressionDetector({"ttft_p50_ms": 10, "generated_tok_s": steady(100)}, tolerance_percent=20)
    runs = [{"ttft_p50_ms": 13.0, "generated_tok_s": 90.0}] * 3
    assert [[one.metric for one in detector.check_regression(run)] for run in runs] == [[], [], ["ttft_p50_ms"]]
    assert detector.check_regression({"ttft_p50_ms": math.nan}) == []
    with pytest.raises(TypeError, match="'ttft_p50_ms'"):
        RegressionDetector({"ttft_p50_ms": "10"})  # type: ignore[dict-item]


@given(rounds, st.lists(values, max_size=4), st.data(), st.sampled_from(DIRECTED))
def test_rounds_that_reach_the_baseline_never_flag(
    before: list[float], others: list[float], data: st.DataObject, which: tuple[str, Direction]
) -> None:
    """Neither a median inside of the baseline's spread, nor rounds of which one is as good as a baseline without a
    spread."""
    baseline = summarize(before)
    now = summarize(data.draw(st.lists(st.floats(baseline.low, baseline.high), min_size=1, max_size=5)))
    for then, found in ((baseline, now), (steady(before[0]), summarize([before[0], *others]))):
        detector = RegressionDetector({which[0]: then}, tolerance_percent=0, num_in_a_row=1)
        assert detector.check_regression({which[0]: found}) == []


@given(values, st.floats(0.0, 80.0), st.floats(0.0, 90.0), st.sampled_from(DIRECTED))
def test_only_what_is_over_the_tolerance_flags(
    value: float, tolerance: float, change: float, which: tuple[str, Direction]
) -> None:
    metric, direction = which
    now = value * (1 - change / 100 if direction == "lower" else 1 + change / 100)
    detector = RegressionDetector({metric: steady(value)}, tolerance_percent=tolerance, num_in_a_row=1)
    found = detector.check_regression({metric: steady(now)})
    if abs(change - tolerance) > 1e-6:
        assert bool(found) == (change > tolerance)


def test_impossible_options_are_refused() -> None:
    for wrong in ({"tolerance_percent": -1.0}, {"tolerance_percent": math.nan}, {"num_in_a_row": 0}):
        with pytest.raises(ValueError, match="at least"):
            RegressionDetector({}, **wrong)


def test_nothing_and_nan() -> None:
    baseline = {"errors_ms": steady(0), "gone_ms": steady(math.nan), "rate_tok_s": steady(0)}
    detector = RegressionDetector(baseline, num_in_a_row=1)
    assert detector.check_regression(baseline) == []
    (found,) = detector.check_regression({"errors_ms": steady(1), "gone_ms": steady(5), "rate_tok_s": steady(9)})
    assert (found.metric, found.change) == ("errors_ms", math.inf)
    assert detector.check_regression({"errors_ms": steady(math.nan)}) == []
