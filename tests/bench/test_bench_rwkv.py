"""`archerfish bench rwkv` on a tiny model and little work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archerfish.bench import rwkv
from archerfish.bench.baseline import DIRECTIONS, Baseline
from archerfish.bench.generate import Report, engines
from archerfish.cli.main import main
from archerfish.config import EngineConfig
from archerfish.errors import UnsupportedModelError
from archerfish.models.adapter import model_class
from archerfish.models.config import Config
from archerfish.observe.regression import worse_when
from tests.engine.tiny_llama import save_tiny_llama, tiny_config
from tests.engine.tiny_rwkv import rwkv_config, save_tiny_rwkv


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    little = {"NUM_STREAMS": 3, "STREAM_OUTPUT": 4, "SHARED_TOKENS": 64, "UNEVEN_TOKENS": 60, "PREFIX_OUTPUT": 3}
    for name, value in little.items():
        monkeypatch.setattr(rwkv, name, value)


def config(directory: Path) -> EngineConfig:
    return rwkv_config(save_tiny_rwkv(directory), load_format="dummy")


def test_everything_is_measured_in_every_round(tmp_path: Path) -> None:
    report, told = Report(), list[int]()
    rwkv.measure(config(tmp_path), report, 2, (16, 32), lambda done, total, what: told.append(total))
    assert {len(values) for values in report.samples.values()} == {2}
    assert told == [8] * 8
    assert report.samples["requests with the same tokens, share"] == [1.0, 1.0]
    state = report.figures["MB of a state"]
    assert report.figures["MB kept of 1,024 tokens, every 32"] == pytest.approx(32 * state)
    assert [bar.value is not None for bar in rwkv.bars(report)] == [True] * 3
    assert [bar.value for bar in rwkv.bars(Report())] == [None] * 3


def test_what_is_shared_is_computed_once(tmp_path: Path) -> None:
    report = Report()
    with engines(config(tmp_path), {}, {"enable_prefix_caching": False, "block_size": 0}) as (kept, plain):
        rwkv.compare_prefixes(report, kept, plain, 0)
        assert kept.scheduler.stats().prefill_tokens_computed == 64 + 3 * 16
        assert plain.scheduler.stats().prefill_tokens_computed == 3 * 80


def test_a_model_with_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no recurrent model"):
        rwkv.measure(tiny_config(save_tiny_llama(tmp_path)), Report(), 1, ())


@pytest.mark.parametrize("name", rwkv.SHAPES)
def test_shapes_can_be_built(name: str, tmp_path: Path) -> None:
    values = Config(json.loads((rwkv.write_shape(name, tmp_path / name) / "config.json").read_text()))
    shapes = model_class(values).dummy_shapes(values)
    assert shapes["lm_head.weight"] == (65536, rwkv.SHAPES[name][1])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config(tmp_path).model
    arguments = ["bench", "rwkv", "--model", model, "--load-format", "dummy", "--dtype", "float32", "--rounds", "1", "--json"]
    assert main([*arguments, "--memory-budget-gib", "0.05", "--spacings", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == tmp_path.name and len(found["bars"]) == 3
    names = list(Baseline.of(found).metrics)
    assert {name for name in names if worse_when(name, DIRECTIONS["rwkv"]) == "neither"} == {"requests/s, without"}
    assert main([*arguments, "--spacings", "16,x"]) != 0
    assert "--spacings must be numbers" in capsys.readouterr().out
