"""Baselines of benches: what is kept of a report, what is compared, and what the command line makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archerfish.bench import baseline
from archerfish.bench.baseline import DIRECTIONS, READERS, Baseline, compare
from archerfish.bench.gpu import METRICS as GPU_METRICS
from archerfish.bench.serve_report import ROWS
from archerfish.bench.stats import Summary, summarize
from archerfish.cli.bench_report import EXIT_REGRESSION
from archerfish.cli.main import COMMANDS, main
from archerfish.cli.options import Parser
from archerfish.errors import InvalidInputError, InvalidOptionError, NotFoundError
from archerfish.observe.regression import worse_when

MACHINE = {"cpu": "slow", "cores": 2}
ONE = summarize([1.0, 2.0, 3.0]).as_dict()
REPORTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "embed": ({"engines": {"archerfish": {"metrics": {"load_s": ONE, "short@8": ONE}}, "st": {"metrics": {"load_s": ONE}}}},
              ["archerfish/load_s", "archerfish/short@8"]),
    "throughput": ({"samples": {"continuous 8": ONE, "static 8": ONE}, "figures": {"kv utilisation 8": 0.9}},
                   ["continuous 8", "kv utilisation 8", "static 8"]),
    "latency": ({"samples": {"archerfish: gap p50, ms": ONE}, "figures": {}}, ["archerfish: gap p50, ms"]),
    "prefix": ({"samples": {"hit rate, tokens": ONE}, "figures": {}}, ["hit rate, tokens"]),
    "rwkv": ({"samples": {"requests/s, without": ONE, "tokens/s, one stream": ONE}, "figures": {"MB of a state": 2.0}},
             ["MB of a state", "requests/s, without", "tokens/s, one stream"]),
    "tts": ({"samples": {"tokens/s, 64 streams": ONE, "real-time factor, one stream": ONE}, "figures": {"copy rate, GB/s": 2}},
            ["copy rate, GB/s", "real-time factor, one stream", "tokens/s, 64 streams"]),
    "scheduler": ({"steps": {"plan_p50_us": 3.0, "steps": 20}}, ["plan_p50_us"]),
    "gpu": ({"shapes": {"tiny": {"archerfish": {"bs1_ttft_ms": 2, "bs1_ttft_ms_all": [1, 2, 3], "error": ""},
                                 "vllm": {"bs1_ttft_ms_all": [9]}, "ratios": {}}}}, ["tiny/bs1_ttft_ms"]),
    "startup": ({"starts": [{"shape": "tiny", "engine": engine, "start": "first", "load_s": 1.0}
                            for engine in ("archerfish", "vllm")]}, ["tiny/first start/load_s"]),
    "serve": ({"points": [{"scenario": "s", "server": server, "load": "l", "summary": {"requests_s": ONE}}
                          for server in ("other", "archerfish")]}, ["s, archerfish, l/requests_s"]),
    "store": ({"openings": [{"name": name, "seconds": ONE} for name in ("archerfish (mapped)", "torch.load")],
               "conversion_mb_per_s": {"arrow": ONE}}, ["conversion/arrow", "opening/archerfish (mapped)"]),
}  # fmt: skip


@pytest.mark.parametrize("bench", READERS)
def test_our_figures_of_every_bench_are_kept_and_have_a_direction(bench: str, tmp_path: Path) -> None:
    report, names = REPORTS[bench]
    found = Baseline.of({"bench": bench, "machine": MACHINE, **report})
    assert sorted(found.metrics) == names
    for name in names:
        worse_when(name, DIRECTIONS.get(bench, {}))
    path = tmp_path / "baseline.json"
    found.write(path)
    assert Baseline.read(path) == found
    assert compare(path, found, 0).breaches == []


def test_a_server_of_another_name_is_ours_if_it_is_the_first() -> None:
    points = [{"scenario": "s", "server": server, "load": "l", "summary": {"requests_s": ONE}} for server in ("mine", "other")]
    assert list(Baseline.of({"bench": "serve", "machine": {}, "points": points}).metrics) == ["s, mine, l/requests_s"]


def test_figures_that_people_see_have_the_right_direction() -> None:
    for metric in GPU_METRICS:
        assert worse_when(f"tiny/{metric.key}", {}) == ("lower" if metric.higher_is_better else "higher")
    directions = DIRECTIONS["serve"]
    found = {key: worse_when(f"chat8, archerfish, l/{key}", directions) for _, key, _, _ in ROWS}
    lower = {key for key, direction in found.items() if direction == "lower"}
    assert lower == {"requests_s", "tokens_s", "prompt_tokens_s", "goodput_s", "steps_s", "read_tokens_s"}
    assert {found[key] for key in ("e2e_p99_ms", "ttft_p50_ms", "loop_us_token", "memory_late_bytes")} == {"higher"}
    assert {found[key] for key in ("num_ok", "num_refused", "client_lag_p99_ms", "little_ratio")} == {"neither"}
    for name in ("continuous 8", "kv utilisation 8"):
        assert worse_when(name, DIRECTIONS["throughput"]) == "lower"
    assert worse_when("transformers at 32", DIRECTIONS["throughput"]) == "neither"
    assert worse_when("transformers: gap p99, ms", DIRECTIONS["latency"]) == "neither"
    assert worse_when("archerfish: tokens/s after 16 tokens", DIRECTIONS["latency"]) == "lower"
    assert worse_when("archerfish: first token after 16 tokens, ms", DIRECTIONS["latency"]) == "higher"
    assert worse_when("archerfish: memory, MB", DIRECTIONS["latency"]) == "higher"
    assert worse_when("archerfish: CPU, %", DIRECTIONS["latency"]) == "neither"  # more cores at work may be the faster way


def saved(path: Path, **metrics: float) -> Baseline:
    made = Baseline("scheduler", "", MACHINE, {name: Summary(value, value, value, 1) for name, value in metrics.items()})
    made.write(path)
    return made


def measured(**metrics: float) -> Baseline:
    return Baseline("scheduler", "", MACHINE, {name: Summary(value, value, value, 1) for name, value in metrics.items()})


def test_three_worse_runs_on_end_are_a_regression_also_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    saved(path, plan_us=10, commit_us=10)
    before = path.read_bytes()
    slow, fast = measured(plan_us=12, commit_us=10), measured(plan_us=10, commit_us=9)
    told = [compare(path, run, 5) for run in (slow, slow, fast, slow, slow, slow)]
    assert [bool(one.regressions) for one in told] == [False] * 5 + [True]
    assert [one.breaches[0].num_in_a_row if one.breaches else 0 for one in told] == [1, 2, 0, 1, 2, 3]
    assert path.read_bytes() == before  # the baseline itself is not touched
    assert told[-1].as_dict()["breaches"][0]["change"] == pytest.approx(0.2) and told[-1].as_dict()["is_regression"]
    saved(path, plan_us=10.5)  # a new baseline begins anew
    assert compare(path, slow, 5).breaches[0].num_in_a_row == 1


def test_what_cannot_be_compared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.json"
    saved(path, plan_us=10, gone_us=5, warmth=3)
    found = compare(path, measured(plan_us=10, new_us=1, warmth=9, colour=1), 5)
    assert (found.missing, found.unjudged) == (["gone_us"], ["colour", "warmth"])
    assert [one.metric for one in found.comparisons] == ["plan_us"]
    monkeypatch.setitem(DIRECTIONS, "scheduler", {"warmth": "higher"})
    assert [one.metric for one in compare(path, measured(warmth=9), 5).breaches] == ["warmth"]


def test_another_bench_model_or_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    saved(path, plan_us=10)
    own = measured(plan_us=10)
    for other, expected in (
        (Baseline("gpu", "", MACHINE, own.metrics), "of the bench 'scheduler', not of 'gpu'"),
        (Baseline("scheduler", "big", MACHINE, own.metrics), "of the model '', not of 'big'"),
        (Baseline("scheduler", "", {**MACHINE, "cores": 4}, own.metrics), "whose cores is 2; here it is 4"),
    ):
        with pytest.raises(InvalidOptionError, match=expected):
            compare(path, other, 5)
    with pytest.raises(InvalidInputError, match="Nothing was measured"):
        Baseline("scheduler", "", MACHINE, {}).write(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"bench": "x"}', *(
        json.dumps({"bench": "x", "model": "", "machine": {}, "metrics": {"a_ms": {"median": value}}}) for value in ("1", 1)
    )],
)  # fmt: skip
def test_a_file_that_is_no_baseline_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    with pytest.raises(NotFoundError, match="no baseline"):
        Baseline.read(path)
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="is no baseline"):
        Baseline.read(path)
    saved(path, plan_us=1)
    baseline.History(path).path.write_text(text or "x")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        compare(path, measured(plan_us=1), 5)


BENCH = ["bench", "scheduler", "--sequences", "4", "--steps", "4", "--nodes", "1000"]


@pytest.mark.no_cover
def test_the_command_saves_compares_and_fails_at_the_third_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "b.json", tmp_path / "report.json"
    assert main([*BENCH, f"--output={output}", "--quiet", "--save-baseline", str(path)]) == 0
    assert list(Baseline.read(path).words) == BENCH[2:]
    assert main(["bench", "--baseline", str(path), "--tolerance", "1e9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]["num_compared"] == 6
    values = json.loads(path.read_text())
    values["metrics"] = {"plan_p50_us": {"median": 1e-9, "low": 1e-9, "high": 1e-9, "rounds": 1}}
    path.write_text(json.dumps(values))
    codes = [main([*BENCH, "--baseline", str(path), "--output", str(output)]) for _ in range(3)]
    assert codes == [0, 0, EXIT_REGRESSION]
    said = capsys.readouterr().out
    assert "plan_p50_us" in said and "1 of 1 figures are worse than the baseline; 1 of them are regressions." in said
    assert json.loads(output.read_text())["compared"]["is_regression"] is True


def test_a_baseline_alone_says_which_bench_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "b.json", list[list[str]]()

    def parse(self: Parser, words: list[str]) -> None:
        seen.append([self.prog, *words])
        raise SystemExit(0)

    monkeypatch.setattr(Parser, "parse", parse)
    Baseline("latency", "some-model", MACHINE, {"a_ms": Summary(1, 1, 1, 1)}).write(path)
    assert main(["bench", "--baseline", str(path), "--rounds", "2"]) == 0
    assert main(["bench", "--rounds", "2", f"--baseline={path}", "--model", "other"]) == 0
    Baseline("scheduler", "", MACHINE, {"plan_us": Summary(1, 1, 1, 1)}, ("--steps", "3")).write(path)
    assert main(["--quiet", "bench", "--baseline", str(path)]) == 0
    assert seen == [
        ["archerfish bench latency", "--baseline", str(path), "--rounds", "2"],
        ["archerfish bench latency", "--rounds", "2", f"--baseline={path}", "--model", "other"],
        ["archerfish bench scheduler", "--quiet", "--steps", "3", "--baseline", str(path)],
    ]
    assert main(["bench", "--baseline", str(tmp_path / "none")]) == NotFoundError.exit_code
    for words in (["bench", "--baseline"], ["bench", "--rounds", "2"], ["bench", "latensy", "--baseline", str(path)]):
        assert main(words) == 2
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "bench": "warmth"}))
    assert main(["bench", "--baseline", str(path)]) == 2
    assert "bench 'warmth'" in capsys.readouterr().err and len(seen) == 3


def test_a_wrong_baseline_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archerfish.bench.bookkeeping.measure_bookkeeping", lambda *_: pytest.fail("ran"))
    assert main([*BENCH, "--baseline", str(tmp_path / "none.json")]) == NotFoundError.exit_code
    assert "There is no baseline" in capsys.readouterr().err
    assert main([*BENCH, "--tolerance", "-1"]) == InvalidOptionError.exit_code
    assert "--tolerance takes" in capsys.readouterr().err


def test_a_run_is_not_lost_with_a_baseline_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "b.json", tmp_path / "report.json"
    saved(path, plan_p50_us=1)
    assert main([*BENCH, "--baseline", str(path), "--output", str(output)]) == InvalidOptionError.exit_code
    assert "whose cpu is 'slow'" in capsys.readouterr().err
    assert json.loads(output.read_text())["bench"] == "scheduler"


@pytest.mark.parametrize("command", [command.name for command in COMMANDS if command.name.startswith("bench ")])
def test_every_bench_takes_a_baseline_and_is_known_to_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--output", "--baseline", "--save-baseline", "--tolerance"))
    assert command.removeprefix("bench ") in READERS
