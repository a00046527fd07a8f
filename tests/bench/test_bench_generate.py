"""The generation benchmarks on a tiny random model: they run, and count what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from archerfish.bench import generate
from archerfish.bench.generate import (
    Job,
    Report,
    latency_benchmark,
    measure_latency,
    measure_prefix,
    measure_throughput,
    mixed_jobs,
)
from archerfish.cli.main import main
from archerfish.config import EngineConfig
from tests.engine.tiny_llama import TINY


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    small = {
        "SHARED_TOKENS": 48, "OWN_TOKENS": 8, "PREFIX_OUTPUT": 3, "PREFIX_REQUESTS": 6, "LATENCY_PROMPTS": (4, 40),
        "LATENCY_OUTPUT": 5, "MEAN_OUTPUT": 8, "MOST_OUTPUT": 24, "MOST_PROMPT": 32, "PEER_BATCH": 4,
    }
    for name, value in small.items():
        monkeypatch.setattr(generate, name, value)
    return EngineConfig(model=str(tmp_path), dtype="float32", load_format="dummy", max_cache_tokens=4096, max_num_seqs=8)


def test_the_mixed_work_is_what_it_is_said_to_be() -> None:
    jobs = mixed_jobs(4000, 1000, seed=0)
    assert {min(len(job.prompt) for job in jobs), max(len(job.prompt) for job in jobs)} == {16, 256}
    outputs = [job.num_output for job in jobs]
    assert min(outputs) == 4
    assert max(outputs) <= 512
    assert sum(outputs) / len(outputs) == pytest.approx(64, rel=0.05)
    assert mixed_jobs(5, 1000, seed=3) == mixed_jobs(5, 1000, seed=3) != mixed_jobs(5, 1000, seed=4)


def test_throughput_compares_continuous_static_and_peers(config: EngineConfig) -> None:
    asked: list[int] = []

    def peer(jobs: Sequence[Job], batch: int) -> float:
        asked.append(len(jobs))
        return 1.0

    told: list[str] = []
    report = Report(tell=lambda name, value: told.append(name))
    measure_throughput(config, report, 2, (2, 4), {"peer": peer})
    assert asked == [16, 16]
    assert sorted(set(told)) == ["continuous 2", "continuous 4", "peer", "static 2", "static 4"]
    assert all(len(report.samples[name]) == 2 for name in set(told))
    assert 0.3 < report.figures["kv utilisation 4"] <= 1.0
    assert (report.ratio("continuous 4", "peer") or 0) > 1


def test_prefix_counts_hits_and_passes(config: EngineConfig) -> None:
    report = Report()
    measure_prefix(config, report, 1)
    assert report.samples["hit rate, requests"] == [5 / 6]
    assert report.samples["hit rate, tokens"] == [pytest.approx(5 * 48 / (6 * 56))]
    assert report.samples["forward passes of an exact repeat"] == [0]


def test_latency_has_a_moment_for_every_token(config: EngineConfig) -> None:
    report = Report()
    peer = {"peer": lambda prompt, num_output: [0.1 * (i + 1) for i in range(num_output)]}
    measure_latency(config, report, latency_benchmark(1), peer)
    assert report.samples["peer: gap p50, ms"] == [pytest.approx(100), pytest.approx(100)]
    assert report.samples["archerfish: first token after 40 tokens, ms"][0] > 0


def test_the_command_prints_bars(config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "prefix", "--rounds", "1", "--model", config.model, "--dtype", "float32", "--load-format", "dummy"]
    assert main([*arguments, "--max-cache-tokens", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {bar["name"] for bar in found["bars"]} >= {"hit rate", "forward passes of an exact repeat"}


def test_bookkeeping_is_measured_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", "--sequences", "8", "--steps", "20", "--nodes", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"]["num_sequences"] == 8 and [row["num_nodes"] for row in found["cache"]] == [1000]
