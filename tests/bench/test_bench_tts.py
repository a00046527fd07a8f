"""`archerfish bench tts` on a tiny model and little work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archerfish.bench import tts
from archerfish.bench.generate import Report, engines
from archerfish.bench.rwkv import write_shape
from archerfish.cli.main import main
from archerfish.config import EngineConfig
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.store.rwkv_source import read_rwkv7


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DECODE_OUTPUT": 2, "AUDIO_SECONDS": 1, "TOKENS_PER_SECOND": 2, "COPY_BYTES": {"cpu": 1 << 16}}.items():
        monkeypatch.setattr(tts, name, value)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    return write_shape("tiny", tmp_path / "tiny", VOCAB_SIZE)


def test_every_number_of_streams_is_measured(shape: Path) -> None:
    report, told = Report(), list[tuple[int, int]]()
    config = EngineConfig(model=str(shape), load_format="dummy", dtype="float32", num_threads=1)
    tts.measure(config, report, 1, (1, 2), lambda done, total, what: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    assert set(report.samples) == {
        "tokens/s, one stream", "share of the copy rate, 1", "real-time factor, one stream", "streams in real time, 1 at once",
        "tokens/s, 2 streams", "share of the copy rate, 2", "streams in real time, 2 at once",
    }  # fmt: skip
    names = [bar.name for bar in tts.bars(report) if bar.value is None]
    assert names == ["one stream over the package rwkv", "share of the copy rate, 64 streams"]


def test_what_a_step_moves(shape: Path) -> None:
    config = EngineConfig(model=str(shape), load_format="dummy", dtype="float32", num_threads=1, enable_prefix_caching=False)
    with engines(config, {}) as (engine,):
        state = 2 * (2 * 64 * 64 + 2 * 128) * 4  # of two layers: two heads' matrices and two inputs
        assert tts.step_bytes(engine, 3) - tts.step_bytes(engine, 0) == 2 * 3 * state
        assert 4 * VOCAB_SIZE * 128 < tts.step_bytes(engine, 0) < 8 * VOCAB_SIZE * 128  # the head, and not the table


def test_the_peers_checkpoint_has_all_tensors(shape: Path, tmp_path: Path) -> None:
    values = json.loads((shape / "config.json").read_text())
    config, _ = read_rwkv7(tts.write_checkpoint(values, tmp_path / "peer.pth"))
    assert {name: config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")} == {
        "hidden_size": 128, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2,
    }  # fmt: skip


def test_streams_must_be_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tts", "--streams", "1,x"]) == 2
    assert "--streams must be numbers" in capsys.readouterr().err
