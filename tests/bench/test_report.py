"""Reports, baselines, and the command line around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archerfish.bench.report import DIRECTIONS, Baseline, BenchReport, Measurement, breaches_path, compare
from archerfish.bench.table import BENCHES, Flag, load
from archerfish.cli.bench import EXIT_REGRESSION
from archerfish.cli.main import main
from archerfish.cli.options import Parser
from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.observe.regression import worse_when
from archerfish.observe.summary import Summary, percentile, summarize

MACHINE = {"cpu": "slow", "cores": 2}
BENCH = ["bench", "scheduler", "--sequences", "4", "--steps", "4", "--nodes", "1000"]


def report_of(*rows: tuple[str, float] | tuple[str, float, str]) -> BenchReport:
    report = BenchReport("some", "model")
    for row in rows:
        report.add(Measurement(*row))
    return report


def test_percentile_is_the_smallest_sample_that_the_share_does_not_exceed() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert summarize([5, 1, 3]) == Summary(3, 1, 5, 3)


def test_table_has_medians_ranges_and_gains() -> None:
    report = report_of(
        ("load, ms", 10.0), ("load, ms", 30.0), ("load, ms", 20.0), ("load, ms", 60.0, "peer"), ("rate", 5.0)
    )
    report.add(Measurement("long, tokens/s", 5000.0))
    report.add("a remark")
    columns, rows = report.table()
    assert columns == ["median (range)", "archerfish", "peer", "to peer"]
    assert rows == [
        ["load, ms", "20 (10-30)", "60", "3.00 x"],
        ["rate", "5", "-", ""],
        ["long, tokens/s", "5,000", "-", ""],
    ]
    whole = report.as_dict()
    assert whole["notes"] == ["a remark"]
    assert whole["figures"]["load, ms"]["archerfish"]["samples"] == [10.0, 30.0, 20.0]
    assert json.loads(json.dumps(whole)) == whole


def test_first_engine_counts_as_ours_where_none_has_our_name() -> None:
    report = report_of(("load, ms", 2.0, "mine"), ("load, ms", 8.0, "other"))
    assert report.engines == ["mine", "other"] and report.gain("load, ms", ["other"]) == 4
    assert list(Baseline.of(report).metrics.values()) == [Summary(2, 2, 2, 1)]
    assert BenchReport("empty").own_summaries() == {} and BenchReport("empty").table() == (["median (range)"], [])


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("one stream, tokens/s", "lower"),
        ("first token, ms", "higher"),
        ("plan p50, us", "higher"),
        ("evict, ns", "higher"),
        ("imports, s", "higher"),
        ("resident, MB", "higher"),
        ("requests, hit rate", "lower"),
        ("overload: unanswered", "higher"),
        ("64 streams, share of the limit", "lower"),
        ("refused, requests", "neither"),
        ("copy rate, GB/s", "neither"),
    ],
)
def test_the_unit_of_a_metric_says_which_direction_is_worse(metric: str, direction: str) -> None:
    assert worse_when(metric, DIRECTIONS) == direction


def baseline(**metrics: float) -> Baseline:
    named = {name.replace("_", ", "): Summary(value, value, value, 1) for name, value in metrics.items()}
    return Baseline("scheduler", "", MACHINE, named)


def test_three_worse_runs_in_a_row_are_a_regression(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    baseline(plan_us=10, commit_us=10).write(path)
    before = path.read_bytes()
    slow, fast = baseline(plan_us=12, commit_us=10), baseline(plan_us=10, commit_us=9)
    found = [compare(path, run, 5) for run in (slow, slow, fast, slow, slow, slow)]
    assert [one["is_regression"] for one in found] == [False] * 5 + [True]
    assert [one["breaches"][0]["num_in_a_row"] if one["breaches"] else 0 for one in found] == [1, 2, 0, 1, 2, 3]
    assert path.read_bytes() == before
    assert found[-1]["breaches"][0]["change"] == pytest.approx(0.2)
    baseline(plan_us=10.5).write(path)
    assert compare(path, slow, 5)["breaches"][0]["num_in_a_row"] == 1
    assert compare(path, baseline(commit_us=1), 5)["missing"] == ["plan, us"]


def test_another_bench_model_or_machine_is_not_comparable(tmp_path: Path) -> None:
    path, own = tmp_path / "b.json", baseline(plan_us=10)
    own.write(path)
    for other, expected in (
        (Baseline("gpu", "", MACHINE, own.metrics), "The bench of the baseline is 'scheduler', that of this run 'gpu'"),
        (Baseline("scheduler", "big", MACHINE, own.metrics), "The model of the baseline is '', that of this run 'big'"),
        (
            Baseline("scheduler", "", {**MACHINE, "cores": 4}, own.metrics),
            "The cores of the baseline is 2, that of this run 4",
        ),
    ):
        with pytest.raises(InvalidOptionError, match=expected):
            compare(path, other, 5)
    with pytest.raises(InvalidInputError, match="measured nothing"):
        Baseline("scheduler", "", MACHINE, {}).write(path)


TEXT_FIGURE = {"median": "1", "low": 1, "high": 1, "rounds": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"bench": "x"}',
        json.dumps({"bench": "x", "model": "", "machine": {}, "words": [], "metrics": {"a": TEXT_FIGURE}}),
    ],
)
def test_files_that_are_not_baselines_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    with pytest.raises(NotFoundError, match="no baseline"):
        Baseline.read(path)
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="is not a baseline"):
        Baseline.read(path)
    baseline(plan_us=1).write(path)
    breaches_path(path).write_text(text if text != "[]" and "bench" not in text else '["x"]')
    with pytest.raises(InvalidInputError, match="cannot be read"):
        compare(path, baseline(plan_us=1), 5)


def test_command_saves_a_baseline_and_fails_at_the_third_worse_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: Any) -> Iterator[Measurement]:
        assert (options.sequences, options.steps) == (4, 4)
        yield Measurement("plan p50, us", 10.0)
        yield Measurement("commit p50, us", 5.0)

    monkeypatch.setattr("archerfish.bench.scheduler.measure", measure)
    path, output = tmp_path / "b.json", tmp_path / "report.json"
    assert main([*BENCH, f"--output={output}", "--quiet", "--save-baseline", str(path)]) == 0
    assert list(Baseline.read(path).words) == BENCH[2:]
    assert main(["bench", "--baseline", str(path), "--tolerance", "1e9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]["num_compared"] == len(
        Baseline.read(path).metrics
    )
    values = json.loads(path.read_text())
    values["metrics"] = {"plan p50, us": {"median": 1e-9, "low": 1e-9, "high": 1e-9, "rounds": 1}}
    path.write_text(json.dumps(values))
    codes = [main([*BENCH, "--baseline", str(path), "--output", str(output)]) for _ in range(3)]
    assert codes == [0, 0, EXIT_REGRESSION]
    shown = capsys.readouterr().out
    assert "plan p50, us" in shown and "1 of 1 figures are worse than the baseline; 1 of them are regressions." in shown
    assert json.loads(output.read_text())["compared"]["is_regression"] is True
    path.write_text(json.dumps({**values, "machine": {**values["machine"], "cpu": "other"}}))
    output.unlink()
    assert main([*BENCH, "--baseline", str(path), "--output", str(output)]) == InvalidOptionError.exit_code
    assert json.loads(output.read_text())["bench"] == "scheduler"  # the figures are not lost


def test_baseline_alone_selects_its_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "b.json", list[list[str]]()

    def parse(self: Parser, words: list[str]) -> None:
        seen.append([self.prog, *words])
        raise SystemExit(0)

    monkeypatch.setattr(Parser, "parse", parse)
    Baseline("latency", "some-model", MACHINE, {"a, ms": Summary(1, 1, 1, 1)}).write(path)
    assert main(["bench", "--rounds", "2", f"--baseline={path}", "--model", "other"]) == 0
    Baseline("scheduler", "", MACHINE, {"plan, us": Summary(1, 1, 1, 1)}, ("--steps", "3")).write(path)
    assert main(["--quiet", "bench", "--baseline", str(path)]) == 0
    assert seen == [
        ["archerfish bench latency", "--rounds", "2", f"--baseline={path}", "--model", "other"],
        ["archerfish bench scheduler", "--quiet", "--steps", "3", "--baseline", str(path)],
    ]
    assert main(["bench", "--baseline", str(tmp_path / "none")]) == NotFoundError.exit_code
    for words in (["bench", "--baseline"], ["bench", "--rounds", "2"], ["bench", "latensy", "--baseline", str(path)]):
        assert main(words) == 2
    path.write_text(json.dumps({**json.loads(path.read_text()), "bench": "warmth"}))
    assert main(["bench", "--baseline", str(path)]) == 2
    assert "bench 'warmth'" in capsys.readouterr().err and len(seen) == 2


def test_every_bench_has_its_function() -> None:
    for bench in BENCHES:
        if bench.name != "serve":  # which needs an optional package
            assert callable(load(bench.function))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scheduler", "--baseline", "none.json"], "There is no baseline"),
        (["scheduler", "--tolerance", "-1"], "--tolerance must be"),
        (["scheduler", "--steps", "0"], "--steps must be"),
        (["scheduler", "--nodes", "5"], "the smallest tree"),
        (["throughput", "--batches", "8,x"], "--batches must be"),
        (["rwkv", "--shape", "9b"], "invalid choice"),
    ],
)
def test_wrong_options_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) in (2, 3)
    assert said in capsys.readouterr().err


def test_flags_take_what_their_defaults_say() -> None:
    parser = Parser()
    for flag in (
        Flag("words", "", [], "WORD"),
        Flag("--many", "", []),
        Flag("--sizes", "", (1, 2), minimum=0.5),
        Flag("--count", "", 3),
        Flag("--limit", "", 1.5, minimum=0),
        Flag("--quick", "", False),
        Flag("--name", "", "x"),
    ):
        flag.add_to(parser)
    usual = vars(parser.parse([]))
    assert usual == {"words": [], "many": [], "sizes": (1, 2), "count": 3, "limit": 1.5, "quick": False, "name": "x"}
    given = parser.parse(
        ["a", "--many", "p", "--many", "q", "--sizes", "4,0.5", "--count", "7", "--limit", "0", "--quick"]
    )
    assert (given.words, given.many, given.sizes, given.count, given.limit, given.quick) == (
        ["a"],
        ["p", "q"],
        (4, 0.5),
        7,
        0.0,
        True,
    )
